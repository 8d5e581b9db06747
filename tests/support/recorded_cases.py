"""How near tests come to what they compare with, told to tools/proven_models.py (which keeps it if asked)."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from proven_models import ALONE, TRAINING, Case, record
from torch import Tensor
from train_engine_cases import Scenario


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The norm of the difference of all tensors together, over that of theirs."""
    apart, size = (
        sum(float(tensor.double().square().sum()) for tensor in tensors)
        for tensors in ((ours[name] - theirs[name] for name in theirs), theirs.values())
    )
    return (apart / size) ** 0.5


def layout_name(scenario: Scenario) -> str:
    """The sizes of a scenario that are above 1, data parallelism first; sp: the sequence is cut, too."""
    sizes = {axis: size for axis, size in scenario.sizes if size > 1}
    shared = [sizes.get(axis, 1) for axis in ("tp", "pp", "cp")]
    data = scenario.world // (shared[0] * shared[1] * shared[2])
    words = [f"dp{data}"] * (data > 1) + [f"{axis}{size}" for axis, size in sizes.items()]
    words += ["copies"] * (0 < scenario.fsdp_size < scenario.world)
    words += ["sp"] * any("sequence_parallel=True" in key for key in scenario.overrides)
    return " ".join(words) or ALONE


def type_of(folder: Path | str) -> str:
    """What a model's config.json says of its type."""
    return json.loads((Path(folder) / "config.json").read_text())["model_type"]


def on_cuda(scenario: Scenario) -> Scenario:
    """What a test on a GPU ran, whose workers name their device themselves."""
    return replace(scenario, device="cuda")


def case_of(model_type: str, scenario: Scenario, part: str = TRAINING, dtype: str = "float32") -> Case:
    device = "CPU"
    if scenario.device != "cpu":
        device = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0]
    return Case(model_type, scenario.strategy, part, layout_name(scenario), device, dtype)


def record_gaps(case: Case, gaps: Mapping[str, float]) -> None:
    """Record the distances that a comparison has found; none if it failed."""
    record(case, gaps.get("log_prob"), gaps.get("gradient"))


def record_outcome(case: Case, ours: Any, theirs: Any) -> None:
    """Record what two outcomes, of train_engine_cases or alike, are apart."""
    log_prob = float((ours.log_prob - theirs.log_prob).abs().max())
    record(case, log_prob, distance(ours.grads, theirs.grads) if theirs.grads else None)
