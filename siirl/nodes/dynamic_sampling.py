"""Dynamic sampling: groups whose responses all score alike are dropped, until enough others are there.

Source: DAPO (2025), section 3.2.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.groups import is_varied
from siirl.data.buffer import RowBuffer
from siirl.data.rows import objects, take_rows
from siirl.errors import RewardError
from siirl.nodes.context import OpContext
from siirl.nodes.filter import count_dropped
from siirl.nodes.mini_batches import distinct_ids


def collect_varied(ctx: OpContext, rows: TensorDict, buffer: RowBuffer) -> None:
    """Keep the groups of a round whose metric varies, in the buffer. No communication."""
    metric_B = metric_of(rows, ctx.cfg.algorithm.filter_groups.metric)
    varied_B = is_varied(metric_B, rows["group_id"])
    num_groups = len(rows["group_id"].unique())
    ctx.metrics.mean("sampling/groups_varied", len(rows["group_id"][varied_B].unique()), num_groups)
    ctx.metrics.max("sampling/rounds", ctx.round)
    count_dropped(ctx, rows, ~varied_B, "not_varied")
    buffer.add(take_rows(rows, varied_B))


def metric_of(rows: TensorDict, name: str) -> Tensor:
    """The value of each row that must vary, float64 [B].

    "score", or a number that the reward function returned under this name; "acc" is the score where no row
    has one. RewardError, with the row, for a row without a number.
    """
    if name == "score":
        return rows["score"].double()
    infos = [info or {} for info in objects(rows, "reward_info")]
    if name == "acc" and not any("acc" in info for info in infos):
        return rows["score"].double()
    values = []
    for row, info in enumerate(infos):
        value = info.get(name)
        if not isinstance(value, int | float):
            raise RewardError(
                f"algorithm.filter_groups.metric={name}: the reward function returned {value!r} under this "
                f"name for row {int(rows['row_id'][row])}; it returned "
                f"{', '.join(info) or 'no further values'}. Return a number for every response, or set "
                "algorithm.filter_groups.metric=score."
            )
        values.append(float(value))
    return torch.tensor(values, dtype=torch.float64)


def dynamic_sampling(ctx: OpContext, rows: TensorDict, buffer: RowBuffer) -> TensorDict:
    """The first train_batch_size groups that were kept, in the order in which they came; the others stay.

    Collective over ctx.group: ranks exchange 8 bytes a group.
    """
    needed = ctx.cfg.data.train_batch_size
    kept = distinct_ids(buffer.orders(), ctx.group)
    ctx.metrics.mean("sampling/groups_left", len(kept) - needed)
    return buffer.take(kept[:needed])
