#!/usr/bin/env bash
# GRPO for Llama-3.1-405B-Instruct on 32 machines with 8 GPUs: TP 8 x PP 16 x CP 2, two chunks on each pipeline rank.
# 126 layers do not divide by 16: embedding and output head count as a layer each, so the first and the last stage
# have 7 and the others 8. A rollout engine spans a machine and its weights take 101 GB of each GPU: H200 or larger.
#
#   python3 examples/data_preprocess/deepscaler.py --local_dir ~/data/deepscaler
#   PET_NNODES=32 PET_NODE_RANK=0 MASTER_ADDR=node-a bash examples/run_llama3.1-405b-megatron.sh
#
# Any key can follow; lib/launch.sh lists the variables; run it on every machine, with its own PET_NODE_RANK.
MODEL_NAME=${MODEL_NAME:-Llama-3.1-405B-Instruct}
DATASET=${DATASET:-deepscaler}
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

launch \
  data.train_batch_size=$((8 * NNODES)) \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=$((4 * NNODES)) \
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
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=16 \
  actor_rollout_ref.actor.megatron.sequence_parallel=True \
  actor_rollout_ref.actor.megatron.context_parallel_size=2 \
  actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.override_transformer_config.account_for_embedding_in_pipeline_split=True \
  actor_rollout_ref.actor.megatron.override_transformer_config.account_for_loss_in_pipeline_split=True \
  actor_rollout_ref.actor.megatron.override_ddp_config.overlap_grad_reduce=True \
  actor_rollout_ref.actor.megatron.override_ddp_config.overlap_param_gather=True \
  actor_rollout_ref.actor.megatron.param_offload=True \
  actor_rollout_ref.actor.megatron.grad_offload=True \
  actor_rollout_ref.actor.megatron.optimizer_offload=True \
  trainer.balance_batch=True \
  trainer.total_epochs=5 \
  trainer.save_freq=30 \
  trainer.test_freq=10 \
  trainer.max_actor_ckpt_to_keep=3 \
  "$@"
