"""The fields of a dataclass are documented under themselves, not in a list in its docstring."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "siirl"
ROOMS = ("checkpoint", "compiler", "config", "dag", "data", "launch", "types.py")


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            yield node


def listed(node: ast.ClassDef) -> list[str]:
    """The fields that the docstring of a dataclass explains: "name: what it is" or "one, other: what"."""
    doc = ast.get_docstring(node) or ""
    names = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]
    return [name for name in names if re.search(rf"(^|[.;] |\n|, ){name}(, \w+)*: ", doc)]


@pytest.mark.parametrize("room", ROOMS)
def test_no_docstring_lists_the_fields_of_a_dataclass(room):
    files = [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py"))
    found = {
        f"{file.relative_to(PACKAGE)}: {node.name}": names
        for file in files
        for node in classes(ast.parse(file.read_text()))
        if (names := listed(node))
    }
    assert found == {}


def test_the_scan_finds_such_lists():
    doc = '"""A thing. one: the first; two, three: others. four is\n    five: last."""'
    names = "".join(f"    {name}: int\n" for name in ("one", "two", "three", "four", "five"))
    tree = ast.parse(f"@dataclass\nclass A:\n    {doc}\n{names}")
    assert [listed(node) for node in classes(tree)] == [["one", "two", "three", "five"]]
