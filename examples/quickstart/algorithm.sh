#!/usr/bin/env bash
# Train the quickstart model by another algorithm: bash examples/quickstart/algorithm.sh ppo [key=value ...]
set -euo pipefail
actor=actor_rollout_ref.actor
name=${1-}
[[ $# -eq 0 ]] || shift
case $name in
  grpo) ;;
  gspo) set -- $actor.policy_loss.loss_mode=gspo $actor.clip_ratio_low=3e-4 $actor.clip_ratio_high=4e-4 \
    $actor.loss_agg_mode=seq-mean-token-mean "$@" ;;
  dapo) set -- algorithm.filter_groups.enable=True $actor.clip_ratio_high=0.28 "$@" ;;
  ppo) set -- algorithm.adv_estimator=gae critic.optim.lr=1e-3 critic.use_dynamic_bsz=True \
    critic.model.enable_gradient_checkpointing=False critic.fsdp_config.mixed_precision.param_dtype=float32 "$@" ;;
  rloo) set -- algorithm.adv_estimator=rloo "$@" ;;
  reinforce++) set -- algorithm.adv_estimator=reinforce_plus_plus "$@" ;;
  remax) set -- algorithm.adv_estimator=remax "$@" ;;
  *)
    echo "usage: $0 ALGORITHM [key=value ...]: ALGORITHM is grpo, gspo, dapo, ppo, rloo, reinforce++ or remax" >&2
    exit 2
    ;;
esac
exec bash "$(dirname "$0")/run.sh" "$@"
