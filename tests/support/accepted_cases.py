"""A small model of a type, trained by an engine and by transformers: what is wrong, and how far off it is."""

import contextlib
import copy
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import causal_lms
import config_values
import pytest
import torch
import torch.distributed as dist
import train_engine_cases as cases
from expert_cases import largest_gap, on_disk
from proven_models import TRAINING
from recorded_cases import case_of, distance, record_gaps
from safetensors.torch import load_file
from train_engine_cases import Scenario
from transformers import CONFIG_MAPPING

from siirl.config import load_config
from siirl.models.families import types_with
from siirl.models.trained import OWN_TYPE

MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
MIXED_QWEN = MIXED | {"use_sliding_window": True, "max_window_layers": 1}
WINDOWS: dict[str, dict[str, Any]] = {
    **{
        kind: MIXED
        for kind in (
            "afmoe",
            "cwm",
            "dots1",
            "exaone4",
            "exaone_moe",
            "gemma2",
            "gemma3_text",
            "mellum",
            "ministral",
            "olmo3",
        )
    },
    **{kind: {"sliding_window": 5} for kind in ("ministral3", "mistral", "mixtral", "phi3", "starcoder2")},
    "qwen2": MIXED_QWEN,
    "qwen2_moe": MIXED_QWEN,
    "qwen3": MIXED_QWEN,
    "gpt_oss": {"sliding_window": 5}
    | ({"swiglu_limit": 0.7} if hasattr(CONFIG_MAPPING["gpt_oss"](), "swiglu_limit") else {}),
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 5},
    "smollm3": MIXED | {"use_sliding_window": True},
}
"""Sliding windows that are shorter than rows, in some layers where that may be, and bounds that small numbers
reach."""


@dataclass(frozen=True)
class Bounds:
    """How near is near enough."""

    log_prob: float = 1e-5
    """Of log-probs and entropies, in nats."""
    gradient: float = 1e-6
    """Of each number of the gradient, whose norm is cut to CLIP."""
    norm: float = 1e-5
    """Of the gradient's norm, relative."""


EXACT = Bounds()


def results(
    rank: int, world: int, kinds: list[str], scenario: Scenario, bounds: Bounds = EXACT, values: str = "set"
) -> dict[str, str]:
    """Model type -> what is wrong with how the engine trains a small model of it.

    values: "set" in its config.json; "null" or "absent" are all that may be null.
    """
    found = {}
    part = "compiled layers" if any("compile_layers" in key for key in scenario.overrides) else TRAINING
    for kind in kinds:
        gaps: dict[str, float] = {}
        problem = wrong(kind, scenario, bounds, gaps, values)
        record_gaps(case_of(kind, scenario, part), {} if problem else gaps)
        found |= {kind: problem} if problem else {}
    return found


def wrong(kind: str, scenario: Scenario, bounds: Bounds, gaps: dict[str, float], values: str = "set") -> str:
    """What is wrong; the distances that are found go into gaps."""

    from siirl.engines.rollout.hf.hf_rollout import build_model
    from siirl.engines.weights.target import tensor_names

    made = [tempfile.mkdtemp(prefix="siirl-model-type-")]
    dist.broadcast_object_list(made)
    folder = Path(made[0])
    if dist.get_rank() == 0:
        if values == "set":
            causal_lms.write_model(folder, causal_lms.tiny_config(kind, **WINDOWS.get(kind, {})))
        else:
            _write_with_few_values(folder, kind, values)
    dist.barrier()
    engine, _ = cases.build_engine(scenario, folder)
    stored = load_file(folder / "model.safetensors")
    exported = {name: weight.to("cpu", copy=True) for name, weight in engine.export_weights()}
    if exported.keys() != stored.keys():
        return f"exports have other weights: {sorted(exported.keys() ^ stored.keys())[:4]}"
    if unequal := [name for name, weight in stored.items() if not torch.equal(exported[name], weight)]:
        return f"exported otherwise: {unequal[:4]}"
    rows = cases.sample_rows(0)
    model = cases.model_of_hf(folder).eval()
    log_prob_BT, entropy_BT = cases.reference_outputs(model, rows)
    found = engine.compute(rows, ("log_prob", "entropy"), cases.TEMPERATURE)
    for name, expected_BT in (("log_prob", log_prob_BT), ("entropy", entropy_BT)):
        gaps[name] = float((found[name] - expected_BT.detach()).abs().max())
        if not gaps[name] < bounds.log_prob:
            return f"{name} is off by {gaps[name]}"
    mask_BT = rows["response_mask"]
    loss_BT = -rows["advantage"] * log_prob_BT - cases.ENTROPY_COEFF * entropy_BT
    ((loss_BT * mask_BT).sum() / mask_BT.sum()).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), cases.CLIP))
    (metrics,) = cases.train_steps(engine, scenario, range(1))
    if metrics.values()["grad_norm"] != pytest.approx(expected, rel=bounds.norm):
        return f"grad_norm is {metrics.values()['grad_norm']} instead of {expected}"
    if problem := wrong_gradients(engine, model, bounds, gaps):
        return problem
    model_cfg = load_config(cases.overrides_for(folder)).actor_rollout_ref.model
    names, _ = tensor_names(build_model(model_cfg, "float32", torch.device("meta")))
    exported = {name: shape for name, (shape, _) in engine.weight_specs().items()}
    if {name: shape for name, (shape, _) in names.items()} != exported:
        return f"rollouts have other weights: {sorted(names.keys() ^ exported.keys())[:4]}"
    return ""


def _write_with_few_values(folder: Path, kind: str, values: str) -> None:
    """A model whose config.json has null for all that may be null, or does not have it where that is its
    default; of values of which each may be null, but not all at once, some stay."""
    row, raw = config_values.table()[kind], config_values.small_files(kind)[0]
    none = [name for name in row["null"] if values == "null" or row["defaults"][name] is None]
    if types_with(lambda row: row.has_states).count(kind):  # two layers would be without attention
        none.remove("layer_types")
    assert none
    few = raw
    for name in none:
        fewer = {key: value for key, value in few.items() if key != name}
        fewer |= {name: None} if values == "null" else {}
        with contextlib.suppress(TypeError):  # of transformers: it reckons with another that is null, too
            CONFIG_MAPPING[kind].from_dict(copy.deepcopy(fewer))
            few = fewer
    assert few != raw
    causal_lms.write_model(folder, CONFIG_MAPPING[kind].from_dict(copy.deepcopy(few)))
    (folder / "config.json").write_text(json.dumps(few))


def wrong_gradients(engine: Any, model: Any, bounds: Bounds, gaps: dict[str, float]) -> str:
    """What of the engine's first gradient, tensor by tensor, is not that of a model of transformers.

    The first rank compares: transformers writes files there alone.
    """
    ours = cases.first_step_gradients(engine)
    if dist.get_rank():
        return ""
    theirs = on_disk(model, {name: param.grad for name, param in model.named_parameters()})
    theirs = {name: grad for name, grad in theirs.items() if not name.endswith(OWN_TYPE)}
    if ours.keys() != theirs.keys():
        return f"other gradients: {sorted(ours.keys() ^ theirs.keys())[:4]}"
    gap, name = largest_gap(ours, theirs)
    if not gap < bounds.gradient:
        return f"the gradient of {name} is off by {gap}"
    gaps["gradient"] = distance(ours, theirs)
    return ""
