"""Checkpoint folders on disk: complete ones, the current one, the one to resume from. No torch.

root/global_step_N/            a complete checkpoint; it appears by one rename
root/global_step_N/manifest.json   size and SHA-256 of every other file in it, written last
root/latest_checkpointed_iteration.txt   the step of the current one; replaced atomically, after the rename
root/global_step_N.tmp         a save that is being written, or was killed
root/global_step_N.old         what a new save of the same step replaces, until that one is in its place
root/global_step_N.deleted     an old checkpoint that is being deleted, or whose deletion was killed

The next save removes what killed ones left behind. An .old whose step has no folder goes back to its place:
the save that was to replace it was killed between two renames.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from siirl.disk import naming
from siirl.errors import CheckpointError, ConfigError, SiirlError, StorageError

log = logging.getLogger(__name__)
FORMAT = 1
POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE_FILE = "state.json"
"""Of each model: JSON of what surrounds its tensors."""
EXTRA_FILE = "extra.json"
"""The state of the run that is the same on all ranks."""
FOREIGN = {
    "actor/model_world_size_*_rank_*.pt": "verl or siiRL",
    "actor/dist_ckpt": "verl with Megatron",
    "iter_*/mp_rank_*": "Megatron-LM",
    "mp_rank_*/model_optim_rng.pt": "Megatron-LM",
    "*_model_states.pt": "DeepSpeed",
    "global_step*/*_model_states.pt": "DeepSpeed",
    ".metadata": "torch.distributed.checkpoint",
    "trainer_state.json": "the Trainer of transformers",
}
"""Pattern of a file in a checkpoint of another program -> which."""
ASIDE, OLD, DELETED = ".tmp", ".old", ".deleted"
_STEP_FOLDER = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its path inside it, its size, its SHA-256."""

    path: str
    num_bytes: int
    sha256: str


def check_writable(root: Path, key: str = "trainer.default_local_dir") -> None:
    """Prove that files can be written under `root`, before training starts. ConfigError if not.

    key: the setting that names the folder.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".writable_") as probe:
            probe.write(b"siirl")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise ConfigError(
            f"{key}={str(root)!r} cannot be written: {error}. "
            "What the run makes could not be saved. Choose another folder, or fix its permissions or free "
            "space."
        ) from error


def write_file(path: Path, data: str) -> None:
    """Write a text file and wait until the disk has it."""
    with naming(path), path.open("w") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folders(folder: Path) -> None:
    """Wait until the disk knows the entries of `folder` and of all folders in it."""
    for path, _, _ in os.walk(folder):
        _sync_folder(Path(path))


def step_folder(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


def step_of(checkpoint: Path) -> int:
    """The step of a complete checkpoint, as its manifest says: a copy may have any name. CheckpointError."""
    return int(read_manifest(checkpoint)["step"])


def saved_steps(root: Path) -> list[int]:
    """Steps of the checkpoint folders under `root`, newest first, complete or not."""
    if not root.is_dir():
        return []
    found = (_STEP_FOLDER.fullmatch(path.name) for path in root.iterdir() if path.is_dir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """What is read of a checkpoint inside, and is not what was saved, is a CheckpointError that names it."""
    try:
        yield
    except SiirlError:
        raise
    except Exception as error:  # the edge to formats of others, which raise what they trip over
        raise CheckpointError(
            f"{folder} cannot be read: {type(error).__name__}: {error}. Restore it, or take another one."
        ) from error


def records_of(checkpoint: Path, paths: Iterable[Path]) -> list[FileRecord]:
    """Size and checksum of files of a checkpoint, hashed in parallel."""

    def record(path: Path) -> FileRecord:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(path.relative_to(checkpoint).as_posix(), path.stat().st_size, digest)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(record, sorted(paths)))


def write_manifest(checkpoint: Path, step: int, records: Iterable[FileRecord], about: dict[str, Any]) -> None:
    """Declare the checkpoint complete: list its files. `about`: further JSON values that a reader needs."""
    files = [asdict(record) for record in sorted(records, key=lambda record: record.path)]
    write_file(
        checkpoint / MANIFEST, json.dumps({"format": FORMAT, "step": step, **about, "files": files}, indent=1)
    )


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest. CheckpointError if there is none that can be read: the checkpoint is not complete."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        why = foreign(checkpoint) or "it is not complete"
        raise CheckpointError(f"{checkpoint} has no {MANIFEST}: {why}.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not of checkpoint format {FORMAT}: it was written by another version."
        )
    if problem := _misfit(manifest):
        raise CheckpointError(f"{checkpoint} is corrupted: {MANIFEST} is no list of its files: {problem}.")
    return manifest


def _misfit(manifest: dict[str, Any]) -> str:
    """What of a manifest is not as `write_manifest` writes it; empty if nothing is."""
    models, world_size, listed = (manifest.get(name) for name in ("models", "world_size", "files"))
    if not isinstance(models, list) or not models or not all(_is_inside(model) for model in models):
        return "it names no models"
    if not isinstance(listed, list) or not all(_is_record(entry) for entry in listed):
        return "an entry is not the path of a file in it, a size and a checksum"
    step = manifest.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        return f"step = {step!r}"
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 0 < world_size <= len(listed):
        return f"world_size = {world_size!r}"
    return ""


def _is_record(entry: Any) -> bool:
    names = {"path", "num_bytes", "sha256"}
    return isinstance(entry, dict) and entry.keys() == names and _is_inside(entry["path"])


def _is_inside(path: Any) -> bool:
    """Whether it is a path within a folder."""
    if not isinstance(path, str) or not path or not path.isprintable():
        return False
    return not path.startswith("/") and ".." not in path.split("/")


def verify(checkpoint: Path, under: str = "", contents: bool = True) -> dict[str, Any]:
    """Compare the files (those whose path starts with `under`) with the manifest, which is returned.

    contents: read them; else only their sizes are compared. CheckpointError names the first file that is
    missing, cut short, changed or not listed.
    """
    manifest = read_manifest(checkpoint)
    listed = [FileRecord(**entry) for entry in manifest["files"]]
    if skipped := _parts(checkpoint, manifest) - {record.path for record in listed}:
        names = ", ".join(sorted(skipped)[:3])
        raise CheckpointError(f"{checkpoint} is corrupted: {MANIFEST} does not list {names}.")
    wanted = [record for record in listed if record.path.startswith(under)]
    for record in wanted:
        path = checkpoint / record.path
        if not path.is_file():
            raise CheckpointError(f"{checkpoint} is corrupted: {record.path} is missing.")
        if path.stat().st_size != record.num_bytes:
            raise CheckpointError(
                f"{checkpoint} is corrupted: {record.path} has {path.stat().st_size} bytes "
                f"instead of {record.num_bytes}."
            )
    if not contents:
        return manifest
    found = records_of(checkpoint, [checkpoint / record.path for record in wanted])
    for record, now in zip(sorted(wanted, key=lambda r: checkpoint / r.path), found, strict=True):
        if record.sha256 != now.sha256:
            raise CheckpointError(f"{checkpoint} is corrupted: the contents of {record.path} have changed.")
    return manifest


def _parts(checkpoint: Path, manifest: dict[str, Any]) -> set[str]:
    """What every checkpoint of these models and ranks consists of, and the tensors that are there."""
    models, ranks = manifest["models"], range(manifest["world_size"])
    parts = {EXTRA_FILE, *(f"{model}/{STATE_FILE}" for model in models)}
    parts |= {f"ranks/rank_{rank}{suffix}" for rank in ranks for suffix in (".json", ".safetensors")}
    tensors = (path for model in models for path in (checkpoint / model).glob("*.distcp"))
    return parts | {path.relative_to(checkpoint).as_posix() for path in tensors}


def publish(aside: Path, root: Path, step: int) -> Path:
    """Make a complete folder the current checkpoint: rename it, then replace the pointer."""
    final = step_folder(root, step)
    sync_folders(aside)
    if final.exists():
        os.replace(final, _fresh(final.with_suffix(OLD)))
    os.replace(aside, final)
    _sync_folder(root)
    pointer = root / f"{POINTER}.tmp"
    write_file(pointer, str(step))
    os.replace(pointer, root / POINTER)
    _sync_folder(root)
    return final


def prepare_aside(root: Path, step: int) -> Path:
    """An empty folder for the files of a coming checkpoint; what killed saves left behind is removed."""
    root.mkdir(parents=True, exist_ok=True)
    put_back(root)
    for path in _leftovers(root, ASIDE, OLD, DELETED):
        shutil.rmtree(path)
    aside = aside_folder(root, step)
    aside.mkdir()
    return aside


def aside_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return step_folder(root, step).with_suffix(ASIDE)


def put_back(root: Path) -> None:
    """Give checkpoints whose replacement was killed before it got their place that place again."""
    for path in replaced(root):
        log.warning("%s goes back to its place: the save that was to replace it was killed", path)
        os.replace(path, path.with_suffix(""))


def replaced(root: Path) -> list[Path]:
    """Checkpoints that the next resume puts back in their places."""
    return [path for path in _leftovers(root, OLD) if not path.with_suffix("").exists()]


def prune(root: Path, keep: int, current: int) -> None:
    """Delete the oldest checkpoints beyond `keep`, the current one never, nor any of a later step.

    A checkpoint that cannot be deleted is left with a warning.
    """
    steps = [step for step in saved_steps(root) if step <= current]
    for folder in [step_folder(root, step) for step in steps[keep:]] + _leftovers(root, OLD, DELETED):
        try:
            if not folder.suffix:
                folder = folder.rename(_fresh(folder.with_suffix(DELETED)))
            shutil.rmtree(folder)
        except OSError as error:
            log.warning("the old checkpoint %s cannot be deleted: %s", folder, error)


def remove_checkpoints(root: Path) -> None:
    """Remove all checkpoints under `root`, the pointer first. OSError if one cannot be removed."""
    (root / POINTER).unlink(missing_ok=True)
    steps = [step_folder(root, step) for step in saved_steps(root)]
    for folder in [*steps, *_leftovers(root, ASIDE, OLD, DELETED)]:
        shutil.rmtree(folder)


def current_step(root: Path) -> int | None:
    """The step that the pointer names; None if there is no pointer that can be read."""
    try:
        return int((root / POINTER).read_text())
    except (OSError, ValueError):
        return None


def newest_step(root: Path) -> int | None:
    """The step of the current checkpoint, else of the newest folder; None if there is none."""
    step = current_step(root)
    return next(iter(saved_steps(root)), None) if step is None else step


def pointer_problem(root: Path) -> str:
    """Why the pointer cannot be followed or replaced, though it or checkpoints are there; empty if it can."""
    pointer, step, steps = root / POINTER, current_step(root), saved_steps(root)
    if pointer.exists() and not pointer.is_file():
        return (
            f"{pointer} is no file: it is where the step of the current checkpoint is written. Remove it; "
            f"checkpoints there: {_named(steps)}."
        )
    if step is not None and steps and step < min(steps):
        return (
            f"{pointer} names step {step}, but the checkpoints there are {_named(steps)}: none is of that "
            "step or an earlier one. Write one of these steps into it, give its folder as "
            "trainer.resume_from_path with trainer.resume_mode=resume_path, or start over with "
            "trainer.resume_mode=disable trainer.overwrite=true."
        )
    return ""


def _named(steps: list[int]) -> str:
    """Steps for a message, the newest few."""
    shown = ", ".join(f"global_step_{step}" for step in steps[:5])
    return f"{shown} and {len(steps) - 5} more" if len(steps) > 5 else shown or "none"


def find_resume(root: Path, mode: str, from_path: str | Path | bool | None) -> Path | None:
    """The checkpoint to resume from, its files checked against its manifest; None: start from the beginning.

    auto: the current one; if it is damaged, the newest complete one before it, with a warning that says why;
    None if there is none at all. StorageError if all are damaged, or the one of resume_path is.
    """
    if mode == "disable":
        return None
    if mode == "resume_path":
        return check_given(from_path)
    put_back(root)
    if problem := pointer_problem(root):
        raise StorageError(problem)
    return newest_complete(root)


def newest_complete(root: Path, contents: bool = True) -> Path | None:
    """The current checkpoint, or the newest complete one before it; None if there is none at all.

    contents: see verify; then each one that is passed over is logged. StorageError if all are damaged.
    """
    current, steps = current_step(root), saved_steps(root)
    candidates = steps if current is None else [current, *(step for step in steps if step < current)]
    problems = []
    for step in candidates:
        checkpoint = step_folder(root, step)
        try:
            verify(checkpoint, contents=contents)
        except (CheckpointError, OSError) as error:
            problems.append(f"global_step_{step}: {error}")
            if contents:
                log.warning(
                    "checkpoint of step %d is not used: %s Falling back to the one before it.", step, error
                )
            continue
        return checkpoint
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise StorageError(
            f"no complete checkpoint under {root}, newest first:\n{listed}\n"
            "Restore the files of one, give a folder from elsewhere as trainer.resume_from_path with "
            "trainer.resume_mode=resume_path, or start over with trainer.resume_mode=disable "
            "trainer.overwrite=true."
        )
    return None


def check_given(from_path: str | Path | bool | None, contents: bool = True) -> Path:
    """The checkpoint of trainer.resume_from_path. StorageError if it is damaged; contents: see verify."""
    checkpoint = given_checkpoint(from_path)
    try:
        verify(checkpoint, contents=contents)
    except (CheckpointError, OSError) as error:
        beside = saved_steps(checkpoint.parent)
        others = [step for step in beside if step_folder(checkpoint.parent, step) != checkpoint]
        raise StorageError(
            f"trainer.resume_from_path: {error} Restore it, or give another one; beside it: {_named(others)}."
        ) from error
    return checkpoint


def given_checkpoint(from_path: str | Path | bool | None) -> Path:
    """The folder of trainer.resume_from_path, its files not yet checked. ConfigError if it is no checkpoint.

    Cheap enough to call before the workers start.
    """
    if not from_path or from_path is True:
        raise ConfigError(
            "trainer.resume_mode=resume_path needs trainer.resume_from_path: set it to a global_step_N."
        )
    checkpoint = Path(from_path).expanduser()
    if (checkpoint / MANIFEST).is_file():
        return checkpoint
    reason = foreign(checkpoint) if checkpoint.is_dir() else "no such folder"
    if not reason and _STEP_FOLDER.fullmatch(checkpoint.name) is None:
        reason = f"it has no {MANIFEST}"
    if reason:
        raise ConfigError(
            f"trainer.resume_from_path={str(from_path)!r} is no checkpoint: {reason}. "
            "Give a global_step_N folder, or a copy of one."
        )
    return checkpoint


def foreign(checkpoint: Path) -> str:
    """Of whom a folder without a manifest may be a checkpoint, and the way out; empty if nothing says it."""
    for pattern, whose in FOREIGN.items():
        if found := next(checkpoint.glob(pattern), None):
            return (
                f"it has {found.relative_to(checkpoint)}, as {whose} writes it, and siirl reads its own "
                "checkpoints only. Export it there as a Hugging Face folder, and start from that "
                "(actor_rollout_ref.model.path)"
            )
    return ""


def _leftovers(root: Path, *suffixes: str) -> list[Path]:
    """Folders under `root` that are no checkpoints (any more, or yet)."""
    if not root.is_dir():
        return []
    return [
        path
        for path in sorted(root.iterdir())
        if path.suffix in suffixes and _STEP_FOLDER.fullmatch(path.stem) and path.is_dir()
    ]


def _fresh(path: Path) -> Path:
    if path.exists():
        shutil.rmtree(path)
    return path


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
