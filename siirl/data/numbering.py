"""Ids of rows that were put together anew: unique over all ranks, without communication."""

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.data.rows import object_column, objects

_MOST = 1 << 20
"""More rows than there are at one place."""


def number_anew(rows: TensorDict, place_B: Tensor) -> None:
    """Replace row_id and, of an interaction, episode_id (also in extra_info), by ids that are unique.

    place_B: where what a row belongs to (its group, its draw) stands among those of all ranks, int64 [B]. The
    new ids follow (place, old id); rows of equal place and equal old episode_id stay one episode.
    """
    rows["row_id"] = _within(place_B, rows["row_id"])
    if "episode_id" not in rows.keys():
        return
    rows["episode_id"] = _within(place_B, rows["episode_id"])
    if "extra_info" in rows.keys():
        numbered = zip(objects(rows, "extra_info"), rows["episode_id"].tolist(), strict=True)
        rows.set("extra_info", object_column([info | {"episode_id": number} for info, number in numbered]))


def _within(place_B: Tensor, id_B: Tensor) -> Tensor:
    """place * _MOST + 0, 1, ... for the distinct ids at each place, ascending."""
    pair_P2, index_B = torch.unique(torch.stack([place_B, id_B], -1), dim=0, return_inverse=True)
    place_P = pair_P2[:, 0].contiguous()
    number_P = torch.arange(len(place_P)) - torch.searchsorted(place_P, place_P)
    return (place_P * _MOST + number_P)[index_B]
