"""Weight links: the weights of a training engine, brought to another engine, complete or not at all.

All ranks of a link call `push` together. Ranks that hold a trainer export its weights (a collective of
theirs); a target on such a rank loads them as they pass by. If some target ranks hold no trainer, the
lowest trainer rank broadcasts the tensors to them in buckets, each announced by a header. So goes the first
sync, and what is made to be sent, such as adapters; in the next ones each rank gets what it keeps from who
has it (shard_way.py). A link of kind "checkpoint" has the lowest rank write a folder that the targets read
(folder.py). No rank goes on before all agree that the sync succeeded.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist

from siirl.compiler.plan import LinkPlan
from siirl.engines.rollout.base import WeightPart
from siirl.engines.train.base import TrainEngine
from siirl.engines.weights.bucket import DTYPES, Entry, LiveWeights, Named, empty_bucket, pack, room, unpack
from siirl.engines.weights.folder import WeightFolder
from siirl.engines.weights.shard_sync import ArrivingParts, ShardSync
from siirl.engines.weights.shard_way import CANNOT, ShardWay
from siirl.engines.weights.target import WeightTarget
from siirl.errors import WeightSyncError
from siirl.observe.metrics import Metrics
from siirl.observe.spans import note, phase, waiting
from siirl.parallel.process_groups import ProcessGroupManager

log = logging.getLogger(__name__)

BUCKET_BYTES = 128 << 20
"""Tensors are broadcast together up to this size; a larger one goes alone."""
MESSAGE_BYTES = 512
PARTS: tuple[WeightPart, ...] = get_args(WeightPart)
TARGET_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, OSError)
"""What an engine may raise while it loads: told to all ranks, so that none waits for the one that failed."""


class Meeting(NamedTuple):
    """What all ranks of a link know of each other before a sync."""

    version: int
    """That of the trainer."""
    is_current: bool
    """All targets have it."""
    dtype: torch.dtype | None
    """To send in; None: each tensor in its own."""
    part: WeightPart
    sources: tuple[int, ...]
    receivers: tuple[int, ...]
    """Ranks of the target without a trainer."""
    base: int
    """The digest of what the root and all targets hold of the folder of the last sync; 0: not the same."""
    of_shards: frozenset[int]
    """What the ranks say of a sync by shards, see ShardWay."""

    @property
    def root(self) -> int:
        return self.sources[0]


def make_link(
    plan: LinkPlan,
    source: TrainEngine | None,
    target: WeightTarget | None,
    groups: ProcessGroupManager,
    folder: Path,
) -> "WeightLink":
    """The link of `plan` on this rank, between the engines that this rank holds. No communication.

    folder: where a link of kind "checkpoint" puts the weights; all its ranks must see the same.
    """
    return WeightLink(plan, source, target, groups, folder)


class WeightLink:
    """One transfer, from a trainer to a rollout or a teacher. `push` is collective over plan.ranks."""

    def __init__(
        self,
        plan: LinkPlan,
        source: TrainEngine | None,
        target: WeightTarget | None,
        groups: ProcessGroupManager,
        folder: Path,
    ) -> None:
        """See make_link."""
        self.name = plan.name
        self._folder = WeightFolder(folder) if plan.kind == "checkpoint" else None
        if source is None and target is None:
            raise WeightSyncError(
                f"{self}: rank {groups.rank} holds neither {plan.source} nor {plan.target}."
            )
        if plan.kind == "local" and (source is None or target is None):
            lacking = plan.source if source is None else plan.target
            raise WeightSyncError(f"{self} is local, and rank {groups.rank} holds no {lacking}.")
        self._ranks = plan.ranks
        self._source = source
        self._target = target
        self._rank = groups.rank
        self._kind = plan.kind
        self._group = groups.get(plan.ranks)
        self._broken = False
        self._num_bytes = 0
        self._dtype_codes: dict[WeightPart, int] = {}
        self._shards: ShardWay | None = None  # from the second sync on
        self._may_shard = len(plan.ranks) > 1 and self._folder is None

    def __str__(self) -> str:
        return f"weight link {self.name!r}"

    def push(self) -> Metrics:
        """Bring the target to the source's version; nothing if all target ranks have it. Wakes the target.

        The trainer's parameters must be on their device. Metrics: time/weight_sync_s, weight_sync/bytes
        (one copy of the weights, or what was written of it to a folder) and the version; the version alone
        when skipped. WeightSyncError on every rank of the link if any part failed; targets that failed refuse
        to generate.
        """
        start = time.perf_counter()
        with phase("compare_versions"):
            meeting = self._exchange()
        version = meeting.version
        metrics = Metrics()
        metrics.max(f"weight_sync/{self.name}_version", version)
        if meeting.is_current:
            return metrics
        self._broken, self._num_bytes = False, 0
        with phase("transfer", version=version):
            if (shards := self._decided(meeting)) is not None:
                self._transfer(partial(self._arriving, shards), version)
            else:
                self._transfer(partial(self._found, meeting), version)
            if self._may_shard and self._shards is None:
                self._shards = ShardWay(self.name, self._source, self._target, self._group)
            if torch.cuda.is_available():
                with phase("wait_for_device"):  # but not for copies that go on beside what comes next
                    torch.cuda.current_stream().synchronize()
            note(bytes=self._num_bytes)
        metrics.max("time/weight_sync_s", time.perf_counter() - start)
        metrics.max("weight_sync/bytes", self._num_bytes)
        return metrics

    def _exchange(self) -> Meeting:
        source, target = self._source, self._target
        mine = [
            int(source is not None),
            source.version if source is not None else 0,
            int(target is not None),
            target.weight_version if target is not None else 0,
            self._dtype_code(target) if target is not None else 0,
            PARTS.index(target.takes) if target is not None else 0,
            self._folder.digest if self._folder is not None else 0,
            self._shards.says() if self._shards is not None else CANNOT,
        ]
        table = self._all_gather(mine, torch.int64)
        sources = {rank: row[1] for rank, row in zip(self._ranks, table, strict=True) if row[0]}
        targets = {rank: row[3:6] for rank, row in zip(self._ranks, table, strict=True) if row[2]}
        if not sources or not targets:
            raise WeightSyncError(
                f"{self}: ranks {self._ranks} hold no {'target' if sources else 'trainer'}."
            )
        if len(set(sources.values())) > 1:
            raise WeightSyncError(f"{self}: trainer ranks are at different steps, {sources} (rank: version).")
        version = next(iter(sources.values()))
        codes = {code for _, code, _ in targets.values()}
        parts = {part for _, _, part in targets.values()}
        if len(parts) > 1:
            wanted = [PARTS[part] for part in sorted(parts)]
            raise WeightSyncError(f"{self}: the target's ranks want different weights: {wanted}.")
        dtype = list(DTYPES.values())[codes.pop()] if len(codes) == 1 and codes != {-1} else None
        current = all(held == version for held, _, _ in targets.values())
        ranks = tuple(sorted(sources)), tuple(sorted(targets.keys() - sources.keys()))
        bases = {
            row[6] for rank, row in zip(self._ranks, table, strict=True) if row[2] or rank == ranks[0][0]
        }
        base = bases.pop() if len(bases) == 1 else 0
        say = frozenset(row[7] for row in table)
        return Meeting(version, current, dtype, PARTS[parts.pop()], *ranks, base, say)

    def _dtype_code(self, target: WeightTarget) -> int:
        """Index into DTYPES of the one floating type that the target wants, or -1 if it wants several."""
        if target.takes not in self._dtype_codes:  # the specs of a part stay what they are
            wanted = {dtype for _, dtype in target.weight_specs().values() if dtype.is_floating_point}
            self._dtype_codes[target.takes] = (
                [*DTYPES.values()].index(wanted.pop()) if len(wanted) == 1 else -1
            )
        return self._dtype_codes[target.takes]

    def _decided(self, meeting: Meeting) -> ShardSync | None:
        """The plan of shards by which this sync goes, if it does."""
        if self._shards is None:
            return None
        with phase("decide"):
            return self._shards.decided(meeting.of_shards, len(meeting.sources), bool(meeting.receivers))

    def _arriving(self, sync: ShardSync) -> Iterator[Named] | ArrivingParts:
        """What the target of this rank takes, as others send it."""
        assert self._shards is not None
        self._num_bytes = sync.whole_bytes
        stream = self._shards.arriving(sync)
        return stream if isinstance(stream, ArrivingParts) else self._unbroken(stream)

    def _unbroken(self, tensors: Iterator[Named]) -> Iterator[Named]:
        """Sets _broken if getting tensors fails (not: using them)."""
        try:
            yield from tensors
        except RuntimeError:
            self._broken = True
            raise

    def _found(self, meeting: Meeting) -> Iterator[Named] | LiveWeights:
        """What the target of this rank takes of the trainer: where it is trained, or as it is exported."""
        with phase("find"):
            live = self._live(meeting.part)
        if live is None:
            return self._stream(meeting)
        self._num_bytes = live.num_bytes(meeting.dtype)
        return live

    def _live(self, part: WeightPart) -> LiveWeights | None:
        """The weights where they are trained, if the target of each rank is there and takes them so."""
        if self._kind != "local" or part != "merged" or self._source is None or self._target is None:
            return None
        return self._source.live_weights() if self._target.reads_live else None

    def _transfer(
        self, find: Callable[[], Iterator[Named] | LiveWeights | ArrivingParts], version: int
    ) -> None:
        """find: gives what the target loads. Meanwhile the target gets ready."""
        try:
            failure = self._target_failure(lambda target: target.expect_weights())
            stream = find()
            failure = failure or self._target_failure(lambda target: target.load_weights(stream, version))
            if not isinstance(stream, LiveWeights):
                for _ in stream:
                    pass  # export and broadcast are collective: take part to the end
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self}, version {version}: the weights did not arrive: {error}"
            ) from error
        with phase("agree"):
            failures = self._agree(failure)
        if failures:
            raise WeightSyncError(f"{self}, version {version}, failed. {' '.join(failures)}")

    def _target_failure(self, act: Callable[[WeightTarget], None]) -> str:
        """Have the target do something; why it failed, or an empty text."""
        if self._target is None:
            return ""
        try:
            act(self._target)
        except TARGET_FAILURES as error:
            if self._broken:
                raise
            return f"rank {self._rank}: {error}"
        return ""

    def _stream(self, meeting: Meeting) -> Iterator[Named]:
        """The tensors as this rank gets them; sets _broken if getting them fails (not: using them)."""
        dtype, root, part = meeting.dtype, meeting.root, meeting.part
        try:
            if self._folder is not None:
                yield from self._through_folder(self._folder, meeting)
                return
            if self._source is None:
                tensors = self._received(root)
            else:
                exported = _export(self._source, dtype, part)
                tensors = self._sent(exported, root) if meeting.receivers else exported
            yield from self._counted(tensors)
        except RuntimeError:
            self._broken = True
            raise

    def _through_folder(self, folder: WeightFolder, meeting: Meeting) -> Iterator[Named]:
        """The root writes what has changed since what all hold, all wait for its word, targets read.

        What a target could not read, or not make the root's weights of, is written once more, and whole.
        """
        failures: list[str] = []
        for base in dict.fromkeys((meeting.base, 0)):
            word = self._written(folder, meeting, base)
            with phase("wait_for_folder"):
                word = self._header(word, meeting.root)
            if "error" in word:
                raise WeightSyncError(f"{self}: rank {meeting.root}: {word['error']}")
            self._num_bytes = word["bytes"]
            failure = ""
            if self._target is not None:
                try:
                    with phase("read"):
                        folder.read(meeting.version, word["digest"])
                except OSError as error:
                    failure = f"rank {self._rank}: {error}"
            failures = self._agree(failure)
            if not failures:
                return folder.tensors() if self._target is not None else iter(())
            log.warning("%s, version %d: %s", self, meeting.version, " ".join(failures))
        raise WeightSyncError(" ".join(failures))

    def _written(self, folder: WeightFolder, meeting: Meeting, base: int) -> dict[str, Any] | None:
        """Take part in the export, and as the root write it; the word for the others."""
        if self._source is None:
            return None
        tensors = _export(self._source, meeting.dtype, meeting.part)
        word: dict[str, Any] = {}
        try:
            if self._rank == meeting.root:
                digest, size = folder.write(meeting.version, tensors, base)
                word = {"digest": digest, "bytes": size}
            for _ in tensors:
                pass
        except (OSError, RuntimeError) as error:
            word = {"error": f"the weights could not be written to {folder}: {error}"}
        return word if self._rank == meeting.root else None

    def _counted(self, tensors: Iterator[Named]) -> Iterator[Named]:
        for name, tensor in tensors:
            self._num_bytes += tensor.nbytes
            yield name, tensor

    def _sent(self, tensors: Iterator[Named], root: int) -> Iterator[Named]:
        """Pass the trainer's tensors on, and broadcast them from the root.

        All trainer ranks see the same sizes, so they meet in the broadcasts between the same exports.
        """
        bucket: list[Named] = []
        filled = 0
        try:
            for name, tensor in tensors:
                if bucket and filled + room(tensor.nbytes) > BUCKET_BYTES:
                    self._broadcast(bucket, root)
                    bucket, filled = [], 0
                bucket.append((name, tensor))
                filled += room(tensor.nbytes)
                yield name, tensor
        except RuntimeError as error:
            if self._rank == root:
                self._header({"error": f"the trainer's export failed: {error}"}, root)
            raise
        self._broadcast(bucket, root)
        self._broadcast([], root)

    def _broadcast(self, bucket: list[Named], root: int) -> None:
        if self._rank != root:
            self._receive_bucket(root)
            return
        entries = tuple(Entry.of(name, tensor) for name, tensor in bucket)
        device = bucket[0][1].device if bucket else torch.device("cpu")
        self._header({"device": device.type, "tensors": entries}, root)
        if not bucket:
            return
        flat = empty_bucket(entries, device)
        pack(bucket, entries, flat)
        with waiting():
            dist.broadcast(flat, src=root, group=self._group)

    def _received(self, root: int) -> Iterator[Named]:
        while bucket := self._receive_bucket(root):
            yield from bucket

    def _receive_bucket(self, root: int) -> list[Named]:
        """The root's next tensors, views of one buffer; none at the end. WeightSyncError if it gave up."""
        header = self._header(None, root)
        if "error" in header:
            raise WeightSyncError(f"{self}: rank {root}: {header['error']}")
        if not header["tensors"]:
            return []
        entries = tuple(Entry(name, tuple(shape), dtype) for name, shape, dtype in header["tensors"])
        flat = empty_bucket(entries, header["device"])
        with waiting():
            dist.broadcast(flat, src=root, group=self._group)
        return unpack(entries, flat)

    def _header(self, content: dict[str, Any] | None, root: int) -> dict[str, Any]:
        """Broadcast a JSON object from the root."""
        text = b"" if content is None else json.dumps(content).encode()
        size = torch.tensor([len(text)])
        with waiting():
            dist.broadcast(size, src=root, group=self._group)
        data = (
            torch.empty(int(size), dtype=torch.uint8)
            if content is None
            else torch.frombuffer(bytearray(text), dtype=torch.uint8)
        )
        with waiting():
            dist.broadcast(data, src=root, group=self._group)
        return json.loads(data.numpy().tobytes())

    def _agree(self, failure: str) -> list[str]:
        """The failures of all ranks; each gives its own, or an empty text."""
        text = failure.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
        rows = self._all_gather([*text], torch.uint8)
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
        return [text for text in texts if text]

    def _all_gather(self, mine: list[int], dtype: torch.dtype) -> list[list[int]]:
        """The numbers of each rank, of this type."""
        if len(self._ranks) == 1:  # gloo would take a tenth of a sync within one device
            return [mine]
        sent = torch.tensor(mine, dtype=dtype)
        rows = [torch.empty_like(sent) for _ in self._ranks]
        with waiting():
            dist.all_gather(rows, sent, group=self._group)
        return torch.stack(rows).tolist()


def _export(source: TrainEngine, dtype: torch.dtype | None, part: WeightPart) -> Iterator[Named]:
    """What a target takes of the trainer's weights."""
    if part == "merged":
        return source.export_weights(dtype)
    return source.export_adapter(dtype, with_base=part == "base_and_adapter")
