#!/usr/bin/env bash
# Train on given responses, on CPU, from scratch: bash examples/given_responses/run.sh NAME [key=value ...]
# NAME: sft, dpo, sft_grpo (a warm-up of 15 steps, then GRPO), reward (a reward model), or reward_grpo (a reward model, and beside
# it a policy that learns from its scores). GIVEN_RESPONSES_DIR (outputs/given_responses) holds inputs and results.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
NAME=${1:?name an example: sft, dpo, sft_grpo, reward or reward_grpo}
shift
OUT=${GIVEN_RESPONSES_DIR:-outputs/given_responses}
actor=actor_rollout_ref.actor
keys=() # what differs from the list at the end
reward_model=(
  reward_model.enable=True
  reward_model.model.path="$OUT/model"
  reward_model.optim.lr=1e-3
  reward_model.use_dynamic_bsz=True
  reward_model.fsdp_config.mixed_precision.param_dtype=float32
)
case $NAME in
  sft)
    keys+=(
      data.train_files="$OUT/given.parquet"
      actor_rollout_ref.rollout.name=dataset
      $actor.policy_loss.loss_mode=sft
      trainer.total_training_steps=60
      trainer.val_before_train=False
      trainer.test_freq=-1
    )
    ;;
  dpo)
    keys+=(
      data.train_files="$OUT/given.parquet"
      'data.response_keys=[chosen,rejected]'
      actor_rollout_ref.rollout.name=dataset
      actor_rollout_ref.rollout.n=2
      actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=float32
      actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
      $actor.policy_loss.loss_mode=dpo
      trainer.total_training_steps=40
      trainer.val_before_train=False
      trainer.test_freq=-1
    )
    ;;
  sft_grpo)
    keys+=(
      dag.workflow_path=dag_templates/sft_grpo.yaml
      dag.node_config.demonstrations.data.train_files="$OUT/given.parquet"
      dag.node_config.demonstrations.rollout.agent.last_step=15
      dag.node_config.rollout.rollout.agent.first_step=16
      data.train_files="$OUT/train.parquet"
      algorithm.adv_estimator=grpo
      algorithm.norm_adv_by_std_in_grpo=False
      actor_rollout_ref.rollout.name=hf
      actor_rollout_ref.rollout.n=16
      custom_reward_function.path=examples/quickstart/reward.py
      trainer.total_training_steps=60
      trainer.test_freq=5
    )
    ;;
  reward)
    keys+=(
      "${reward_model[@]}"
      data.train_files="$OUT/preferences.parquet"
      'data.response_keys=[chosen,rejected]'
      actor_rollout_ref.rollout.name=dataset
      actor_rollout_ref.rollout.n=2
      trainer.total_training_steps=60
      trainer.val_before_train=False
      trainer.test_freq=-1
    )
    ;;
  reward_grpo)
    keys+=(
      "${reward_model[@]}"
      dag.workflow_path=dag_templates/reward_training_grpo.yaml
      dag.node_config.pairs.data.train_files="$OUT/preferences.parquet"
      dag.node_config.rollout.rollout.agent.first_step=51
      data.train_files="$OUT/train.parquet"
      data.max_response_length=1 # responses of one token: given ones are cut, and none has an end to read
      data.truncation=right
      algorithm.adv_estimator=grpo
      algorithm.norm_adv_by_std_in_grpo=False
      actor_rollout_ref.rollout.name=hf
      actor_rollout_ref.rollout.n=16
      trainer.total_training_steps=120
      trainer.test_freq=20
    )
    ;;
  *)
    echo "run.sh: unknown example $NAME: name sft, dpo, sft_grpo, reward or reward_grpo" >&2
    exit 2
    ;;
esac
if [[ ! -e $OUT/given.parquet ]]; then
  "$PYTHON" -m examples.given_responses.prepare --out "$OUT"
fi
exec "$PYTHON" -m siirl.main_dag \
  data.val_files="$OUT/test.parquet" \
  data.train_batch_size=32 \
  data.max_prompt_length=16 \
  data.max_response_length=2 \
  actor_rollout_ref.model.path="$OUT/model" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  $actor.optim.lr=1e-3 \
  $actor.ppo_mini_batch_size=32 \
  $actor.use_dynamic_bsz=True \
  $actor.fsdp_config.mixed_precision.param_dtype=float32 \
  actor_rollout_ref.rollout.dtype=float32 \
  trainer.device=cpu \
  trainer.n_gpus_per_node=1 \
  trainer.save_freq=-1 \
  trainer.resume_mode=disable \
  trainer.overwrite=true \
  trainer.project_name=siirl \
  trainer.experiment_name="$NAME" \
  trainer.output_dir="$OUT/$NAME" \
  "${keys[@]}" "$@"
