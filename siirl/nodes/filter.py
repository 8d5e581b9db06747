"""Ops that keep some rows: the user's filter_plugin, and the resampling of PF-PPO."""

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.groups import resampling_weights
from siirl.data.buffer import number_anew
from siirl.data.rows import objects, take_rows
from siirl.errors import DagError
from siirl.nodes.context import Op, OpContext
from siirl.observe.spans import waiting


def filter_op(plugin: Callable[[OpContext, TensorDict], Tensor]) -> Op:
    """The op of a filter_plugin: plugin(ctx, rows) -> whether to keep each row, bool [B]. No communication.

    Whole groups are on one rank. Rows keep their row_id.
    """

    def filter_rows(ctx: OpContext, rows: TensorDict) -> TensorDict:
        keep_B = torch.as_tensor(plugin(ctx, rows))
        if keep_B.dtype != torch.bool or keep_B.shape != (len(rows),):
            raise DagError(
                f"node {ctx.node_id!r}: its filter_plugin returned {keep_B.dtype} of shape "
                f"{tuple(keep_B.shape)} for {len(rows)} rows. Return True or False for each row."
            )
        ctx.metrics.mean("filter/kept", float(keep_B.sum()), len(keep_B))
        count_dropped(ctx, rows, ~keep_B, "filtered")
        return take_rows(rows, keep_B)

    return filter_rows


def count_dropped(ctx: OpContext, rows: TensorDict, dropped_B: Tensor, why: str) -> None:
    """data/SOURCE/WHY: how many rows of a training step are dropped, by data source. No communication."""
    if not ctx.validate and ctx.is_shard_leader and dropped_B.any():
        sources = Counter(objects(take_rows(rows, dropped_B), "data_source"))
        for source, number in sources.items():
            ctx.metrics.sum(f"data/{source}/{why}", number)


def pf_ppo(ctx: OpContext, rows: TensorDict) -> TensorDict:
    """As many rows as there were, drawn with replacement by their scores; each draw is a row of its own.

    Of an interaction whole episodes are drawn, by the mean score of their rows; each draw is an episode of
    its own. The draw depends on (seed, step) and all rows, not on where they lie. Collective over ctx.group:
    12 bytes a row. Source: "Policy Filtration for RLHF" (2024), section 4.
    """
    unit_B = rows["episode_id"] if "episode_id" in rows.keys() else rows["row_id"]
    mine: dict[int, list[int]] = {}
    for index, unit in enumerate(unit_B.tolist()):
        mine.setdefault(unit, []).append(index)
    ids, scores = _all_units(
        {unit: float(rows["score"][at].double().mean()) for unit, at in mine.items()}, ctx.group
    )
    options = {str(name): value for name, value in ctx.cfg.algorithm.pf_ppo.items()}
    weights = resampling_weights(scores, **options)
    generator = torch.Generator().manual_seed(ctx.cfg.trainer.seed * 1_000_003 + ctx.step)
    drawn = ids[torch.multinomial(weights, len(ids), replacement=True, generator=generator)].sort().values
    ctx.metrics.mean("resampling/distinct", len(drawn.unique()) / max(len(ids), 1))
    taken = [(draw, at) for draw, unit in enumerate(drawn.tolist()) for at in mine.get(unit, ())]
    out = take_rows(rows, [at for _, at in taken])
    number_anew(out, torch.tensor([draw for draw, _ in taken], dtype=torch.int64))
    return out


def _all_units(mine: dict[int, float], group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(ids ascending, their scores) of all ranks of the group; what several ranks hold counts once."""
    parts: list[list[tuple[int, float]]] = [[] for _ in range(dist.get_world_size(group))]
    with waiting():
        dist.all_gather_object(parts, list(mine.items()), group=group)
    pairs = sorted(dict(pair for part in parts for pair in part).items())
    return torch.tensor([unit for unit, _ in pairs]), torch.tensor([score for _, score in pairs]).double()
