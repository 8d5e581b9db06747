"""The rollout op of recorded rollouts: rollout.name=replay."""

from pathlib import Path

from tensordict import TensorDict

from siirl.data.recorded_rollouts import step_folder
from siirl.data.replayed_rows import recorded_rows
from siirl.errors import DataError
from siirl.nodes.context import OpContext
from siirl.nodes.generate import conditions_of, report, samples_of


def replay(ctx: OpContext, rows: TensorDict, recordings: Path) -> TensorDict:
    """The rows that a rollout recorded at this step. No communication.

    DataError if they do not belong to these prompts or to this configuration.
    """
    rollout_cfg = ctx.cfg.actor_rollout_ref.rollout
    folder = step_folder(recordings, ctx.agent, ctx.step)
    columns = recorded_rows(folder, rows, rollout_cfg.n, conditions_of(ctx))
    width = columns["response_ids"].shape[1]
    if width > rollout_cfg.response_length:
        raise DataError(
            f"{folder} has responses of up to {width} tokens, data.max_response_length is "
            f"{rollout_cfg.response_length}. Set it to {width} or more."
        )
    out = samples_of(rows, rollout_cfg.n, columns)
    report(ctx, out)
    return out
