#!/usr/bin/env bash
# Train the quickstart's task as a framework asks it: bash examples/agents_elsewhere/quickstart.sh openai_agents [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHON=${PYTHON:-.venv/bin/python}
NAME=${1-}
case $NAME in
  openai | anthropic | openai_agents) shift ;;
  *)
    echo "usage: $0 FRAMEWORK [key=value ...]: FRAMEWORK is openai, anthropic or openai_agents" >&2
    exit 2
    ;;
esac
export QUICKSTART_DIR=${AGENTS_ELSEWHERE_DIR:-outputs/agents_elsewhere_$NAME}
if [[ ! -e $QUICKSTART_DIR/data/test.parquet ]]; then
  "$PYTHON" -m examples.quickstart.prepare --out "$QUICKSTART_DIR"
fi
exec bash examples/quickstart/run.sh \
  actor_rollout_ref.serve.command="examples/agents_elsewhere/frameworks.py:$NAME" \
  trainer.experiment_name="quickstart_$NAME" \
  trainer.n_gpus_per_node=1 \
  trainer.total_training_steps=60 \
  trainer.test_freq=20 \
  actor_rollout_ref.rollout.n=8 \
  "$@"
