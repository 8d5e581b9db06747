"""Losses and gradients in bf16, the default, are as near to float64 as plain transformers in bf16 are."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from siirl.engines.train.base import AdamStep
from siirl.service.commands import AdapterSpec, CreateModel, Datum, ForwardBackward, OptimStep, SaveState

pytestmark = pytest.mark.heavy
KEYS = ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16",)
MODEL, RANK, ALPHA = "a:train:0", 4, 32
FACTOR = 1.5
"""Errors of ours, in those of plain transformers in bf16: both are rounding, of other orders of sums."""


def plain(path, weights: dict[str, torch.Tensor], data: list[Datum], dtype: torch.dtype):
    """Log-probs of the targets, and the gradient of their negative sum by A and B, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).requires_grad_(False)
    parts = {
        name: one.clone().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        for name, one in weights.items()
    }
    for name in [name for name in parts if ".lora_A" in name]:
        layer = model.get_submodule(name.removesuffix(".lora_A.weight"))
        pair = parts[name], parts[name.replace(".lora_A", ".lora_B")]

        def forward(x, layer=layer, pair=pair):
            a, b = (one.to(x.dtype) for one in pair)
            return torch.nn.functional.linear(x, layer.weight) + ALPHA / RANK * ((x @ a.t()) @ b.t())

        layer.forward = forward
    told = []
    for one in data:
        logits = model(torch.tensor([one.tokens])).logits[0].to(parts[name].dtype)
        target = torch.from_numpy(one.inputs["target_tokens"])
        told.append(torch.log_softmax(logits, -1).gather(-1, target[:, None])[:, 0])
    (-torch.cat(told).sum()).backward()
    return torch.cat(told).detach().double(), {name: one.grad.double() for name, one in parts.items()}


def far(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The difference, in units of what is wanted, both as one vector."""
    flat = [torch.cat([one[name].double().flatten() for name in wanted]) for one in (found, wanted)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def test_losses_and_gradients_in_bf16_are_as_near_to_float64_as_plain_transformers(service, tenants):
    tenants.create(CreateModel(MODEL, AdapterSpec(RANK, 3)))
    adapter, draw = tenants._tenants[MODEL].trained.adapter, np.random.default_rng(1)
    adapter.vector.add_(0.02 * torch.randn(adapter.vector.shape, generator=torch.Generator().manual_seed(3)))
    adapter.changed()
    rows = [draw.integers(2, 64, count + 1) for count in (24, 9, 31, 17)]
    data = [Datum(row[:-1].tolist(), {"target_tokens": row[1:].astype(np.int64)}) for row in rows]
    weights = tenants._tenants[MODEL].trained.weights()
    path = service._cfg.actor_rollout_ref.model.path
    exact, exact_grad = plain(path, weights, data, torch.float64)
    rounded, rounded_grad = plain(path, weights, data, torch.bfloat16)

    (found,) = tenants.train([ForwardBackward(MODEL, "cross_entropy", {}, data, False)])
    still = AdamStep(0.0, 0.0, 0.9, 1e-8, 0.0, 0.0)  # its first moment is the gradient
    tenants.step([OptimStep(MODEL, still)])
    tenants.save(SaveState(MODEL, f"tinker://{MODEL}/weights/still", True))
    _, stored = tenants.read(f"tinker://{MODEL}/weights/still")
    gradient = {name: stored[f"optimizer/exp_avg.{name}"] for name in weights}

    log_prob = torch.from_numpy(np.concatenate(found.log_probs)).double()
    ours, theirs = (log_prob - exact).norm(), (rounded - exact).norm()
    assert ours < FACTOR * theirs and ours > 1e-4 * exact.norm(), (ours, theirs)
    assert found.loss == pytest.approx(-log_prob.sum().item(), rel=1e-5)
    ours, theirs = far(gradient, exact_grad), far(rounded_grad, exact_grad)
    assert 1e-4 < ours < FACTOR * theirs, (ours, theirs)
