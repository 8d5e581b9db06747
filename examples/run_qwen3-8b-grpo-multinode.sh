#!/usr/bin/env bash
# GRPO for Qwen3-8B on two machines or more, each of which holds a whole copy of the trained weights (HSDP).
# Run the same command on each of them, with its own PET_NODE_RANK; Kubernetes' training operator sets the PET_*
# variables and MASTER_ADDR by itself. Paths must exist on all machines. docs/launch.md tells more.
#
#   PET_NNODES=2 PET_NODE_RANK=0 MASTER_ADDR=node-a bash examples/run_qwen3-8b-grpo-multinode.sh   # on node-a
#   PET_NNODES=2 PET_NODE_RANK=1 MASTER_ADDR=node-a bash examples/run_qwen3-8b-grpo-multinode.sh   # on node-b
set -euo pipefail
export PET_NNODES=${PET_NNODES:-2}
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen3-8b-grpo.sh" \
  actor_rollout_ref.actor.fsdp_config.fsdp_size="${N_GPUS_PER_NODE:-8}" \
  "$@"
