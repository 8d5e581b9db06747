"""The process groups that Megatron-Core asks for when it lays a model over ranks. Pure numbers, no torch.

Megatron-Core's default rank order is tp-cp-ep-dp-pp. Dense layers see a model's ranks as the grid
[pp, dp, cp, tp], expert layers as [pp, expert dp, ep, etp]; the last axis varies fastest.
"""

from collections.abc import Sequence
from itertools import product
from math import prod

from siirl.parallel.dims import ParallelDims
from siirl.parallel.placement import Ranks

_DENSE = (("tp",), ("cp",), ("dp",), ("pp",), ("cp", "dp"), ("tp", "cp"), ("tp", "dp"))
_DENSE += (("tp", "cp", "dp"), ("tp", "pp"))
_EXPERT = (("etp",), ("ep",), ("expert_dp",), ("etp", "ep"), ("etp", "ep", "pp"))


def megatron_groups(dims: ParallelDims, ranks: Sequence[int]) -> tuple[Ranks, ...]:
    """The distinct rank tuples, each sorted, over which a Megatron model of these sizes communicates.

    ranks: the model's, in order. The first tuple is all of them. A test holds this list against what
    `initialize_model_parallel` creates.
    """
    dense = {"tp": dims.tp, "cp": dims.cp, "dp": dims.dp, "pp": dims.pp}
    expert = {"etp": dims.etp, "ep": dims.ep, "expert_dp": dims.expert_dp, "pp": dims.pp}
    found = [tuple(range(dims.world))]
    for axes in _DENSE:
        found += _lines(dense, axes)
    for axes in _EXPERT:
        found += _lines(expert, axes)
    for line in _lines(dense, ("pp",)):
        found += [(line[0],), tuple(sorted({line[0], line[-1]}))]  # position and word embeddings
    return tuple(dict.fromkeys(tuple(ranks[local] for local in line) for line in found))


def _lines(sizes: dict[str, int], axes: tuple[str, ...]) -> list[Ranks]:
    """The local ranks that differ in these axes only, a tuple for each place on the other axes."""
    strides = {axis: prod(list(sizes.values())[:index]) for index, axis in enumerate(sizes)}

    def offsets(names: Sequence[str]) -> list[int]:
        places = product(*(range(sizes[name]) for name in names))
        return [sum(at * strides[name] for at, name in zip(place, names, strict=True)) for place in places]

    others = [axis for axis in sizes if axis not in axes]
    return [tuple(sorted(start + step for step in offsets(axes))) for start in sorted(offsets(others))]
