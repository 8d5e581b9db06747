"""AdamW over shards makes of them what torch's makes of plain tensors, and asks DTensor about none."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import adam

from siirl.config.common import OptimConfig
from siirl.engines.train.optimizer import MOMENTS, make_adamw, scaled_to_norm

SHAPES = ((5, 3), (7,), (1, 1), (0, 4))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    file = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)])) for shape in SHAPES]
    return [*params, nn.Parameter(torch.randn(4))]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    """Of all but one parameter, another one each step."""
    torch.manual_seed(step)
    for param in params:
        param.grad = torch.randn_like(param)
    params[step % len(params)].grad = None


@pytest.mark.parametrize("overrides", [{}, {"foreach": True}, {"fused": False}])
def test_shards_become_those_of_torchs_adamw(mesh, monkeypatch, overrides):
    seen = []
    update = adam.adam
    monkeypatch.setattr(adam, "adam", lambda *lists, **named: (seen.extend(lists), update(*lists, **named)))
    optim = OptimConfig(lr=1e-2, weight_decay=0.1, override_optimizer_config=dict(overrides))
    ours = sharded(mesh)
    theirs = [nn.Parameter(local(param).clone()) for param in ours]
    own = make_adamw(ours, optim)
    options = overrides or {"fused": True}
    other = torch.optim.AdamW(theirs, lr=1e-2, betas=tuple(optim.betas), weight_decay=0.1, **options)
    for step in range(6):
        give_gradients(ours, step)
        for a, b in zip(ours, theirs, strict=True):
            b.grad = None if a.grad is None else local(a.grad).clone()
        own.step()
        assert seen and not any(isinstance(tensor, DTensor) for tensors in seen for tensor in tensors)
        other.step()
        seen.clear()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(local(a), b)
        for name in MOMENTS:
            assert isinstance(own.state[a][name], DTensor) == isinstance(a, DTensor)
            assert torch.equal(local(own.state[a][name]), other.state[b][name])


def test_gradients_are_clipped_where_they_lie(mesh):
    params = sharded(mesh)
    give_gradients(params, 1)
    grads = [param.grad for param in params]
    whole = torch.cat([local(grad).flatten().double() for grad in grads if grad is not None])
    norm = scaled_to_norm(grads, 0.5, dist.group.WORLD)
    assert norm == pytest.approx(whole.norm().item(), rel=1e-6)
    after = torch.cat([local(grad).flatten().double() for grad in grads if grad is not None])
    torch.testing.assert_close(after, whole * 0.5 / whole.norm(), rtol=1e-6, atol=1e-7)


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
