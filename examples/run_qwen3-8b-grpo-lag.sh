#!/usr/bin/env bash
# GRPO for Qwen3-8B with long responses: a step does not wait for the longest, which goes on in the next one.
# docs/async.md tells when that helps; `rollout/staleness` and `rollout/partial` among the metrics show what it does.
#
#   MODEL_PATH=~/data/models/Qwen3-8B bash examples/run_qwen3-8b-grpo-lag.sh
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen3-8b-grpo.sh" \
  data.max_response_length=16384 \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
  actor_rollout_ref.rollout.max_lag=1 \
  "$@"
