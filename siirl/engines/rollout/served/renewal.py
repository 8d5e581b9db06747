"""Whether an engine whose worker has gone is fit for the next one, and what makes it so.

The next worker finds it as one that has just started: without requests, without weights that anything could
be sampled from, with empty caches, and asleep if its worker ever put it to sleep, as a device's memory is the
worker's until it says `wake`. What cannot be told for sure is not fit.
"""

from collections.abc import Mapping
from typing import Any

from siirl.errors import RolloutError

ALL = frozenset({"weights", "kv_cache"})
"""The parts that sleep."""
BEGINS, FINISHES = "begin_", "finish_"
"""How methods of NativeEngine are named between which weights are replaced, in whatever way."""


class Renewal:
    """What a worker has had its engine do, as far as the next worker depends on it."""

    def __init__(self) -> None:
        self.sound = True
        """It has had no error of its own."""
        self._updating = False
        self._without_weights = False
        """None have come since it changed its worker."""
        self._asleep: frozenset[str] = frozenset()
        self._sleep: dict[str, Any] | None = None
        """How it was told to sleep last."""
        self._rests = False
        """It sleeps since it changed its worker, who does not know."""

    def begins(self, method: str) -> bool:
        """It is told to do this; False if that is done already."""
        if method.startswith(BEGINS):
            self._updating = True
        if method == "sleep" and self._rests:
            self._rests = False
            return False
        return True

    def done(self, method: str, arguments: Mapping[str, Any]) -> None:
        """It has done this."""
        match method:
            case _ if method.startswith(FINISHES):
                self._updating = self._without_weights = False
            case "sleep":
                self._sleep, self._asleep = dict(arguments), ALL
            case "wake":
                self._asleep -= {arguments["part"]}

    def check_weights(self) -> None:
        """RolloutError if what it has are weights of a worker before."""
        if self._without_weights:
            raise RolloutError("it has no weights of this worker: a sync comes first")

    def renew(self, engine: Any) -> bool:
        """Make an engine (NativeEngine, or None before it was started) fit; whether it is."""
        partly = bool(self._asleep) and self._asleep != ALL
        if engine is None or not hasattr(engine, "renew") or not self.sound or self._updating or partly:
            return False
        engine.renew()
        if self._sleep is not None and not self._asleep:
            engine.sleep(**self._sleep)
            self._asleep = ALL
        self._without_weights, self._rests = True, bool(self._asleep)
        return True
