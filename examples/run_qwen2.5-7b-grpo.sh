#!/usr/bin/env bash
# GRPO for Qwen2.5-7B-Instruct on machines with 8 GPUs of 80 GB: FSDP training, vLLM rollouts.
#
#   python3 examples/data_preprocess/gsm8k.py --local_dir ~/data/gsm8k
#   MODEL_PATH=~/data/models/Qwen2.5-7B-Instruct bash examples/run_qwen2.5-7b-grpo.sh trainer.total_epochs=1
#
# Any key can follow; lib/launch.sh lists the variables, docs/launch.md tells about several machines.
MODEL_NAME=${MODEL_NAME:-Qwen2.5-7B-Instruct}
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

launch \
  data.train_batch_size=$((128 * NNODES)) \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=$((32 * NNODES)) \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=32768 \
  actor_rollout_ref.ref.fsdp_config.param_offload=True \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.enforce_eager=False \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768 \
  trainer.balance_batch=True \
  trainer.total_epochs=15 \
  trainer.save_freq=30 \
  trainer.test_freq=10 \
  trainer.max_actor_ckpt_to_keep=3 \
  "$@"
