"""Defaults that do not go with what was set: they work, but are hardly what is meant."""

from collections.abc import Iterator

from siirl.config.aliases import POLICY
from siirl.config.resolve import COMPUTE_DTYPE, compute_dtype
from siirl.config.root import Config


def default_warnings(cfg: Config) -> Iterator[str]:
    """One line for each such default."""
    yield from _unlike_its_paper(cfg)
    yield from _averaged_advantages(cfg)
    yield from _reference_of_another_type(cfg)
    yield from _uncorrected_lag(cfg)
    yield from _uncorrected_fp8(cfg)


def _unlike_its_paper(cfg: Config) -> Iterator[str]:
    actor, mode = cfg.actor_rollout_ref.actor, "actor_rollout_ref.actor.loss_agg_mode"
    default, of_paper = actor.loss_agg_mode, actor.loss.paper_mode
    if of_paper == "seq-mean-token-mean" and mode not in cfg.explicit:
        yield (
            f"{mode}={default} is the default, but the paper of policy_loss.loss_mode={actor.loss_name} "
            f"averages over each response first. Set {mode}={of_paper} (or {default})."
        )


def _averaged_advantages(cfg: Config) -> Iterator[str]:
    """Advantages that differ within a row, under a loss that takes their mean."""
    actor, algorithm = cfg.actor_rollout_ref.actor, cfg.algorithm
    if not actor.loss.row_advantage:
        return
    credit, estimator = algorithm.credit, algorithm.estimator
    causes = [f"adv_estimator={algorithm.adv_estimator}"] if estimator.form == "token" else []
    if estimator.form == "reward to go":
        causes += ["use_kl_in_reward=true"] if algorithm.use_kl_in_reward else []
        if "gamma" in estimator.keys and algorithm.gamma != 1:
            causes.append(f"gamma={algorithm.gamma:g}")
    causes += [f"credit.group_by=[{','.join(credit.group_by)}]"] if "turn" in credit.group_by else []
    causes += ["credit.equal_weight=turn"] if credit.equal_weight == "turn" else []
    if causes:
        yield (
            f"policy_loss.loss_mode={actor.loss_name} takes the mean of a row's advantages, as its "
            f"paper has one for a row, but algorithm.{causes[0]} gives the tokens of a row different ones: "
            "the differences are lost. Set policy_loss.loss_mode=gspo, whose ratio is that of the row as "
            "well and keeps them."
        )


def _reference_of_another_type(cfg: Config) -> Iterator[str]:
    """A reference that rounds otherwise than the actor: the KL of identical weights is not 0."""
    ref, actor = compute_dtype(cfg, "ref"), compute_dtype(cfg, "actor")
    if ref != actor and (cfg.actor_rollout_ref.actor.use_kl_loss or cfg.algorithm.use_kl_in_reward):
        name = f"{POLICY}.ref.{COMPUTE_DTYPE[cfg.actor_rollout_ref.ref.strategy]}"
        yield (
            f"{name}={ref}, but the actor computes in {actor}: the KL from the reference has the difference "
            f"of their rounding in it. Leave {name} out, and it is the actor's."
        )


def _uncorrected_lag(cfg: Config) -> Iterator[str]:
    """Tokens of older weights that count like those of the newest."""
    actor, max_lag = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout.max_lag
    if max_lag and actor.recompute_old_log_prob and not actor.corrects_rollout:
        yield (
            "actor_rollout_ref.actor.rollout_correction.weight=none with actor_rollout_ref.rollout."
            f"max_lag={max_lag}: tokens of older weights count as if the newest had sampled them. Leave it "
            "unset (truncate)."
        )


def _uncorrected_fp8(cfg: Config) -> Iterator[str]:
    """Tokens that an engine in FP8 has sampled, which count as if the policy itself had."""
    actor, in_fp8 = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout.in_fp8
    if in_fp8 and actor.recompute_old_log_prob and not (actor.corrects_rollout or actor.imitates):
        yield (
            "actor_rollout_ref.actor.rollout_correction.weight=none with actor_rollout_ref.rollout."
            f"{in_fp8}: tokens that the engine finds likelier than the policy does count as if they were "
            "not. Leave it unset (truncate)."
        )
