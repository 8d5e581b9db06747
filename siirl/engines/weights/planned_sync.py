"""A plan of buckets of tensors: made once, then followed by all ranks of a link.

The first sync of a link announces each bucket by a header. What it announced is the plan of the next ones:
every rank knows which tensors come in which bucket and who sends it, so only their bytes travel, with a
trailer that says by what plan they lie there, or why the sender gave up. Whatever fails, all ranks take part
in all broadcasts, so nobody waits for one that does not come.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from siirl.engines.weights.bucket import DTYPES, Entry, Named, empty_bucket, pack, room, unpack
from siirl.errors import WeightSyncError
from siirl.observe.spans import phase, waiting

TRAILER_BYTES = 512
"""At the end of a bucket of a plan: the plan's digest, then why the sender gave up, or nothing."""


class GaveUp(WeightSyncError):
    """A sync by a plan has failed, and this rank has taken part in all of its broadcasts."""


def joined(buckets: Iterable[tuple[Entry, ...]], limit: int) -> tuple[tuple[Entry, ...], ...]:
    """The same tensors in fewer buckets: neighbours together, up to so many bytes."""
    found: list[tuple[Entry, ...]] = []
    filled = 0
    for bucket in buckets:
        size = sum(room(entry.num_bytes) for entry in bucket)
        if found and filled + size <= limit:
            found[-1], filled = found[-1] + bucket, filled + size
        else:
            found.append(bucket)
            filled = size
    return tuple(found)


@dataclass(frozen=True)
class BucketPlan:
    """Which tensors come in which bucket, in this order."""

    buckets: tuple[tuple[Entry, ...], ...]
    device: str
    """Type of the device on which they lie."""
    made_for: tuple
    """What else must be the same for it to hold, on all ranks."""

    @cached_property
    def digest(self) -> int:
        """A number above 0 of 63 bits that other plans do not have."""
        text = json.dumps([self.buckets, self.device, self.made_for], default=str).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1 or 1


class PlannedSync:
    """One sync by a plan, as one rank takes part in it."""

    def __init__(self, plan: BucketPlan, sender: int, group: Any, rank: int, in_flight: int) -> None:
        """in_flight: how many broadcasts are begun before the first of them must have ended."""
        self._plan, self._sender, self._group = plan, sender, group
        self._rank, self._in_flight = rank, in_flight
        self._begun: deque[tuple[Tensor, Any]] = deque()
        self._number = 0  # of the next bucket
        self._whole: Tensor | None = None  # the trailer of a bucket that has all that it should

    def sent(self, tensors: Iterable[Named], casts: bool = False) -> Iterator[Named]:
        """Pass the trainer's tensors on, and send them, or see them sent. GaveUp if others come, or not all.

        casts: floating tensors may come in another floating type than they are sent in.
        """
        bucket: list[Named] = []
        try:
            for name, tensor in _exported(tensors):
                self._check_next(len(bucket), name, tensor, casts)
                bucket.append((name, tensor))
                if len(bucket) == len(self._plan.buckets[self._number]):
                    with phase("send"):
                        self._send(bucket)
                    bucket = []
                yield name, tensor
            if self._number < len(self._plan.buckets):
                raise GaveUp(f"{self._expected(len(bucket))} did not come from the trainer's export")
        except GaveUp as error:
            while self._number < len(self._plan.buckets):
                self._send(None, str(error))
            self._end()
            raise
        self._end()

    def received(self) -> Iterator[Named]:
        """The tensors that come. GaveUp, once all buckets have come, if a sender did."""
        failure = ""
        for entries in self._plan.buckets:
            while self._number < len(self._plan.buckets) and len(self._begun) < self._in_flight:
                self._begin()
            with phase("receive"):
                flat = self._ended()
                failure = failure or self._trouble(flat)
            if not failure:
                yield from unpack(entries, flat)
        if failure:
            raise GaveUp(failure)

    def _expected(self, place: int) -> str:
        return self._plan.buckets[self._number][place].name

    def _check_next(self, place: int, name: str, tensor: Tensor, casts: bool) -> None:
        if self._number == len(self._plan.buckets):
            raise GaveUp(f"{name} came, which the first sync did not have")
        planned = self._plan.buckets[self._number][place]
        found = Entry.of(name, tensor)
        if casts and tensor.is_floating_point() and DTYPES[planned.dtype].is_floating_point:
            found = found._replace(dtype=planned.dtype)
        if found != planned or tensor.device.type != self._plan.device:
            raise GaveUp(
                f"{found.name} ({found.dtype}, {list(found.shape)}) came where the first sync had "
                f"{planned.name} ({planned.dtype}, {list(planned.shape)})"
            )

    def _send(self, bucket: Sequence[Named] | None, failure: str = "") -> None:
        """Take part in the next broadcast; as its sender, with the tensors, or with why there are none."""
        while len(self._begun) >= self._in_flight:
            self._ended()
        if self._rank != self._sender:
            self._begin()
            return
        flat = empty_bucket(self._plan.buckets[self._number], self._plan.device, TRAILER_BYTES)
        if bucket is None:
            flat[-TRAILER_BYTES:] = _trailer(self._plan.digest, failure).to(flat.device)
        else:
            pack(bucket, self._plan.buckets[self._number], flat)
            if self._whole is None:  # on the device once: each copy from the host's memory waits for it
                self._whole = _trailer(self._plan.digest, "").to(flat.device)
            flat[-TRAILER_BYTES:] = self._whole
        self._begin(flat)

    def _begin(self, flat: Tensor | None = None) -> None:
        """Begin the next broadcast, to end later."""
        if flat is None:
            flat = empty_bucket(self._plan.buckets[self._number], self._plan.device, TRAILER_BYTES)
        with waiting():
            work = dist.broadcast(flat, src=self._sender, group=self._group, async_op=True)
        self._begun.append((flat, work))
        self._number += 1

    def _ended(self) -> Tensor:
        """The bytes of the oldest broadcast that was begun, once it has ended."""
        flat, work = self._begun.popleft()
        with waiting():
            work.wait()
        return flat

    def _end(self) -> None:
        while self._begun:
            self._ended()

    def _trouble(self, flat: Tensor) -> str:
        """Why a bucket cannot be used, or ""."""
        trailer = flat[-TRAILER_BYTES:].cpu().numpy().tobytes()
        if text := trailer[8:].rstrip(b"\0").decode(errors="replace"):
            return f"rank {self._sender}: {text}"
        if int.from_bytes(trailer[:8], "big") != self._plan.digest:
            return f"rank {self._sender} sends other buckets than those of the first sync"
        return ""


def _exported(tensors: Iterable[Named]) -> Iterator[Named]:
    """Tells errors of the export from those of sending."""
    try:
        yield from tensors
    except RuntimeError as error:
        raise GaveUp(f"the trainer's export failed: {error}") from error


def _trailer(digest: int, failure: str) -> Tensor:
    text = digest.to_bytes(8, "big") + failure.encode()[: TRAILER_BYTES - 8]
    return torch.frombuffer(bytearray(text.ljust(TRAILER_BYTES, b"\0")), dtype=torch.uint8)
