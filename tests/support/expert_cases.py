"""Mixtures of experts against plain Hugging Face, and copies of a tensor against each other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import train_engine_cases as cases
from train_engine_cases import Outcome


def reference_on_disk(path: str, model: str, lora: str | list[str] = "") -> Outcome:
    """The reference's outcome under the names of model files."""
    outcome = cases.run_reference(Path(path), lora)
    named = {name: names_on_disk(getattr(outcome, name), model) for name in ("grads", "weights")}
    return replace(outcome, **named)


def names_on_disk(tensors: dict[str, torch.Tensor], model: str) -> dict[str, torch.Tensor]:
    """Tensors under the names of model files, where transformers stacks experts in memory."""
    router = "block_sparse_moe" if model == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if model == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            name = name.removesuffix("mlp.experts.gate_up_proj")
            for expert, both in enumerate(tensor):
                for part, half in zip((gate, up), both.chunk(2), strict=True):
                    found[f"{name}{router}.experts.{expert}.{part}.weight"] = half
        elif name.endswith(".experts.down_proj"):
            name = name.removesuffix("mlp.experts.down_proj")
            for expert, part in enumerate(tensor):
                found[f"{name}{router}.experts.{expert}.{down}.weight"] = part
        else:
            found[name.replace("mlp.gate.weight", f"{router}.gate.weight")] = tensor
    return found


def largest_gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    return max((float((ours[name] - theirs[name]).abs().max()), name) for name in theirs)


def assert_equal_training(ours: Outcome, theirs: Outcome) -> None:
    assert theirs.log_prob.abs().max() > 1
    torch.testing.assert_close(ours.log_prob, theirs.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=1e-5, rtol=0)
    assert ours.grads.keys() == theirs.grads.keys()
    gap, name = largest_gap(ours.grads, theirs.grads)
    assert gap < 1e-6, name
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-4)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
    assert ours.weights.keys() == theirs.weights.keys()
    gap, name = largest_gap(ours.weights, theirs.weights)
    assert gap < 0.01 * cases.LR, name


def unequal_replicas(engine: Any) -> list[str]:
    """Names of weights and moments of which ranks hold copies that are not the same. Collective."""
    from siirl.engines.train.megatron.state import pieces_of

    held: dict[tuple, torch.Tensor] = {}
    for param, entry in engine._params:
        owned, start = engine._shards.tensors(param)
        flats = {f"AdamW's {kind}": (flat, start) for kind, flat in owned.items()}
        for kind, (flat, first) in (flats | {"the model's": (param.detach().view(-1), 0)}).items():
            for name, piece in pieces_of(engine._params, entry, flat, first):
                held[kind, name, piece.offset, tuple(piece.local.shape)] = piece.local.to("cpu", copy=True)
    everybody: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, held)
    first_seen: dict[tuple, torch.Tensor] = {}
    wrong, num_copies = set(), 0
    for one in everybody:
        for key, value in one.items():
            num_copies += key in first_seen
            if not torch.equal(first_seen.setdefault(key, value), value):
                wrong.add(f"{key[0]} {key[1]}")
    dims = engine._dims
    assert num_copies or dims.world in (dims.pp, 1), "nothing was compared"
    return sorted(wrong)
