"""The fields of a dataclass are documented under themselves, not in a list in its docstring."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

PACKAGE = Path(__file__).parents[2] / "siirl"
FILES = sorted(PACKAGE.rglob("*.py"))


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Dataclasses, and what else has typed fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node


def listed(node: ast.ClassDef) -> list[str]:
    """The fields that the docstring of a class explains: "name: what it is" or "one, other: what"."""
    doc = ast.get_docstring(node) or ""
    names = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]
    return [name for name in names if re.search(rf"(^|[.;] |\n|, ){name}(, \w+)*: ", doc)]


def test_no_docstring_lists_the_fields_of_a_dataclass():
    found = {
        f"{file.relative_to(PACKAGE)}: {node.name}": names
        for file in FILES
        for node in classes(ast.parse(file.read_text()))
        if (names := listed(node))
    }
    assert found == {}


def test_the_scan_finds_such_lists():
    doc = '"""A thing. one: the first; two, three: others. four is\n    five: last."""'
    names = "".join(f"    {name}: int\n" for name in ("one", "two", "three", "four", "five"))
    tree = ast.parse(f"@dataclass\nclass A:\n    {doc}\n{names}")
    assert [listed(node) for node in classes(tree)] == [["one", "two", "three", "five"]]
