#!/usr/bin/env bash
# Train one policy to debate with itself, on CPU, from scratch: bash examples/multi_agent/debate.sh [alone] [key=value ...]
exec env EXAMPLE=debate bash "$(dirname "$0")/solver_verifier.sh" "$@"
