"""Checkpoints of sharded models: other rank counts, subgroups, failures and kills in the middle."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_harness import WorkerFailure, run_workers
from some_cases import some
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from siirl.checkpoint import files
from siirl.checkpoint import manager as writer
from siirl.checkpoint.manager import CheckpointManager, SavedModel
from siirl.checkpoint.state_tree import rng_state, set_rng_state
from siirl.errors import CheckpointError, StorageError
from siirl.model_files import stored_tensors

CPU = torch.device("cpu")
WIDTH = 7  # not a multiple of the rank counts: shards are uneven


class ShardedEngine:
    """A small FSDP2 model with AdamW, its state as flat names to DTensors."""

    def __init__(self, group: dist.ProcessGroup, seed: int):
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        fully_shard(self.module, mesh=DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",)))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.05)
        self.version = 0
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with_lr, self.optimizer.param_groups[0]["lr"] = self.optimizer.param_groups[0]["lr"], 0.0
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] = with_lr

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.module(torch.randn(8, WIDTH)).square().mean().backward()
            self.optimizer.step()
            self.version += 1

    def state_dict(self):
        named = dict(self.module.named_parameters())
        moments = {
            f"{key}.{name}": self.optimizer.state[p][key]
            for name, p in named.items()
            for key in ("exp_avg", "exp_avg_sq", "step")
        }
        return {
            "model": {name: p.detach() for name, p in named.items()},
            "optimizer": moments,
            "version": self.version,
        }

    def load_state_dict(self, state):
        self.version = state["version"]  # the tensors were filled in place

    def export_weights(self, dtype=None):
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach().full_tensor()

    def full(self) -> dict[str, list]:
        state = self.state_dict()
        return {
            name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).tolist()
            for part in ("model", "optimizer")
            for name, tensor in state[part].items()
        }


def save_then_go_on(rank: int, world_size: int, root: str):
    """Train 3 steps, save, train 2 more: (state at the save, state at the end)."""
    engine = ShardedEngine(dist.group.WORLD, seed=1)
    torch.manual_seed(100 + rank)
    engine.train(3)
    models = {"actor": SavedModel(engine, dist.group.WORLD)}
    checkpoints = CheckpointManager(Path(root), 2, dist.group.WORLD)
    checkpoints.save(3, models, {"position": 48}, rng_state(CPU))
    saved = engine.full()
    engine.train(2)
    return saved, engine.full()


def resume_then_go_on(rank: int, world_size: int, root: str):
    engine = ShardedEngine(dist.group.WORLD, seed=2)
    checkpoints = CheckpointManager(Path(root), 2, dist.group.WORLD)
    path = checkpoints.find_resume("auto", None)
    restored = checkpoints.load(path, {"actor": SavedModel(engine, dist.group.WORLD)})
    loaded = engine.full()
    if restored.rank_state:
        set_rng_state(restored.rank_state, CPU)
    engine.train(2)
    return (
        loaded,
        engine.full(),
        restored.step,
        restored.extra,
        engine.version,
        restored.rank_state is not None,
    )


def test_a_run_continues_bit_for_bit_and_on_other_rank_counts(tmp_path):
    (saved, end), *_ = run_workers(save_then_go_on, 2, str(tmp_path))
    for world_size in (1, 2, 3):
        results = run_workers(resume_then_go_on, world_size, str(tmp_path))
        for rank, (loaded, finished, step, extra, version, has_rng) in enumerate(results):
            assert loaded == saved
            assert (step, extra, version) == (3, {"position": 48}, 5)
            assert has_rng == (rank < 2)
            assert world_size != 2 or finished == end


def two_overlapping_models(rank: int, world_size: int, root: str):
    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (1, 2))}
    mine = {ranks: group for ranks, group in groups.items() if rank in ranks}

    def engines(offset: int):
        return {ranks: ShardedEngine(group, seed=offset + ranks[0]) for ranks, group in mine.items()}

    def models(of: dict):
        return {f"agent_{ranks[0]}.actor": SavedModel(engine, mine[ranks]) for ranks, engine in of.items()}

    first, second = engines(10), engines(20)
    for engine in first.values():
        engine.train(1)
    checkpoints = CheckpointManager(Path(root), 2, dist.group.WORLD)
    path = checkpoints.save(1, models(first), {}, {"rank": rank})
    restored = checkpoints.load(path, models(second))
    same = all(second[ranks].full() == first[ranks].full() for ranks in mine)
    return same, restored.rank_state, files.read_manifest(path)["models"]


def test_models_on_overlapping_rank_subsets_share_a_checkpoint(tmp_path):
    for rank, (same, rank_state, names) in enumerate(run_workers(two_overlapping_models, 3, str(tmp_path))):
        assert same and rank_state == {"rank": rank} and names == ["agent_0.actor", "agent_1.actor"]
    files.verify(tmp_path / "global_step_1")


def _fail_on_rank_1(step: int, stage: str) -> None:
    """Make rank 1 fail at `stage` of the save to come."""
    if dist.get_rank() != 1:
        return

    def no_space(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    if stage == "writing a shard":
        stored_tensors.TensorWriter.write_data = no_space
    elif stage == "the state of a rank":
        writer.save_file = no_space
    elif stage == "the checksums":
        files.records_of = no_space
    else:
        ShardedEngine.state_dict = no_space


STAGES = ("writing a shard", "the state of a rank", "the checksums", "collecting the state")


def save_twice_with_a_failure(rank: int, world_size: int, root: str, stage: str):
    engine = ShardedEngine(dist.group.WORLD, seed=1)
    models = {"actor": SavedModel(engine, dist.group.WORLD)}
    checkpoints = CheckpointManager(Path(root), 2, dist.group.WORLD)
    checkpoints.save(1, models, {}, {"rng": torch.zeros(1)})
    _fail_on_rank_1(2, stage)
    try:
        checkpoints.save(2, models, {}, {"rng": torch.zeros(1)})
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("stage", some(STAGES, "the state of a rank"))
def test_a_failure_of_one_rank_is_an_error_on_all_and_the_previous_checkpoint_stays(tmp_path, stage):
    for message in run_workers(save_twice_with_a_failure, 2, str(tmp_path), stage):
        assert "checkpoint of step 2" in message and "No space left on device" in message
        assert "rank 1" in message
    assert files.find_resume(tmp_path, "auto", None) == tmp_path / "global_step_1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", files.POINTER]


def save_twice_with_little_room(rank: int, world_size: int, root: str):
    """After the first save no file of rank 1 may be longer than 64 bytes: the system refuses the write."""
    engine = ShardedEngine(dist.group.WORLD, seed=1)
    models = {"actor": SavedModel(engine, dist.group.WORLD)}
    checkpoints = CheckpointManager(Path(root), 2, dist.group.WORLD)
    checkpoints.save(1, models, {}, {})
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    try:
        checkpoints.save(2, models, {}, {})
    except StorageError as error:
        return str(error)
    return "no error"


def test_a_file_that_the_system_refuses_to_write_is_no_part_of_a_checkpoint(tmp_path):
    """torch's writer loses what fails in its threads: the index would say nothing of what is not there."""
    for message in run_workers(save_twice_with_little_room, 2, str(tmp_path)):
        assert "step 2" in message and "rank 1" in message
        assert (
            f"the disk is full: {tmp_path}/global_step_2.tmp/actor" in message and "File too large" in message
        )
        assert "the last good one is global_step_1" in message
    assert files.find_resume(tmp_path, "auto", None) == tmp_path / "global_step_1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", files.POINTER]


def killed_in_the_middle(rank: int, world_size: int, root: str, where: str):
    engine = ShardedEngine(dist.group.WORLD, seed=1)
    models = {"actor": SavedModel(engine, dist.group.WORLD)}
    checkpoints = CheckpointManager(Path(root), 2, dist.group.WORLD)
    checkpoints.save(1, models, {}, {})
    if rank == 0:
        module, name = {
            "data": (writer, "save_tensors"),
            "manifest": (files, "write_manifest"),
            "pointer": (files, "write_file"),
        }[where]
        original = getattr(module, name)

        def die(*args, **kwargs):
            if where != "pointer" or files.POINTER in str(args[0]):
                if where == "manifest":
                    original(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, name, die)
    checkpoints.save(2, models, {}, {})


@pytest.mark.parametrize("where", some(["data", "manifest", "pointer"], "manifest"))
def test_kill_9_in_the_middle_of_a_save_leaves_the_previous_checkpoint_current(tmp_path, where):
    with pytest.raises(WorkerFailure):
        run_workers(killed_in_the_middle, 2, str(tmp_path), where)
    assert files.current_step(tmp_path) == 1
    assert files.find_resume(tmp_path, "auto", None) == tmp_path / "global_step_1"
    results = run_workers(resume_then_go_on, 2, str(tmp_path))
    assert [result[2] for result in results] == [1, 1]


def resume_from_damage(rank: int, world_size: int, root: str):
    try:
        found = CheckpointManager(Path(root), 2, dist.group.WORLD).find_resume("auto", None)
    except CheckpointError as error:
        return str(error)
    return str(found)


def test_all_ranks_agree_on_what_to_resume_from(tmp_path):
    run_workers(save_then_go_on, 2, str(tmp_path))
    assert set(run_workers(resume_from_damage, 2, str(tmp_path))) == {str(tmp_path / "global_step_3")}
    (tmp_path / "global_step_3" / "extra.json").unlink()
    messages = set(run_workers(resume_from_damage, 2, str(tmp_path)))
    assert len(messages) == 1 and "extra.json is missing" in messages.pop()
