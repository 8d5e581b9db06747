"""The container recipes: linted, and what they install and copy is there."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*[!e]"))
ALLOWED = {
    "DL3008": "the distribution's own versions of packages",
    "DL3013": "versions stand in pyproject.toml",
    "DL3064": "TOKENIZERS_PARALLELISM is no secret",
    "DL3066": "the user is made in the image",
}


def test_both_are_here():
    assert [path.suffix for path in FILES] == [".cpu", ".megatron"]
    assert all(path.with_name(f"{path.name}.dockerignore").is_file() for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix[1:])
def test_it_passes_the_linter(path):
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed")
    ignored = [word for rule in ALLOWED for word in ("--ignore", rule)]
    done = subprocess.run([linter, "--no-color", *ignored, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix[1:])
def test_extras_and_files_are_those_of_the_project(path):
    text = path.read_text()
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {extra for extras in re.findall(r"'\.\[([^]]+)\]'", text) for extra in extras.split(",")}
    assert asked and asked <= known.keys()
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    names = [name for words in copied for name in words if not name.startswith("--")]
    assert names and all((ROOT / name).exists() for name in names)
