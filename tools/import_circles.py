"""Circles among the modules of a package, also those that import-linter does not see; run by `make check`.

An import counts wherever it stands: at the top, in a function, under TYPE_CHECKING. So does a text that names
a module or its function, "package.module" or "package.module:function", as it is loaded when it is needed.
Usage: python tools/import_circles.py [PACKAGE FOLDER]
"""

import ast
import re
import sys
from collections.abc import Container, Iterator
from pathlib import Path

TEMPORARY: set[frozenset[str]] = set()
"""Circles that are known and will go. One that has gone must be taken from here."""
_NAME = re.compile(r"\w+(?:\.\w+)+(?::\w+)?")

Edges = dict[str, dict[str, int]]
"""module -> each module that it imports -> the line."""


def edges(package: Path) -> Edges:
    """Which module of a package imports which, by any means."""
    files = {_module(path, package.parent): path for path in sorted(package.rglob("*.py"))}
    found: Edges = {}
    for module, path in files.items():
        found[module] = {}
        tree = ast.parse(path.read_text(), str(path))
        names = [*_imported(tree, module, path.name == "__init__.py")]
        names += [(name, line) for name, line in _written(tree) if _first(name, files) != package.name]
        for name, line in names:
            target = _first(name, files)
            if target and target != module:
                found[module].setdefault(target, line)
    return found


def circles(graph: Edges) -> list[list[str]]:
    """The sets of modules that reach each other, each sorted (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in graph[module]:
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in graph:
        if module not in index:
            visit(module)
    return sorted(found)


def problems(package: Path, temporary: set[frozenset[str]]) -> list[str]:
    """A line for each circle that is not allowed, with its imports, and for each that is gone."""
    graph = edges(package)
    found = circles(graph)
    lines = [
        f"{' <-> '.join(circle)}: these modules import each other ({_steps(graph, circle)}). Move what they "
        "share below them, or hand it over as an argument."
        for circle in found
        if frozenset(circle) not in temporary
    ]
    gone = temporary - {frozenset(circle) for circle in found}
    lines += [f"{', '.join(sorted(circle))}: no circle any more. Take it from TEMPORARY." for circle in gone]
    return lines


def _steps(graph: Edges, circle: list[str]) -> str:
    return ", ".join(
        f"{module}:{line} -> {target}"
        for module in circle
        for target, line in graph[module].items()
        if target in circle
    )


def _imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything that a module imports."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _written(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every text that could name a module, or something in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
            yield node.value.replace(":", "."), node.lineno


def _first(name: str, files: Container[str]) -> str | None:
    """The module that a dotted name is, or is in."""
    parts = name.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((known for known in names if known in files), None)


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def main() -> int:
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "siirl"
    found = problems(package, TEMPORARY if package.name == "siirl" else set())
    for line in found:
        print(line, file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
