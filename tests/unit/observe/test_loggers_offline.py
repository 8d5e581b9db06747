"""The packages behind trainer.logger, as they are installed, without a network: what they keep of a run that
was started, and resumed from its second step."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RUN = """
import sys
from pathlib import Path
from siirl.observe.loggers import make_sinks
from siirl.observe.sinks import RunInfo

name, first_step = sys.argv[1], int(sys.argv[2])
info = RunInfo(Path("out"), "project", "experiment", 3, first_step, {"trainer": {"seed": 1}}, {})
sinks = make_sinks([name], info)
for step in range(first_step + 1, first_step + 3):
    sinks.log(step, {"reward/score": step / 4, "bad": float("nan"), "val/gsm8k (main)": 1.0})
    sinks.text(step, "train", [{"prompt": "1+1=", "response": "2"}])
sinks.close()
"""
OFFLINE = {
    "WANDB_MODE": "offline",
    "SWANLAB_MODE": "offline",
    "MLFLOW_TRACKING_URI": "mlruns",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Run it twice, the second time from step 1 on; the folder."""

    def start(name):
        pytest.importorskip(name)
        env = os.environ | OFFLINE | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
        for step in ("0", "1"):
            command = [sys.executable, "-c", RUN, name, step]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
            assert done.returncode == 0 and "failed and may lack" not in done.stderr, done.stderr
        return tmp_path

    return start


def known_as(folder, name):
    return json.loads((folder / "out" / "loggers.json").read_text())[name]


def test_wandb(started):
    folder = started("wandb")
    runs = sorted((folder / "out" / "wandb").glob("offline-run-*"))
    assert len(runs) == 2 and all(run.name.endswith(known_as(folder, "wandb")) for run in runs)
    for run in runs:
        (record,) = run.glob("*.wandb")
        assert b"reward/score" in record.read_bytes() and list(run.glob("files/media/table/samples/*.json"))


def test_mlflow(started, monkeypatch):
    folder = started("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert run.info.run_id == known_as(folder, "mlflow") and run.info.run_name == "experiment"
    history = client.get_metric_history(run.info.run_id, "reward/score")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    assert {"reward/score", "bad", "val/gsm8k__main_"} == set(run.data.metrics)


def test_swanlab(started):
    folder = started("swanlab")
    records = sorted((folder / "out" / "swanlab").glob(f"run-*-{known_as(folder, 'swanlab')}/*.swanlab"))
    assert len(records) == 2 and all(b"reward/score" in record.read_bytes() for record in records)


def test_trackio(started, monkeypatch):
    folder = started("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    read = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as S\n"
        "print(json.dumps({run: S.get_logs('project', run) for run in S.get_runs('project')}))"
    )
    found = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    ((run, lines),) = json.loads(found.stdout).items()
    assert run == known_as(folder, "trackio") and run.startswith("experiment-")
    scores = [(line["step"], line["reward/score"]) for line in lines if "reward/score" in line]
    assert scores == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    tables = [line["samples/train"]["_value"] for line in lines if "samples/train" in line]
    assert tables[0] == [{"prompt": "1+1=", "response": "2"}]
