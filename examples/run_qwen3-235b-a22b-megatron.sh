#!/usr/bin/env bash
# GRPO for the mixture of experts Qwen3-235B-A22B on 32 machines with 8 GPUs of 80 GB: TP 4 x PP 8 x EP 8. 94 layers
# do not divide by 8: embedding and output head count as a layer each, so the first and the last stage have 11 and
# the others 12. A rollout engine spans a machine: its weights take 59 GB of each GPU, which training leaves meanwhile.
#
#   python3 examples/data_preprocess/deepscaler.py --local_dir ~/data/deepscaler
#   PET_NNODES=32 PET_NODE_RANK=0 MASTER_ADDR=node-a bash examples/run_qwen3-235b-a22b-megatron.sh
#
# Any key can follow; lib/launch.sh lists the variables; run it on every machine, with its own PET_NODE_RANK.
MODEL_NAME=${MODEL_NAME:-Qwen3-235B-A22B}
DATASET=${DATASET:-deepscaler}
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

launch \
  data.train_batch_size=$((16 * NNODES)) \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=$((8 * NNODES)) \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.85 \
  actor_rollout_ref.rollout.enforce_eager=False \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.sequence_parallel=True \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.override_transformer_config.account_for_embedding_in_pipeline_split=True \
  actor_rollout_ref.actor.megatron.override_transformer_config.account_for_loss_in_pipeline_split=True \
  actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=alltoall \
  actor_rollout_ref.actor.megatron.override_transformer_config.moe_grouped_gemm=True \
  actor_rollout_ref.actor.megatron.param_offload=True \
  actor_rollout_ref.actor.megatron.grad_offload=True \
  actor_rollout_ref.actor.megatron.optimizer_offload=True \
  trainer.balance_batch=True \
  trainer.total_epochs=5 \
  trainer.save_freq=30 \
  trainer.test_freq=10 \
  trainer.max_actor_ckpt_to_keep=3 \
  "$@"
