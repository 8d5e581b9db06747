#!/usr/bin/env bash
# A student learns from two teachers that know half of a task each, on CPU: bash examples/distillation/run.sh [key=value ...]
# DISTILLATION_DIR (outputs/distillation) holds models, data and results.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${DISTILLATION_DIR:-outputs/distillation}
actor=actor_rollout_ref.actor
if [[ ! -e $OUT/test.parquet ]]; then
  "$PYTHON" -m examples.distillation.prepare --out "$OUT"
fi
exec "$PYTHON" -m siirl.main_dag \
  dag.workflow_path=examples/distillation/two_teachers.yaml \
  dag.node_config.larger.model.path="$OUT/larger" \
  dag.node_config.smaller.model.path="$OUT/smaller" \
  data.train_files="$OUT/train.parquet" \
  data.val_files="$OUT/test.parquet" \
  data.train_batch_size=64 \
  data.max_prompt_length=16 \
  data.max_response_length=2 \
  actor_rollout_ref.model.path="$OUT/student" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  $actor.optim.lr=1e-3 \
  $actor.ppo_mini_batch_size=64 \
  $actor.use_dynamic_bsz=True \
  $actor.distill.top_k=-1 \
  $actor.distill.divergence=forward_kl \
  $actor.fsdp_config.mixed_precision.param_dtype=float32 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.dtype=float32 \
  teacher.log_prob_use_dynamic_bsz=True \
  teacher.fsdp_config.mixed_precision.param_dtype=float32 \
  custom_reward_function.path=examples/quickstart/reward.py \
  trainer.device=cpu \
  trainer.n_gpus_per_node=1 \
  trainer.total_training_steps=60 \
  trainer.test_freq=20 \
  trainer.save_freq=-1 \
  trainer.resume_mode=disable \
  trainer.overwrite=true \
  trainer.project_name=siirl \
  trainer.experiment_name=distillation \
  trainer.output_dir="$OUT/run" \
  "$@"
