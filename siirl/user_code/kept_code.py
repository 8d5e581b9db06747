"""A run keeps to the code that it began with: its processes make modules of the text that was read then.

So a worker that is started again, or one reward worker that is replaced, runs what the others run, whatever
was written into the files meanwhile. Other text files (tools, templates) are kept the same way.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

_kept: dict[str, str] = {}


def keep_to(texts: Mapping[str, str]) -> None:
    """From now on this process takes these texts for the content of these files (whole real paths)."""
    if texts and not _kept:
        sys.meta_path.insert(0, _KeptModules())
    _kept.update(texts)


def kept_texts() -> dict[str, str]:
    """What this process keeps to, for a process that it starts."""
    return dict(_kept)


def is_there(path: Path) -> bool:
    """Whether a file is there, or is kept."""
    return os.path.realpath(path) in _kept or path.is_file()


def read_text(path: Path) -> str:
    """The text of a file of the user's: as it was when the run began. OSError; ValueError if not UTF-8."""
    kept = _kept.get(os.path.realpath(path))
    return path.read_text(encoding="utf-8") if kept is None else kept


def module_of_file(name: str, path: Path) -> ModuleType:
    """A new module of a file, not yet in sys.modules and not yet run: see run_module."""
    real = os.path.realpath(path)
    loader = _KeptLoader(name, str(path)) if real in _kept else None
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or spec.loader is None or not is_there(path):
        raise FileNotFoundError(f"no such file: {path}")
    return importlib.util.module_from_spec(spec)


class _KeptLoader(importlib.machinery.SourceFileLoader):
    """Takes the source from what is kept, and neither reads nor writes compiled files."""

    def get_data(self, path: str) -> bytes:
        return _kept[os.path.realpath(path)].encode()

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError("what is kept has no compiled file")


class _KeptModules(importlib.abc.MetaPathFinder):
    """Finds modules whose files are kept, in the order of the path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        last = fullname.rpartition(".")[2]
        files = (os.path.join(last, "__init__.py"), f"{last}.py")
        if not any(kept.endswith(f"{os.sep}{file}") for kept in _kept for file in files):
            return None
        for folder in sys.path if path is None else path:
            for file in files:
                found = os.path.join(os.path.abspath(folder or "."), file)
                if os.path.realpath(found) in _kept:
                    return importlib.util.spec_from_file_location(
                        fullname, found, loader=_KeptLoader(fullname, found)
                    )
            if importlib.machinery.PathFinder.find_spec(fullname, [folder]) is not None:
                return None
        return None
