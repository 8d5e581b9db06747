"""A job that is right, as a file, for cases to change."""

from pathlib import Path

import pytest
import yaml
from job_harness import Inputs, overrides


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Inputs:
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def deep(tmp_path) -> str:
    """A folder that `../..` does not leave."""
    folder = tmp_path / "a" / "b" / "c" / "d"
    folder.mkdir(parents=True)
    return str(folder)


@pytest.fixture
def good(inputs, deep) -> Path:
    """The YAML file of a run."""
    tree: dict = {}
    for text in overrides(inputs, Path(deep) / "out"):
        name, _, value = text.partition("=")
        *groups, last = name.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = yaml.safe_load(value)
    path = Path(deep) / "good.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
