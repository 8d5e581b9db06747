"""What all ranks have, brought to the first along a tree: no rank receives from more than a few others."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

FAN_IN = 8
"""From how many ranks one receives."""


def join_on_first(mine: Any, add: Callable[[Any, Any], Any], group: dist.ProcessGroup) -> Any:
    """What the ranks of a group have, joined by `add`; None on all but its first rank.

    add(mine, theirs) -> both. Up to 9 ranks are added in the order of the ranks; beyond these, each with
    those that it has received before. Values are pickled. Collective over the group.
    """
    place, size = dist.get_rank(group), dist.get_world_size(group)
    for child in range(FAN_IN * place + 1, min(FAN_IN * (place + 1) + 1, size)):
        mine = add(mine, _receive(child, group))
    if not place:
        return mine
    dist.send_object_list([mine], group=group, device=torch.device("cpu"), group_dst=(place - 1) // FAN_IN)
    return None


def _receive(child: int, group: dist.ProcessGroup) -> Any:
    box: list[Any] = [None]
    dist.recv_object_list(box, group=group, device=torch.device("cpu"), group_src=child)
    return box[0]
