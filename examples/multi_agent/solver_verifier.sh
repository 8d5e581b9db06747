#!/usr/bin/env bash
# Train two policies that need each other, on CPU, from scratch: bash examples/multi_agent/solver_verifier.sh [key=value ...]
# With the word alone before the keys: one agent on the same data, which sees what the solver sees.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
example=examples/multi_agent/solver_verifier
if [[ ${1-} == alone ]]; then
  shift
  name=alone
  set -- custom_reward_function.name=alone "$@"
else
  name=team
  set -- dag.workflow_path=$example.yaml "$@"
fi
OUT=${MULTI_AGENT_DIR:-outputs/solver_verifier}
if [[ ! -e $OUT/data/test.parquet ]]; then
  "$PYTHON" examples/quickstart/prepare.py --out "$OUT/quickstart" --rows 1  # the tiny model and its tokenizer
  "$PYTHON" $example.py --out "$OUT/data"
fi
exec "$PYTHON" -m siirl.main_dag \
  algorithm.adv_estimator=grpo \
  algorithm.norm_adv_by_std_in_grpo=False \
  data.train_files="$OUT/data/train.parquet" \
  data.val_files="$OUT/data/test.parquet" \
  data.train_batch_size=16 \
  data.max_prompt_length=16 \
  data.max_response_length=2 \
  actor_rollout_ref.model.path="$OUT/quickstart/model" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.actor.entropy_coeff=0.02 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.dtype=float32 \
  actor_rollout_ref.rollout.n=16 \
  custom_reward_function.path=$example.py \
  trainer.device=cpu \
  trainer.n_gpus_per_node=1 \
  trainer.total_training_steps=100 \
  trainer.test_freq=10 \
  trainer.save_freq=-1 \
  trainer.resume_mode=disable \
  trainer.project_name=siirl \
  trainer.experiment_name=solver_verifier_$name \
  trainer.output_dir="$OUT/$name" \
  "$@"
