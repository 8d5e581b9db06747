"""What the ranks of a route say to each other: collectives, and messages between single ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from siirl.compiler.plan import RoutePlan
from siirl.data.assign import first_ranks, homes
from siirl.data.header import Specs
from siirl.errors import DeadlineError, WorkerError
from siirl.observe.spans import phase, waiting
from siirl.parallel.process_groups import ProcessGroupManager, name_ranks
from siirl.types import Layout

CPU = torch.device("cpu")


class RouteComm:
    """For one rank of a route. All but `swap` and `post` are collective over the route.

    DeadlineError and WorkerError name the route and the other ranks.
    """

    def __init__(self, groups: ProcessGroupManager, route: RoutePlan):
        self.route, self.rank = route, groups.rank
        self._groups = groups

    @property
    def group(self) -> dist.ProcessGroup:
        return self._groups.get(self.route.ranks)

    def reduce(self, words: np.ndarray, how: dist.ReduceOp.RedOpType) -> np.ndarray:
        """The sum, or the largest, of what the ranks have: int64 or float64, of one shape."""
        if len(self.route.ranks) > 1:
            with self.named("headers"):
                dist.all_reduce(torch.from_numpy(words), how, group=self.group)
        return words

    def gather(self, mine: np.ndarray) -> np.ndarray:
        """What all ranks have, [ranks, ...]."""
        if len(self.route.ranks) == 1:
            return mine[None]
        own = torch.from_numpy(mine)
        gathered = torch.empty(len(self.route.ranks), *own.shape, dtype=own.dtype)
        with self.named("headers"):
            dist.all_gather(list(gathered), own, group=self.group)
        return gathered.numpy()

    def gather_specs(self, specs: Specs) -> dict[int, Specs]:
        """Those of all ranks, to say which of them contradict each other."""
        parts: list[Specs] = [()] * len(self.route.ranks)
        with self.named("columns"):
            dist.all_gather_object(parts, specs, group=self.group)
        return dict(zip(self.route.ranks, parts, strict=True))

    def donated(self, specs: Specs, donor: int) -> Specs:
        """The columns as they are on the donor, for ranks that have none and may get no rows."""
        box = [specs]
        with self.named("columns"):
            dist.broadcast_object_list(box, donor, self.group, CPU)
        return specs or box[0]

    def exchange(self, words: np.ndarray, to: Sequence[int], senders: Sequence[int]) -> dict[int, np.ndarray]:
        """The words of each sender; all have equally many. `to` and `senders` may name this rank."""
        others = {rank: torch.from_numpy(words) for rank in to if rank != self.rank}
        incoming = {rank: torch.empty(len(words), dtype=torch.int64) for rank in senders}
        self.post("headers", others, {rank: data for rank, data in incoming.items() if rank != self.rank}, 0)
        told = {rank: data.numpy() for rank, data in incoming.items()}
        return told | ({self.rank: words} if self.rank in told else {})

    def swap(
        self,
        outgoing: Mapping[int, Tensor],
        senders: Sequence[int],
        what: str,
        device: torch.device = CPU,
        pairwise: bool = True,
    ) -> dict[int, Tensor]:
        """Bytes to other ranks, and what `senders` send: how many, then the bytes. what: for messages.

        pairwise: else the bytes go through one all-to-all, which all ranks take part in.
        """
        sizes = {rank: torch.empty(1, dtype=torch.int64) for rank in senders}
        self.post(what, {rank: torch.tensor([len(data)]) for rank, data in outgoing.items()}, sizes, 0)
        incoming = {
            rank: torch.empty(int(size), dtype=torch.uint8, device=device) for rank, size in sizes.items()
        }
        if pairwise:
            self.post(what, outgoing, incoming, 1)
            return incoming
        ranks, nothing = self.route.ranks, torch.empty(0, dtype=torch.uint8, device=device)
        sent = [outgoing.get(rank, nothing) for rank in ranks]
        into = [len(incoming.get(rank, nothing)) for rank in ranks]
        arrived = nothing.new_empty(sum(into))
        out = [len(data) for data in sent]
        with self.named(what):
            dist.all_to_all_single(arrived, torch.cat(sent), into, out, group=self.group)
        parts = dict(zip(ranks, arrived.split(into), strict=True))
        return {rank: parts[rank] for rank in senders}

    def post(
        self, what: str, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int
    ) -> None:
        """Tensors of known sizes from rank to rank. what: for messages."""
        with self.named(what):
            posted = [dist.irecv(data, rank, self.group, tag) for rank, data in incoming.items()]
            posted += [dist.isend(data, rank, self.group, tag) for rank, data in outgoing.items()]
            for one in posted:
                assert one is not None, "this rank is in the group"
                one.wait()

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Names the route and its ranks when a collective fails or passes the deadline."""
        route = self.route
        try:
            with phase(what), waiting():
                yield
        except RuntimeError as error:
            others = name_ranks([rank for rank in route.ranks if rank != self.rank])
            where = f"route {route.name} ({route.source} -> {route.target}): rank {self.rank}"
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                late = f"{where} waited {self._groups.timeout_s:g} s for the {what} of {others}: {error}"
                raise DeadlineError(late) from error
            raise WorkerError(f"{where} lost {others} while exchanging {what}: {error}") from error


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
