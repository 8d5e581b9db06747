#!/usr/bin/env bash
# GRPO for Qwen3-0.6B on one GPU of 24 GB: FSDP training and vLLM rollouts take turns on it.
#
#   python3 examples/data_preprocess/gsm8k.py --local_dir ~/data/gsm8k
#   MODEL_PATH=~/data/models/Qwen3-0.6B bash examples/run_qwen3-0.6b-1gpu.sh
#
# Any key can follow; lib/launch.sh lists the variables.
MODEL_NAME=${MODEL_NAME:-Qwen3-0.6B}
N_GPUS_PER_NODE=${N_GPUS_PER_NODE:-1}
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

launch \
  data.train_batch_size=32 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
  actor_rollout_ref.rollout.enforce_eager=False \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  trainer.total_epochs=3 \
  trainer.save_freq=50 \
  trainer.test_freq=25 \
  trainer.max_actor_ckpt_to_keep=2 \
  "$@"
