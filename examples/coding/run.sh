#!/usr/bin/env bash
# A coding agent, mini-swe-agent, learns to mend 20 small repositories, on CPU: bash examples/coding/run.sh [key=value ...]
# AGENT_PYTHON is a Python with the package mini-swe-agent; AGENT=shell does without it: the model says commands turn by turn.
# CODING_DIR (outputs/coding) holds inputs and results.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
AGENT_PYTHON=${AGENT_PYTHON:-.venv/mini-swe-agent/bin/python}
OUT=${CODING_DIR:-outputs/coding}
FILE=$OUT/run/listen/coder_rank_0.json
if [[ ! -e $OUT/model ]]; then
  "$PYTHON" -m examples.coding.prepare --out "$OUT"
fi
rm -f "$FILE" # of an earlier run
if [[ ${AGENT:-} != shell ]]; then
  "$AGENT_PYTHON" examples/coding/agents.py "$FILE" --config examples/coding/tiny.yaml --agents 4 &
  AGENTS=$!
  trap 'kill "$AGENTS" 2>/dev/null || true' EXIT
fi
"$PYTHON" -m siirl.main_dag \
  dag.workflow_path="examples/coding/${AGENT:-coder}.yaml" \
  algorithm.adv_estimator=grpo \
  algorithm.norm_adv_by_std_in_grpo=False \
  data.train_files="$OUT/tasks" \
  data.val_files="$OUT/tasks" \
  data.train_batch_size=4 \
  data.max_prompt_length=48 \
  data.max_response_length=64 \
  actor_rollout_ref.model.path="$OUT/model" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  actor_rollout_ref.actor.optim.lr=2e-3 \
  actor_rollout_ref.actor.entropy_coeff=0.02 \
  actor_rollout_ref.actor.ppo_mini_batch_size=4 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32 \
  actor_rollout_ref.rollout.name=hf \
  actor_rollout_ref.rollout.dtype=float32 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.agent.max_turn_tokens=1 \
  trainer.device=cpu \
  trainer.n_gpus_per_node=1 \
  trainer.total_training_steps=30 \
  trainer.test_freq=30 \
  trainer.save_freq=-1 \
  trainer.resume_mode=disable \
  trainer.overwrite=true \
  trainer.project_name=siirl \
  trainer.experiment_name=coding \
  trainer.output_dir="$OUT/run" \
  "$@"
