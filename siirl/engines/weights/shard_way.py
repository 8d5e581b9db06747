"""Whether the next sync of a link goes by shards, and this rank's part of it: see shard_sync.py.

The first sync of a link never does: engines find out in it where tensors land. From then on it does where
all ranks can say what they hold and keep, and trainers would else send whole tensors to ranks that have no
trainer, or gather more than an engine on their rank keeps.
"""

import logging
from collections.abc import Iterator
from typing import Any

from siirl.engines.train.base import TrainEngine
from siirl.engines.weights.bucket import Named
from siirl.engines.weights.shard_plan import whole_box
from siirl.engines.weights.shard_sync import ArrivingParts, Kept, Pieces, ShardSync
from siirl.engines.weights.target import WeightTarget
from siirl.errors import WeightSyncError

log = logging.getLogger(__name__)

CANNOT, UNPLANNED, PLANNED = range(3)
"""What a rank says of the next sync by shards; UNPLANNED: nobody knows yet."""


class ShardWay:
    """Of one rank of a link, once a trainer's parameters are on their device."""

    def __init__(
        self, name: str, source: TrainEngine | None, target: WeightTarget | None, group: Any
    ) -> None:
        self._name, self._source, self._target, self._group = name, source, target, group
        self._sync: ShardSync | None = None
        self._says = UNPLANNED if self._held() is not None else CANNOT
        self._told = False  # the target: parts come

    def says(self) -> int:
        """CANNOT and so on, of this rank. No communication."""
        target = self._target
        if target is not None and (target.takes != "merged" or target.keeps == "unknown"):
            return CANNOT
        return self._says

    def decided(self, said: frozenset[int], num_sources: int, receive: bool) -> ShardSync | None:
        """The plan by which the next sync goes; None: it goes another way. Tells the target. Collective over
        the link's ranks if one has to be made.

        said: by all ranks. receive: whether some ranks of the target hold no trainer.
        """
        if CANNOT not in said and UNPLANNED in said:
            self._plan(num_sources, receive)
            said = frozenset({self._says})
        sync = self._sync if said == {PLANNED} else None
        if self._target is not None and self._target.keeps == "parts" and (sync or self._told):
            self._told = sync is not None
            self._target.expect_parts(sync and sync.arriving)
        return sync

    def arriving(self, sync: ShardSync) -> Iterator[Named] | ArrivingParts:
        """What the target of this rank takes."""
        held = self._held() or {}
        if self._target is not None and self._target.keeps == "parts":
            return ArrivingParts(sync, held)
        return sync.whole(held)

    def _held(self) -> Pieces | None:
        return self._source.held_pieces() if self._source is not None else {}

    def _kept(self) -> Kept | None:
        """What the target of this rank keeps; None: it cannot say."""
        if self._target is None:
            return {}
        specs = self._target.weight_specs()
        boxes = {name: [whole_box(shape)] for name, (shape, _) in specs.items()}
        if self._target.keeps == "parts":
            boxes = self._target.kept_boxes()
        if boxes is None or any(0 in shape for shape, _ in specs.values()):
            return None
        return {name: (str(specs[name][1]), each) for name, each in boxes.items()}

    def _plan(self, num_sources: int, receive: bool) -> None:
        """Plan; a rank's layout stays what it is, so this is done once, whatever comes of it."""
        self._sync, self._says = None, CANNOT
        device = self._source.device.type if self._source is not None else None
        try:
            sync = ShardSync(self._held(), self._kept(), self._group, device)
        except WeightSyncError as error:  # on all ranks
            log.info("weight link %r: %s", self._name, error)
            return
        fullest, gathered = sync.fullest_bytes, sync.whole_bytes * (num_sources - 1) // num_sources
        if receive or fullest < gathered:
            self._sync, self._says = sync, PLANNED
            say = "weight link %r goes by shards: the busiest rank sends or gets %.1f MiB"
            log.info(say, self._name, fullest / 2**20)
