"""`make check` finds circles of imports wherever they hide; and names of files that are not unique."""

import importlib.util
import tomllib
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

from siirl.compiler.backends import ROLLOUT_BACKENDS, TRAIN_BACKENDS

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("import_circles", ROOT / "tools" / "import_circles.py")
assert _spec and _spec.loader
checker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(checker)

BACK = {
    "at the top": "from house.room import low\n",
    "of a name in it": "from house.room.low import name\n",
    "relative": "from . import low\n",
    "of a relative name": "from .low import name\n",
    "in a function": "def call():\n    import house.room.low\n",
    "for types only": "import typing\nif typing.TYPE_CHECKING:\n    from house.room.low import name\n",
    "by text": 'ENTRY = "house.room.low:run"\n',
    "by the text of a module": 'HOMES = {"name": "house.room.low"}\n',
}


def made(folder: Path, high: str) -> Path:
    """A package in which house.room.low imports house.room.high, whose code is given."""
    files = {"__init__": "", "room/__init__": "", "room/low": "import house.room.high\n", "room/high": high}
    for name, code in files.items():
        path = folder / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    return folder / "house"


@pytest.mark.parametrize("how", BACK)
def test_a_circle_is_found_however_it_is_closed(how, tmp_path):
    (line,) = checker.problems(made(tmp_path, BACK[how]), set())
    assert line.startswith("house.room.high <-> house.room.low: ")
    assert "house.room.low:1 -> house.room.high" in line


@pytest.mark.parametrize(
    "high", ["", "import house\nfrom house.room import other\n", '"""See house.room.low."""\n', 'A = "low"\n']
)
def test_no_circle_is_invented(high, tmp_path):
    assert checker.problems(made(tmp_path, high), set()) == []


def test_a_known_circle_is_let_through_until_it_is_gone(tmp_path):
    known = {frozenset({"house.room.high", "house.room.low"})}
    assert checker.problems(made(tmp_path, BACK["at the top"]), known) == []
    (line,) = checker.problems(made(tmp_path, ""), known)
    assert "no circle any more" in line


def test_no_folder_of_tests_is_passed_over(pytestconfig):
    """By default pytest does not look into folders that are called as those of builds are, such as dist."""
    passed_over = pytestconfig.getini("norecursedirs")
    folders = {
        part for file in (ROOT / "tests").rglob("test_*.py") for part in file.relative_to(ROOT).parts[:-1]
    }
    assert "dist" in folders
    assert [(name, mask) for name in folders for mask in passed_over if fnmatch(name, mask)] == []


def test_no_two_test_files_have_one_name():
    by_pytest = {"__init__.py", "conftest.py"}
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in by_pytest)
    assert [name for name, number in names.items() if number > 1] == []


def test_no_two_files_of_different_rooms_have_one_name():
    everywhere = {"__init__.py", "base.py"}
    names = Counter(path.name for path in (ROOT / "siirl").rglob("*.py") if path.name not in everywhere)
    assert [name for name, number in names.items() if number > 1] == []


def test_the_contract_between_backends_names_every_engine():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (apart,) = (contract["modules"] for contract in contracts if contract["type"] == "independence")
    for row in (*TRAIN_BACKENDS.values(), *ROLLOUT_BACKENDS.values()):
        module = row.engine.partition(":")[0]
        assert any(f"{module}.".startswith(f"{name}.") for name in apart), (module, apart)
