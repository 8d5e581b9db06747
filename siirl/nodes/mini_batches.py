"""The mini-batches of a training node: the same rows take part in the same optimizer step on any ranks."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from siirl.nodes.context import NodeContext


def mini_batches(
    ctx: NodeContext, id_B: Tensor, num_ids: int, epochs: int, shuffle_seed: int | None
) -> Iterator[Tensor]:
    """For each optimizer step, which of this rank's rows take part: bool [B].

    A mini-batch is a run of `num_ids` ids in ascending order, those of mini_batch_ids; with shuffle_seed, in
    an order drawn for each step and epoch. The last one of an epoch may be short. Collective over ctx.group.
    """
    position_B, total = global_positions(id_B, ctx.group)
    for epoch in range(epochs):
        place_B = position_B
        if shuffle_seed is not None:
            place_B = _order(total, (shuffle_seed * 1_000_003 + ctx.step) * 1_009 + epoch)[position_B]
        for first in range(0, total, num_ids):
            yield (place_B >= first) & (place_B < first + num_ids)


def mini_batch_ids(rows: TensorDict, prompts: int, n: int) -> tuple[Tensor, int]:
    """(ids by which the rows of a trainer are cut into mini-batches, how many ids make one).

    Rows of agents that talk go by prompt: an episode has any number of them. All others go one by one.
    """
    if "group_id" in rows.keys():
        return rows["group_id"], prompts
    return rows["row_id"], prompts * n


def global_positions(row_id_B: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Position of each of this rank's rows among all rows of the group, by row_id; and their number.

    Rows that several ranks hold count once. Collective over the group; exchanges 8 bytes a row.
    """
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([len(row_id_B)], dtype=torch.int64), group=group)
    width = int(max(count.item() for count in counts))
    mine = torch.full((width,), -1, dtype=torch.int64)
    mine[: len(row_id_B)] = row_id_B
    gathered = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(gathered, mine, group=group)
    ids = torch.cat([part[: int(count)] for part, count in zip(gathered, counts, strict=True)]).unique()
    return torch.searchsorted(ids, row_id_B.contiguous()), len(ids)


def _order(total: int, seed: int) -> Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))
