"""What is known of a backend besides its code: a class for each, beside its checks. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from siirl.compiler.memory.estimate import MemoryLine, ModelShape
from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.config.actor import ActorConfig
from siirl.config.roles import role_model
from siirl.findings import Check
from siirl.parallel.dims import ParallelDims
from siirl.parallel.placement import Ranks

ASKED = ("cfg", "role", "dims", "node")
"""What the checks of a backend are given: of a node that asks for a model of a role, of these sizes."""

NO_EXPERTS = "it does not say which experts computed a token"


@dataclass(frozen=True)
class Backend(ABC):
    """What a backend can do, and what follows for a model on it. Attributes are the same for all models."""

    engine: str
    """ "module:Class", imported where an engine is built."""

    checks: ClassVar[tuple[Check, ...]] = ()
    """What must hold beyond the product of the sizes: of stage "model", which may need what ASKED names."""

    gathers_weights = False
    """Each layer's weights are gathered where it is computed, from dims.weight_shards ranks."""

    layers_by_keys = False
    """Its layers are fused or compiled where keys of the model ask for that."""

    shares_prompts = False
    """Rows of one prompt that lie together cost that prompt once."""

    kernels_of_parts = False
    """FlashAttention 4 is for it also where several ranks have parts of a row."""

    five_sizes = False
    """Its models are cut by tp, pp, cp and ep, which are always named."""

    weights = True
    """It needs weights."""

    works_alone = False
    """It goes on with what a stream has asked while its worker does something else."""

    writes_in_place = False
    """It can have weights written where its first sync put them (rollout.replace_weights)."""

    device_share = False
    """On a GPU it takes a share of the device (rollout.gpu_memory_utilization) while it does not sleep."""

    takes_images = False
    """Of a rollout: prompts may have images."""

    timed = False
    """Of a rollout: the cost model has constants for what it samples, and for its weight syncs."""

    base_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of its group that models of agents on one frozen base agree on; none: they cannot share a base."""

    offloads: ClassVar[tuple[str, ...]] = ()
    """Keys in a model's group that move it to host memory while it is idle."""

    offloads_trained: ClassVar[tuple[str, ...]] = ()
    """Further ones of a model that trains."""

    @abstractmethod
    def dims(self, cfg: Config, role: str, world: int) -> ParallelDims:
        """The parallel sizes that a model gets on so many ranks."""

    @abstractmethod
    def memory(self, model: ModelPlan, cfg: Config, shape: ModelShape, rows: int) -> list[MemoryLine]:
        """What a rank holds. rows: those of a shard."""

    def groups(self, dims: ParallelDims, ranks: Ranks) -> Iterable[Ranks]:
        """The rank tuples that a model of these sizes, on these ranks, communicates over."""
        return ()

    def packages(self, cfg: Config, role: str) -> object:
        """ConfigError where what it needs is not installed; asked on the machine where it would run."""
        return None

    def advice(self, model: ModelPlan, cfg: Config) -> list[str]:
        """What works, but badly, and what could not be checked: a line each."""
        return []

    def recomputes(self, cfg: Config, role: str) -> bool:
        """Whether whole layers are computed again in the backward pass."""
        return role_model(cfg, role).enable_gradient_checkpointing

    def own_recomputation(self, cfg: Config, role: str) -> bool:
        """Whether options of its own say what is computed again, in the place of the model's key."""
        return False

    def no_replay(self, actor: ActorConfig) -> str:
        """Why the actor's options do not go with experts that were chosen before (router_replay), and the
        fix; empty: they do."""
        return ""

    def no_experts(self, cfg: Config) -> str:
        """Of a rollout: why experts cannot be replayed from it; empty: they can."""
        return NO_EXPERTS

    def environment(self, dims: ParallelDims) -> dict[str, str]:
        """Variables that the processes of a model of these sizes need before CUDA starts."""
        return {}


def replicas(world: int, tp: int = 1) -> ParallelDims:
    """The sizes of rollout engines of tp ranks each."""
    return ParallelDims(world, tp=tp, dp_replicate=max(1, world // tp))


def balances(option: str) -> str:
    """Why a loss of the router does not go with experts that were chosen before."""
    return (
        f"with {option}: the loss balances what the router would choose now, and it does not choose. Leave "
        "out one of them."
    )
