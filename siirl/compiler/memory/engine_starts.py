"""Whether a rollout engine starts: its weights and the KV cache of one row, in its share of a device. Pure.

vLLM ends at its start where its share does not hold them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from siirl.compiler.backends import backend_of
from siirl.compiler.memory.engine_memory import engine_bytes
from siirl.compiler.memory.estimate import BYTES, ModelShape, read_shape
from siirl.compiler.plan import ModelPlan, Plan
from siirl.config import Config
from siirl.config.roles import ROLES
from siirl.config.rollout import RolloutConfig
from siirl.spelling import GIB, gib_texts

MOST_SHARE = 0.95
"""Of a device that is advised: the rest is for CUDA contexts and the worker."""
_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
_TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@dataclass(frozen=True)
class EngineStart:
    """What an engine has on each of its devices, in bytes."""

    model: ModelPlan
    share: float
    """Of the device."""
    device: int
    weights: int
    """Of each rank of the engine."""
    row: int
    """KV cache of a row of full length, on each rank of the engine."""
    row_tokens: int
    workspace: int
    """What a step of the engine takes besides: activations of its tokens, and logits of its rows."""
    sizes: dict[int, tuple[int, int]]
    """Ranks that an engine can have on a machine -> weights and row of each."""

    @property
    def room(self) -> int:
        return int(self.share * self.device)

    @property
    def starts(self) -> bool:
        return self.weights + self.row <= self.room

    @property
    def least(self) -> int:
        """Bytes that it takes with the KV cache of one row."""
        return self.weights + self.row + self.workspace

    @property
    def can_start(self) -> bool:
        """With some share of the device."""
        return self.least <= MOST_SHARE * self.device

    @property
    def rows(self) -> int:
        """Rows of full length that the KV cache holds at once."""
        return max(0, self.room - self.weights - self.workspace) // max(1, self.row)

    @property
    def text(self) -> str:
        """What the share holds; where that is too little, why, and what to set."""
        weights, row = self.weights / GIB, self.row / GIB
        gib = f"{self.share:g} of the device = {gib_texts(self.room / GIB, weights + row)[0]} GiB"
        if self.starts:
            left = max(0, self.room - self.weights - self.workspace) / GIB
            return (
                f"{self.model.name}: {gib}: weights {weights:.1f}, KV cache {left:.1f} "
                f"for {self.rows} rows of {self.row_tokens} tokens"
            )
        return (
            f"{self.model.name} does not start: its engine gets {gib} "
            f"(rollout.gpu_memory_utilization), and takes {weights:.1f} for its weights and {row:.1f} "
            f"for the KV cache of one row of {self.row_tokens} tokens. {self._advice}"
        )

    @property
    def _advice(self) -> str:
        if self.can_start:
            return f"Set {_SHARE}={math.ceil(100 * self.least / self.device) / 100:g}."
        for tensor, (weights, row) in sorted(self.sizes.items()):
            share = (weights + row + self.workspace) / self.device
            if tensor > self.model.dims.tp and share <= MOST_SHARE:
                more = "" if share <= self.share else f" {_SHARE}={math.ceil(100 * share) / 100:g}"
                engine = "" if self.model.backend == "vllm" else "actor_rollout_ref.rollout.name=vllm "
                return f"Set {engine}{_TENSOR}={tensor}{more}."
        return "No engine on the GPUs of one machine holds it: larger ones do, or weights in fewer bits."


def engine_starts(plan: Plan, configs: Mapping[str, Config], gib: float) -> Iterator[EngineStart]:
    """Each vLLM engine on devices of so many GiB; none on CPUs, or where a model's sizes are not known."""
    for model in plan.models.values():
        cfg = ROLES[model.role].engine_cfg(configs[model.node])
        shares_another = model.base not in (None, model.name)
        if not model.generates or not backend_of(model).device_share or shares_another:
            continue
        shape = read_shape(cfg, model.role)
        if cfg.trainer.device == "cpu" or isinstance(shape, str):
            continue
        yield _start(model, cfg, shape, int(gib * GIB))


def _start(model: ModelPlan, cfg: Config, shape: ModelShape, device: int) -> EngineStart:
    rollout = cfg.actor_rollout_ref.rollout
    whole, _ = engine_bytes(model, cfg, shape, rows_per_shard=0)
    whole *= model.dims.tp
    tokens = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    ranks, gpus = len(model.ranks), cfg.trainer.n_gpus_per_node
    possible = {n for n in range(1, gpus + 1) if ranks % n == gpus % n == shape.heads % n == 0}
    sizes = {
        tensor: (-(-whole // tensor), tokens * _cached(shape, rollout, tensor))
        for tensor in {*possible, model.dims.tp}
    }
    weights, row = sizes[model.dims.tp]
    step = min(rollout.max_num_batched_tokens, tokens * rollout.max_num_seqs)
    widest = 2 * shape.intermediate // model.dims.tp + 4 * shape.hidden
    logits = 2 * 4 * shape.vocabulary * min(rollout.max_num_seqs, step)
    workspace = step * widest * BYTES[rollout.dtype] + logits
    return EngineStart(model, rollout.device_share, device, weights, row, tokens, workspace, sizes)


def _cached(shape: ModelShape, rollout: RolloutConfig, tensor: int) -> int:
    """Bytes that one of so many ranks keeps of a token: of compressed keys and values all."""
    values = shape.cached or 2 * shape.kv_width // min(tensor, shape.kv_heads)
    return shape.attending * values * BYTES[rollout.dtype]
