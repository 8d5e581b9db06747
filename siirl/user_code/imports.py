"""What a file of Python imports of the user's own code: found in source text, nothing is imported or run."""

import ast
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path


def find_module(module: str, folders: Sequence[str] | None = None) -> Path | None:
    """The source file of a module, sought in folders (sys.path unless given) without importing its parents.

    Of a package, its __init__.py. None if there is no source of it there.
    """
    for folder in sys.path if folders is None else folders:
        base = Path(folder or ".", *module.split("."))
        for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if file.is_file():
                return file
    return None


def own_code(file: Path) -> dict[str, Path]:
    """The file and all that it imports of the user's own, again and again: name below its folder -> file.

    Own is what lies below the file's folder or a folder of sys.path, and is neither installed nor of Python
    or siirl. Imports in functions count; those that are computed are not seen. What is no Python has none.
    """
    root = file.resolve().parent
    folders = [str(root), *(path for path in sys.path if is_own(Path(path or ".")))]
    found: dict[Path, None] = {file.resolve(): None}
    for one in _each_once(found):
        for name in _imported(one, root):
            parts = name.split(".")
            for depth in range(1, len(parts) + 1):  # the packages above are imported, too
                source = find_module(".".join(parts[:depth]), folders)
                if source is not None and is_own(source):
                    found.setdefault(source.resolve())
    return {_name(path, root): path for path in found}


def _each_once(found: dict[Path, None]) -> Iterator[Path]:
    """The keys of a dict that grows meanwhile, each once."""
    done: set[Path] = set()
    while left := [path for path in found if path not in done]:
        for path in left:
            done.add(path)
            yield path


def _imported(file: Path, root: Path) -> Iterator[str]:
    """Full names of modules that a file imports; "from a import b" may name the module a.b."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [_package(file, root, node.level), base]))
            yield from filter(None, [base])
            yield from (".".join(filter(None, [base, alias.name])) for alias in node.names)


def _package(file: Path, root: Path, level: int) -> str:
    """The package that so many dots mean in a file, as a name below the root."""
    folder = file.parent
    for _ in range(level - 1):
        folder = folder.parent
    return ".".join(folder.relative_to(root).parts) if folder.is_relative_to(root) else ""


def is_own(path: Path) -> bool:
    path = path.resolve()
    return path.exists() and not any(path.is_relative_to(folder) for folder in _others())


def _others() -> list[Path]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return [Path(sysconfig.get_path(name)).resolve() for name in names] + [
        Path(__file__).resolve().parents[1]
    ]


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
