"""Rank lists as users write them and as plans store them. Pure text and numbers: nothing is evaluated."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from siirl.errors import PlacementError

Ranks = tuple[int, ...]

_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_PERCENT = re.compile(r"(?:(\d+(?:\.\d+)?)%\s*-\s*)?(\d+(?:\.\d+)?)%")
_LARGEST_RANK = 1_000_000  # a mistyped range must not fill the memory
_FORMS = 'Write ranks as "0-3", "0,2,5", "0-7:2" (every second) or [0, 1], or a share as "50%" or "50%-100%"'


def parse_placement(value: Any, world_size: int, who: str) -> Ranks:
    """The sorted ranks that a `placement` names, on a cluster of `world_size` ranks.

    value: a rank list or range, a percentage (the first so many percent of the cluster, or a range of
    percents), or a mapping with one key, `ranks` or `share` (a fraction, or [from, to]). who: for messages,
    e.g. "node 'reward'". PlacementError if it cannot be read, is empty, repeats a rank, or leaves the
    cluster.
    """
    if isinstance(value, dict):
        ranks = _from_mapping(value, world_size, who)
    elif isinstance(value, str) and "%" in value:
        ranks = _from_percent(value, world_size, who)
    else:
        ranks = _from_ranks(value, who)
    return _checked(ranks, world_size, value, who)


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks in the shortest form that `parse_ranks` reads back in the same order: "0-3,8,10-14:2"."""
    parts: list[str] = []
    start = 0
    while start < len(ranks):
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 0
        end = start + 1
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - start > 2 or (end - start == 2 and step == 1):
            parts.append(f"{ranks[start]}-{ranks[end - 1]}" + (f":{step}" if step > 1 else ""))
            start = end
        else:
            parts.append(str(ranks[start]))
            start += 1
    return ",".join(parts)


def parse_ranks(text: str) -> Ranks:
    """The ranks of a list of numbers and ranges, in the order written. ValueError if it is anything else."""
    ranks: list[int] = []
    for part in text.split(",") if text else []:
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is neither a rank nor a range of ranks")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step < 1 or last > _LARGEST_RANK:
            raise ValueError(f"{part.strip()!r} runs backwards, in steps of 0, or past rank {_LARGEST_RANK}")
        ranks.extend(range(first, last + 1, step))
    return tuple(ranks)


def _from_mapping(value: dict[Any, Any], world_size: int, who: str) -> Iterable[int]:
    match list(value.items()):
        case [("ranks", ranks)]:
            return _from_ranks(ranks, who)
        case [("share", [float() | int() as first, float() | int() as last])]:
            return _share(first, last, world_size, value, who)
        case [("share", float() | int() as share)] if not isinstance(share, bool):
            return _share(0, share, world_size, value, who)
        case [("share", str() as share)] if "%" in share:
            return _from_percent(share, world_size, who)
    raise PlacementError(
        f"{who}: placement {value!r} is not understood: it takes one key, ranks or share. {_FORMS}."
    )


def _from_percent(text: str, world_size: int, who: str) -> Iterable[int]:
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        raise PlacementError(f"{who}: placement {text!r} is not a share of the cluster. {_FORMS}.")
    return _share(float(match[1] or 0) / 100, float(match[2]) / 100, world_size, text, who)


def _share(first: float, last: float, world_size: int, value: Any, who: str) -> Iterable[int]:
    if not 0 <= first < last <= 1:
        raise PlacementError(
            f"{who}: placement {value!r} asks for the part {first:g} to {last:g} of the cluster: "
            f"a share lies between 0 and 1. {_FORMS}."
        )
    bounds = [round(part * world_size, 6) for part in (first, last)]
    if any(bound != int(bound) for bound in bounds):
        raise PlacementError(
            f"{who}: placement {value!r} is ranks {bounds[0]:g} to {bounds[1]:g} of a cluster of "
            f"{world_size} ranks: "
            f"not a whole number. Choose a share that divides {world_size}, or name the ranks."
        )
    return range(int(bounds[0]), int(bounds[1]))


def _from_ranks(value: Any, who: str) -> Iterable[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, str):
        try:
            return parse_ranks(value)
        except ValueError as error:
            raise PlacementError(f"{who}: placement {value!r}: {error}. {_FORMS}.") from None
    if isinstance(value, list | tuple) and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return value
    raise PlacementError(f"{who}: placement {value!r} is not understood. {_FORMS}.")


def _checked(ranks: Iterable[int], world_size: int, value: Any, who: str) -> Ranks:
    listed = list(ranks)
    if not listed:
        raise PlacementError(f"{who}: placement {value!r} names no rank. {_FORMS}.")
    outside = max(listed) if max(listed) >= world_size else min(listed)
    if not 0 <= outside < world_size:
        raise PlacementError(
            f"{who}: placement {value!r} names rank {outside}, but the cluster has {world_size} ranks "
            f"(0-{world_size - 1}). Place the node inside it, or raise trainer.nnodes or "
            "trainer.n_gpus_per_node."
        )
    if len(set(listed)) != len(listed):
        twice = next(rank for rank in listed if listed.count(rank) > 1)
        raise PlacementError(f"{who}: placement {value!r} names rank {twice} twice. Name each rank once.")
    return tuple(sorted(listed))
