"""What an engine is told that its state follows from: noted by its worker, told again to one in its place."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from siirl.engines.rollout.served.engine_process import EngineProcess


class Told(ABC):
    """Something that an engine is told and that its state follows from."""

    subject: ClassVar[Literal["weights", "adapter", "memory"]]
    kind: ClassVar[str]
    """The method of NativeEngine by which it is told, at least to a process that was just started."""

    @abstractmethod
    def tell(self, process: EngineProcess) -> Any:
        """Tell a process that was told what came before. Errors as of EngineProcess."""

    def tell_again(self, process: EngineProcess) -> Any:
        """The same later, to a process in the place of the first."""
        return self.tell(process)

    def replaces(self, other: "Told") -> bool:
        """Whether what was told before has no effect from here on."""
        return False


@dataclass(frozen=True)
class BeginUpdate(Told):
    """All weights are about to be replaced, by the engine's loaders."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    subject = "weights"
    kind = "begin_update"

    def tell(self, process: EngineProcess) -> Any:
        """See Told."""
        process.call(self.kind, **self.arguments)

    def replaces(self, other: Told) -> bool:
        """See Told."""
        return other.subject in ("weights", "adapter")


@dataclass(frozen=True)
class LoadChunk(Told):
    """Some tensors are there for the loaders, see WeightPacker.to_load."""

    bucket: Mapping[str, Any]
    kept: Mapping[str, Any]
    """The same where it stays."""
    subject = "weights"
    kind = "update"

    def tell(self, process: EngineProcess) -> Any:
        """See Told."""
        process.call(self.kind, bucket=self.bucket)

    def tell_again(self, process: EngineProcess) -> Any:
        """See Told."""
        process.call(self.kind, bucket=self.kept)


@dataclass(frozen=True)
class FinishUpdate(Told):
    """All tensors have come."""

    subject = "weights"
    kind = "finish_update"

    def tell(self, process: EngineProcess) -> Any:
        """See Told."""
        return process.call(self.kind)


@dataclass(frozen=True)
class Sleep(Told):
    """Give back the memory of the device."""

    keeps_weights: bool
    """In host memory; else they are gone."""
    subject = "memory"
    kind = "sleep"

    def tell(self, process: EngineProcess) -> Any:
        """See Told."""
        process.call(self.kind, keeps_weights=self.keeps_weights)

    def replaces(self, other: Told) -> bool:
        """See Told."""
        return other.subject == "memory" or not self.keeps_weights


@dataclass(frozen=True)
class Wake(Told):
    """Take memory again."""

    part: str
    """Of the engine, see NativeEngine.wake."""
    subject = "memory"
    kind = "wake"

    def tell(self, process: EngineProcess) -> Any:
        """See Told."""
        process.call(self.kind, part=self.part)


METHODS = ("begin_update", "update", "finish_update", "load_adapter", "sleep", "wake")
"""Of NativeEngine, from whose calls its state follows."""


class Journal:
    """What makes the state of an engine, in the order in which it was told; without what was undone later."""

    def __init__(self) -> None:
        self.told: list[Told] = []

    def note(self, event: Told) -> None:
        """Add what was told."""
        self.told = [one for one in self.told if not event.replaces(one)] + [event]
