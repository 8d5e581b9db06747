#!/usr/bin/env bash
# GRPO for Llama-3.1-70B-Instruct on 2, 8 or 16 machines with 8 GPUs of 80 GB. On 16 GPUs the optimizer states alone
# would take 49 GiB of each (docs/scaling.md): there the optimizer runs on the host.
#
#   python3 examples/data_preprocess/deepscaler.py --local_dir ~/data/deepscaler
#   PET_NNODES=2 PET_NODE_RANK=0 MASTER_ADDR=node-a bash examples/run_llama3.1-70b-megatron.sh
#
# Any key can follow; lib/launch.sh lists the variables; run it on every machine, with its own PET_NODE_RANK.
MODEL_NAME=${MODEL_NAME:-Llama-3.1-70B-Instruct}
DATASET=${DATASET:-deepscaler}
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

MEGATRON=actor_rollout_ref.actor.megatron
OPTIMIZER=actor_rollout_ref.actor.optim.override_optimizer_config
case $NNODES in
  2)
    SIZES=("$MEGATRON.pipeline_model_parallel_size=2" "$OPTIMIZER.optimizer_cpu_offload=True"
      "$OPTIMIZER.optimizer_offload_fraction=1.0" "$OPTIMIZER.overlap_cpu_optimizer_d2h_h2d=True")
    ;;
  8) SIZES=("$MEGATRON.pipeline_model_parallel_size=4" "$MEGATRON.context_parallel_size=2") ;;
  16) SIZES=("$MEGATRON.pipeline_model_parallel_size=8" "$MEGATRON.context_parallel_size=2") ;;
  *)
    echo "PET_NNODES=$NNODES: sizes are known for 2, 8 and 16 machines. Add yours (docs/scaling.md)." >&2
    exit 2
    ;;
esac

launch \
  data.train_batch_size=$((32 * NNODES)) \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=$((16 * NNODES)) \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.enforce_eager=False \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.sequence_parallel=True \
  "${SIZES[@]}" \
  actor_rollout_ref.actor.megatron.param_offload=True \
  actor_rollout_ref.actor.megatron.grad_offload=True \
  actor_rollout_ref.actor.megatron.optimizer_offload=True \
  trainer.balance_batch=True \
  trainer.total_epochs=5 \
  trainer.save_freq=30 \
  trainer.test_freq=10 \
  trainer.max_actor_ckpt_to_keep=3 \
  "$@"
