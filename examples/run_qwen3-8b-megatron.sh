#!/usr/bin/env bash
# GRPO for Qwen3-8B on machines with 8 GPUs of 80 GB: Megatron-Core training (TP 2 x PP 4, sequence parallel), vLLM
# rollouts. The settings are those of siiRL's guide to the Megatron backend.
#
#   python3 examples/data_preprocess/deepscaler.py --local_dir ~/data/deepscaler
#   bash examples/run_qwen3-8b-megatron.sh
#
# Any key can follow; lib/launch.sh lists the variables.
MODEL_NAME=${MODEL_NAME:-Qwen3-8B}
DATASET=${DATASET:-deepscaler}
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

export HYDRA_FULL_ERROR=${HYDRA_FULL_ERROR:-1}
export SIIRL_LOG_VERBOSITY=${SIIRL_LOG_VERBOSITY:-INFO}
ACTOR_REF_TP=${ACTOR_REF_TP:-2}
ACTOR_REF_PP=${ACTOR_REF_PP:-4}
ACTOR_REF_CP=${ACTOR_REF_CP:-1}
ACTOR_REF_SP=${ACTOR_REF_SP:-True}

launch \
  data.train_batch_size=$((128 * NNODES)) \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$ACTOR_REF_TP" \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$ACTOR_REF_PP" \
  actor_rollout_ref.actor.megatron.context_parallel_size="$ACTOR_REF_CP" \
  actor_rollout_ref.actor.megatron.sequence_parallel="$ACTOR_REF_SP" \
  actor_rollout_ref.actor.megatron.use_distributed_optimizer=True \
  actor_rollout_ref.actor.megatron.param_dtype=bfloat16 \
  actor_rollout_ref.actor.megatron.param_offload=False \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=$((16 * NNODES)) \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.grad_clip=1.0 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size="$ACTOR_REF_TP" \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.45 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.prompt_length=1024 \
  actor_rollout_ref.rollout.response_length=2048 \
  trainer.logger="['console','tensorboard']" \
  trainer.save_freq=30 \
  trainer.test_freq=10 \
  trainer.total_epochs=30 \
  trainer.resume_mode=auto \
  trainer.max_actor_ckpt_to_keep=5 \
  trainer.default_local_dir="${CKPT_PATH:-$OUTPUT_DIR/checkpoints}" \
  trainer.val_before_train=True \
  "$@"
