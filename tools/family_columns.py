"""Table of docs/models.md with a row for each model type: what trains it and samples it, how large it may be.

Cells are asked of what `siirl check` and `siirl plan` ask: the table of families, and the memory estimate.
"""

import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.memory.estimate import read_shape
from siirl.compiler.plan import Plan
from siirl.config import Config, load_config, with_overrides
from siirl.errors import UserError
from siirl.findings import Findings
from siirl.models.adapter_targets import ADAPTED, why_not_adapted
from siirl.models.config_values import as_read, without_value
from siirl.models.families import family_of, known_types
from siirl.models.sampled import why_not_in_vllm
from siirl.models.trained import TRAINABLE
from siirl.show.memory_text import memory_warnings

COLUMNS = ("model type", "fsdp", "megatron", "sampled by", "LoRA", "FP8", "largest")
GPUS, GPU_GIB = 8, 80
NONE = "-"
_POLICY = "actor_rollout_ref"
_DEEPEST = 1024
"""Layers that no model has."""
_WHERE_NO_DEFAULT = {"num_experts_per_tok": 6, "head_dim": 128}
"""Sizes that some types have no default of, as DeepSeek-V2 and Ministral have them."""


def family_rows() -> Iterator[str]:
    """The lines of the table."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for kind in sorted({kind for strategy in TRAINABLE for kind in known_types(strategy)}):
        cells = [trained(kind, strategy) for strategy in TRAINABLE]
        cells += [sampled(kind), adapted(kind), multiplied(kind), largest(kind)]
        yield f"| {' | '.join((kind, *cells))} |"


def trained(kind: str, strategy: str) -> str:
    """As what a strategy trains a type."""
    if kind not in known_types(strategy):
        return NONE
    return "any role" if kind in known_types(strategy, "value") else "actor"


def sampled(kind: str) -> str:
    """The rollout engines that take a type, of the shape that transformers gives it."""
    family = family_of(kind)
    found = ["hf"]
    if not why_not_in_vllm({"model_type": kind}, on_cpu=False, dtype="bfloat16"):
        found.append("vllm")
    elif not family.vllm.why_not:
        found.append("vllm on a CPU")
    return ", ".join([*found, "sglang"] if family.sglang else found)


def adapted(kind: str) -> str:
    """What of a type may have LoRA adapters."""
    if family_of(kind).latent:
        return NONE
    if family_of(kind).sees_images:
        return "text part"
    config = {"model_type": kind, "num_experts": 8 if family_of(kind).experts else 0}
    for targets, text in (("all-linear", "all"), (ADAPTED, "attention")):
        if not why_not_adapted(config, targets, ""):
            return text
    return NONE


def multiplied(kind: str) -> str:
    """Whether its linear layers multiply in FP8."""
    return "yes" if family_of(kind).float8 else NONE


@cache
def largest(kind: str) -> str:
    """Parameters of the deepest model of a type that fits, its layers as transformers' defaults have them."""
    written = {"model_type": kind}
    while missing := without_value(as_read(written)).removeprefix("no ").partition(" ")[0]:
        if missing not in _WHERE_NO_DEFAULT:
            return NONE
        written[missing] = _WHERE_NO_DEFAULT[missing]
    if not family_of(kind).counted or "hidden_size" not in as_read(written):
        return NONE
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(written))
        found = next(((layers, cfg) for cfg in jobs(kind, folder) if (layers := deepest(cfg))), None)
        if found is None:  # of the defaults of Granite 4's hybrids, which have no attention
            return NONE
        layers, cfg = found
        shape = read_shape(with_overrides(cfg, deep(layers)), "actor")
    assert not isinstance(shape, str), shape
    return f"{shape.params / 1e9:.0f} B, {layers} layers"


def jobs(kind: str, folder: str) -> Iterator[Config]:
    """GRPO of a model under fsdp, its engines and experts shared by as many ranks as divide them; what waits
    is in host memory."""
    fsdp, engine = f"{_POLICY}.actor.fsdp_config", "vllm" if "vllm" in sampled(kind).split(", ") else "hf"
    for experts in (GPUS, 1) if family_of(kind).experts else (1,):
        for tensor in (8, 4, 2, 1) if engine == "vllm" else (1,):
            keys = {
                f"{_POLICY}.model.path": folder,
                f"{_POLICY}.rollout.name": engine,
                f"{_POLICY}.rollout.tensor_model_parallel_size": tensor,
                f"{fsdp}.expert_parallel_size": experts,
                f"{fsdp}.param_offload": True,
                f"{fsdp}.optimizer_offload": True,
            }
            yield with_overrides(_defaults(), keys)


def deep(layers: int) -> dict[str, Any]:
    """What makes a model so deep."""
    return {f"{_POLICY}.model.override_config": {"num_hidden_layers": layers}}


@cache
def _defaults() -> Config:
    gpus = ("trainer.device=cuda", f"trainer.n_gpus_per_node={GPUS}")
    return load_config(["algorithm.adv_estimator=grpo", *gpus])


def deepest(cfg: Config) -> int:
    """The most layers with which a job gets no warning of memory; 0: none, or it is refused."""
    try:
        plan, configs = compile_plan(load_dag(cfg), cfg, GPUS)
    except UserError:
        return 0
    low, high = 0, _DEEPEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(plan, configs, middle) else (low, middle)
    return low


def fits(plan: Plan, configs: dict[str, Config], layers: int) -> bool:
    """Whether `siirl plan` has nothing to say of the memory that a plan takes with so deep a model."""
    other = {node: with_overrides(cfg, deep(layers)) for node, cfg in configs.items()}
    refused = Findings()
    return not memory_warnings(plan, other, GPU_GIB, refused) and not refused.problems
