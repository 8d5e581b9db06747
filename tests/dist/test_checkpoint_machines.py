"""Checkpoints in the memory of several machines: one or two ranks here, with a folder of their own."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_harness import run_workers
from test_checkpoint_ranks import ShardedEngine

from siirl.checkpoint import files
from siirl.checkpoint.manager import CheckpointManager
from siirl.checkpoint.staging import SavedModel
from siirl.errors import ConfigError
from siirl.parallel.process_groups import ProcessGroupManager


def manager_of(rank: int, world_size: int, root: str, per_machine: int) -> tuple[CheckpointManager, dict]:
    """With a folder that the ranks of one machine share."""
    world = tuple(range(world_size))
    twin = ProcessGroupManager([world], "gloo", 20).twins([world])[world]
    folder = Path(root) / f"machine_{rank // per_machine}"
    groups = {"group": dist.group.WORLD, "background_group": twin}
    return CheckpointManager(folder, 1, dist.group.WORLD, twin, per_machine), groups


def weights(engine: ShardedEngine) -> dict[str, torch.Tensor]:
    state = engine.state_dict()
    return {
        f"{part}.{name}": getattr(x, "full_tensor", lambda x=x: x)().clone()
        for part in ("model", "optimizer")
        for name, x in state[part].items()
    }


def save(rank: int, world_size: int, root: str, per_machine: int):
    engine = ShardedEngine(dist.group.WORLD, seed=1)
    manager, groups = manager_of(rank, world_size, root, per_machine)
    for step in (2, 4):
        torch.manual_seed(step)
        engine.train(2)
        manager.save(step, {"actor": SavedModel(engine, **groups)}, {"at": step}, {"rank": rank}, True)
        manager.wait()
    return weights(engine)


def load(rank: int, world_size: int, root: str, per_machine: int):
    engine = ShardedEngine(dist.group.WORLD, seed=9)
    manager, groups = manager_of(rank, world_size, root, per_machine)
    found = manager.find_resume("auto", None)
    if found is None:
        return None
    restored = manager.load(found, {"actor": SavedModel(engine, **groups)})
    assert restored.extra == {"at": restored.step}
    assert restored.rank_state is None or restored.rank_state == {"rank": rank}
    manager.save(5, {"actor": SavedModel(engine, **groups)}, {"at": 5}, {"rank": rank}, True)
    manager.wait()
    return restored.step, weights(engine)


def assert_same(loaded, saved) -> None:
    for (step, mine), theirs in zip(loaded, saved, strict=False):
        assert step == 4 and mine.keys() == theirs.keys() and len(mine) > 8
        assert all(mine[name].equal(theirs[name]) for name in mine)


def shared(rank: int, world_size: int, root: str, folders: int) -> str:
    """What is said of a folder that is the same on all ranks, or of one for each."""
    folder = Path(root) / str(rank % folders)
    try:
        CheckpointManager(folder, 1, dist.group.WORLD).require_shared()
    except ConfigError as error:
        return str(error)
    return "".join(path.name for path in folder.iterdir())


def test_a_folder_of_each_machine_is_refused_before_training_and_one_of_all_is_left_as_it_was(tmp_path):
    assert run_workers(shared, 2, str(tmp_path), 1) == ["", ""]
    told = run_workers(shared, 2, str(tmp_path / "apart"), 2)
    assert told[0].partition(": ")[2] == told[1].partition(": ")[2], "all ranks raise"
    assert "does not see there what rank 1 on" in told[0] and "trainer.memory_checkpoint_freq=1" in told[0]


def test_what_a_lost_machine_had_comes_back_from_the_next_one(tmp_path):
    saved = run_workers(save, 3, str(tmp_path), 1)
    machines = [tmp_path / f"machine_{index}" for index in range(3)]
    assert [files.saved_steps(machine) for machine in machines] == [[4]] * 3
    for index, machine in enumerate(machines):
        shards = {path.name for path in machine.glob("*/actor/*.distcp")}
        assert {int(name.split("_")[2]) for name in shards} == {index, (index - 1) % 3}, "the last one's too"
    shutil.rmtree(machines[1])
    (machines[2] / "global_step_4" / "ranks" / "rank_2.json").write_text("{damaged}")
    assert_same(run_workers(load, 3, str(tmp_path), 1), saved)
    assert [files.saved_steps(machine) for machine in machines] == [[5]] * 3, "copies are made again"
    shutil.rmtree(machines[0])
    shutil.rmtree(machines[1])
    assert run_workers(load, 3, str(tmp_path), 1) == [None] * 3, "two neighbours are gone, and so are files"


@pytest.mark.slow
def test_other_numbers_of_machines_and_ranks_go_on_from_memory(tmp_path):
    saved = run_workers(save, 4, str(tmp_path), 2)
    machines = [tmp_path / f"machine_{index}" for index in range(2)]
    for index in range(2):
        shutil.copytree(machines[index], tmp_path / "moved" / f"machine_{2 - index}")
    assert_same(run_workers(load, 3, str(tmp_path / "moved"), 1), saved)
    newer = machines[0] / "global_step_6"
    shutil.copytree(machines[0] / "global_step_4", newer)
    (newer / "extra.json").unlink()
    shutil.rmtree(machines[1])
    assert_same(run_workers(load, 2, str(tmp_path), 2), saved)
