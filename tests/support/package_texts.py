"""What the package may print: tests of pages that quote messages look for their words here."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "siirl"


@cache
def texts() -> str:
    """All string literals of the package but docstrings, what is inserted into them as a NUL."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)
