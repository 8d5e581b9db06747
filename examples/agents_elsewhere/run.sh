#!/usr/bin/env bash
# Train an agent that is somebody else's program, on CPU, from scratch: bash examples/agents_elsewhere/run.sh [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${AGENTS_ELSEWHERE_DIR:-outputs/agents_elsewhere}
if [[ ! -e $OUT/test.parquet ]]; then
  "$PYTHON" -m examples.agents_elsewhere.prepare --out "$OUT"
fi
exec "$PYTHON" -m siirl.main_dag \
  dag.workflow_path=examples/agents_elsewhere/shopper.yaml \
  algorithm.adv_estimator=grpo \
  algorithm.norm_adv_by_std_in_grpo=False \
  data.train_files="$OUT/train.parquet" \
  data.val_files="$OUT/test.parquet" \
  data.train_batch_size=8 \
  data.max_prompt_length=16 \
  data.max_response_length=16 \
  actor_rollout_ref.model.path="$OUT/model" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.actor.entropy_coeff=0.02 \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.dtype=float32 \
  actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.rollout.agent.max_turn_tokens=1 \
  trainer.device=cpu \
  trainer.n_gpus_per_node=1 \
  trainer.total_training_steps=80 \
  trainer.test_freq=10 \
  trainer.save_freq=-1 \
  trainer.resume_mode=disable \
  trainer.overwrite=true \
  trainer.project_name=siirl \
  trainer.experiment_name=agents_elsewhere \
  trainer.output_dir="$OUT/run" \
  "$@"
