"""Writes a staged checkpoint: aside, checked, then current by one pointer, or not at all."""

import json
import shutil
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

from siirl.checkpoint import files
from siirl.checkpoint.files import EXTRA_FILE, STATE_FILE
from siirl.checkpoint.hf_directory import copy_hf_files, save_hf
from siirl.checkpoint.machines import copy_to_next
from siirl.checkpoint.staging import Staged, StagedModel
from siirl.checkpoint.together import Together, for_each, rank_in
from siirl.disk import naming
from siirl.errors import CheckpointError
from siirl.model_files.stored_tensors import save_tensors


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
