#!/usr/bin/env bash
# Train agents that need each other, on CPU, from scratch: bash examples/multi_agent/solver_verifier.sh [alone] [key=value ...]
# alone: one agent on the same data, which sees what the solver sees. MULTI_AGENT_DIR (outputs/multi_agent) holds inputs and
# results, SEED (0) draws models, data and samples. EXAMPLE=debate: the example of debate.sh, on the same data.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
EXAMPLE=${EXAMPLE:-solver_verifier}
SEED=${SEED:-0}
OUT=${MULTI_AGENT_DIR:-outputs/multi_agent}/numbers_$SEED
if [[ ${1-} == alone ]]; then
  shift
  name=alone
  set -- custom_reward_function.path=examples/multi_agent/solver_verifier.py custom_reward_function.name=alone \
    data.max_response_length=1 "$@"
else
  name=$EXAMPLE
  set -- dag.workflow_path="dag_templates/$EXAMPLE.yaml" custom_reward_function.path="examples/multi_agent/$EXAMPLE.py" \
    actor_rollout_ref.rollout.agent.process_path="examples/multi_agent/$EXAMPLE.py" data.max_response_length=8 "$@"
fi
if [[ ! -e $OUT/test.parquet ]]; then
  "$PYTHON" examples/multi_agent/solver_verifier.py --out "$OUT" --seed "$SEED"
fi
exec "$PYTHON" -m siirl.main_dag \
  algorithm.adv_estimator=grpo \
  algorithm.norm_adv_by_std_in_grpo=False \
  data.train_files="$OUT/train.parquet" \
  data.val_files="$OUT/test.parquet" \
  data.train_batch_size=16 \
  data.max_prompt_length=24 \
  actor_rollout_ref.model.path="$OUT/model_0" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.actor.entropy_coeff=0.02 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.dtype=float32 \
  actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.rollout.agent.max_turn_tokens=1 \
  trainer.device=cpu \
  trainer.n_gpus_per_node=1 \
  trainer.seed="$SEED" \
  trainer.total_training_steps=60 \
  trainer.test_freq=10 \
  trainer.save_freq=-1 \
  trainer.resume_mode=disable \
  trainer.project_name=siirl \
  trainer.experiment_name="$name" \
  trainer.output_dir="$OUT/$name" \
  "$@"
