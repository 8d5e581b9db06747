"""The source of the package, parsed once in a process: for tests of what stands in it, whose files go to one
worker of pytest (conftest.py)."""

import ast
import gc
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "siirl"


@cache
def package_nodes() -> dict[Path, list[ast.AST]]:
    """Of each file of the package what is in it; what is around a node comes before it."""
    collects = gc.isenabled()
    gc.disable()
    found = {
        file: list(ast.walk(ast.parse(file.read_text(), str(file)))) for file in sorted(PACKAGE.rglob("*.py"))
    }
    gc.freeze()  # millions, which nobody has to look through again
    if collects:
        gc.enable()
    return found


@cache
def texts() -> str:
    """All string literals of the package but docstrings, what is inserted into them as a NUL."""
    found = []
    for in_file in package_nodes().values():
        docstrings = {id(node.value) for node in in_file if isinstance(node, ast.Expr)}
        for node in in_file:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)
