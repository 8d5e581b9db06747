#!/usr/bin/env bash
# GRPO of a pretrained model (Gemma 3 270M) on arithmetic, on one GPU: bash examples/real_model/run.sh NAME [key=value ...]
# NAME: sums (one agent), team (one answers, another of its own weights checks) or products (with a calculator as tool).
# MODEL (models/gemma-3-270m) is what get_model.py makes; REAL_MODEL_DIR (outputs/real_model) holds inputs and results; SEED (0).
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
HERE=examples/real_model
NAME=${1:?name a run: sums, team or products}
shift
MODEL=${MODEL:-models/gemma-3-270m}
OUT=${REAL_MODEL_DIR:-outputs/real_model}
SEED=${SEED:-0}
TASK=sums
keys=() # what differs from the list at the end
case $NAME in
  sums) ;;
  team)
    keys+=(
      dag.workflow_path=dag_templates/solver_verifier.yaml
      actor_rollout_ref.rollout.agent.process_path=$HERE/reward.py
      actor_rollout_ref.rollout.agent.max_turn_tokens=6
      data.max_response_length=64
    )
    ;;
  products)
    TASK=products
    keys+=(
      actor_rollout_ref.rollout.multi_turn.enable=true
      actor_rollout_ref.rollout.multi_turn.format=hermes
      actor_rollout_ref.rollout.multi_turn.tool_config_path=$HERE/tools.yaml
      actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2
      actor_rollout_ref.rollout.agent.max_turn_tokens=48
      data.max_prompt_length=128
      data.max_response_length=128
    )
    ;;
  *)
    echo "run.sh: unknown run $NAME: name one of sums, team, products" >&2
    exit 2
    ;;
esac
if [[ ! -e $OUT/products_val.jsonl ]]; then
  "$PYTHON" $HERE/prepare.py --out "$OUT"
fi
# 107 is the end of a line, which ends a turn here.
exec "$PYTHON" -m siirl.main_dag \
  algorithm.adv_estimator=grpo \
  data.train_files="$OUT/${TASK}_train.jsonl" \
  data.val_files="$OUT/${TASK}_val.jsonl" \
  data.train_batch_size=128 \
  data.max_prompt_length=64 \
  data.max_response_length=6 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.optim.lr=1e-5 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=16 \
  "actor_rollout_ref.rollout.stop_token_ids=[107]" \
  custom_reward_function.path=$HERE/reward.py \
  trainer.n_gpus_per_node=1 \
  trainer.seed="$SEED" \
  trainer.total_training_steps=100 \
  trainer.test_freq=10 \
  trainer.log_val_generations=16 \
  trainer.save_freq=-1 \
  trainer.output_dir="$OUT/${NAME}_$SEED" \
  "${keys[@]}" "$@"
