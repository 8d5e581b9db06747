"""What the page knows of a run comes from its folder: whole, going on, damaged, too large, or of no run."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from viewed_runs import STEP_S, write_error, write_run

from siirl.errors import ConfigError
from siirl.launch.run_folder import LOCK
from siirl.observe.position import record_end
from siirl.observe.sinks import JsonlSink
from siirl.observe.trace import TRACE_DIR, TraceFile, merge_trace
from siirl.runs.folder_reader import Skipped
from siirl.runs.run_files import MetricHistory, read_history
from siirl.runs.run_state import run_folder
from siirl.service.desk import Tenant
from siirl.service.sessions import Model, Session, write_status
from siirl.view import episodes, trace_reader, view_page
from siirl.view.alerts import alerts
from siirl.view.metric_curves import MOST_POINTS, clock, curves, thin
from siirl.view.run_parts import RunParts
from siirl.view.run_status import ROLLOUT
from siirl.view.view_page import read_run


def test_a_run_is_read_from_its_folder(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    about = run["overview"]
    assert (about["state"], about["step"], about["total"], about["name"]) == ("ended", 6, 6, "small")
    assert about["command"] == "python -m siirl.main_dag trainer.token=..."
    assert (about["host"], about["commit"]) == ("node7", "0123456789ab (changed)")
    assert [(place["ranks"], place["step"]) for place in about["places"]] == [("0-1", 6)]
    assert run["curves"]["reward/score"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert run["curves"]["reward/score"]["values"][-1] == 1.0
    assert [(e["step"], e["kind"]) for e in run["episodes"]] == [
        (6, "validation"),
        (6, "train"),
        (1, "validation"),
        (1, "train"),
    ]
    assert run["episodes"][0]["rewards"] == {"0": 1.0, "1": -0.5}
    said = RunParts(tmp_path / "run").read("texts validation 6").value["validation 6.0"]
    assert said["messages"][2]["rewards"] == [["score", -0.5]]
    assert "hello from rank 1" in run["health"]["logs"][1]["lines"]
    assert run["notes"] == []


def test_a_run_that_nobody_named_has_the_name_of_its_folder(tmp_path):
    """And not that of all runs without one: several stand on a page."""
    path = write_run(tmp_path / "run") / "job.json"
    job = json.loads(path.read_text())
    for explicit, name in ((["trainer.experiment_name"], "small"), (["trainer.nnodes"], "run")):
        job["config"]["explicit"] = explicit
        path.write_text(json.dumps(job))
        assert read_run(path.parent)["overview"]["name"] == name


def test_the_nodes_of_the_plan_have_their_share_of_the_step(tmp_path):
    dag = read_run(write_run(tmp_path / "run"))["dag"]
    assert sum(node["share"] for node in dag["nodes"]) == pytest.approx(1, abs=0.01)
    assert all(f'id="{node["mark"]}"' in dag["svg"] for node in dag["nodes"])
    assert "http" not in dag["svg"].replace('"http://www.w3.org/', "")


def test_a_link_has_the_weights_that_it_brought_last(tmp_path):
    run = write_run(tmp_path)
    (link,) = read_run(run)["dag"]["links"]
    assert link["version"] is None and f'id="{link["mark"]}"' in read_run(run)["dag"]["svg"]
    with (run / "metrics.jsonl").open("a") as file:
        for step, version in ((4, 7.0), (5, 9.0)):
            file.write(json.dumps({"step": step, f"weight_sync/{link['name']}_version": version}) + "\n")
    assert read_run(run)["dag"]["links"][0]["version"] == 9


@pytest.mark.parametrize("merged", [False, True])
def test_the_timeline_has_the_last_steps_of_every_rank(tmp_path, merged):
    folder = write_run(tmp_path / "run", steps=6)
    if merged:
        merge_trace(folder)
        shutil.rmtree(folder / TRACE_DIR)
    shown = read_run(folder)["timeline"]
    assert [step["step"] for step in shown["steps"]] == [4, 5, 6]
    assert [step["start"] for step in shown["steps"]] == [0, STEP_S * 1e3, 2 * STEP_S * 1e3]
    assert [lane["rank"] for lane in shown["lanes"]] == [0, 1]
    spans = shown["lanes"][0]["spans"]
    outer = [span for span in spans if span[3] == 0 and not span[4]]
    assert sum(span[2] for span in outer) == pytest.approx(3 * STEP_S * 1e3, rel=1e-3)
    assert ["micro_batch", {"tokens": 128, "bytes": 4096}] in [[span[0], span[5]] for span in spans]
    assert [span[0] for span in spans if span[4]] == ["hangs"], "what had no end is shown as such"


def test_a_long_trace_and_many_ranks_are_cut_and_said(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", steps=40)
    monkeypatch.setattr(trace_reader, "MOST_BYTES", 8_000)
    monkeypatch.setattr(trace_reader, "MOST_RANKS", 1)
    run = read_run(folder)
    assert {lane["rank"] for lane in run["timeline"]["lanes"]} == {0}
    assert run["timeline"]["steps"][-1]["step"] == 40
    assert any("1 of 2 ranks" in note for note in run["notes"])
    assert any(note.startswith("rank_0.jsonl: its first") for note in run["notes"])


def test_of_ranks_that_are_not_shown_the_outermost_intervals_are_those_of_a_whole_reading(
    tmp_path, monkeypatch
):
    """Also of one that hangs in a phase within an instruction, and of what other threads did."""
    trace = TraceFile(tmp_path / TRACE_DIR, 1, 'rank 1, "tid":0,', 0.0)
    for step in (1, 2):
        for name in ("rollout", "reshard"):
            trace.begin(name, step + 0.1)
            trace.begin("forward", step + 0.2)
            trace.complete("micro_batch", step + 0.2, step + 0.3, {"tokens": 5})
            trace.end(step + 0.4, {"tokens": 7})
            trace.end(step + 0.5, {"step": step, "rows": 3})
        thread = threading.Thread(target=lambda at=step: (trace.begin("loads", at), trace.end(at + 0.3, {})))
        thread.start()
        thread.join()
    trace.begin("train", 3.0)
    trace.begin("forward", 3.5)
    trace.complete("micro_batch", 3.5, 3.9, {"tokens": 5})
    trace.close()
    shutil.copy(tmp_path / TRACE_DIR / "rank_1.jsonl", tmp_path / TRACE_DIR / "rank_0.jsonl")
    (*_, whole), _ = trace_reader.read_traces(tmp_path, Skipped())
    monkeypatch.setattr(trace_reader, "MOST_RANKS", 1)
    (*_, fast), shown = trace_reader.read_traces(tmp_path, Skipped())
    assert [trace.rank for trace in shown] == [0] and len(whole.spans) > 1 and list(fast.spans) == [0]
    outer = [span for span in whole.spans[0] if span.depth == 0]
    assert fast.spans[0] == outer and fast.label == whole.label
    assert [(span.name, span.open, span.end_us) for span in outer][-1] == ("train", True, 3.5e6)
    assert fast.instructions(2) == whole.instructions(2) and len(fast.instructions(2)) == 2


def test_a_step_whose_beginning_was_not_read_is_not_shown(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", steps=4)
    size = (folder / TRACE_DIR / "rank_0.jsonl").stat().st_size
    assert [step["step"] for step in read_run(folder)["timeline"]["steps"]] == [2, 3, 4]
    for part, steps in ((0.6, [3, 4]), (0.4, [4]), (0.1, [4])):
        monkeypatch.setattr(trace_reader, "MOST_BYTES", int(2 * part * size))
        shown = read_run(folder)["timeline"]
        assert [step["step"] for step in shown["steps"]] == steps
        assert [bound["step"] for bound in shown["bounds"]] == steps


def test_the_state_is_that_of_the_folder(tmp_path):
    folder = write_run(tmp_path / "run")
    assert read_run(folder)["overview"]["state"] == "ended"
    record_end(folder, "id", "stopped", "stopped by SIGTERM")
    assert read_run(folder)["overview"]["state"] == "interrupted"
    record_end(folder, "id", "failed", "rank 1, step 6, actor_train: killed by SIGKILL")
    (failed,) = [place for place in read_run(folder)["overview"]["places"] if place["state"] == "failed"]
    assert (failed["ranks"], failed["count"]) == ("1", 1), "it was killed, and left no error of its own"
    (folder / "progress.jsonl").unlink()
    write_error(folder, 1, "PeerError: gone", secondary=True)
    write_error(folder, 0, "ValueError: no such column")
    run = read_run(folder)
    assert run["overview"]["state"] == "failed"
    assert [error["rank"] for error in run["health"]["errors"]] == [0, 1], "the first cause first"
    script = (
        f"import fcntl, sys; f = open({str(folder / LOCK)!r}, 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"1\n"
        assert read_run(folder)["overview"]["state"] == "running"
        holder.communicate()
    assert read_run(folder)["overview"]["state"] == "failed"


def test_settings_say_who_set_them_and_hide_secrets(tmp_path):
    folder = write_run(tmp_path / "run")
    job = json.loads((folder / "job.json").read_text())
    rollout = {"n": 16, "max_lag": 0, "enforce_eager": False}
    job["config"] |= {
        "actor_rollout_ref": {"rollout": rollout, "model": {"path": "/m", "hf_hub_token": "hush"}},
        "ray_init": {"env_vars": {"API_KEY": "hush"}},
        "explicit": ["actor_rollout_ref.rollout.n", "ray_init.env_vars"],
    }
    plan = json.loads(job["plan"])
    eager = {"model": "agent_0.rollout", "keys": {f"{ROLLOUT}.enforce_eager": False}, "reason": "on CUDA"}
    job["plan"] = json.dumps(plan | {"choices": [eager]})
    (folder / "job.json").write_text(json.dumps(job))
    run = read_run(folder)
    rows = {row[0]: row[1:] for row in run["settings"]}
    assert rows[f"{ROLLOUT}.n"] == ["16", "set", ""]
    assert rows[f"{ROLLOUT}.enforce_eager"] == ["agent_0.rollout: False", "chosen", "on CUDA"]
    assert rows["ray_init.env_vars.API_KEY"][:2] == ["***", "set"] and "hush" not in json.dumps(run)
    about = {name: value for name, value, _ in run["overview"]["settings"]}
    assert about == {"model": "/m", "responses of a prompt": "16"}, "what is off is skipped"


def test_settings_of_a_resumed_run_tell_apart_what_the_resume_set(tmp_path):
    """A key that was typed behind `siirl resume` is the user's."""
    folder = write_run(tmp_path / "run")
    job = json.loads((folder / "job.json").read_text())
    keys = ["output_dir", "default_local_dir", "resume_mode", "total_training_steps"]
    job["config"]["trainer"] |= {"output_dir": "a", "default_local_dir": "b", "resume_mode": "auto"}
    job["config"]["explicit"] = [f"trainer.{name}" for name in keys]
    (folder / "job.json").write_text(json.dumps(job))
    command = "python .venv/bin/siirl resume run trainer.total_training_steps=6 trainer.default_local_dir=b"
    for line, who in (("python -m siirl.main_dag", "set"), (command, "siirl resume")):
        text = (folder / "run.yaml").read_text()
        (folder / "run.yaml").write_text(re.sub("(?m)^command: .*$", f"command: {line}", text))
        set_by = {row[0]: row[2] for row in read_run(folder)["settings"]}
        assert [set_by[f"trainer.{name}"] for name in keys] == [who, "set", who, "set"]


def test_the_overview_of_an_interrupted_run_says_how_it_goes_on(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "checkpoints" / "global_step_4").mkdir(parents=True)
    assert read_run(folder)["overview"]["how_on"] == "", "it has ended"
    record_end(folder, "id", "stopped", "stopped by SIGINT")
    assert read_run(folder)["overview"]["how_on"] == f"To go on after step 4: siirl resume {folder}"


def test_the_clock_of_curves_begins_with_the_first_step():
    history = MetricHistory()
    for step, time_s in ((1, 1010.0), (2, 1030.0), (3, 1040.5)):
        history.add({"step": step, "time_s": time_s, "time/step_s": 10.0})
    assert clock(history) == {"steps": [1, 2, 3], "seconds": [10.0, 30.0, 40.5]}
    assert clock(MetricHistory()) == {"steps": [], "seconds": []}


def test_a_curve_of_many_points_keeps_its_ends_and_extremes():
    points = [(step, 0.0) for step in range(100_000)]
    points[77_777], points[12_345] = (77_777, 9.0), (12_345, -9.0)
    kept = [points[at] for at in thin([value for _, value in points], MOST_POINTS)]
    assert len(kept) <= MOST_POINTS and kept == sorted(set(kept))
    assert {points[0], points[-1], (77_777, 9.0), (12_345, -9.0)} <= set(kept)
    history = MetricHistory(series={"loss": dict(points)})
    skipped = Skipped()
    shown = curves(history, skipped)
    assert shown["loss"]["of"] == 100_000 and len(shown["loss"]["steps"]) <= MOST_POINTS
    assert skipped == {
        "curves": "of 1 that has more than 2000 points, the lowest and the highest point of each stretch are "
        "shown"
    }


def test_the_newest_conversations_come_first_up_to_a_bound(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    monkeypatch.setattr(episodes, "MOST_EPISODES", 2)
    run = read_run(folder)
    assert [episode["step"] for episode in run["episodes"]] == [6, 6]
    assert any(note.startswith("conversations: the newest 2 are listed") for note in run["notes"])


def history_of(name, values, tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", first_step=0)
    for step, value in enumerate(values, 1):
        sink.log(step, {name: value})
    sink.close()
    return read_history(tmp_path, Skipped())


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("actor/ref_kl", [0.01] * 10 + [0.5] * 6, "moves away from the reference"),
        ("agent_1/actor/ppo_kl", [0.01] * 10 + [0.5] * 6, "each update changes the policy more"),
        ("actor/entropy", [1.5] + [0.001] * 6, "nearly the same each time"),
        ("agent_0/reward/zero_std_groups", [0.95] * 5, "score alike and teach nothing"),
        ("actor/skipped_step", [0, 0, 1, 0], "optimizer step was skipped"),
        ("actor/rollout_log_prob_diff", [0.2] * 3, "disagree on the probabilities"),
        ("rollout/truncated", [0.6] * 3, "cut at data.max_response_length"),
        ("rollout/staleness", [0.5] * 10 + [2.0] * 6, "more off-policy"),
        ("reward/failed", [0, 2], "raised or ran out of time"),
        ("actor/grad_norm", [1.0, float("nan")], "was not a finite number in 1 step"),
    ],
)
def test_what_asks_for_a_look_is_an_alert(tmp_path, name, values, words):
    (alert,) = alerts(history_of(name, values, tmp_path))
    assert alert.metric == name and words in alert.text


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("actor/ref_kl", [0.001 * step for step in range(20)]),
        ("actor/ref_kl", [0.5] * 20),
        ("actor/entropy", [1.5, 1.2, 0.9, 0.6, 0.5]),
        ("actor/entropy", [0.01] * 9),
        ("reward/zero_std_groups", [1.0, 0.2, 0.3, 0.3, 0.2, 0.3]),
        ("actor/skipped_step", [0] * 5),
        ("actor/rollout_log_prob_diff", [0.01] * 5),
    ],
)
def test_a_quiet_run_has_no_alert(tmp_path, name, values):
    assert alerts(history_of(name, values, tmp_path)) == []


def test_what_many_agents_have_is_one_alert():
    series = {f"agent_{agent}/rollout/truncated": {1: 0.9} for agent in range(3)}
    assert len(alerts(MetricHistory(series=series))) == 3
    series |= {f"agent_{agent}/rollout/truncated": {1: 0.9} for agent in range(3, 51)}
    (alert,) = alerts(MetricHistory(series=series))
    assert alert.text.startswith("agent_0/rollout/truncated is 0.9")
    assert alert.text.endswith("The same is seen of agent_1, agent_2, agent_3, and of 47 more.")


def test_responses_that_score_by_their_length_are_an_alert():
    def found(success, failure, steps=8):
        lengths = (("success", success), ("failure", failure))
        series = {f"agent_1/reward/length_{kind}": dict.fromkeys(range(steps), v) for kind, v in lengths}
        return [alert.text for alert in alerts(MetricHistory(series=series))]

    (text,) = found(600.0, 300.0)
    assert "agent_1/reward/length_success is 600 tokens where the other responses have 300" in text
    assert (
        found(300.0, 600.0) == found(400.0, 300.0) == found(20.0, 2.0) == found(600.0, 300.0, steps=3) == []
    )


def test_health_has_the_tenants_of_a_service_with_their_queues_and_adapters(tmp_path):
    folder = write_run(tmp_path / "run")
    assert read_run(folder)["health"]["service"] is None
    session = Session("ann", 0.0, {}, {"s:sample:0": ""}, {"s:train:0": Model(8), "s:train:1": Model(4)})
    tenant = Tenant(tokens=640, num_waiting=3, waiting_bytes=2_000_000, kept_bytes=10)
    write_status(folder / "service" / "status.json", {"s": session}, {"ann": tenant})
    service = read_run(folder)["health"]["service"]
    assert service["tenants"] == [["ann", [8, 4], 1, 1, 3, 2_000_000, 640, 10]] and service["told_s"] > 0
    (folder / "service" / "status.json").write_text(
        '{"time": "x", "tenants": {"<b>": {"adapters": 3}, "b": 5}}'
    )
    assert read_run(folder)["health"]["service"] == {
        "told_s": None,
        "tenants": [["<b>", [], 0, 0, 0, 0, 0, 0], ["b", [], 0, 0, 0, 0, 0, 0]],
    }


def test_health_has_attempts_engines_and_the_last_sign_of_life(tmp_path):
    folder = write_run(tmp_path / "run")
    assert read_run(folder)["health"]["attempts"] == read_run(folder)["health"]["engines"] == []
    lost = {"run_id": "id", "attempt": 1, "ended_s": 50.0, "rank": 1, "step": 3, "node": "rollout"}
    (folder / "attempts.jsonl").write_text(json.dumps(lost | {"cause": "killed", "next": "the start"}) + "\n")
    metrics = JsonlSink(folder / "metrics.jsonl")
    metrics.log(
        7, {"agent_0/rollout/in_flight": 12.0, "agent_1/rollout/in_flight": 0.0, "perf/idle_s_max": 2.5}
    )
    metrics.close()
    health = read_run(folder)["health"]
    assert health["attempts"] == [
        {"attempt": 1, "ended_s": 50.0, "cause": "rank 1, step 3, rollout: killed", "next": "the start"}
    ]
    assert [row[:3] for row in health["engines"]] == [
        ["rollout/in_flight", 0, 12.0],
        ["rollout/in_flight", 1, 0.0],
        ["perf/idle_s_max", None, 2.5],
    ]
    assert health["last_sign_s"] > 1e9 and health["starts"] == 1


def test_of_two_lines_for_a_step_the_later_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step":1,"a":null}\n{"step":1,"a":2}\n{"step":2,"a":1}\n{"step":2,"a":3'
    )
    history = read_history(tmp_path, Skipped())
    assert history.series == {"a": {1: 2.0, 2: 1.0}} and not history.broken["a"]


NASTY = [
    "", "{", "[]", "null", "7", '"x"', '{"step": -1}', '{"step": "1", "a": 1}', '{"step": 1e999, "a": 1}',
    '{"step": 3, "a": NaN, "b": Infinity, "c": [1], "d": {}, "e": true, "f": 1' + "0" * 400 + "}",
    '{"step": 3, "messages": 7}', '{"messages": [7], "rewards": {"x": 1}}', '{"response": 1}', "[" * 100_000,
    '{"ph": "E", "ts": 1, "tid": 0}', '{"ph": "B", "ts": "x"}', '{"ph": "X", "ts": 1, "dur": -5, "args": 7}',
    '{"ph": "M", "args": []}', '{"plan": "{}"}', '{"plan": 7, "config": {"trainer": []}}', "\x00\xff",
    '{"messages": [{"turn": {}, "agent": "x", "reward": "y"}], "rewards": []}', "--- [\n", "--- {a: b\n",
    '{"plan": "{\\"nodes\\": 3}"}', '{"rank": 1}', "1\tnode\tnan", "x\ty",
]  # fmt: skip
"""What no run writes; a line of any file, or the whole of one."""


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_folder_is_still_a_page(tmp_path, seed):
    folder, draw = write_run(tmp_path / "run"), random.Random(seed)
    write_error(folder, 0, "ValueError: x")
    merge_trace(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in draw.sample(paths, len(paths) // 2):
        data = path.read_bytes()
        match draw.randrange(5):
            case 0:
                path.write_bytes(data[: draw.randrange(len(data) + 1)])
            case 1:
                path.unlink()
                path.mkdir()
            case 2:
                path.write_text(draw.choice(NASTY), errors="replace")
            case 3:
                lines = data.split(b"\n")
                lines.insert(draw.randrange(len(lines)), draw.choice(NASTY).encode(errors="replace"))
                path.write_bytes(b"\n".join(lines))
            case 4:
                path.write_bytes(draw.randbytes(200))
    run = read_run(folder)
    assert json.loads(json.dumps(run, allow_nan=False)) == run


@pytest.mark.parametrize("line", NASTY)
def test_any_line_in_any_file_of_a_run_is_survived(tmp_path, line):
    folder = write_run(tmp_path / "run")
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".jsonl", ".yaml")):
        path.write_bytes(path.read_bytes() + line.encode(errors="replace") + b"\n")
    for path in (folder / "job.json", folder / "status" / "rank_0", folder / "errors" / "rank_1.json"):
        path.write_text(line, errors="replace")
    run = read_run(folder)
    assert run["curves"]["reward/score"]["values"][0] > 0
    json.dumps(run, allow_nan=False)


def test_folders_of_no_run_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        run_folder(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        run_folder(str(tmp_path))
    (tmp_path / "metrics.jsonl").touch()
    assert run_folder(str(tmp_path)) == tmp_path
    run = read_run(tmp_path)
    assert run["overview"]["step"] is None and run["dag"] is None and run["timeline"] is None


def test_reading_writes_nothing(tmp_path):
    folder = write_run(tmp_path / "run")
    before = {path: os.stat(path).st_mtime_ns for path in folder.rglob("*")}
    view_page.export([folder], tmp_path / "page.html")
    assert {path: os.stat(path).st_mtime_ns for path in folder.rglob("*")} == before
    assert Path(folder, "errors").is_dir()
