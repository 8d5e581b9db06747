"""What users meet around the program: an installed wheel, and a pipe that nobody reads to its end."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SETTINGS = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.n=8",
]


@pytest.mark.parametrize("command", [["siirl.main_dag", "--cfg", "job"], ["siirl.cli", "plan"]])
@pytest.mark.heavy
def test_a_reader_that_stops_early_is_no_error(command):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", *command, *SETTINGS],
        stdout=writing,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_an_installed_wheel_finds_its_templates(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("siirl", "dag_templates"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        tmp_path,
    ]
    subprocess.run(pip, cwd=source, check=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert (tmp_path / "site" / "siirl" / "py.typed").is_file()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "siirl.cli", "check", "--elsewhere", *SETTINGS],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ok: DAG 'grpo'" in done.stdout, done.stderr
