"""The rollout op with a lag: responses may go on in the next steps, under newer weights.

Sources: "APRIL: Active partial rollouts in reinforcement learning" (2025), "AReaL" (2025).
"""

from collections import Counter
from dataclasses import replace

from tensordict import TensorDict

from siirl.engines.rollout.base import Completion, RolloutEngine
from siirl.nodes.context import OpContext, StepInfo
from siirl.nodes.generate import (
    add_experts,
    prompt_seed,
    report,
    response_columns,
    rollout,
    samples_of,
    sampling_params,
)
from siirl.nodes.in_flight import FinishedGroups, RolloutsInFlight
from siirl.nodes.lag_report import report_lag, report_token_lag
from siirl.nodes.recording import dump_rollouts


def partial_rollout(
    ctx: OpContext, rows: TensorDict, engine: RolloutEngine, in_flight: RolloutsInFlight
) -> TensorDict:
    """One row per sample of as many prompts as a batch has, or still lacks: those of this step, or of some
    steps before.

    rows: the prompts that were loaded, maybe several batches or none. Validation samples its own prompts, and
    all of them. No communication but within the shard.
    """
    if ctx.validate:
        return rollout(ctx, rows, engine)
    params = sampling_params(ctx.cfg, ctx.dialect.stop_ids, validate=False)
    in_flight.admit(
        rows, ctx.step, lambda batch, slot: prompt_seed(replace(ctx, now=StepInfo(batch, False)), slot)
    )
    mine = in_flight.sample(params, ctx.step).encode() if engine.leads else None
    taken = FinishedGroups.decode(engine.share(mine))
    completions = [
        Completion(one.token_ids, one.log_probs, one.finish_reason or "", -1, one.versions)
        for one in taken.responses
    ]
    out = samples_of(in_flight.give(taken), params.n, response_columns(completions))
    experts = [one.experts and bytes.fromhex(one.experts) for one in taken.responses]
    add_experts(ctx.cfg, out, experts)
    report(ctx, out)
    lags = [ctx.step - (one.first_step or ctx.step) for one in taken.responses]
    num_partial = sum(len(set(one.steps)) > 1 for one in taken.responses)
    report_token_lag(ctx, Counter(step for one in taken.responses for step in one.steps))
    dropped, left = in_flight.drain_dropped(), in_flight.num_more(ctx.step)
    report_lag(ctx, lags, num_partial, taken.num_restarted, dropped, left)
    ctx.metrics.merge(engine.drain_metrics())
    dump_rollouts(ctx, out)
    return out
