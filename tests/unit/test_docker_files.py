"""The container recipes, without docker: they parse, and what they install, copy and call is there."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from container_files import Instruction, instructions, is_skipped, undeclared
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*[!e]"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ALLOWED = {
    "DL3008": "the distribution's own versions of packages",
    "DL3013": "versions stand in pyproject.toml",
    "DL3064": "TOKENIZERS_PARALLELISM is no secret",
}
OF_THE_BASE = {"PATH"}
"""Variables that an image has from the one that it is made from."""
OWN_PINS = {"transformer_engine"}
"""Packages that an image pins itself, by a build argument: the project does not install them."""

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix[1:])


def read(path: Path) -> list[Instruction]:
    return instructions(path.read_text())


def shell_of(path: Path) -> str:
    return "\n".join(one.text for one in read(path) if one.keyword == "RUN")


def extras_of(path: Path) -> set[str]:
    """Those that the image installs, by name."""
    return {
        extra for extras in re.findall(r"'\.\[([^]]+)\]'", path.read_text()) for extra in extras.split(",")
    }


def installed_by(path: Path) -> dict[str, SpecifierSet]:
    """What of pyproject.toml the image installs, under plain names -> the versions that it allows."""
    lines = list(PROJECT["dependencies"])
    for extra in extras_of(path):
        lines += PROJECT["optional-dependencies"][extra]
    return {plain(one.name): one.specifier for one in map(Requirement, lines)}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_both_are_here():
    assert [path.suffix for path in FILES] == [".cpu", ".megatron"]
    assert all(path.with_name(f"{path.name}.dockerignore").is_file() for path in FILES)


@each_file
def test_it_passes_the_linter(path):
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed")
    ignored = [word for rule in ALLOWED for word in ("--ignore", rule)]
    done = subprocess.run([linter, "--no-color", *ignored, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@each_file
def test_its_instructions_parse(path):
    found = read(path)
    first = next(number for number, one in enumerate(found) if one.keyword == "FROM")
    assert {one.keyword for one in found[:first]} <= {"ARG"}
    for one in found:
        if one.keyword == "RUN":
            done = subprocess.run(["bash", "-n", "-c", one.text], capture_output=True, text=True)
            assert done.returncode == 0, (one.line, done.stderr)
        if one.keyword in ("CMD", "ENTRYPOINT"):
            assert all(isinstance(word, str) for word in json.loads(one.text)), one.line


@each_file
def test_variables_are_declared_and_arguments_used(path):
    found = read(path)
    assert list(undeclared(found, OF_THE_BASE)) == []
    arguments = {one.words()[0].partition("=")[0] for one in found if one.keyword == "ARG"}
    used = {name for one in found for name in one.variables()}
    asked = set(re.findall(r"--build-arg (\w+)", path.read_text()))
    assert asked <= arguments and arguments <= used


@each_file
def test_extras_and_files_are_those_of_the_project(path):
    known = PROJECT["optional-dependencies"]
    assert extras_of(path) and extras_of(path) <= known.keys()
    ignored = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    names = [name for one in read(path) if one.keyword == "COPY" for name in one.words()[:-1]]
    assert names and all((ROOT / name).exists() for name in names)
    for name in (name for name in names if name != "."):
        assert not is_skipped(name, ignored), name
    if "." in names:  # what the image calls afterwards is in it
        needed = ("pyproject.toml", "Makefile", "README.md", "LICENSE", "siirl", "dag_templates", "examples")
        assert [name for name in needed if is_skipped(name, ignored)] == []
        assert is_skipped(".git", ignored) and is_skipped("siirl/dag/__pycache__", ignored)


@each_file
def test_what_is_built_first_has_the_files_that_pyproject_names(path):
    copied: set[str] = set()
    for one in read(path):
        if one.keyword == "COPY":
            copied |= set(one.words()[:-1])
        if one.keyword == "RUN" and "'.[" in one.text:
            named = {"pyproject.toml", PROJECT["readme"], "LICENSE"}
            assert "." in copied or named <= copied, one.line
            return
    pytest.fail("nothing of the project is installed")


@each_file
def test_its_python_is_one_that_the_project_runs_on_and_the_only_one(path):
    versions = set(re.findall(r"python:?(3\.\d+)", " ".join(one.text for one in read(path))))
    assert len(versions) == 1, versions
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{versions.pop()}.0")


@each_file
def test_base_images_and_packages_have_the_versions_of_the_project(path):
    found = read(path)
    defaults = dict(one.text.split("=", 1) for one in found if one.keyword == "ARG" and "=" in one.text)
    for one in (one for one in found if one.keyword == "FROM"):
        image = re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]].strip('"'), one.words()[0])
        assert re.search(r":.*\d+\.\d+.*@sha256:[0-9a-f]{64}$", image), f"{image} may be another one tomorrow"
    known = installed_by(path)
    for name, version in re.findall(r"([A-Za-z][\w.-]*)(?:\[\w+\])?==([\w.${}]+)", shell_of(path)):
        assert plain(name) in known or name in OWN_PINS, f"{name} is no package of the project"
        assert name in OWN_PINS or known[plain(name)].contains(version), (name, version)


@each_file
def test_it_runs_as_a_user_without_rights_by_number_and_reaches_hubs(path):
    """By number: runAsNonRoot of Kubernetes knows no names."""
    users = [one.text for one in read(path) if one.keyword == "USER"]
    assert users == ["1001"] and "useradd --create-home --uid 1001 " in shell_of(path)
    assert not [one for one in read(path) if one.keyword == "ENV" and "OFFLINE" in one.text]


@each_file
def test_what_it_imports_at_the_end_is_installed(path):
    for code in re.findall(r'python -c "([^"]+)"', shell_of(path)):
        tree = ast.parse(code)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        modules = {alias.name.partition(".")[0] for node in imports for alias in node.names}
        assert modules
        by_module = packages_distributions()
        for module in modules:
            packages = {plain(name) for name in (module, *by_module.get(module, []))}
            assert packages & (installed_by(path).keys() | {"siirl"}), module


@each_file
def test_targets_and_files_of_make_that_it_names_are_there(path):
    rules = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"\bmake ([a-z-]+)", path.read_text())):
        assert re.search(rf"^{name}:", rules, re.M), name
    for file in {word for line in re.findall(r"touch ([^&\n]+)", shell_of(path)) for word in line.split()}:
        assert file == "siirl/__init__.py" or re.search(rf"^{re.escape(file)}:", rules, re.M), file


def test_pages_build_the_files_that_are_here():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *FILES]
    named = {name for page in pages for name in re.findall(r"docker build -f (\S+)", page.read_text())}
    assert named == {f"docker/{path.name}" for path in FILES}


BAD = {
    "FROM a:1.0\nRUNN ls\n": "line 2: 'RUNN' is no instruction",
    "FROM a:1.0\nRUN ls \\\n": "line 2: the last instruction does not end",
    "FROM a:1.0\nCMD\n": "line 2: 'CMD' is no instruction with an argument",
}


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_recipe_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(BAD[text])):
        instructions(text)


def test_an_argument_before_the_image_is_not_known_in_it():
    text = "ARG A=1\nFROM a:${A}\nRUN B=2; echo ${A} $B ${C}\nARG C\nRUN echo $C\n"
    found = list(undeclared(instructions(text), set()))
    assert found == [f"line 3: RUN uses {name}, which is not declared" for name in "AC"]
