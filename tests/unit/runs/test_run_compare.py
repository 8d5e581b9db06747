"""`siirl compare`: what differs, and numbers beside each other."""

import json
import random
import re
import statistics

import pytest
import yaml
from run_folders import rewards, written

from siirl.cli import main
from siirl.observe.curve import read_series
from siirl.runs.run_compare import compared

pytestmark = pytest.mark.heavy


@pytest.fixture
def pair(tmp_path):
    one = written(tmp_path / "one", "actor_rollout_ref.actor.optim.lr=1e-5").start()
    two = written(tmp_path / "two", "data.train_batch_size=64").start()
    dice = random.Random(0)
    for run, number in ((one, 25), (two, 7)):
        others = {"actor/entropy": 1.0, "x/y": 5}
        drawn = ({"reward/score": dice.random(), "time/step_s": dice.random()} for _ in range(number))
        run.steps({step + 1: values | others for step, values in enumerate(drawn)})
    record = two.folder / "run.yaml"
    about = yaml.safe_load(record.read_text())
    about["packages"] |= {"torch": "1.0.0"}
    about["packages"].pop("numpy")
    about["siirl"] |= {"commit": "f" * 40, "changed": True}
    record.write_text(f"---\n{yaml.safe_dump(about, sort_keys=False)}")
    return one.folder, two.folder


def test_the_keys_and_versions_that_differ_and_no_others(pair, capsys):
    told = compared(pair)
    default = {"data.train_batch_size": 128}
    assert told["configuration"]["data.train_batch_size"] == [default["data.train_batch_size"], 64]
    assert told["configuration"]["actor_rollout_ref.actor.optim.lr"][0] == 1e-5
    followers = {name for name in told["configuration"] if name.endswith(".ppo_mini_batch_size")}
    assert len(told["configuration"]) == 2 + len(followers) == 5, told["configuration"]
    assert set(told["versions"]) == {"torch", "numpy", "commit of siirl"}
    assert told["versions"]["torch"][1] == "1.0.0" and told["versions"]["numpy"][1] is None
    assert told["versions"]["commit of siirl"][1] == "ffffffffffff (files changed)"
    assert main(["compare", *map(str, pair)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"data\.train_batch_size +128 +64\n", out)
    assert re.search(r"torch +\S+ +1\.0\.0\n", out)


def test_last_best_and_mean_are_those_of_the_metrics_file(pair, capsys):
    assert main(["compare", *map(str, pair), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    for index, folder in enumerate(pair):
        for name, points in read_series(folder / "metrics.jsonl").items():
            if name == "time_s":
                continue
            values, found = list(points.values()), metrics[name][index]
            assert found["last"] == values[-1] and found["step"] == len(values)
            assert found["mean"] == pytest.approx(statistics.fmean(values[-10:]))
            best = {"reward/score": max, "time/step_s": min}.get(name)
            assert found.get("best") == (best(values) if best else None)
            assert best is None or points[found["best_step"]] == found["best"]


def test_a_run_compared_with_itself_differs_in_nothing(tmp_path, capsys):
    run = written(tmp_path).start().steps(rewards(range(1, 5)))
    assert main(["compare", str(run.folder), str(run.folder)]) == 0
    out = capsys.readouterr().out
    assert "configuration: the same" in out and "versions: the same" in out


def test_without_the_job_the_recorded_configuration_says_the_same(pair):
    before = compared(pair)["configuration"]
    for folder in pair:
        (folder / "job.json").unlink()
    assert compared(pair)["configuration"] == before
