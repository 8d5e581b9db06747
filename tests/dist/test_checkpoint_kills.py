"""Saves in the background of several ranks: the bytes of the foreground, errors, kills at any moment."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_harness import WorkerFailure, run_workers
from some_cases import some
from stored_checkpoints import assert_same_checkpoints
from test_checkpoint_ranks import STAGES, ShardedEngine, _fail_on_rank_1

from siirl.checkpoint import files
from siirl.checkpoint.manager import CheckpointManager
from siirl.checkpoint.staging import SavedModel
from siirl.errors import CheckpointError
from siirl.parallel.process_groups import ProcessGroupManager

KILLS = 15


def make_manager(world_size: int, root: str) -> tuple[CheckpointManager, dict]:
    """A manager, and what a SavedModel needs to be saved in the background."""
    world = tuple(range(world_size))
    twin = ProcessGroupManager([world], "gloo", 20).twins([world])[world]
    manager = CheckpointManager(Path(root), 2, dist.group.WORLD, twin)
    return manager, {"group": dist.group.WORLD, "background_group": twin}


def save_both_ways(rank: int, world_size: int, root: str):
    """A save in each way after the same steps; training goes on, with collectives, during the second."""
    for way in ("foreground", "background"):
        engine = ShardedEngine(dist.group.WORLD, seed=1)
        torch.manual_seed(100 + rank)
        engine.train(2)
        manager, groups = make_manager(world_size, f"{root}/{way}")
        models = {"actor": SavedModel(engine, **groups)}
        manager.save(2, models, {"position": 32}, {"rank": rank}, background=way == "background")
        engine.train(20)
        assert manager.wait().path == Path(root) / way / "global_step_2"


def test_a_save_in_the_background_is_the_same_as_one_in_the_foreground(tmp_path):
    run_workers(save_both_ways, 2, str(tmp_path))
    first, second = (tmp_path / way / "global_step_2" for way in ("foreground", "background"))
    assert_same_checkpoints(first, second, "actor")


def fail_in_the_background(rank: int, world_size: int, root: str, stage: str):
    engine = ShardedEngine(dist.group.WORLD, seed=1)
    manager, groups = make_manager(world_size, root)
    models = {"actor": SavedModel(engine, **groups)}
    manager.save(1, models, {}, {"rng": torch.zeros(1)})
    _fail_on_rank_1(2, stage)
    try:
        manager.save(2, models, {}, {"rng": torch.zeros(1)}, background=True)
        engine.train(1)
        manager.wait()
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("stage", some(STAGES, "writing a shard"))
def test_a_failure_of_one_rank_in_the_background_reaches_all(tmp_path, stage):
    for message in run_workers(fail_in_the_background, 2, str(tmp_path), stage):
        assert "checkpoint of step 2" in message and "No space left on device" in message
        assert "rank 1" in message
    assert files.find_resume(tmp_path, "auto", None) == tmp_path / "global_step_1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", files.POINTER]


class Numbers:
    """The smallest engine: every value of its state is the step."""

    def __init__(self, step: int = 0):
        self.tensors = {name: torch.full((50,), float(step)) for name in ("a", "b")}

    def state_dict(self):
        return {"model": self.tensors, "optimizer": {}, "version": int(self.tensors["a"][0])}

    def load_state_dict(self, state):
        assert float(state["version"]) == self.tensors["a"][0]

    def step(self) -> int:
        (value,) = {float(x) for tensor in self.tensors.values() for x in tensor}
        return int(value)


def save_until_killed(manager: CheckpointManager, groups: dict, promises: Path, first: int) -> None:
    """Save step after step, each of them twice, in turns in the background; note what a save promised."""
    rank, step = dist.get_rank(groups.get("group")), first
    while True:
        step += 1
        for background in (True, False):
            manager.save(step, {"m": SavedModel(Numbers(step), **groups)}, {}, {"r": rank}, background)
        if rank == 0:
            files.write_file(promises, str(step))


def check_survivor(root: Path, promises: Path) -> int:
    """The step that a resume finds: whole, and not older than what was promised."""
    found = files.find_resume(root, "auto", None)
    promised = int(promises.read_text() or 0) if promises.exists() else 0
    if found is None:
        assert promised == 0
        return 0
    engine = Numbers()
    restored = CheckpointManager(root, 2, None).load(found, {"m": SavedModel(engine, None)})
    assert engine.step() == restored.step == files.step_of(found) >= promised
    return restored.step


def wait_for_a_promise(promises: Path, after: int) -> float:
    """Wait until a step later than `after` is saved; seconds that it took: a slow machine is no case."""
    start_s = time.monotonic()
    while not promises.exists() or int(promises.read_text() or 0) <= after:
        assert time.monotonic() - start_s < 100
        time.sleep(0.002)
    return time.monotonic() - start_s


def kill_savers(rank: int, world_size: int, root: str, promises: str) -> tuple[list[int], set[str]]:
    """Start a saver and kill it after a random time, again and again: (steps found, kinds of leftovers)."""
    draw, steps, leftovers = random.Random(0), [0], set()
    for _ in range(KILLS):
        saver = os.fork()
        if saver == 0:
            manager = CheckpointManager(Path(root), 2, None)
            save_until_killed(manager, {"group": None}, Path(promises), steps[-1])
        pair_s = wait_for_a_promise(Path(promises), steps[-1])
        time.sleep(draw.uniform(0.0, pair_s))
        os.kill(saver, signal.SIGKILL)
        os.waitpid(saver, 0)
        leftovers |= {path.suffix for path in Path(root).iterdir()}
        steps.append(check_survivor(Path(root), Path(promises)))
    return steps, leftovers


def test_kill_9_at_any_moment_of_a_save_never_loses_the_last_good_checkpoint(tmp_path):
    root, promises = tmp_path / "checkpoints", tmp_path / "promises"
    root.mkdir()
    ((steps, leftovers),) = run_workers(kill_savers, 1, str(root), str(promises))
    assert steps == sorted(set(steps)) and steps[-1] >= KILLS, "saves went on from kill to kill"
    assert ".tmp" in leftovers, "no save was hit: the delays are wrong"


def save_until_a_rank_is_killed(rank: int, world_size: int, root: str, promises: str, victim: int):
    """The savers of two ranks; one of them kills itself at a random moment, from a thread of its own."""
    manager, groups = make_manager(world_size, root)
    found = manager.find_resume("auto", None)
    first = 0 if found is None else files.step_of(found)

    def kill() -> None:
        time.sleep(random.uniform(0.0, wait_for_a_promise(Path(promises), first)))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        threading.Thread(target=kill).start()
    save_until_killed(manager, groups, Path(promises), first)


def test_kill_9_of_one_of_two_ranks_ends_both_and_loses_nothing(tmp_path):
    root, promises = tmp_path / "checkpoints", tmp_path / "promises"
    for victim in (0, 1):
        with pytest.raises(WorkerFailure):
            run_workers(save_until_a_rank_is_killed, 2, str(root), str(promises), victim, deadline_s=20)
        check_survivor(root, promises)
