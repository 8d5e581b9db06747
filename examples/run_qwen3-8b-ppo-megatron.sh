#!/usr/bin/env bash
# PPO for Qwen3-8B on machines with 8 GPUs of 80 GB: actor (TP 2 x PP 2) and critic (TP 4) on Megatron-Core, on the
# same GPUs, vLLM rollouts.
#
#   python3 examples/data_preprocess/deepscaler.py --local_dir ~/data/deepscaler
#   bash examples/run_qwen3-8b-ppo-megatron.sh
#
# Any key can follow; lib/launch.sh lists the variables.
MODEL_NAME=${MODEL_NAME:-Qwen3-8B}
DATASET=${DATASET:-deepscaler}
ALG=${ALG:-gae}
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

launch \
  algorithm.gamma=1.0 \
  algorithm.lam=0.95 \
  data.train_batch_size=$((128 * NNODES)) \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=$((32 * NNODES)) \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.45 \
  actor_rollout_ref.rollout.enforce_eager=False \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.sequence_parallel=True \
  actor_rollout_ref.actor.megatron.param_offload=True \
  actor_rollout_ref.actor.megatron.grad_offload=True \
  actor_rollout_ref.actor.megatron.optimizer_offload=True \
  critic.strategy=megatron \
  critic.optim.lr=1e-5 \
  critic.use_dynamic_bsz=True \
  critic.ppo_max_token_len_per_gpu=16384 \
  critic.megatron.tensor_model_parallel_size=4 \
  critic.megatron.sequence_parallel=True \
  critic.megatron.param_offload=True \
  critic.megatron.grad_offload=True \
  critic.megatron.optimizer_offload=True \
  trainer.critic_warmup=5 \
  trainer.balance_batch=True \
  trainer.total_epochs=5 \
  trainer.save_freq=30 \
  trainer.test_freq=10 \
  trainer.max_actor_ckpt_to_keep=3 \
  "$@"
