#!/usr/bin/env bash
# Train in an environment of another package, on CPU, from scratch: bash examples/environments/run.sh NAME [key=value ...]
# NAME: reasoning_gym, lake, nim, guess, shop or verifiers. ENVIRONMENTS_DIR (outputs/environments) holds inputs and results.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
NAME=${1:?name an example: reasoning_gym, lake, nim, guess, shop or verifiers}
shift
OUT=${ENVIRONMENTS_DIR:-outputs/environments}/$NAME
keys=() # what differs from the list at the end
case $NAME in
  reasoning_gym)
    legs='reasoning_gym:leg_counting?max_instances=1&min_animals=1&max_animals=1'
    keys+=(
      "data.train_files=$legs&size=2000&seed=0"
      "data.val_files=$legs&size=100&seed=2000"
      data.max_prompt_length=48
      trainer.total_training_steps=120
    )
    ;;
  lake)
    keys+=(
      dag.workflow_path=examples/environments/lake.yaml
      trainer.total_training_steps=40
      data.max_prompt_length=16
      data.max_response_length=96
      actor_rollout_ref.rollout.agent.max_turn_tokens=1
    )
    ;;
  nim)
    keys+=(
      dag.workflow_path=examples/environments/nim.yaml
      dag.node_config.second.model.path="$OUT/model_1"
      actor_rollout_ref.actor.entropy_coeff=0.1 # one who always loses must go on trying
      data.max_prompt_length=16
      data.max_response_length=64
      actor_rollout_ref.rollout.agent.max_turn_tokens=1
    )
    ;;
  guess)
    PORT=${GUESS_PORT:-8123}
    "$PYTHON" examples/environments/guess_server.py "$PORT" &
    SERVER=$!
    exec 9> >(cat; kill "$SERVER" 2>/dev/null) # the server ends when all that has this open has ended: with the run
    keys+=(
      dag.workflow_path=examples/environments/guess.yaml
      dag.node_config.number.env_path="openenv:http://127.0.0.1:$PORT"
      data.max_prompt_length=16
      data.max_response_length=48
      actor_rollout_ref.rollout.agent.max_turn_tokens=1
    )
    until (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; do
      kill -0 "$SERVER" 2>/dev/null || { echo "run.sh: the server of the environment has ended: see above" >&2; exit 1; }
      sleep 1
    done
    ;;
  shop)
    PATH=$(cd "$(dirname "$PYTHON")" && pwd):$PATH # the server's python
    keys+=(
      dag.workflow_path=examples/environments/shop.yaml
      custom_reward_function.path=examples/environments/shop_reward.py
      trainer.total_training_steps=60
      data.max_prompt_length=16
      data.max_response_length=24
      actor_rollout_ref.rollout.agent.max_turn_tokens=1
    )
    ;;
  verifiers)
    number="verifiers:examples/environments/guess_verifiers.py?python=${VERIFIERS_PYTHON:-.venv/verifiers/bin/python}"
    keys+=(
      dag.workflow_path=examples/environments/verifiers.yaml
      "data.train_files=$number&args.num_examples=1600"
      "data.val_files=$number&args.num_examples=14"
      data.max_prompt_length=16
      data.max_response_length=48
      actor_rollout_ref.rollout.agent.max_turn_tokens=1
    )
    ;;
  *)
    echo "run.sh: unknown example $NAME: name one of reasoning_gym, lake, nim, guess, shop, verifiers" >&2
    exit 2
    ;;
esac
if [[ ! -e $OUT/model_0 ]]; then
  "$PYTHON" -m examples.environments.prepare "$NAME" --out "$OUT"
fi
exec "$PYTHON" -m siirl.main_dag \
  algorithm.adv_estimator=grpo \
  algorithm.norm_adv_by_std_in_grpo=False \
  data.train_files="$OUT/train.parquet" \
  data.val_files="$OUT/test.parquet" \
  data.train_batch_size=16 \
  data.max_response_length=1 \
  actor_rollout_ref.model.path="$OUT/model_0" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.actor.entropy_coeff=0.02 \
  actor_rollout_ref.actor.ppo_mini_batch_size='${data.train_batch_size}' \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.dtype=float32 \
  actor_rollout_ref.rollout.n=16 \
  trainer.device=cpu \
  trainer.n_gpus_per_node=1 \
  trainer.total_training_steps=80 \
  trainer.test_freq=10 \
  trainer.save_freq=-1 \
  trainer.resume_mode=disable \
  trainer.overwrite=true \
  trainer.project_name=siirl \
  trainer.experiment_name="environments_$NAME" \
  trainer.output_dir="$OUT/run" \
  "${keys[@]}" "$@"
