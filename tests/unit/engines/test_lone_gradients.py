"""Gradients on one rank are bit for bit those that FSDP reduces there, and FSDP is left with none."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from siirl.engines.train.fsdp.fsdp_engine import LoneGradients
from siirl.engines.train.fsdp.fsdp_model import fsdp_modules

FP32, BF16 = torch.float32, torch.bfloat16
TYPES = [(FP32, FP32, FP32), (FP32, BF16, FP32), (BF16, BF16, FP32), (FP32, BF16, BF16), (BF16, BF16, BF16)]
"""Of weights, of products, of sums."""
WORDS, WIDTH, STEPS = 50, 32, 3


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    file = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def build(mesh, types) -> nn.Sequential:
    """Layers between an embedding and a head that share their weight; one bias is never trained."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = embedding.weight
    layers = [nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(3)]
    model = nn.Sequential(embedding, *layers, head).to(types[0])
    layers[1][0].bias.requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=types[1], reduce_dtype=types[2], cast_forward_inputs=False)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def train(mesh, types, num_passes: int, alone: bool) -> list[list[Tensor]]:
    """Gradients of each step, then the weights after all of them."""
    model = build(mesh, types)
    lone = LoneGradients(model, types[2]) if alone else None
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    found = []
    for _ in range(STEPS):
        for number in range(num_passes):
            is_last = number == num_passes - 1
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            ids = torch.randint(WORDS, (40,))
            logits = model(ids).float()
            nn.functional.cross_entropy(logits, ids.roll(1)).div(num_passes).backward()
        if lone:
            assert all(param.grad is None for param in params), "FSDP has reduced some"
            lone.hand_over()
        assert all(param.grad.placements == param.placements for param in params)
        found.append([param.grad.to_local().clone() for param in params])
        optimizer.step()
        optimizer.zero_grad()
    assert len(fsdp_modules(model)) == 4
    return [*found, [param.to_local().clone() for param in params]]


@pytest.mark.parametrize(("types", "num_passes"), list(itertools.product(TYPES, (1, 2, 5))))
def test_sums_are_those_that_fsdp_reduces(mesh, types, num_passes):
    ours, theirs = (train(mesh, types, num_passes, alone) for alone in (True, False))
    for own, other in zip(ours, theirs, strict=True):
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(own, other, strict=True))


class Half(nn.Module):
    """A model of two layers, one of which is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def test_a_parameter_without_a_gradient_keeps_none(mesh):
    model = fully_shard(Half(), mesh=mesh, reshard_after_forward=False)
    lone = LoneGradients(model, FP32)
    model(torch.ones(2, 4)).sum().backward()
    lone.hand_over()
    assert model.used.weight.grad is not None
    assert model.idle.weight.grad is None and model.idle.bias.grad is None
