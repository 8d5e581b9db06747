"""The mini-batches of a training node: the same rows take part in the same optimizer step on any ranks."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from siirl.config.batch import BatchArithmetic, batch_of
from siirl.nodes.context import OpContext
from siirl.observe.spans import waiting


def policy_mini_batches(ctx: OpContext, rows: TensorDict) -> Iterator[Tensor]:
    """mini_batches of the actor, as its node's configuration cuts them. Collective over ctx.group."""
    actor = ctx.cfg.actor_rollout_ref.actor
    return mini_batches(ctx, rows, batch_of(ctx.cfg), actor.data_loader_seed if actor.shuffle else None)


def mini_batches(
    ctx: OpContext, rows: TensorDict, batch: BatchArithmetic, shuffle_seed: int | None
) -> Iterator[Tensor]:
    """For each optimizer step, which of this rank's rows take part: bool [B].

    A mini-batch is a run of the rows of so many prompts, in the order of row_id; with shuffle_seed, in an
    order drawn for each step and epoch. The last one of an epoch may be short. Rows of an interaction, of
    which an episode may have any number, go by episode, in runs of equal length: as many mini-batches as
    there are of whole batches, whatever episodes were dropped. Some are empty where there are fewer episodes.
    Collective over ctx.group.
    """
    for mine_B in _mini_batches(ctx, rows, batch, shuffle_seed):
        if ctx.taken is not None:
            ctx.taken.begin_update(mine_B)
        yield mine_B


def _mini_batches(
    ctx: OpContext, rows: TensorDict, batch: BatchArithmetic, shuffle_seed: int | None
) -> Iterator[Tensor]:
    by_episode = "episode_id" in rows.keys()
    found = global_positions(rows["episode_id"], ctx.group) if by_episode else _row_positions(ctx, rows)
    position_B, total = found
    for epoch in range(batch.epochs):
        place_B = position_B
        if shuffle_seed is not None:
            place_B = _order(total, (shuffle_seed * 1_000_003 + ctx.step) * 1_009 + epoch)[position_B]
        if by_episode:
            for step in range(batch.mini_batches):
                yield place_B * batch.mini_batches // max(total, 1) == step
            continue
        for first in range(0, total, batch.mini_rows):
            yield (place_B >= first) & (place_B < first + batch.mini_rows)


def _row_positions(ctx: OpContext, rows: TensorDict) -> tuple[Tensor, int]:
    """global_positions of the rows, of which each has an id of its own: where no id is left out, from their
    number and the smallest and largest one alone."""
    row_id_B = rows["row_id"]
    most = torch.iinfo(torch.int64).max
    ends = torch.stack([row_id_B.max(), -row_id_B.min()]) if len(row_id_B) else torch.tensor([-most, -most])
    count = torch.tensor([len(row_id_B) if ctx.is_shard_leader else 0])
    with waiting():
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=ctx.group)
        dist.all_reduce(count, group=ctx.group)
    last, first, total = int(ends[0]), -int(ends[1]), int(count)
    if last - first + 1 == total:
        return row_id_B - first, total
    return global_positions(row_id_B, ctx.group)


def global_positions(row_id_B: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Position of each of this rank's rows among the distinct ids of the group, ascending; and their number.

    Rows that several ranks hold count once, as do those of one id. Collective as distinct_ids.
    """
    ids = distinct_ids(row_id_B, group)
    return torch.searchsorted(ids, row_id_B.contiguous()), len(ids)


def distinct_ids(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The distinct int64 that the ranks of a group hold, ascending. Collective over the group; exchanges 8
    bytes for each.
    """
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    with waiting():
        dist.all_gather(counts, torch.tensor([len(mine)]), group=group)
    width = int(max(count.item() for count in counts))
    padded = torch.nn.functional.pad(mine.long(), (0, width - len(mine)))
    parts = [torch.empty_like(padded) for _ in counts]
    with waiting():
        dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)]).unique()


def _order(total: int, seed: int) -> Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))
