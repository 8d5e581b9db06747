"""Load an object from a file or a module that the user names. A run keeps to the code that it began with: its
processes make modules of the text that was read then.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from siirl.errors import DagError
from siirl.user_code.source import import_problem, split_reference

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


def load_object(reference: str, who: str, kind: str = "function") -> Any:
    """The object that "pkg.mod:name" or "path/file.py:name" names. DagError if it cannot be imported.

    who: the key that names it. kind: "function" or "class", for messages.
    """
    where, name = split_reference(reference, who, kind)
    try:
        module = (
            _module_of_file(Path(where).expanduser())
            if where.endswith(".py")
            else importlib.import_module(where)
        )
    except (ImportError, OSError, SyntaxError) as error:
        raise DagError(f"{who} = {reference!r}: {import_problem(where, error)}") from error
    except (Exception, SystemExit) as error:  # the user's code runs here: it may raise anything
        raise DagError(
            f"{who} = {reference!r}: {where!r} raised {type(error).__name__} when it was imported: {error}. "
            "Correct it."
        ) from error
    if not hasattr(module, name):
        raise DagError(f"{who} = {reference!r}: {where!r} has no {name!r}. Name a {kind} that it defines.")
    return getattr(module, name)


def _module_of_file(path: Path) -> ModuleType:
    name = "siirl_user_" + re.sub(r"\W", "_", str(path.resolve()))
    if name in sys.modules:
        return sys.modules[name]
    module = module_of_file(name, path)
    assert module.__spec__ is not None and module.__spec__.loader is not None, f"{path} has no loader"
    sys.modules[name] = module
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # last, so that a neighbour called json.py hides no library
    try:
        module.__spec__.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half of a module would be taken for the whole the next time
        raise
    return module
