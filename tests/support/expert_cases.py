"""Mixtures of experts against plain Hugging Face, and copies of a tensor against each other."""

import hashlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_engine_cases as cases
from safetensors.torch import load_file
from torch import Tensor
from train_engine_cases import Outcome

STACKED = {
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
    ".router.weight": ".router.layer.weight",
}
"""Names of granitemoe's tensors in memory -> in files."""


def reference_on_disk(path: str, model: str, lora: str | list[str] = "") -> Outcome:
    """The reference's outcome under the names of model files."""
    outcome = cases.run_reference(Path(path), lora)
    named = {name: names_on_disk(getattr(outcome, name), model) for name in ("grads", "weights")}
    return replace(outcome, **named)


def names_on_disk(tensors: dict[str, torch.Tensor], model: str) -> dict[str, torch.Tensor]:
    """Tensors under the names of model files, where transformers stacks experts in memory."""
    if model == "gpt_oss":  # stacked in its files, too
        return tensors
    if model == "granitemoe":  # likewise, by other names
        for own, stored in STACKED.items():
            tensors = {name.replace(own, stored): tensor for name, tensor in tensors.items()}
        return tensors
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


def on_disk(model: Any, tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """What a model's files would have under the names that they have for its parameters' tensors."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            found = tensors[name]
            param.copy_(torch.zeros_like(param) if found is None else found)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def largest_gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    return max((float((ours[name] - theirs[name]).abs().max()), name) for name in theirs)


def assert_equal_training(ours: Outcome, theirs: Outcome) -> None:
    assert theirs.log_prob.abs().max() > 1
    torch.testing.assert_close(ours.log_prob, theirs.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.prob_square, theirs.prob_square, atol=1e-6, rtol=0)
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

    held: dict[tuple, str] = {}
    for param, entry in engine._params:
        owned, start = engine._shards.tensors(param)
        flats = {f"AdamW's {kind}": (flat, start) for kind, flat in owned.items()}
        for kind, (flat, first) in (flats | {"the model's": (param.detach().view(-1), 0)}).items():
            for name, piece in pieces_of(engine._params, entry, flat, first):
                bits = piece.local.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
                held[kind, name, piece.offset, tuple(piece.local.shape)] = hashlib.sha256(bits).hexdigest()
    everybody: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, held)
    first_seen: dict[tuple, str] = {}
    wrong, num_copies = set(), 0
    for one in everybody:
        for key, value in one.items():
            num_copies += key in first_seen
            if first_seen.setdefault(key, value) != value:
                wrong.add(f"{key[0]} {key[1]}")
    dims = engine._dims
    whole = any(entry.cut == "whole" for _, entry in engine._params)  # of OLMo 1 ranks cut everything
    copied = dims.world not in (dims.pp, 1) and (whole or dims.dp * dims.cp > 1)
    assert num_copies or not copied, "nothing was compared"
    return sorted(wrong)


def _logits(router: Any, hidden: Tensor) -> Tensor:
    """What a router's matrix, the only one that it has, and its bias make of the tokens."""
    (weight,) = (param for param in router.parameters() if param.ndim == 2)
    bias = next((param for param in router.parameters() if param.ndim == 1), None)
    return F.linear(hidden.reshape(-1, hidden.shape[-1]), weight, bias)


def router_losses_of_hf(path: str, step: int, aux: float, z: float) -> dict[str, torch.Tensor]:
    """Clipped gradients of the policy's loss and the router's, written out, by plain Hugging Face.

    aux, z: what the balancing loss and the z-loss weigh.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    top_k = getattr(model.config, "num_experts_per_tok", 0) or model.config.moe_topk
    recorder = model._can_record_outputs["router_logits"]
    routers = [module for module in model.modules() if isinstance(module, recorder.target_class)]
    seen: list[list[torch.Tensor]] = [[] for _ in routers]
    for number, router in enumerate(routers):
        router.register_forward_hook(
            lambda module, given, _, number=number: seen[number].append(_logits(module, given[0]))
        )
    rows = cases.sample_rows(step)
    log_prob_BT, entropy_BT = cases.reference_outputs(model, rows)
    mask_BT = rows["response_mask"]
    loss_BT = -rows["advantage"] * log_prob_BT - cases.ENTROPY_COEFF * entropy_BT
    loss = (loss_BT * mask_BT).sum() / mask_BT.sum()
    for logits in seen:
        logits_NE = torch.cat([row[:-1] for row in logits])  # nothing follows the last token of a row
        probs_NE, num = logits_NE.softmax(-1), len(logits_NE)
        chosen_NE = torch.zeros_like(probs_NE).scatter(1, probs_NE.topk(top_k).indices, 1.0)
        balance = (probs_NE.sum(0) * chosen_NE.sum(0)).sum() * probs_NE.shape[1] / (top_k * num * num)
        loss = loss + aux * balance + z * logits_NE.logsumexp(-1).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), cases.CLIP)
    return {name: param.grad for name, param in model.named_parameters()}
