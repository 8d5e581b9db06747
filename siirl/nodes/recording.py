"""Records the rows of a rollout as files, which rollout.name=replay reads back."""

from pathlib import Path

from tensordict import TensorDict

from siirl.data.recorded_rollouts import step_folder
from siirl.data.replayed_rows import conditions, record
from siirl.nodes.context import OpContext
from siirl.observe.spans import phase
from siirl.types import EXPERT_FIELDS


def dump_rollouts(ctx: OpContext, out: TensorDict) -> None:
    """Write a training step's rows where trainer.dump_rollouts_dir says, if it does. No communication.

    Without the experts of their tokens, which are many times as large: a replay trains by those of its pass.
    """
    root = ctx.cfg.trainer.dump_rollouts_dir
    if root and not ctx.validate:
        with phase("dump"):
            folder = step_folder(Path(root).expanduser(), ctx.agent, ctx.step)
            record(folder, out.exclude(*EXPERT_FIELDS), conditions_of(ctx))


def conditions_of(ctx: OpContext) -> dict[str, str]:
    """What this run's rows depend on: to be recorded, or compared."""
    rollout_cfg = ctx.cfg.actor_rollout_ref.rollout
    return conditions(ctx.tokenizer, rollout_cfg.n, rollout_cfg.temperature)
