"""What a user sees of a run: table, files, TensorBoard, curve, summary; the clocks and logs behind it."""

import io
import json
import logging
import math
import re
import shutil
import sys
import warnings

import pytest

from siirl.config import load_config
from siirl.errors import ConfigError
from siirl.observe import console
from siirl.observe.columns import COLUMNS, REWARD, cell, number
from siirl.observe.console import ConsoleSink
from siirl.observe.curve import closing_summary, duration, read_series, reward_curve_png
from siirl.observe.loggers import make_sinks
from siirl.observe.logs import setup_logging
from siirl.observe.metrics import Metrics, mfu, peak_flops
from siirl.observe.position import PositionFile, read_position
from siirl.observe.sinks import JsonlSink, RunInfo, samples_text
from siirl.observe.spans import Observer


def step_values(step: int) -> dict[str, float]:
    return {
        "reward/score": 1 - math.exp(-step / 30),
        "rollout/response_length": 5.25,
        "actor/entropy": 1.5,
        "actor/lr": 5e-4,
        "time/step_s": 0.5,
        "time/rollout_actor_s": 0.3,
        "time/actor_train_s": 0.19,
        "time/overhead_s": 0.01,
    }


def info(tmp_path, **changes) -> RunInfo:
    fields = {
        "output_dir": tmp_path,
        "project": "p",
        "experiment": "e",
        "total_steps": 50,
        "first_step": 0,
        "config": {},
        "sample_dirs": {},
    }
    return RunInfo(**(fields | changes))


def test_the_console_prints_one_aligned_line_for_each_step(capsys):
    sink = ConsoleSink(50)
    sink.log(0, {"val/reward/mean": 0.05})
    for step in range(1, 46):
        sink.log(step, step_values(step))
    sink.close()
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.split()[0].endswith("/50")]
    assert [row[0] for row in rows] == [f"{step}/50" for step in range(46)]
    headers = [line for line in lines if line.split()[0] == "step"]
    assert len(headers) == 4  # the first, the second when columns were added, then every 20 rows
    assert "mfu" not in headers[-1] and "entropy" in headers[-1]
    header = headers[-1].split()
    last = dict(zip(header[: header.index("lr") + 1], rows[-1], strict=False))
    assert last == {
        "step": "45/50",
        "reward": "0.777",
        "val": "-",
        "length": "5.2",
        "entropy": "1.500",
        "lr": "0.0005",
    }
    assert (
        len({len(line) for line in lines if line in headers[1:] or line.split()[0] in ("20/50", "30/50")})
        == 1
    )
    times = [line for line in lines if "seconds a step" in line]
    assert times[-1].split()[:4] == ["0:00", "since", "the", "start;"]
    assert times[-1].split(": ")[1] == "rollout_actor 0.30, actor_train 0.19, overhead 2.0%"


def test_the_console_says_that_an_engine_was_started_again_on_any_rank(capsys):
    sink = ConsoleSink(2)
    for step, count in ((1, 0), (2, 3)):
        sink.log(step, step_values(step) | {"rollout/engine_restarts": count})
    sink.close()
    said = [line.strip() for line in capsys.readouterr().out.splitlines() if "again" in line]
    assert said == ["rollout engines started again in this step: 3"]


def test_a_plain_line_has_the_numbers_of_the_table_as_pairs(capsys):
    sink = ConsoleSink(3, progress="plain")
    for step in (0, 1):
        sink.log(
            step,
            {"reward/score": step / 4, "agent_1/actor/grad_norm": 1.5, "perf/other": 2.0, "time/step_s": 9.0},
        )
    sink.text(1, "validation", [{"conversation": "hello"}])
    sink.close()
    before, line = capsys.readouterr().out.splitlines()
    assert before.startswith("step=0/3 reward/score=0.000 ")
    assert re.fullmatch(
        r"step=1/3 reward/score=0\.250 agent_1/actor/grad_norm=1\.500 time/step_s=9\.00 left=0:0\d", line
    )


def test_each_agent_has_its_own_number_in_a_cell():
    values = {"agent_0/reward/score": 0.5, "agent_1/reward/score": 0.25, "val/reward/score": 9.0}
    assert cell(REWARD, values) == "0.500|0.250"
    assert cell(REWARD, {"other": 1.0}) == "-"
    assert cell(REWARD, {"agent_1/reward/score": 0.25}, (0, 1)) == "-|0.250"
    assert cell(REWARD, {"other": 1.0}, (0, 1)) == "-"
    assert cell(REWARD, {"reward/score": 1.0}, (0, 1)) == "1.000"
    many = {f"agent_{agent}/reward/score": float(agent) for agent in (10, 2)}
    assert cell(REWARD, many) == "2.000|10.000"


def test_the_console_says_whose_numbers_are_in_a_cell_also_where_agents_train_by_turns(capsys):
    sink = ConsoleSink(9)
    both = {f"agent_{agent}/reward/score": 0.5 for agent in (0, 1)} | {"agent_0/interaction/turns": 3.0}
    for step in (1, 2, 3):
        sink.log(step, both | {f"agent_{step % 2}/actor/grad_norm": float(step)})
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert "a|b: agents 0|1; length: tokens of an agent's row" in first
    assert header.split() == ["step", "reward", "val", "length", "grad", "step", "s", "left"]
    assert rows[0].split() == ["1/9", "0.500|0.500", "-", "-", "-|1.000", "-", "-"]
    assert [row.split()[4] for row in rows] == ["-|1.000", "2.000|-", "-|3.000"]
    assert {len(row) for row in rows} == {len(header)}


def test_the_console_says_how_long_the_rest_takes_with_all_that_lies_between_steps(capsys, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now_s[0])
    sink = ConsoleSink(total_steps=103, first_step=100)  # resumed
    for step, took_s in ((101, 4000.0), (102, 2000.0), (103, 10.0)):
        now_s[0] += took_s
        sink.log(step, {"time/step_s": 1.0})
    sink.close()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[-1]) for row in rows if "/103" in row[0]] == [
        ("101/103", "2:13:20"),
        ("102/103", "50:00"),
        ("103/103", "-"),
    ]
    assert rows[-1][:3] == ["1:40:10", "since", "the"]


def test_a_warning_of_torch_about_its_own_names_does_not_reach_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SIIRL_LOG_VERBOSITY", raising=False)
    logging.captureWarnings(False)  # a run in this process may have left it on
    code = "import warnings\nwarnings.warn('old name', FutureWarning)\nwarnings.warn('odd', UserWarning)"
    with warnings.catch_warnings():
        setup_logging(0, tmp_path)
        for module in ("torch.distributed.c10d_logger", "mine"):
            exec(compile(code, module, "exec"), {"__name__": module})
    logging.captureWarnings(False)
    said = capsys.readouterr().err
    assert said.count("old name") == 1 and said.count("odd") == 2
    assert "torch.distributed.c10d_logger:2" not in said


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 3, "0.000"),
        (1e-6, 3, "1.0e-06"),
        (12.3456, 1, "12.3"),
        (25600.4, 0, "25600"),
        (math.nan, 3, "nan"),
        (-2e7, 3, "-2.0e+07"),
        (1e-6, None, "1e-06"),
        (5e-4, None, "0.0005"),
    ],
)
def test_numbers_fit_their_column(value, digits, text):
    assert number(value, digits) == text


def test_metrics_and_samples_are_files_whatever_the_loggers_are(tmp_path):
    sinks = make_sinks([], info(tmp_path, sample_dirs={"validation": tmp_path / "elsewhere"}))
    sinks.log(1, {"a": 1.5, "bad": math.nan})
    rows = [{"prompt": "1+1=", "response": "2\nbecause", "score": 1.0, "ground_truth": "2"}]
    sinks.text(1, "train", rows)
    sinks.text(1, "validation", rows)
    sinks.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["step"] == 1 and record["a"] == 1.5 and record["bad"] is None
    parsed = json.loads((tmp_path / "rollouts" / "train" / "step_1.jsonl").read_text())
    assert parsed == {"step": 1, **rows[0]}
    assert (tmp_path / "elsewhere" / "step_1.txt").read_text() == samples_text(rows)
    assert "score=1" in samples_text(rows) and "    because" in samples_text(rows)


def test_tensorboard_gets_every_number(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for folder, env in ((tmp_path / "tensorboard", None), (tmp_path / "other", str(tmp_path / "other"))):
        monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
        if env:
            monkeypatch.setenv("TENSORBOARD_DIR", env)
        sinks = make_sinks(["tensorboard"], info(tmp_path))
        sinks.log(7, {"reward/score": 0.25})
        sinks.text(7, "train", [{"response": "4"}])
        sinks.close()
        events = EventAccumulator(str(folder)).Reload()
        assert [(event.step, event.value) for event in events.Scalars("reward/score")] == [(7, 0.25)]


def test_a_missing_package_is_a_warning_and_an_unknown_name_an_error(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        sinks = make_sinks(["wandb"], info(tmp_path))
    assert "pip install wandb" in caplog.text and len(sinks.sinks) == 2
    with pytest.raises(ConfigError, match=r"'tensorbord'.*Known are console"):
        make_sinks(["tensorbord"], info(tmp_path))


def test_a_resumed_run_overrides_the_steps_it_repeats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for values in ({"val/reward/mean": 0.1}, {"val/reward/mean": 0.2}):
        sink = JsonlSink(path)
        sink.log(3, values)
        sink.close()
    with path.open("a") as file:
        file.write('{"step": 4, "val/rew')
    assert read_series(path)["val/reward/mean"] == {3: 0.2}


def test_a_metrics_file_has_each_step_once_after_a_resume_and_none_after_a_fresh_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for first_step, steps, expected in (
        (0, (0, 1, 2, 3), [0, 1, 2, 3]),
        (2, (3, 4), [0, 1, 2, 3, 4]),
        (0, (0,), [0]),
    ):
        sink = JsonlSink(path, first_step)
        for step in steps:
            sink.log(step, {"reward/score": first_step + step})
        sink.close()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines] == expected
        assert lines[-1]["reward/score"] == first_step + steps[-1]
        with path.open("a") as file:  # killed in the middle of a line
            file.write('{"step": 2, "reward/sc')


@pytest.mark.parametrize("how", ["removed", "folder removed", "replaced", "removed at the end"])
def test_metrics_that_are_removed_while_a_run_goes_on_are_written_anew(tmp_path, how, caplog):
    path = tmp_path / "out" / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(6):
        if step == 3 and how != "removed at the end":
            shutil.rmtree(path.parent) if how.startswith("folder") else path.unlink()
            if how == "replaced":
                path.write_text("something else")
        sink.log(step, {"reward/score": step})
    if how == "removed at the end":
        path.unlink()
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(6))
    assert caplog.text.count("is written anew") == 1


def test_the_reward_curve_is_a_picture_with_both_curves(tmp_path):
    from matplotlib.image import imread

    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(0, 61):
        values = step_values(step) | ({"val/reward/mean": 1 - math.exp(-step / 25)} if step % 10 == 0 else {})
        sink.log(step, values)
    sink.close()
    drawn = reward_curve_png(tmp_path / "metrics.jsonl", tmp_path / "sub" / "curve.png")
    full = imread(drawn)
    one = JsonlSink(tmp_path / "one.jsonl")
    one.log(0, {"reward/score": 0.0})
    one.close()
    flat = imread(reward_curve_png(tmp_path / "one.jsonl", tmp_path / "one.png"))
    assert full.shape == flat.shape and full.shape[1] > 1000
    assert abs(full - flat).sum() > 1000


def test_no_curve_is_drawn_of_a_run_without_rewards(tmp_path):
    for text in ("", '{"step": 1, "actor/sft_loss": 0.5}\n'):
        (tmp_path / "metrics.jsonl").write_text(text)
        assert reward_curve_png(tmp_path / "metrics.jsonl", tmp_path / "curve.png") is None
        assert not (tmp_path / "curve.png").exists()


@pytest.mark.parametrize(
    ("num_steps", "legend"),
    [
        (3, "training"),
        (12, "training, mean of 3 steps (thin: each)"),
        (60, "training, mean of 9 steps (thin: each)"),
    ],
)
def test_a_short_run_is_not_smoothed_and_the_legend_says_what_is(tmp_path, num_steps, legend):
    import matplotlib

    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(num_steps):
        sink.log(step, {"reward/score": step % 2})
    sink.close()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        picture = reward_curve_png(tmp_path / "metrics.jsonl", tmp_path / "curve.svg", "hunt")
    text = picture.read_text()
    assert f">{legend}<" in text and ">hunt<" in text


def test_the_summary_names_rewards_and_places(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, value in ((0, 0.05), (10, 0.95), (20, 0.9)):
        counts = {"data/math/prompts": 3, "data/my/data/prompts": 1, "data/math/dropped": 7}
        cut = {"data/my/data/truncated": 1} if step else {}
        sink.log(step, {"val/reward/mean": value, "reward/score": value / 2} | counts | cut)
    sink.close()
    places = {"checkpoint": tmp_path / "checkpoints", "HF model": None}
    text = closing_summary(tmp_path / "metrics.jsonl", 125.4, places)
    assert "0.050 (step 0) -> 0.900 (step 20); best 0.950 (step 10)" in text
    counted = "12 (math 9, my/data 3); 2 truncated (my/data 2); 7 of the files dropped as too long (math 7)"
    assert counted in text
    assert "2 min 5 s" in text and str(tmp_path / "checkpoints") in text and "HF model" not in text
    assert [duration(s) for s in (3.21, 3723)] == ["3.2 s", "1:02:03"]


def test_the_end_of_an_evaluation_says_nothing_of_training(tmp_path):
    from siirl.dag_worker.step_report import closing_report

    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(20, {"val/reward/mean": 0.9})
    sink.close()
    for val_only, places in (("true", 0), ("false", 2)):
        cfg = load_config(["algorithm.adv_estimator=grpo", f"trainer.val_only={val_only}"])
        given = tmp_path / "checkpoints/global_step_20"
        text = closing_report(cfg, "grpo", tmp_path, given, [], None, 1.0)
        assert "validation reward" in text
        assert text.count("reward curve") + text.count("checkpoint  ") == places, text
        assert (tmp_path / "reward_curve.png").exists() == bool(places)


def test_spans_add_up_to_the_step_and_nested_ones_count_once(monkeypatch, tmp_path):
    clock = iter(range(100))
    monkeypatch.setattr("siirl.observe.spans.time.perf_counter", lambda: next(clock))
    observer = Observer(PositionFile(tmp_path / "rank_0"))
    observer.begin_step()  # 1
    with observer.span("rollout", 5), observer.span("sync", 5):  # 2 to 5, 3 to 4
        assert read_position(tmp_path / "rank_0").node == "sync"
    with observer.span("reshard", 5):  # 6 to 7
        pass
    with observer.span("reshard", 5):  # 8 to 9
        pass
    values = observer.metrics().values()  # 10
    assert values == {
        "time/rollout_s": 3,
        "time/sync_s": 1,
        "time/reshard_s": 2,
        "time/step_s": 9,
        "time/overhead_s": 4,
    }
    assert [span.depth for span in observer.spans] == [1, 0, 0, 0]
    position = read_position(tmp_path / "rank_0")
    assert (position.node, position.step) == ("end of reshard", 5)
    assert read_position(tmp_path / "absent") is None


def test_a_span_is_closed_by_an_exception_and_waits_for_the_device():
    calls = []
    observer = Observer(sync=lambda: calls.append(1))
    with pytest.raises(RuntimeError), observer.span("node", 1):
        raise RuntimeError
    assert [span.name for span in observer.spans] == ["node"] and len(calls) == 2
    with observer.span("next", 1):
        pass
    assert observer.spans[-1].depth == 0


def test_node_times_of_ranks_merge_to_the_slowest():
    merged = Metrics()
    for seconds in (1.0, 3.0, 2.0):
        one = Metrics()
        one.max("time/rollout_s", seconds)
        merged.merge(one)
    assert merged.values() == {"time/rollout_s": 3.0}


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("cpu", None),
    ],
)
def test_the_peak_is_known_by_the_device_name(device, peak):
    assert peak_flops(device) == peak
    assert mfu(98.9e12, 0.5, 2, "NVIDIA H200") == pytest.approx(0.1)
    assert mfu(1e12, 1.0, 1, "cpu") is None


def test_logging_follows_the_environment(tmp_path, monkeypatch):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        monkeypatch.setenv("SIIRL_LOG_VERBOSITY", "warning")
        monkeypatch.setenv("SIIRL_LOGGING_FILENAME", "run.log")
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        setup_logging(3, tmp_path / "logs")
        later = io.StringIO()
        monkeypatch.setattr(sys, "stderr", later)  # as a live progress bar does
        logging.getLogger("siirl.x").info("hidden")
        logging.getLogger("siirl.x").warning("shown")
        for text in (later.getvalue(), (tmp_path / "logs" / "run.log").read_text()):
            assert "[rank 3] W siirl.x: shown" in text and "hidden" not in text
        monkeypatch.setenv("SIIRL_LOG_VERBOSITY", "loud")
        with pytest.raises(ConfigError, match="SIIRL_LOG_VERBOSITY='LOUD'"):
            setup_logging(0, tmp_path)
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
        root.handlers[:], root.level = before
        logging.captureWarnings(False)


def test_every_column_has_a_header_of_its_own():
    assert len({column.header for column in COLUMNS}) == len(COLUMNS)


def test_a_long_conversation_is_cut_on_the_console(capsys):
    sink = ConsoleSink(5)
    sink.text(3, "validation", [{"conversation": "\n".join(f"line {n}" for n in range(30))}])
    out = capsys.readouterr().out
    assert "line 23" in out and "line 24" not in out and "... and 6 more lines" in out


def test_the_bar_of_a_resumed_run_begins_where_it_goes_on_and_moves_with_the_steps(monkeypatch):
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    sink = ConsoleSink(20, first_step=7)
    (task,) = sink._progress.tasks
    assert (task.completed, task.total) == (7, 20)
    for step in (8, 9):
        sink.log(step, step_values(step))
        assert task.completed == step
    sink.close()
    assert sink._progress.live.is_started is False
