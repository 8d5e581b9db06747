"""The fields of a dataclass are documented under themselves, not in a list in its docstring."""

import ast
import re

import pytest
from package_sources import PACKAGE, package_nodes

pytestmark = pytest.mark.heavy


def listed(node: ast.ClassDef) -> list[str]:
    """The fields that the docstring of a class explains: "name: what it is" or "one, other: what"."""
    doc = ast.get_docstring(node) or ""
    names = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]
    return [name for name in names if re.search(rf"(^|[.;] |\n|, ){name}(, \w+)*: ", doc)]


def test_no_docstring_lists_the_fields_of_a_dataclass():
    found = {
        f"{file.relative_to(PACKAGE)}: {node.name}": names
        for file, in_file in package_nodes().items()
        for node in in_file
        if isinstance(node, ast.ClassDef) and (names := listed(node))
    }
    assert found == {}


def test_the_scan_finds_such_lists():
    doc = '"""A thing. one: the first; two, three: others. four is\n    five: last."""'
    names = "".join(f"    {name}: int\n" for name in ("one", "two", "three", "four", "five"))
    (node,) = ast.parse(f"@dataclass\nclass A:\n    {doc}\n{names}").body
    assert listed(node) == ["one", "two", "three", "five"]
