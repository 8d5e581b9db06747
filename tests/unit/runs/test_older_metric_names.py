"""Metrics that had another name: runs of before show today's, and what asks for the older one gets it."""

import json
import urllib.request
from pathlib import Path

import pytest

from siirl.observe.curve import read_series
from siirl.observe.loggers import make_sinks
from siirl.observe.metrics import OLDER_NAMES, todays_name, with_older_names
from siirl.observe.sinks import JsonlSink, RunInfo
from siirl.runs.folder_reader import Skipped
from siirl.runs.run_compare import compared
from siirl.runs.run_files import latest_metrics, read_history, recent_history, scan_metrics
from siirl.view.alerts import alerts
from siirl.view.metric_curves import curves

STALE = [0.5] * 10 + [2.0] * 6
"""A staleness that is an alert."""


def test_the_page_of_metrics_names_each_older_one_once():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    for older, today in OLDER_NAMES.items():
        shown = [
            f"`{name.replace('speaker_#', 'speaker_<n>').replace('turn_#', 'turn_<n>').replace('#', 'K')}`"
            for name in (older, today)
        ]
        assert f"| {shown[1]} | {shown[0]} |" in page and page.count(shown[0]) == 1


def written(folder, name, values=STALE):
    """A run's folder as it was before metrics were renamed."""
    sink = JsonlSink(folder / "metrics.jsonl", first_step=0)
    for step, value in enumerate(values, 1):
        sink.log(step, {name: value})
    sink.close()
    return folder


@pytest.mark.parametrize("agent", ["", "agent_12/"])
@pytest.mark.parametrize("number", [0, 16])
@pytest.mark.parametrize("older", OLDER_NAMES)
def test_each_older_name_has_one_of_today_and_is_told_beside_it(older, number, agent):
    before, today = (agent + name.replace("#", str(number)) for name in (older, OLDER_NAMES[older]))
    assert todays_name(before) == today == todays_name(today)
    assert with_older_names({today: 1.0, "actor/entropy": 2.0}) == {
        today: 1.0,
        before: 1.0,
        "actor/entropy": 2.0,
    }


@pytest.mark.parametrize(
    "name", ["rollout/lag_max_9", "val/rollout/lag", "rollout/lagging", "x/lag", "reward/score"]
)
def test_other_names_are_their_own(name):
    assert todays_name(name) == name and with_older_names({name: 1.0}) == {name: 1.0}


@pytest.mark.parametrize("name", ["agent_1/rollout/lag", "agent_1/rollout/staleness"])
def test_every_reader_of_a_run_gives_todays_names(tmp_path, name):
    folder, today = written(tmp_path, name), "agent_1/rollout/staleness"
    history = read_history(folder, Skipped())
    points = dict(enumerate(STALE, 1))
    assert history.series == recent_history(folder, Skipped()).series == {today: points}
    assert latest_metrics(folder) == {today: 2.0} and list(curves(history, Skipped())) == [today]
    series = read_series(folder / "metrics.jsonl")
    assert series[today] == points and series["agent_1/rollout/lag"] is series[today]
    assert list(series) == ["time_s", today]
    assert "agent_1/rollout/lag" in series and series.get("agent_1/rollout/lag") == points
    assert "rollout/lag" not in series and series.get("rollout/lag", 3) == 3
    (alert,) = alerts(history)
    assert alert.metric == today and "more off-policy" in alert.text


def test_a_run_of_before_is_compared_with_one_of_today(tmp_path):
    for name in ("rollout/lag", "rollout/staleness"):
        (tmp_path / name).mkdir(parents=True)
        written(tmp_path / name, name)
    (metric, both), *others = compared((tmp_path / "rollout/lag", tmp_path / "rollout/staleness"))[
        "metrics"
    ].items()
    assert metric == "rollout/staleness" and both[0] == both[1] and both[0] and not others


@pytest.mark.parametrize("name", ["reward/shaped", "reward/total"])
def test_the_reward_of_a_run_of_before_is_its_total(tmp_path, name):
    scan = scan_metrics(written(tmp_path, name, [1.0, 2.0]), Skipped())
    assert scan.rewards == {"reward/total": {1: 1.0, 2: 2.0}}


def test_where_a_line_has_both_names_todays_counts(tmp_path):
    lines = [{"step": step, "time_s": 1.0, "rollout/staleness": 2.0, "rollout/lag": 1.0} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[-1]]))
    assert read_history(tmp_path, Skipped()).series == {"rollout/staleness": {1: 2.0, 2: 2.0}}
    assert read_series(tmp_path / "metrics.jsonl")["rollout/staleness"] == {1: 2.0, 2: 2.0}


def test_an_alert_on_an_older_name_goes_on_to_get_it(tmp_path):
    pytest.importorskip("prometheus_client")
    info = RunInfo(tmp_path, "p", "e", 50, 0, {}, {}, prometheus_address="127.0.0.1:0")
    sinks = make_sinks(["prometheus"], info)
    sinks.log(3, {"rollout/staleness_max": 2.0, "agent_1/rollout/staleness_2": 0.5})
    address = f"http://127.0.0.1:{sinks.sinks[-1].sink.port}/metrics"
    told = urllib.request.urlopen(address).read().decode()
    sinks.close()
    for name, value in (
        ("rollout_lag_max", 2.0),
        ("rollout_staleness_max", 2.0),
        ("agent_1_rollout_lag_2", 0.5),
    ):
        assert f'siirl_{name}{{experiment="e",project="p"}} {value}' in told
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["rollout/lag_max"] == line["rollout/staleness_max"] == 2.0
