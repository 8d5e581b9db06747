"""Whether the next sync of a link goes by shards, and this rank's part of it: see shard_sync.py.

The first sync of a link never does: engines find out in it where tensors land. From then on it does where all
ranks can say what they hold and keep, and where that puts fewer bytes on the fullest link than the other way,
in which trainers gather all tensors and one of them sends them to whoever has no trainer.
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

CANNOT, UNPLANNED, PAYS, DOES_NOT_PAY = range(4)
"""What a rank says of the next sync by shards; UNPLANNED: nobody knows yet."""


class ShardWay:
    """Of one rank of a link, once a trainer's parameters are on their device."""

    def __init__(
        self, name: str, source: TrainEngine | None, target: WeightTarget | None, group: Any
    ) -> None:
        self._name, self._source, self._target, self._group = name, source, target, group
        self._sync: ShardSync | None = None
        self._answer = UNPLANNED
        self._can = self._held() is not None
        self._told = False  # the target: parts come

    def says(self) -> int:
        """CANNOT and so on, of this rank. No communication."""
        target = self._target
        if not self._can or (target is not None and (target.takes != "merged" or target.keeps == "unknown")):
            return CANNOT
        return self._answer

    def decided(self, said: frozenset[int], num_sources: int, num_receivers: int) -> ShardSync | None:
        """The plan by which the next sync goes; None: it goes another way. Tells the target. Collective over
        the link's ranks if one has to be made.

        said: by all ranks.
        """
        if CANNOT not in said and (len(said) > 1 or UNPLANNED in said):
            self._plan(num_sources, num_receivers)
            said = frozenset({self._answer})
        goes = said == {PAYS}
        if self._target is not None and self._target.keeps == "parts" and (goes or self._told):
            self._told = goes
            self._target.expect_parts(self._sync.arriving if goes and self._sync else None)
        return self._sync if goes else None

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

    def _plan(self, num_sources: int, num_receivers: int) -> None:
        """Plan, and compare with the other way."""
        self._sync, self._answer = None, DOES_NOT_PAY
        device = self._source.device.type if self._source is not None else None
        # A rank's layout stays what it is, so this is planned once, whatever comes of it.
        try:
            sync = ShardSync(self._held(), self._kept(), self._group, device)
        except WeightSyncError as error:  # on all ranks
            log.info("weight link %r: %s", self._name, error)
            return
        self._sync = sync
        other = gathered_bytes(sync.whole_bytes, num_sources, num_receivers)
        self._answer = PAYS if (sync.fullest_bytes, sync.all_bytes) < other else DOES_NOT_PAY
        log.log(
            logging.INFO if self._answer == PAYS else logging.DEBUG,
            "weight link %r: by shards the busiest rank sends or gets %.1f MiB, else %.1f: shards %s",
            self._name,
            sync.fullest_bytes / 2**20,
            other[0] / 2**20,
            "pay" if self._answer == PAYS else "do not pay",
        )


def gathered_bytes(whole: int, num_sources: int, num_receivers: int) -> tuple[int, int]:
    """Bytes that the busiest rank sends, and all ranks together, where trainers gather and one sends."""
    gathered = whole * (num_sources - 1) // num_sources
    return (
        gathered + (whole if num_receivers else 0),
        gathered * num_sources + whole * num_receivers,
    )
