"""Muon's steps on matrices are its papers' in float64 and torch's in bfloat16; the rest has AdamW's."""

import pytest
import torch
import torch.distributed as dist
from dist_harness import run_workers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from siirl.config.common import OptimConfig
from siirl.engines.train.muon import COEFFICIENTS, make_optimizer

SHAPES = ((5, 3), (3, 8), (6, 6), (1, 4), (9, 2))
"""Of the matrices in a layer: tall, wide and square, with rows that no number of ranks divides."""
REST = ((7, 3), (4,))
"""An embedding and a bias."""
SHARDED = (Shard(0),)
STEPS, LR, DECAY, MOMENTUM = 4, 0.02, 0.1, 0.9


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.ParameterList(torch.randn(shape, dtype=dtype) for shape in SHAPES)
        self.layers = nn.ModuleList([self.layer])
        self.rest = nn.ParameterList(torch.randn(shape, dtype=dtype) for shape in REST)


def gradient(shape: tuple[int, ...], step: int, place: int) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(100 * step + place), dtype=torch.float64
    )


def stepped(dtype: torch.dtype, placements=SHARDED, sizes=(1,), **options) -> list[torch.Tensor]:
    """The whole parameters after STEPS steps, on every rank; in one of them a matrix has no gradient."""
    model = Model(dtype)
    mesh = init_device_mesh("cpu", sizes)
    for params in (model.layer, model.rest):
        for index, param in enumerate(params):
            params[index] = nn.Parameter(distribute_tensor(param.data, mesh, placements))
    optim = OptimConfig(name="muon", lr=LR, weight_decay=DECAY, override_optimizer_config=options)
    own = make_optimizer(model, optim, mesh.get_group(len(sizes) - 1))
    for step in range(STEPS):
        for place, param in enumerate(model.parameters()):
            grad = gradient(param.shape, step, place).to(dtype)
            param.grad = distribute_tensor(grad, mesh, placements)
            if (step, place) == (1, 3):
                param.grad = None
        own.step()
    return [param.detach().full_tensor() for param in model.parameters()]


def of_a_group(rank: int, world: int, dtype: torch.dtype, placements, sizes) -> list[torch.Tensor]:
    return stepped(dtype, placements, sizes, momentum=MOMENTUM)


def of_papers(nesterov: bool, iterations: int) -> list[torch.Tensor]:
    """M = mu M + G, W -= lr (0.2 sqrt(max(rows, columns)) O + decay W), by the singular values of the
    momentum: an iteration maps each of them by an odd polynomial and leaves the vectors."""
    a, b, c = COEFFICIENTS
    found = []
    for place, weight in enumerate(Model(torch.float64).layer):
        weight, momentum = weight.data, torch.zeros_like(weight)
        for step in range(STEPS):
            if (step, place) == (1, 3):
                continue
            grad = gradient(weight.shape, step, place)
            momentum = MOMENTUM * momentum + grad
            u, s, v = torch.linalg.svd(
                grad + MOMENTUM * momentum if nesterov else momentum, full_matrices=False
            )
            s = s / s.square().sum().sqrt()
            for _ in range(iterations):
                s = a * s + b * s**3 + c * s**5
            update = 0.2 * max(weight.shape) ** 0.5 * u @ torch.diag(s) @ v
            weight = weight - LR * (update + DECAY * weight)
        found.append(weight)
    return found


@pytest.fixture
def alone(tmp_path):
    file = tmp_path / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("nesterov", "iterations"), [(True, 5), (False, 5), (True, 3)])
def test_steps_of_matrices_are_those_of_the_papers_in_float64(alone, nesterov, iterations):
    own = stepped(torch.float64, momentum=MOMENTUM, nesterov=nesterov, ns_steps=iterations)
    for ours, theirs in zip(own, of_papers(nesterov, iterations), strict=False):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_in_bfloat16_steps_are_bit_for_bit_those_of_torchs_muon_and_adamw(alone):
    own = stepped(torch.float32, ns_dtype="bfloat16", fused=True)
    model = Model(torch.float32)
    muon = torch.optim.Muon(model.layer.parameters(), LR, DECAY, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(model.rest.parameters(), LR, weight_decay=DECAY, fused=True)
    for step in range(STEPS):
        for place, param in enumerate(model.parameters()):
            param.grad = gradient(param.shape, step, place).float() if (step, place) != (1, 3) else None
        muon.step()
        adamw.step()
    for ours, theirs in zip(own, model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_ranks_that_share_matrices_take_the_steps_of_one():
    (whole,) = run_workers(of_a_group, 1, torch.float64, SHARDED, (1,))
    for placements, sizes in ((SHARDED, (3,)), ((Replicate(), Shard(0)), (2, 2))):
        world = torch.Size(sizes).numel()
        for found in run_workers(of_a_group, world, torch.float64, placements, sizes):
            for ours, one in zip(found, whole, strict=True):
                torch.testing.assert_close(ours, one, rtol=0, atol=1e-13)


def test_the_state_of_a_matrix_is_one_tensor_sharded_as_it_is(alone):
    mesh = init_device_mesh("cpu", (1,))
    params = [
        nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)])) for shape in ((3, 2), (4,))
    ]
    layers = nn.ModuleList([nn.ParameterList(params)])
    state = make_optimizer(
        nn.ModuleDict({"layers": layers}), OptimConfig(name="muon"), mesh.get_group()
    ).state
    assert [sorted(state[param]) for param in params] == [
        ["momentum_buffer"],
        ["exp_avg", "exp_avg_sq", "step"],
    ]
    assert isinstance(state[params[0]]["momentum_buffer"], DTensor)
