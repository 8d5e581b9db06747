"""What an asynchronous rollout reports, of responses as of episodes."""

from collections.abc import Mapping, Sequence

from siirl.nodes.context import OpContext

TOO_OLD = "older than max_lag (rollout.stale=drop)"


def report_staleness(
    ctx: OpContext,
    staleness: Sequence[int],
    num_partial: int,
    num_restarted: int,
    dropped: Sequence[int],
    num_left: int,
    num_replayed: int = 0,
) -> None:
    """How old the responses are: the mean, the oldest, and the share of each age.

    staleness: of each response, how many steps ago its first token was sampled. num_partial: those that were
    sampled in several steps. num_restarted: groups that were restarted. dropped: the sample_index
    of each that was given up. num_left: those that stay. num_replayed: episodes that a resume brought back.
    """
    ctx.lost.extend((prompt, -1, TOO_OLD) for prompt in dropped)
    ctx.metrics.mean("rollout/staleness", sum(staleness), len(staleness))
    ctx.metrics.max("rollout/staleness_max", max(staleness, default=0))
    for age in range(ctx.cfg.actor_rollout_ref.rollout.max_lag + 1):
        ctx.metrics.mean(f"rollout/staleness_{age}", staleness.count(age), len(staleness))
    ctx.metrics.mean("rollout/partial", num_partial, len(staleness))
    ctx.metrics.sum("rollout/restarted", num_restarted)
    if num_replayed:
        ctx.metrics.sum("rollout/replayed", num_replayed)
    ctx.metrics.sum("rollout/dropped", len(dropped))
    ctx.metrics.sum("rollout/in_flight", num_left)


def report_token_staleness(ctx: OpContext, num_tokens: Mapping[int, int]) -> None:
    """How old the tokens of an agent's rows are, in the mean. num_tokens: by the step that sampled them."""
    total = sum((ctx.step - step) * count for step, count in num_tokens.items())
    ctx.metrics.mean("rollout/token_staleness", total, sum(num_tokens.values()))
