"""Links, pipes and devices in a run's folder: the page waits for none, and shows nothing from outside."""

import json
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest
from viewed_runs import write_error, write_run

from siirl.runs.run_list import listed
from siirl.view.run_parts import RunParts
from siirl.view.view_page import export, read_run

SECONDS = 60


def everything(folder: Path) -> dict:
    """All that the page has of a run, but the notes; within a bound of time."""
    found: dict = {}

    def read() -> None:
        found.update(read_run(folder))
        parts = RunParts(folder)
        found["texts"] = [parts.read(name).value for name in parts.blocks()]

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive() and found, "it waits"
    return found


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("template") / "run")
    write_error(folder, 0, "RuntimeError: hidden")
    return folder


FILES = (
    *("run.yaml", "job.json", "metrics.jsonl", "progress.jsonl", "status/rank_0", "logs/rank_0.log"),
    *("rollouts/validation/step_6.jsonl", "rollouts/train/step_1.jsonl", "trace/rank_0.jsonl"),
    *("errors/rank_0.json", "status", "logs", "trace", "errors", "rollouts", "rollouts/validation"),
)


def test_the_table_names_what_is_in_a_folder(template):
    there = {str(path.relative_to(template)) for path in template.rglob("*")}
    assert set(FILES) <= there, set(FILES) - there


@pytest.mark.parametrize("name", FILES)
def test_what_a_link_leads_to_outside_is_not_shown(name, template, tmp_path):
    shutil.copytree(template, tmp_path / "run")
    shutil.copytree(template, tmp_path / "without")
    gone = tmp_path / "without" / name
    shutil.rmtree(gone) if gone.is_dir() else gone.write_text("")
    path, outside = tmp_path / "run" / name, tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    wanted, found = everything(tmp_path / "without"), everything(tmp_path / "run")
    notes = found.pop("notes")
    wanted.pop("notes")
    for part in wanted:
        one, other = (json.dumps(data[part], sort_keys=True) for data in (wanted, found))
        # names that were listed are no content
        if part not in ("health", "episodes", "texts"):
            assert one.replace("without", "run") == other, part
    assert "hello from rank 0" not in json.dumps(found["health"]) or "logs" not in name
    assert any("leads out" in note for note in notes), notes


@pytest.mark.parametrize("name", [name for name in FILES if "." in name or "rank" in name])
@pytest.mark.parametrize("kind", ["pipe", "zero", "socket", "loop"])
def test_nothing_is_waited_for_and_nothing_has_no_end(kind, name, template, tmp_path, monkeypatch):
    folder = shutil.copytree(template, tmp_path / "r")
    path = folder / name
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "zero":
            path.symlink_to("/dev/zero")
        case "socket":
            monkeypatch.chdir(path.parent)
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(path.name)
        case _:
            path.symlink_to(path.name)
    assert everything(folder)["overview"] is not None
    export([folder], tmp_path / "page.html")
    listed(tmp_path)


def test_a_link_within_the_folder_is_followed(template, tmp_path):
    folder = shutil.copytree(template, tmp_path / "run")
    (folder / "metrics.jsonl").rename(folder / "moved.jsonl")
    (folder / "metrics.jsonl").symlink_to("moved.jsonl")
    (tmp_path / "link").symlink_to(folder)
    assert read_run(folder)["curves"] == read_run(template)["curves"]
    assert read_run(tmp_path / "link")["curves"] == read_run(template)["curves"]


def test_samples_elsewhere_are_shown_of_a_run_that_nobody_else_can_change(template, public_path):
    folder, elsewhere = shutil.copytree(template, public_path / "run"), public_path / "samples"
    (folder / "rollouts" / "validation").rename(elsewhere)
    job = json.loads((folder / "job.json").read_text())
    job["config"]["trainer"]["validation_data_dir"] = str(elsewhere)
    (folder / "job.json").write_text(json.dumps(job))
    for mode, shown in ((0o755, True), (0o777, False)):
        folder.chmod(mode)
        kinds = {one["kind"] for one in read_run(folder)["episodes"]}
        assert ("validation" in kinds) == shown
