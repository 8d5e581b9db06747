"""Several adapters in one engine: what its users share, and how an adapter gets into it."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from siirl.config import Config
from siirl.engines.rollout.served.engine_process import EngineProcess
from siirl.engines.rollout.served.journal import Told
from siirl.engines.train.adapters.lora import adapter_name
from siirl.engines.weights.target import WeightSpecs
from siirl.model_files.weight_slices import write_adapter

MEMORY_FOLDER = Path("/dev/shm")


class Policy(Protocol):
    """Who uses an engine, alone or with others."""

    def check_idle(self, what: str, even_giving_way: bool = False) -> None:
        """RolloutError if a stream of it has pending requests, so that the engine cannot do `what`."""

    def hold_stream(self) -> None:
        """Have no request of its stream run until `stream_goes_on`."""

    def stream_goes_on(self) -> None:
        """Let the requests that were held run again."""

    def lose_weights(self) -> None:
        """Its weights are about to be replaced with the base's: until its next sync it has none."""


@dataclass
class SharedEngine:
    """An engine, and who uses it."""

    users: list[Policy] = field(default_factory=list)
    """Several, if they are adapters on one base."""
    keeps_weights: bool = False
    """`sleep` moves the weights to host memory, as a frozen base is not sent again. Else it forgets them."""
    loaded: bool = False
    """The base has its weights."""
    weights_sleep: bool = False
    """The weights are not on the device."""
    cache_sleeps: bool = False
    """The KV cache is not on the device."""


def base_alone(
    weights: Iterable[tuple[str, Tensor]], specs: WeightSpecs, adapter: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of the base; those of the adapter are put into `adapter`, in the engine's type."""
    for name, tensor in weights:
        if adapter_name(name) is None:
            yield name, tensor
        else:
            adapter[name] = tensor.detach().to("cpu", specs[name][1], copy=True).contiguous()


@dataclass(frozen=True)
class LoadAdapter(Told):
    """An adapter, by way of a folder in memory that is gone afterwards."""

    name: str
    number: int
    adapter: Mapping[str, Tensor]
    cfg: Config
    subject = "adapter"
    kind = "load_adapter"

    def tell(self, process: EngineProcess) -> None:
        """See Told."""
        model = self.cfg.actor_rollout_ref.model
        place = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="siirl-adapter-", dir=place) as folder:
            write_adapter(Path(folder), self.adapter, model.lora_rank, model.lora_alpha)
            process.call(self.kind, folder=folder, name=self.name, number=self.number)

    def replaces(self, other: Told) -> bool:
        """See Told."""
        return isinstance(other, LoadAdapter) and other.number == self.number
