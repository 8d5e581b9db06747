#!/usr/bin/env bash
# Train a tiny vision model to name colours, by GRPO on CPU. More keys can follow: bash examples/vision/run.sh trainer.total_training_steps=20
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${VISION_DIR:-outputs/vision}
PYTHON=${PYTHON:-.venv/bin/python}
[ -f "$OUT/data/test.parquet" ] || "$PYTHON" examples/vision/prepare.py --out "$OUT"
exec "$PYTHON" -m siirl.main_dag \
  algorithm.adv_estimator=grpo \
  algorithm.norm_adv_by_std_in_grpo=False \
  data.dataset_type=vlm \
  data.train_files="$OUT/data/train.parquet" \
  data.val_files="$OUT/data/test.parquet" \
  data.train_batch_size=32 \
  data.max_prompt_length=32 \
  data.max_response_length=2 \
  actor_rollout_ref.model.path="$OUT/model" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.actor.entropy_coeff=0.01 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.dtype=float32 \
  actor_rollout_ref.rollout.n=16 \
  custom_reward_function.path=examples/vision/reward.py \
  trainer.device=cpu \
  trainer.n_gpus_per_node=2 \
  trainer.total_training_steps=60 \
  trainer.test_freq=10 \
  trainer.save_freq=30 \
  trainer.resume_mode=disable \
  trainer.overwrite=true \
  trainer.project_name=siirl \
  trainer.experiment_name=vision \
  trainer.output_dir="$OUT" \
  "$@"
