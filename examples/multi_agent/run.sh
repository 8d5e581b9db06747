#!/usr/bin/env bash
# Train an example of several agents on CPU: bash examples/multi_agent/run.sh reasoner_actor|planner_worker|self_play [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
NAME=${1:?name an example: reasoner_actor, planner_worker or self_play}
shift
OUT=${MULTI_AGENT_DIR:-outputs/multi_agent}
DAG="$OUT/$NAME/dag.yaml"
WORDS=1
[ "$NAME" = planner_worker ] && WORDS=2
sed "s|MODEL_1|$(realpath "$OUT")/$NAME/model_1|" "examples/multi_agent/$NAME.yaml" > "$DAG"
exec "${PYTHON:-.venv/bin/python}" -m siirl.main_dag \
  dag.workflow_path="$DAG" \
  algorithm.adv_estimator=grpo \
  algorithm.norm_adv_by_std_in_grpo=False \
  data.train_files="$OUT/$NAME/train.parquet" \
  data.val_files="$OUT/$NAME/test.parquet" \
  data.train_batch_size=8 \
  data.max_prompt_length=48 \
  data.max_response_length=32 \
  actor_rollout_ref.model.path="$OUT/$NAME/model_0" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  actor_rollout_ref.actor.optim.lr=5e-4 \
  actor_rollout_ref.actor.entropy_coeff=0.02 \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.dtype=float32 \
  actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.rollout.agent.max_turn_tokens="$WORDS" \
  custom_reward_function.path=examples/multi_agent/reward.py \
  trainer.device=cpu \
  trainer.n_gpus_per_node=1 \
  trainer.total_training_steps=80 \
  trainer.test_freq=10 \
  trainer.save_freq=-1 \
  trainer.resume_mode=disable \
  trainer.project_name=siirl \
  trainer.experiment_name="$NAME" \
  trainer.output_dir="$OUT/$NAME/out" \
  "$@"
