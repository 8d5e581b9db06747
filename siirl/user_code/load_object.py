"""Load an object from a file or a module that the user names."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from siirl.errors import DagError
from siirl.user_code.kept_code import module_of_file
from siirl.user_code.source import import_problem, split_reference


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
