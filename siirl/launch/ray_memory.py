"""Folders of checkpoints in memory on the machines of a Ray cluster: an actor on each holds one.

The actors outlive the workers and their actors, and end with the run. A machine that is lost takes its folder
with it; the next one has copies (siirl/checkpoint/machines.py). ray is imported when it is needed.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from siirl.checkpoint.held_files import Held, held_files, newest_whole
from siirl.config import Config
from siirl.launch.memory_checkpoints import keeps_in_memory, memory_folder
from siirl.launch.process import end_with_parent

ANSWER_S = 10.0


class MemoryActor:
    """On one machine. Its methods are called by the driver."""

    def __init__(self, cfg: Config):
        end_with_parent()  # with its raylet
        self._open = contextlib.ExitStack()
        self._folder = self._open.enter_context(memory_folder(cfg))

    def folder(self) -> str:
        return self._folder

    def held(self) -> list[Held]:
        return held_files(Path(self._folder), contents=False)

    def close(self) -> None:
        self._open.close()


class RayMemory:
    """The folders of a run, by machine: `open` makes those that are not there yet. None if it keeps none."""

    def __init__(self, cfg: Config, options: dict[str, Any]):
        """options: of the actors."""
        self._cfg, self._options = cfg, options
        self._actors: dict[str, Any] = {}
        self._folders: dict[str, str] = {}

    def open(self, nodes: Sequence[str], gather: Callable[[list[Any]], list[str]]) -> None:
        """Have a folder on each of these machines, by their ids in Ray.

        gather: waits for what actors answer. Other machines keep theirs: they may come back.
        """
        if not keeps_in_memory(self._cfg):
            return
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._forget_lost()
        actor_class = ray.remote(MemoryActor)
        for node in dict.fromkeys(nodes):
            if node not in self._actors:
                where = NodeAffinitySchedulingStrategy(node, soft=False)
                actor = actor_class.options(num_cpus=0, scheduling_strategy=where, **self._options)
                self._actors[node] = actor.remote(self._cfg)
        refs = [actor.folder.remote() for actor in self._actors.values()]
        self._folders = dict(zip(self._actors, gather(refs), strict=True))

    def folder_on(self, node: str) -> str:
        return self._folders.get(node, "")

    def newest(self) -> int:
        """The step of the newest checkpoint that is whole on the machines which are there; 0: none."""
        version = newest_whole([held for held in self._forget_lost() if held is not None])
        return 0 if version is None else version.step

    def remove_folders(self) -> None:
        """Without Ray's head, too."""
        self._answers("close")

    def close(self) -> None:
        """Remove the folders, and end the actors."""
        import ray

        self.remove_folders()
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors, self._folders = {}, {}

    def _forget_lost(self) -> list[list[Held]]:
        """What is held by the actors that answer; the others are forgotten."""
        answers = self._answers("held")
        self._actors = {node: actor for node, actor in self._actors.items() if node in answers}
        return list(answers.values())

    def _answers(self, method: str) -> dict[str, Any]:
        if not self._actors:  # perhaps without Ray
            return {}
        import ray
        from ray.exceptions import RayError

        refs = {node: getattr(actor, method).remote() for node, actor in self._actors.items()}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=ANSWER_S)
        found = {}
        for node, ref in refs.items():
            with contextlib.suppress(RayError):  # GetTimeoutError too
                found[node] = ray.get(ref, timeout=0)
        return found
