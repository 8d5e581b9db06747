"""What commands take from the folder of a run: its keys, its checkpoints, where it was started."""

import os
from dataclasses import dataclass
from pathlib import Path

from siirl.checkpoint.files import newest_step, step_folder
from siirl.command_line import import_from_here
from siirl.errors import ConfigError
from siirl.launch.run_record import CONFIG_FILE
from siirl.runs.folder_reader import Skipped
from siirl.runs.run_files import checkpoints_of, read_config, read_starts

LEVELS = 4
"""Folders between a checkpoint or a model of a run and the run."""


@dataclass(frozen=True)
class RecordedRun:
    """A run that can be started again with other keys."""

    folder: Path
    checkpoints: Path
    """Where they lie now: with a copied or moved folder, in the copy."""

    @classmethod
    def read(cls, folder: Path) -> "RecordedRun":
        """The run of a folder. ConfigError if its configuration cannot be read."""
        config = read_config(folder, Skipped())
        if not config or not (folder / CONFIG_FILE).is_file():
            raise ConfigError(
                f"{folder} has no {CONFIG_FILE} that can be read: the keys of its run are not known. Start "
                "it by its command instead, with trainer.output_dir of that folder."
            )
        return cls(folder, checkpoints_of(folder, config))

    @property
    def config_file(self) -> str:
        return str(self.folder / CONFIG_FILE)

    def newest_checkpoint(self) -> Path | None:
        """The current checkpoint, or the newest; not looked into."""
        step = newest_step(self.checkpoints)
        return None if step is None else step_folder(self.checkpoints, step)

    @property
    def directory(self) -> str:
        """Where the run was started, if that is here: relative paths of its keys begin there; or ""."""
        _, start = read_starts(self.folder, Skipped())
        return start.directory if start.directory and os.path.isdir(start.directory) else ""

    def enter_directory(self) -> None:
        """Go where the run was started, if that is here."""
        if directory := self.directory:
            os.chdir(directory)
            import_from_here()


def run_of(path: Path) -> Path | None:
    """The folder of the run that a checkpoint or a model lies in; None: it lies in none."""
    around = (path, *list(path.parents)[:LEVELS])
    return next((folder for folder in around if (folder / CONFIG_FILE).is_file()), None)


def from_here(overrides: list[str]) -> list[str]:
    """Settings whose values name files of the present directory, with whole paths."""

    def whole(text: str) -> str:
        found = text.strip()
        named = found and not found.startswith(("/", "~", "$")) and ("/" in found or "." in found)
        return os.path.abspath(found) if named and os.path.exists(found) else text

    written = []
    for item in overrides:
        name, equals, value = item.partition("=")
        listed = value.startswith("[") and value.endswith("]")
        parts = value[1:-1].split(",") if listed else [value]
        joined = ",".join(map(whole, parts))
        written.append(f"{name}{equals}{f'[{joined}]' if listed else joined}")
    return written
