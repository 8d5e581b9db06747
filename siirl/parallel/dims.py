"""ParallelDims: the one place where the parallel sizes of a model meet. Pure numbers, no torch.

Rank order: a model's ranks are ordered as Megatron-Core orders them by default, tp-cp-ep-dp-pp, tp fastest.
Dense layers see the grid [pp, dp, cp, tp]; expert layers see the same ranks as [pp, expert dp, ep, etp].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from siirl.errors import PlacementError
from siirl.parallel.placement import Ranks, format_ranks


@dataclass(frozen=True)
class ParallelDims:
    """Parallel sizes of one model on the ranks of its node (not of the cluster).

    dp_replicate * dp_shard is the data-parallel size.
    """

    world: int
    """Those ranks."""
    tp: int = 1
    """Tensor parallel."""
    pp: int = 1
    """Pipeline."""
    cp: int = 1
    """Context."""
    ep: int = 1
    """Expert parallel."""
    etp: int = 1
    """Tensor parallel, of experts."""
    vpp: int = 1
    """Model chunks per pipeline rank."""
    dp_replicate: int = 1
    """Copies of parameters and optimizer state."""
    dp_shard: int = 1
    """Data-parallel ranks that share one of them (FSDP: fsdp_size / cp; elsewhere 1)."""

    @property
    def model_parallel(self) -> int:
        """Ranks that one copy of the dense model spans: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Number of data-parallel shards, that is of different sets of rows."""
        return self.world // self.model_parallel

    @property
    def weight_shards(self) -> int:
        """Ranks that share one copy of the weights under FSDP: of as many rows, and of their tokens."""
        return self.dp_shard * self.cp

    @property
    def expert_dp(self) -> int:
        """Copies of each expert."""
        return self.world // (self.etp * self.ep * self.pp)

    def check(self, who: str, ranks: Sequence[int], sequence_parallel: bool = False) -> None:
        """PlacementError, with the numbers and a fix, unless the sizes fit; who: "node 'actor_train'"."""
        where = f"its {self.world} ranks ({format_ranks(ranks)})"
        for name in ("tp", "pp", "cp", "ep", "etp", "vpp", "dp_replicate", "dp_shard"):
            if getattr(self, name) < 1:
                raise PlacementError(
                    f"{who}: {_KEYS.get(name, name)} = {getattr(self, name)}: a size is at least 1."
                )
        if self.world % self.model_parallel:
            raise PlacementError(
                f"{who}: tp({self.tp}) * pp({self.pp}) * cp({self.cp}) = {self.model_parallel} does not "
                f"divide {where}. "
                f"{self._fix(('tp', 'pp', 'cp'), self.model_parallel)}"
            )
        expert = self.etp * self.ep * self.pp
        if self.world % expert:
            raise PlacementError(
                f"{who}: etp({self.etp}) * ep({self.ep}) * pp({self.pp}) = {expert} does not divide {where}. "
                f"{self._fix(('ep', 'etp', 'pp'), expert)}"
            )
        if self.dp_replicate * self.dp_shard != self.dp:
            sizes = [self.cp * size for size in divisors(self.dp)]
            raise PlacementError(
                f"{who}: fsdp_size = {self.weight_shards} does not divide the {self.cp * self.dp} "
                f"data-parallel ranks among {where}. "
                f"Set it to -1 (all of them) or to one of {', '.join(map(str, sizes))}."
            )
        if self.vpp > 1 and self.pp == 1:
            raise PlacementError(
                f"{who}: virtual_pipeline_model_parallel_size = {self.vpp} with pp(1): it counts model "
                "chunks per "
                "pipeline rank, so it needs pipelining. Raise pipeline_model_parallel_size, or unset it."
            )
        if sequence_parallel and self.tp == 1:
            raise PlacementError(
                f"{who}: sequence_parallel with tp(1): it splits activations over the tensor-parallel ranks. "
                "Raise tensor_model_parallel_size, or set sequence_parallel=False."
            )

    def coordinates(self, local_rank: int) -> dict[str, int]:
        """Where a rank sits on each axis; local_rank counts within the model's ranks."""
        rest, tp = divmod(local_rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        rest, etp = divmod(local_rank, self.etp)
        rest, ep = divmod(rest, self.ep)
        return {
            "tp": tp,
            "cp": cp,
            "dp": dp,
            "pp": pp,
            "ep": ep,
            "etp": etp,
            "expert_dp": rest % self.expert_dp,
            "dp_replicate": dp // self.dp_shard,
            "dp_shard": dp % self.dp_shard,
        }

    def data_shard(self, local_rank: int) -> int:
        """Which data-parallel shard of the rows the rank holds; ranks of one shard hold the same rows."""
        return local_rank // (self.tp * self.cp) % self.dp

    def data_shards(self) -> tuple[int, ...]:
        """data_shard of every rank of the model."""
        return tuple(self.data_shard(local) for local in range(self.world))

    def mesh_groups(self, ranks: Sequence[int]) -> dict[str, tuple[Ranks, ...]]:
        """The rank tuples along each axis that has more than one rank (dp_shard always), in rank order.

        Axes: dp_shard, dp_replicate, tp, cp, pp. The union of an axis' tuples is `ranks`.
        """
        sizes = {
            "dp_shard": self.dp_shard,
            "dp_replicate": self.dp_replicate,
            "tp": self.tp,
            "cp": self.cp,
            "pp": self.pp,
        }
        axes = [axis for axis, size in sizes.items() if size > 1 or axis == "dp_shard"]
        return {axis: self._lines(ranks, axis) for axis in axes}

    def fsdp_groups(self, ranks: Sequence[int]) -> dict[str, tuple[Ranks, ...]]:
        """What a model under FSDP communicates over: the rank tuples of each kind, in rank order.

        shard: that share one copy of the weights; data: that hold different rows, all of a batch together;
        where there are several, replicate: that hold the same part of different copies, and sequence: that
        share rows.
        """
        groups = {"shard": self._lines(ranks, "cp", "dp_shard")}
        if self.dp_replicate > 1:
            groups["replicate"] = self._lines(ranks, "dp_replicate")
        if self.cp > 1:
            groups["sequence"] = self._lines(ranks, "cp")
        return groups | {"data": self._lines(ranks, "dp_shard", "dp_replicate")}

    def _lines(self, ranks: Sequence[int], *axes: str) -> tuple[Ranks, ...]:
        """The ranks that differ on these axes of the dense grid only."""
        others = [axis for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp") if axis not in axes]
        lines: dict[tuple[int, ...], list[int]] = {}
        for local, rank in enumerate(ranks):
            place = self.coordinates(local)
            lines.setdefault(tuple(place[other] for other in others), []).append(rank)
        return tuple(tuple(line) for line in lines.values())

    def _fix(self, names: tuple[str, ...], product: int) -> str:
        """Give more ranks, or lower the one size that can be lowered to fit."""
        needed = product * -(-self.world // product)
        fix = f"Give the node {needed} ranks"
        for name in names:
            size = getattr(self, name)
            smaller = [s for s in divisors(size)[:-1] if self.world % (product // size * s) == 0]
            if smaller:
                return f"{fix}, or lower {_KEYS[name]} to {smaller[-1]}."
        return fix + "."


_KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "dp_shard": "fsdp_size",
}


def divisors(number: int) -> list[int]:
    """All, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


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
