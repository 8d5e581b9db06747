"""The rollout op with a lag: responses may go on in the next steps, under newer weights.

Sources: "APRIL: Active partial rollouts in reinforcement learning" (2025), "AReaL" (2025).
"""

from tensordict import TensorDict

from siirl.engines.rollout.base import Completion, RolloutEngine
from siirl.nodes.context import OpContext
from siirl.nodes.generate import (
    report,
    response_columns,
    rollout,
    samples_of,
    sampling_params,
    seed_of,
    stop_token_ids,
)
from siirl.nodes.in_flight import RolloutsInFlight, Taken
from siirl.nodes.recording import dump_rollouts


def partial_rollout(
    ctx: OpContext, rows: TensorDict, engine: RolloutEngine, in_flight: RolloutsInFlight
) -> TensorDict:
    """One row per sample of as many prompts as a batch has: those of this step, or of some steps before.

    rows: the prompts that were loaded, maybe several batches or none. Validation samples its own prompts, and
    all of them. No communication but within the shard.
    """
    if ctx.validate:
        return rollout(ctx, rows, engine)
    params = sampling_params(ctx.cfg, stop_token_ids(ctx), validate=False)
    in_flight.admit(rows, ctx.step, lambda batch, slot: seed_of(ctx, str(slot), step=batch))
    mine = in_flight.sample(params, ctx.step).encode() if engine.leads else None
    taken = Taken.decode(engine.share(mine))
    completions = [
        Completion(one.token_ids, one.log_probs, one.finish_reason or "", min(one.versions, default=-1))
        for one in taken.responses
    ]
    out = samples_of(in_flight.give(taken), params.n, response_columns(completions))
    report(ctx, out)
    _report_lag(ctx, taken, len(in_flight.orders()))
    ctx.metrics.merge(engine.drain_metrics())
    dump_rollouts(ctx, out)
    return out


def _report_lag(ctx: OpContext, taken: Taken, num_left: int) -> None:
    """How old the rows are, in steps: the mean, the oldest, and the share of each age."""
    max_lag = ctx.cfg.actor_rollout_ref.rollout.max_lag
    lags = [ctx.step - (one.first_step or ctx.step) for one in taken.responses]
    partial = sum(one.first_step != one.last_step for one in taken.responses)
    ctx.metrics.mean("rollout/lag", sum(lags), len(lags))
    ctx.metrics.max("rollout/lag_max", max(lags, default=0))
    for lag in range(max_lag + 1):
        ctx.metrics.mean(f"rollout/lag_{lag}", lags.count(lag), len(lags))
    ctx.metrics.mean("rollout/partial", partial, len(lags))
    ctx.metrics.sum("rollout/restarted", taken.num_restarted)
    ctx.metrics.sum("rollout/in_flight", num_left)
