#!/usr/bin/env bash
# GRPO for the mixture of experts Qwen3-30B-A3B on 4 machines with 8 GPUs of 80 GB. Actor: TP 2 x PP 2 with 8 chunks
# of 3 layers on each pipeline rank, EP 4. Reference, on the same GPUs: TP 1, PP 1, EP 4.
#
#   python3 examples/data_preprocess/deepscaler.py --local_dir ~/data/deepscaler
#   PET_NNODES=4 PET_NODE_RANK=0 MASTER_ADDR=node-a bash examples/run_qwen3-30b-a3b-megatron.sh
#
# Any key can follow; lib/launch.sh lists the variables; run it on every machine, with its own PET_NODE_RANK.
MODEL_NAME=${MODEL_NAME:-Qwen3-30B-A3B}
DATASET=${DATASET:-deepscaler}
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

launch \
  data.train_batch_size=$((64 * NNODES)) \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=$((16 * NNODES)) \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.45 \
  actor_rollout_ref.rollout.enforce_eager=False \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.sequence_parallel=True \
  actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 \
  actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=alltoall \
  actor_rollout_ref.actor.megatron.override_transformer_config.moe_grouped_gemm=True \
  actor_rollout_ref.actor.megatron.param_offload=True \
  actor_rollout_ref.actor.megatron.grad_offload=True \
  actor_rollout_ref.actor.megatron.optimizer_offload=True \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.ref.megatron.tensor_model_parallel_size=1 \
  actor_rollout_ref.ref.megatron.expert_model_parallel_size=4 \
  actor_rollout_ref.ref.megatron.override_transformer_config.moe_token_dispatcher_type=alltoall \
  actor_rollout_ref.ref.megatron.override_transformer_config.moe_grouped_gemm=True \
  trainer.balance_batch=True \
  trainer.total_epochs=5 \
  trainer.save_freq=30 \
  trainer.test_freq=10 \
  trainer.max_actor_ckpt_to_keep=3 \
  "$@"
