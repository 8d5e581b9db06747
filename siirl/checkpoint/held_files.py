"""Checkpoints whose files lie on several machines: what each holds, and what is whole. No torch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from siirl.checkpoint.files import (
    MANIFEST,
    FileRecord,
    read_manifest,
    records_of,
    saved_steps,
    step_folder,
)
from siirl.errors import CheckpointError


@dataclass(frozen=True, order=True)
class Version:
    """A checkpoint, the same on all machines. Two of one step differ where attempts have done it twice."""

    step: int
    digest: str
    """Of its manifest."""


@dataclass(frozen=True)
class Held:
    """What one machine holds of a checkpoint."""

    version: Version
    num_files: int
    """Of the whole checkpoint."""
    paths: frozenset[str]
    """Of those that are here."""


def held_files(root: Path, contents: bool) -> list[Held]:
    """What lies below `root` of complete checkpoints, but for their manifests.

    contents: read the files, and count those only that are as they were saved; else their sizes decide.
    """
    found = []
    for step in saved_steps(root):
        checkpoint = step_folder(root, step)
        try:
            listed = [FileRecord(**entry) for entry in read_manifest(checkpoint)["files"]]
            digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
            here = [record for record in listed if _has_its_size(checkpoint, record)]
            if contents:
                now = set(records_of(checkpoint, [checkpoint / record.path for record in here]))
                here = [record for record in here if record in now]
        except (CheckpointError, OSError):  # nothing of it can be told
            continue
        paths = frozenset(record.path for record in here)
        found.append(Held(Version(step, digest), len(listed), paths))
    return found


def newest_whole(machines: Sequence[Sequence[Held]]) -> Version | None:
    """The newest checkpoint each file of which lies on one machine at least; None if there is none."""
    paths: dict[Version, set[str]] = {}
    sizes: dict[Version, int] = {}
    for held in (held for machine in machines for held in machine):
        paths.setdefault(held.version, set()).update(held.paths)
        sizes[held.version] = held.num_files
    return max((version for version, found in paths.items() if len(found) == sizes[version]), default=None)


def _has_its_size(checkpoint: Path, record: FileRecord) -> bool:
    path = checkpoint / record.path
    return path.is_file() and path.stat().st_size == record.num_bytes
