"""What follows from the two layouts of a route for one rank; computed once."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from siirl.data.assign import first_ranks, homes
from siirl.types import Layout


@dataclass(frozen=True)
class RouteSides:
    """Where a rank stands between two layouts."""

    source: Layout
    target: Layout
    rank: int
    source_shard: int | None
    """None: the layout is not on this rank."""
    target_shard: int | None
    first: list[int]
    """The lowest rank of each source shard: it sends to those that have not got its rows."""
    near: list[tuple[int, ...]]
    """See siirl.data.assign.homes."""
    ranks: np.ndarray
    """Of both layouts, sorted."""
    members: list[list[int]]
    """The ranks of each target shard."""
    shard_of: dict[int, int]
    """Rank -> its source shard."""

    @property
    def is_first(self) -> bool:
        """Whether this rank sends the rows of its source shard."""
        return self.source_shard is not None and self.first[self.source_shard] == self.rank

    def places(self, ranks: np.ndarray | list[int]) -> np.ndarray:
        """Where these stand among the ranks of the route."""
        return np.searchsorted(self.ranks, ranks)

    def receivers(self, shard: int) -> list[int]:
        """The ranks of a target shard to which this rank sends rows: they have not got its source shard."""
        if not self.is_first:
            return []
        return [rank for rank in self.members[shard] if self.shard_of.get(rank) != self.source_shard]


@lru_cache(maxsize=64)
def sides_of(source: Layout, target: Layout, rank: int) -> RouteSides:
    """For one rank of the route."""
    shard_of = dict(zip(source.ranks, source.shards, strict=True))
    members: list[list[int]] = [[] for _ in range(target.num_shards)]
    for member, shard in zip(target.ranks, target.shards, strict=True):
        members[shard].append(member)
    return RouteSides(
        source,
        target,
        rank,
        shard_of.get(rank),
        target.shard_of(rank) if rank in target.ranks else None,
        first_ranks(source),
        homes(source, target),
        np.array(sorted({*source.ranks, *target.ranks})),
        members,
        shard_of,
    )
