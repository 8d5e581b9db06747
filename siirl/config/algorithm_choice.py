"""Which advantage estimator and policy loss a configuration picks: their rows of the table."""

from siirl.config.algorithm_table import ESTIMATORS, LOSSES, OWN_ESTIMATOR, OWN_LOSS, Estimator, PolicyLoss
from siirl.config.root import Config


def estimator_of(cfg: Config) -> Estimator:
    """The row of the advantage estimator; OWN_ESTIMATOR for one of the user's."""
    return ESTIMATORS.get(cfg.algorithm.adv_estimator, OWN_ESTIMATOR)


def may_use_critic(cfg: Config) -> bool:
    """Whether the estimator uses a critic; an estimator of the user's own may."""
    return estimator_of(cfg).uses_critic or ":" in cfg.algorithm.adv_estimator


def policy_loss_name(cfg: Config) -> str:
    """The name of the policy loss."""
    actor = cfg.actor_rollout_ref.actor
    return "cpgd" if actor.use_cpgd_loss else actor.policy_loss.loss_mode


def policy_loss_of(cfg: Config) -> PolicyLoss:
    """The row of the policy loss; OWN_LOSS for one of the user's."""
    return LOSSES.get(policy_loss_name(cfg), OWN_LOSS)
