"""Saves in the background from a GPU: the copy is the state of the call, and its memory is used again."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_harness import run_workers
from stored_checkpoints import tensors_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from siirl.checkpoint.manager import CheckpointManager
from siirl.checkpoint.staging import SavedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKEND = "cpu:gloo,cuda:nccl"


class Engine:
    """A sharded matrix on the GPU, changed in place by `change`."""

    def __init__(self):
        self.module = nn.Linear(64, 63, bias=False).cuda()
        fully_shard(self.module, mesh=DeviceMesh.from_group(dist.group.WORLD, "cuda"))
        self.version = 0

    def change(self) -> None:
        with torch.no_grad():
            self.module.weight.mul_(1.5)
        self.version += 1

    def state_dict(self):
        moments = {"exp_avg": torch.full((3,), float(self.version), device="cuda")}
        model = {name: p.detach() for name, p in self.module.named_parameters()}
        return {"model": model, "optimizer": moments, "version": self.version}

    def load_state_dict(self, state):
        self.version = state["version"]


def save_and_change(rank: int, world_size: int, root: str):
    torch.manual_seed(0)
    engine, twin = Engine(), dist.new_group(backend="gloo")
    manager = CheckpointManager(Path(root), 3, dist.group.WORLD, twin)
    saved = {}
    for step in (1, 2, 3):
        engine.change()
        saved[step] = engine.module.weight.full_tensor().detach().cpu()
        models = {"actor": SavedModel(engine, dist.group.WORLD, background_group=twin)}
        manager.save(step, models, {}, {}, background=True)
        engine.change()
    manager.wait()
    return {step: tensor.numpy() for step, tensor in saved.items()}


@pytest.mark.parametrize("world", [1, 2])
def test_the_copy_is_the_state_of_the_call_also_when_its_memory_is_used_again(tmp_path, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    expected = run_workers(save_and_change, world, str(tmp_path), deadline_s=120, backend=BACKEND)[0]
    for step, weight in expected.items():
        found = tensors_of(tmp_path / f"global_step_{step}" / "actor")
        assert torch.equal(found["model/weight"], torch.from_numpy(weight))
        assert found["optimizer/exp_avg"].tolist() == [2.0 * step - 1] * 3
