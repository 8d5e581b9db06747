#!/usr/bin/env bash
# The same agent as a client that comes to the run by itself: bash examples/agents_elsewhere/listen.sh [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHON=${PYTHON:-.venv/bin/python}
export AGENTS_ELSEWHERE_DIR=${AGENTS_ELSEWHERE_DIR:-outputs/agents_elsewhere_listen}
FILE=$AGENTS_ELSEWHERE_DIR/run/listen/shopper_rank_0.json
rm -f "$FILE"  # of an earlier run
"$PYTHON" -m examples.agents_elsewhere.client "$FILE" --clients 4 &
CLIENT=$!
trap 'kill "$CLIENT" 2>/dev/null || true' EXIT
bash examples/agents_elsewhere/run.sh \
  dag.node_config.shopper.serve.command=null \
  dag.node_config.shopper.serve.listen=true \
  "$@"
