"""Saves and restores a run, in the foreground or in the background.

A staged checkpoint is written aside, checked, then current by one pointer, or not at all.
"""

import json
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from siirl.checkpoint import files, state_tree
from siirl.checkpoint.export import copy_hf_files, save_hf
from siirl.checkpoint.files import EXTRA_FILE, STATE_FILE
from siirl.checkpoint.machines import Fetcher, copy_to_next
from siirl.checkpoint.staging import PARTS, SavedModel, Staged, StagedModel, Stager
from siirl.checkpoint.together import Together, for_each, rank_in
from siirl.disk import naming
from siirl.errors import CheckpointError, ConfigError
from siirl.model_files.stored_tensors import files_read, load_tensors, save_tensors


def write_checkpoint(staged: Staged, keep: int, ranks: Together) -> Path:
    """Write what every rank has staged, make it the current checkpoint, delete the oldest beyond `keep`.

    Collective over `ranks`. If any rank fails, CheckpointError is raised on all, and the previous checkpoint
    stays current. Where machines have folders of their own, each has the files of its ranks, those of the
    last machine, and the manifest of all.
    """
    aside = files.aside_folder(ranks.root, staged.step)
    try:
        _write_aside(aside, staged, keep, ranks)
    except CheckpointError:
        if ranks.first_here:  # what is half written may be what fills the disk
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return files.step_folder(ranks.root, staged.step)


def _write_aside(aside: Path, staged: Staged, keep: int, ranks: Together) -> None:
    """The stages of a save; after each, all ranks go on or all raise."""
    step, models = staged.step, staged.models
    with ranks.stage(step, "preparing the folder"):
        if ranks.first_here:
            files.prepare_aside(ranks.root, step)
    with ranks.stage(step, "writing the models"):
        for_each(models, lambda name, model: _save_tensors(aside / name, model))
    with ranks.stage(step, "writing what surrounds the weights"):
        for_each(models, lambda name, model: _save_companions(aside / name, model))
    with ranks.stage(step, "writing the run's state"):
        written = _save_run_state(aside, staged, ranks.rank)
        for name, model in models.items():
            written += _written(aside / name, model.group)
        records = files.records_of(aside, written)
    if ranks.apart:
        copy_to_next(aside, written, step, ranks)
    all_records = ranks.gather_on_all(records) if ranks.apart else ranks.gather(records)
    with ranks.stage(step, "completing it"):
        if ranks.first_here:
            about = {"world_size": len(all_records), "models": _named(all_records)}
            files.write_manifest(aside, step, [record for part in all_records for record in part], about)
            files.publish(aside, ranks.root, step)
    with ranks.stage(step, "removing the oldest"):  # the last one goes when this one is whole everywhere
        if ranks.first_here:
            files.prune(ranks.root, keep, step)


def _save_tensors(folder: Path, model: StagedModel) -> None:
    folder.mkdir(exist_ok=True)
    save_tensors(model.tensors, folder, model.group)


def _save_companions(folder: Path, model: StagedModel) -> None:
    """Write what surrounds the tensors: JSON state, HF config and tokenizer, or HF weights if asked for."""
    rank, source = rank_in(model.group), model.source
    if model.hf_weights is not None and source.hf_path:
        save_hf(model.hf_weights, source.hf_path, folder / "hf", rank, source.hf_config_changes)
    elif rank == 0 and source.hf_path:
        copy_hf_files(source.hf_path, folder / "hf", source.hf_config_changes)
    if rank == 0:
        about = {"lora_alpha": source.lora_alpha, "state": model.values}
        files.write_file(folder / STATE_FILE, json.dumps(about))


def _save_run_state(aside: Path, staged: Staged, rank: int) -> list[Path]:
    folder = aside / "ranks"
    folder.mkdir(exist_ok=True)
    paths = [folder / f"rank_{rank}.json", folder / f"rank_{rank}.safetensors"]
    files.write_file(paths[0], json.dumps(staged.rank_values))
    with naming(paths[1]):
        save_file({name: tensor.contiguous() for name, tensor in staged.rank_tensors.items()}, paths[1])
    if rank == 0:
        paths.append(aside / EXTRA_FILE)
        files.write_file(paths[-1], json.dumps(staged.extra))
    return paths


def _written(folder: Path, group: dist.ProcessGroup | None) -> list[Path]:
    """The files of a model that this rank wrote: its own shards; all others are the first rank's."""
    rank = rank_in(group)
    shards = list(folder.glob(f"__{rank}_*.distcp"))
    if rank:
        return shards
    return shards + [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".distcp"]


def _named(records: list[list[files.FileRecord]]) -> list[str]:
    """Names of the models whose files these are."""
    paths = (record.path for part in records for record in part)
    return sorted({path.split("/")[0] for path in paths if path.endswith(f"/{STATE_FILE}")})


@dataclass(frozen=True)
class Restored:
    """What load brings back besides the models."""

    step: int
    extra: dict[str, Any]
    """What the first rank saved."""
    rank_state: dict[str, Any] | None
    """None on a rank that did not exist when it was saved."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has become current."""

    path: Path
    total_s: float
    """From the call of save until then."""


class CheckpointManager:
    """Checkpoints of one run under `root`, a folder that all ranks see. Collective over all ranks throughout,
    but for `wait` and `take_finished`.

    keep: how many to keep. world: the group of all ranks, gloo or with gloo for CPU; None: this process
    alone. background: a second such group, for saves in the background. per_machine: `root` is in the memory
    of each machine, on which so many ranks are, one after another; each file is kept on two of them, and
    `find_resume` and `load` have what one lacks fetched. 0: all ranks see the same.

    A save in the background is a thread that
      consumes     a copy of the state in host memory, complete before `save` returns;
      produces     the checkpoint, or one error on all ranks;
      waits for    the same thread of the other ranks, over groups that nobody else uses;
      is waited for by the next save and by the end of the run.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        world: dist.ProcessGroup | None,
        background: dist.ProcessGroup | None = None,
        per_machine: int = 0,
    ):
        self.root = Path(root).expanduser().absolute()
        self.keep = keep
        self._ranks = Together(self.root, world, per_machine)
        self._background_ranks = Together(self.root, background, per_machine)
        self._fetcher = Fetcher(self._ranks) if per_machine else None
        self._stager = Stager()
        self._running: Future[Saved] | None = None

    def require_shared(self) -> None:
        """ConfigError on all ranks, if the first one does not see a file that another writes under `root`.

        Each file has a name that nobody asked for before: a network file system then asks its server.
        """
        ranks, name = self._ranks, ""
        with ranks.stage(None, "making a folder for all ranks"):
            if ranks.rank == 0:
                self.root.mkdir(parents=True, exist_ok=True)
                name = Path(tempfile.mkdtemp(prefix=".shared_", dir=self.root)).name
        probe = self.root / ranks.from_first(name)
        with suppress(OSError):
            (probe / str(ranks.rank)).touch()
        hosts = ranks.gather_on_all(socket.gethostname())
        unseen: list[int] = []
        if ranks.rank == 0:
            unseen = [rank for rank in range(len(hosts)) if not (probe / str(rank)).exists()]
            shutil.rmtree(probe, ignore_errors=True)
        if unseen := ranks.from_first(unseen):
            raise ConfigError(
                f"trainer.default_local_dir={str(self.root)!r}: {hosts[0]} does not see there what rank "
                f"{unseen[0]} on {hosts[unseen[0]]} writes: a checkpoint has files of all ranks. Name "
                "a folder of a file system that all machines share, such as NFS or Lustre: their own disks "
                "do not do, nor does a bucket that is mounted with a cache. Or save in memory alone: "
                "trainer.save_freq=-1 trainer.memory_checkpoint_freq=1."
            )

    def save(
        self,
        step: int,
        models: Mapping[str, SavedModel],
        extra: dict[str, Any],
        rank_state: dict[str, Any],
        background: bool = False,
    ) -> Path:
        """Save the models of this rank and the run's state as the checkpoint of `step`; return its folder.

        models: name -> model, in the plan's order; a rank lists those it takes part in. extra: JSON values,
        the same on all ranks (loader position). rank_state: of this rank alone, tensors and JSON values
        (RNG). If any rank fails, CheckpointError is raised on all, and the previous checkpoint stays current.
        background: return once the state is copied; its end, or its error, comes from `take_finished` or
        `wait`, and a save that still runs is waited for first.
        """
        start_s = time.perf_counter()
        self.wait()
        with self._ranks.stage(step, "collecting the state"):
            staged = self._stager.stage(step, models, extra, rank_state, copy=background)
        self._running = Future()
        if background:
            arguments = (self._running, staged, self._background_ranks, start_s)
            threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True).start()
        else:
            self._write(self._running, staged, self._ranks, start_s)
            if self._running.exception() is not None:
                self.wait()
        return files.step_folder(self.root, step)

    def take_finished(self) -> Saved | None:
        """The save that has ended, once; None if there is none or it still runs. Raises its error. Local."""
        return self.wait() if self._running is not None and self._running.done() else None

    def wait(self) -> Saved | None:
        """Wait for the save that runs and return it, once; None if there is none. Raises its error. Local."""
        running, self._running = self._running, None
        return None if running is None else running.result()

    def find_resume(self, mode: str, from_path: str | Path | bool | None) -> Path | None:
        """files.find_resume by rank 0, for all ranks; in memory the newest that is whole on all machines."""
        if self._fetcher is not None:
            return self._fetcher.newest()
        path: Path | None = None
        with self._ranks.stage(None, "looking for the one to resume from"):
            if self._ranks.rank == 0:
                path = files.find_resume(self.root, mode, from_path)
        found = self._ranks.from_first(str(path) if path else None)
        return Path(found) if found else None

    def load(self, checkpoint: Path, models: Mapping[str, SavedModel]) -> Restored:
        """Restore this rank's models in place, on this or another number of ranks; return the run's state."""
        step = files.step_of(checkpoint)
        if self._fetcher is not None:
            self._fetcher.fetch(checkpoint, step, self._names_read(checkpoint, step, models))
        with self._ranks.stage(step, "loading the models"):
            for_each(models, lambda name, model: _load_model(checkpoint / name, model))
        with self._ranks.stage(step, "loading the run's state"), files.reading(checkpoint):
            extra = json.loads((checkpoint / EXTRA_FILE).read_text())
            rank_state = _load_rank_state(checkpoint, self._ranks.rank)
        return Restored(step, extra, rank_state)

    def _names_read(self, checkpoint: Path, step: int, models: Mapping[str, SavedModel]) -> set[str]:
        """Files of tensors that this rank reads."""
        names: set[str] = set()

        def add(name: str, model: SavedModel) -> None:
            folder = checkpoint / name
            tensors = _wanted(folder, model)[2]
            with files.reading(folder):
                names.update(f"{name}/{file}" for file in files_read(tensors, folder))

        with self._ranks.stage(step, "looking for what to read"):
            for_each(models, add)
        return names

    def _write(self, outcome: Future[Saved], staged: Staged, ranks: Together, start_s: float) -> None:
        try:
            path = write_checkpoint(staged, self.keep, ranks)
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: whoever waits raises it
            outcome.set_exception(error)
        else:
            outcome.set_result(Saved(path, time.perf_counter() - start_s))


def _load_model(folder: Path, model: SavedModel) -> None:
    """Restore the parts in load_contents, in place; others keep their state. Collective over its ranks."""
    state, values, tensors = _wanted(folder, model)
    with files.reading(folder):
        load_tensors(tensors, folder, model.group)
        loaded = {key: state_tree.join(value, tensors) for key, value in values.items()}
    model.model.load_state_dict(state | loaded)


def _wanted(folder: Path, model: SavedModel) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """The model's state of now, and what is to be read of it: JSON values, and tensors to be filled."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} does not exist: the run that saved it had no such model. Resume with its DAG."
        )
    wanted = {key for part, keys in PARTS.items() if part in model.load_contents for key in keys}
    with files.reading(folder):
        saved = dict(json.loads((folder / STATE_FILE).read_text())["state"])
    if model.make_room is not None:
        model.make_room(saved)
    state = model.model.state_dict()
    load_keys = [
        key for key in state if key in saved and (key in wanted or key not in sum(PARTS.values(), ()))
    ]
    absent = wanted & state.keys() - saved.keys()
    if absent:
        raise CheckpointError(
            f"{folder} holds no {', '.join(sorted(absent))} state: saved with other save_contents. "
            "Leave that part out of checkpoint.load_contents."
        )
    tensors: dict[str, Tensor] = {}
    values = {key: saved[key] for key in load_keys}
    for key in load_keys:
        own, of_key = state_tree.split(state[key], key)
        if of_key:  # a part of tensors: this rank has its own names, not those of the rank that wrote JSON
            values[key] = own
            tensors |= of_key
    return state, values, tensors


def _load_rank_state(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    path = checkpoint / "ranks" / f"rank_{rank}.json"
    if not path.exists():
        return None
    return state_tree.join(json.loads(path.read_text()), load_file(path.with_suffix(".safetensors")))
