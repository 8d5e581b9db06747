"""Saves and restores a run: written aside, checked, made current by one pointer, or not at all."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from siirl.checkpoint import files, tree
from siirl.checkpoint.hf import copy_hf_files, save_hf
from siirl.checkpoint.storage import load_tensors, save_tensors
from siirl.errors import CheckpointError, SiirlError
from siirl.observe.spans import phase

STATE_FILE = "state.json"
EXTRA_FILE = "extra.json"
_PARTS = {"model": ("model",), "optimizer": ("optimizer", "scheduler")}


class Stateful(Protocol):
    """What a training engine offers to a checkpoint (siirl.engines.train.base.TrainEngine)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True)
class SavedModel:
    """One model of this rank, as a checkpoint sees it.

    group: the ranks of the model; None: this process alone. hf_path: where its HF config and tokenizer come
    from. save_contents, load_contents: of "model", "optimizer" (and its schedule), "extra" (the run's state:
    see save), "hf_model" (also HF weights). lora_alpha: what an export needs to merge adapters.
    hf_config_changes: where its config.json differs from that of hf_path.
    """

    model: Stateful
    group: dist.ProcessGroup | None
    hf_path: str | None = None
    save_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    load_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    lora_alpha: float | None = None
    hf_config_changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Restored:
    """What load brings back besides the models.

    rank_state: None on a rank that did not exist when it was saved.
    """

    step: int
    extra: dict[str, Any]
    rank_state: dict[str, Any] | None


class CheckpointManager:
    """Checkpoints of one run under `root`, a folder that all ranks see. Collective over all ranks throughout.

    keep: how many to keep. world: the group of all ranks, gloo or with gloo for CPU; None: this process
    alone.
    """

    def __init__(self, root: Path, keep: int, world: dist.ProcessGroup | None):
        self.root = Path(root)
        self.keep = keep
        self._world = world
        self._rank = dist.get_rank(world) if world is not None else 0

    def save(
        self, step: int, models: Mapping[str, SavedModel], extra: dict[str, Any], rank_state: dict[str, Any]
    ) -> Path:
        """Save the models of this rank and the run's state as the checkpoint of `step`; return its folder.

        models: name -> model, in the plan's order; a rank lists those it takes part in. extra: JSON values,
        the same on all ranks (loader position). rank_state: of this rank alone, tensors and JSON values
        (RNG). If any rank fails, CheckpointError is raised on all, and the previous checkpoint stays current.
        """
        aside = self.root / f"global_step_{step}.tmp"
        try:
            self._save_aside(aside, step, models, extra, rank_state)
        except CheckpointError:
            if self._rank == 0:  # what is half written may be what fills the disk
                shutil.rmtree(aside, ignore_errors=True)
            raise
        return files.step_folder(self.root, step)

    def _save_aside(
        self,
        aside: Path,
        step: int,
        models: Mapping[str, SavedModel],
        extra: dict[str, Any],
        rank_state: dict[str, Any],
    ) -> None:
        """The stages of a save; after each, all ranks go on or all raise."""
        with self._together(step, "preparing the folder"):
            if self._rank == 0:
                files.prepare_aside(self.root, step)
        with self._together(step, "collecting the state"):
            states = {name: _split_state(model) for name, model in models.items()}
            for name in models:
                (aside / name).mkdir(exist_ok=True)
        with self._together(step, "writing the models"):
            _for_each(models, lambda name, model: save_tensors(states[name][1], aside / name, model.group))
        with self._together(step, "writing what surrounds the weights"):
            _for_each(models, lambda name, model: _save_companions(aside / name, model, states[name][0]))
        with self._together(step, "writing the run's state"):
            written = self._save_extra(aside, extra, rank_state)
            for name, model in models.items():
                written += _written(aside / name, model.group)
            records = files.records_of(aside, written)
        all_records = self._gather(records)
        with self._together(step, "completing it"):
            if self._rank == 0:
                about = {"world_size": len(all_records), "models": _named(all_records)}
                files.write_manifest(aside, step, [record for part in all_records for record in part], about)
                files.publish(aside, self.root, step)
                files.prune(self.root, self.keep, step)

    def find_resume(self, mode: str, from_path: str | Path | bool | None) -> Path | None:
        """files.find_resume by rank 0, for all ranks."""
        found: list[str | None] = [None]
        with self._together(None, "looking for the one to resume from"):
            if self._rank == 0:
                path = files.find_resume(self.root, mode, from_path)
                found = [str(path) if path else None]
        if self._world is not None:
            dist.broadcast_object_list(found, group=self._world, group_src=0)
        return Path(found[0]) if found[0] else None

    def load(self, checkpoint: Path, models: Mapping[str, SavedModel]) -> Restored:
        """Restore this rank's models in place, on this or another number of ranks; return the run's state."""
        step = files.step_of(checkpoint)
        with self._together(step, "loading the models"):
            _for_each(models, lambda name, model: _load_model(checkpoint / name, model))
        with self._together(step, "loading the run's state"):
            extra = json.loads((checkpoint / EXTRA_FILE).read_text())
            rank_state = _load_rank_state(checkpoint, self._rank)
        return Restored(step, extra, rank_state)

    def _save_extra(self, aside: Path, extra: dict[str, Any], rank_state: dict[str, Any]) -> list[Path]:
        value, tensors = tree.split(rank_state, "rank")
        folder = aside / "ranks"
        folder.mkdir(exist_ok=True)
        paths = [folder / f"rank_{self._rank}.json", folder / f"rank_{self._rank}.safetensors"]
        files.write_file(paths[0], json.dumps(value))
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, paths[1])
        if self._rank == 0:
            paths.append(aside / EXTRA_FILE)
            files.write_file(paths[-1], json.dumps(extra))
        return paths

    def _gather(self, records: list[files.FileRecord]) -> list[list[files.FileRecord]]:
        """Every rank's records, on rank 0; elsewhere an empty list."""
        if self._world is None:
            return [records]
        size = dist.get_world_size(self._world)
        gathered: list[Any] | None = [None] * size if self._rank == 0 else None
        dist.gather_object(records, gathered, group=self._world, group_dst=0)
        return gathered or []

    @contextmanager
    def _together(self, step: int | None, doing: str) -> Iterator[None]:
        """All ranks get through what is inside, or all raise CheckpointError with the first one's reason."""
        problem: BaseException | None = None
        try:
            with phase(doing):
                yield
        except (
            Exception,
            CheckpointException,
        ) as error:  # whatever it is, the peers must learn of it: they wait
            problem = error
        reasons = self._reasons(problem)
        if not reasons:
            return
        rank, reason = min(reasons.items())
        of_step = "the checkpoint" if step is None else f"the checkpoint of step {step}"
        raise CheckpointError(
            f"{of_step} under {self.root} failed while {doing}, on rank {rank}: {reason} "
            "No other checkpoint was changed."
        ) from problem

    def _reasons(self, problem: BaseException | None) -> dict[int, str]:
        """Rank -> what went wrong there. One small reduction when all is well."""
        text = None if problem is None else _reason(problem)
        if self._world is None:
            return {} if text is None else {0: text}
        failed = torch.tensor([float(text is not None)])
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._world)
        if not failed.item():
            return {}
        texts: list[str | None] = [None] * dist.get_world_size(self._world)
        dist.all_gather_object(texts, text, group=self._world)
        return {rank: text for rank, text in enumerate(texts) if text is not None}


def _reason(problem: BaseException) -> str:
    if isinstance(problem, CheckpointException):
        rank, (error, _) = min(problem.failures.items())
        return f"{_reason(error)} (its rank {rank})"
    if isinstance(problem, SiirlError):
        return str(problem)
    return f"{type(problem).__name__}: {problem}."


def _split_state(model: SavedModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(JSON, tensors) of the parts that are saved; what belongs to no part, as the version, always is."""
    dropped = {key for part, keys in _PARTS.items() if part not in model.save_contents for key in keys}
    values, tensors = {}, {}
    for key, part in model.model.state_dict().items():
        if key not in dropped:
            values[key], part_tensors = tree.split(part, key)
            tensors |= part_tensors
    return values, tensors


def _for_each(models: Mapping[str, SavedModel], act: Callable[[str, SavedModel], None]) -> None:
    """Act on every model, also after one failed, as other ranks wait in the next; raise the first error."""
    problems: list[BaseException] = []
    for name, model in models.items():
        try:
            act(name, model)
        except (Exception, CheckpointException) as error:
            problems.append(error)
    if problems:
        raise problems[0]


def _save_companions(folder: Path, model: SavedModel, values: dict[str, Any]) -> None:
    """Write what surrounds the tensors: JSON state, HF config and tokenizer, or HF weights if asked for."""
    rank = _rank_in(model.group)
    if "hf_model" in model.save_contents and model.hf_path:
        changes = model.hf_config_changes
        save_hf(model.model.export_weights(), model.hf_path, folder / "hf", rank, changes)
    elif rank == 0 and model.hf_path:
        copy_hf_files(model.hf_path, folder / "hf", model.hf_config_changes)
    if rank == 0:
        about = {"lora_alpha": model.lora_alpha, "state": values}
        files.write_file(folder / STATE_FILE, json.dumps(about))


def _written(folder: Path, group: dist.ProcessGroup | None) -> list[Path]:
    """The files of a model that this rank wrote: its own shards; all others are the first rank's."""
    rank = _rank_in(group)
    shards = list(folder.glob(f"__{rank}_*.distcp"))
    if rank:
        return shards
    return shards + [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".distcp"]


def _rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _load_model(folder: Path, model: SavedModel) -> None:
    """Restore the parts in load_contents, in place; others keep their state. Collective over its ranks."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} does not exist: the run that saved it had no such model. Resume with its DAG."
        )
    wanted = {key for part, keys in _PARTS.items() if part in model.load_contents for key in keys}
    saved = json.loads((folder / STATE_FILE).read_text())["state"]
    state = model.model.state_dict()
    load_keys = [
        key for key in state if key in saved and (key in wanted or key not in sum(_PARTS.values(), ()))
    ]
    absent = wanted & state.keys() - saved.keys()
    if absent:
        raise CheckpointError(
            f"{folder} holds no {', '.join(sorted(absent))} state: saved with other save_contents. "
            "Leave that part out of checkpoint.load_contents."
        )
    tensors: dict[str, Tensor] = {}
    for key in load_keys:
        tensors |= tree.split(state[key], key)[1]
    load_tensors(tensors, folder, model.group)
    model.model.load_state_dict(state | {key: tree.join(saved[key], tensors) for key in load_keys})


def _load_rank_state(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    path = checkpoint / "ranks" / f"rank_{rank}.json"
    if not path.exists():
        return None
    return tree.join(json.loads(path.read_text()), load_file(path.with_suffix(".safetensors")))


def _named(records: list[list[files.FileRecord]]) -> list[str]:
    """Names of the models whose files these are."""
    paths = (record.path for part in records for record in part)
    return sorted({path.split("/")[0] for path in paths if path.endswith(f"/{STATE_FILE}")})
