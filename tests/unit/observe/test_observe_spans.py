"""Phases, notes and traces: what engines and links report about themselves."""

import gzip
import json
import subprocess
import sys
import threading
import time

import pytest

from siirl.cli import main
from siirl.errors import DataError
from siirl.observe.metrics import Metrics
from siirl.observe.spans import Observer, add_phase, note, observing, phase
from siirl.observe.trace import TraceFile, merge_trace


def events_of(output_dir) -> list[dict]:
    """Events of a merged trace, which must be JSON as a whole."""
    with gzip.open(merge_trace(output_dir), "rt") as file:
        return json.load(file)["traceEvents"]


def traced(output_dir, rank=0, **options) -> Observer:
    zero_s = time.perf_counter()
    return Observer(trace=TraceFile(output_dir / "trace", rank, f"rank {rank}", zero_s, **options))


def intervals(events: list[dict]) -> list[tuple[str, int, dict]]:
    """(name, depth, args) of begin/end pairs in order of their begins; checks that they nest, in time too."""
    found, open_now = [], {}
    for event in events:
        stack = open_now.setdefault((event["pid"], event.get("tid")), [])
        if event["ph"] == "B":
            entry = [event["name"], len(stack), None, event["ts"]]
            stack.append(entry)
            found.append(entry)
        elif event["ph"] == "E":
            entry = stack.pop()
            assert event["ts"] >= entry[3]
            entry[2] = event["args"]
    return [tuple(entry[:3]) for entry in found]


def test_phases_and_notes_do_nothing_without_an_observer():
    with phase("decode", rows=3):
        note(tokens=5)
        add_phase("prefill", 0.0, 1.0)


def test_phases_are_booked_under_the_span_around_them_and_summed():
    observer = Observer()
    with observing(observer):
        observer.begin_step()
        with observer.span("rollout", 1):
            for _ in range(2):
                with phase("decode"), phase("attention"):
                    time.sleep(0.001)
            add_phase("prefill", 10.0, 10.5)
    with phase("elsewhere"):
        pass
    values = observer.metrics().values()
    assert values["time/rollout/prefill_s"] == 0.5
    assert 0.002 <= values["time/rollout/decode/attention_s"] <= values["time/rollout/decode_s"]
    assert values["time/rollout/decode_s"] <= values["time/rollout_s"]
    assert values["time/overhead_s"] < values["time/step_s"] - 0.002, "phases are not counted twice"
    assert not [name for name in values if "elsewhere" in name]


def test_a_trace_has_a_lane_for_each_rank_and_nested_intervals_with_their_args(tmp_path):
    for rank in (0, 1, 10):
        observer = traced(tmp_path, rank)
        with observing(observer), observer.span("weight_sync", 3, link="agent_0.weights"):
            with phase("gather", tensors=2):
                note(bytes=7)
            note(version=4)
        observer.close()
    events = events_of(tmp_path)
    assert [event["pid"] for event in events if event.get("name") == "process_name"] == [0, 1, 10]
    assert {event["args"]["name"] for event in events if event.get("name") == "thread_name"} == {
        "instructions"
    }
    of_rank_1 = [event for event in events if event["pid"] == 1 and event["ph"] in "BE"]
    assert intervals(of_rank_1) == [
        ("weight_sync", 0, {"step": 3, "link": "agent_0.weights", "version": 4}),
        ("gather", 1, {"tensors": 2, "bytes": 7}),
    ]


def test_only_the_asked_steps_are_traced(tmp_path):
    observer = traced(tmp_path, steps=(2,))
    with observing(observer):
        for step in (1, 2, 3):
            with observer.span(f"node_{step}", step), phase(f"phase_{step}"):
                add_phase(f"added_{step}", 0.0, 1.0)
    names = {event["name"] for event in events_of(tmp_path) if event["ph"] in "BX"}
    assert names == {"node_2", "phase_2", "added_2"}
    assert len(observer.spans) == 9, "measured all the same"


def test_where_nobody_says_which_a_few_steps_of_the_attempt_are_traced_in_a_bounded_file(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("siirl.observe.trace.FEW_BYTES", 700)
    observer, sizes = traced(tmp_path, steps=None), []
    with observing(observer):
        with observer.span("start", 0):
            pass
        for step in range(41, 251):  # it goes on from a checkpoint
            observer.begin_step(step)
            with observer.span("rollout", step), phase("decode"):
                pass
            sizes.append((tmp_path / "trace" / "rank_0.jsonl").stat().st_size)
    events = events_of(tmp_path)
    written = [n for n, size in enumerate(sizes, 1) if n == 1 or size != sizes[n - 2]]
    assert written == [1, 2, 3, 10, 20, 50, 100, 200]
    assert max(sizes) < 2 * 700 and sizes[-1] < max(sizes)
    assert [e["args"]["step"] for e in events if e["ph"] == "E" and "step" in e["args"]][-1] == 240
    assert {e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]} == {
        "rank 0",
        "instructions",
    }


def test_other_threads_have_lanes_of_their_own_and_do_not_disturb_the_step(tmp_path):
    observer = traced(tmp_path)

    def serve():
        with phase("request"):
            note(tokens=1)

    with observing(observer), observer.span("rollout", 1):
        thread = threading.Thread(target=serve, name="server")
        thread.start()
        thread.join()
    assert [span.name for span in observer.spans] == ["rollout"]
    events = events_of(tmp_path)
    lanes = {e["args"]["name"]: e["tid"] for e in events if e.get("name") == "thread_name"}
    begun = {event["name"]: event["tid"] for event in events if event["ph"] == "B"}
    assert begun == {"rollout": lanes["instructions"], "request": lanes["server"]}


def test_what_a_dead_rank_was_doing_is_in_the_merged_trace(tmp_path, capsys):
    observer = traced(tmp_path)
    span = observer.span("actor_train", 7)
    span.__enter__()  # and killed: nothing is closed
    with (tmp_path / "trace" / "rank_0.jsonl").open("a") as file:
        file.write('{"ph":"E","ts":12')
    assert main(["trace", str(tmp_path)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert intervals(events_of(tmp_path)) == [("actor_train", 0, None)]


def test_merging_without_a_trace_names_the_folder(tmp_path, capsys):
    with pytest.raises(DataError, match=r"trace has no rank_\*\.jsonl.*trainer\.trace=false"):
        merge_trace(tmp_path)
    assert main(["trace", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, monkeypatch, caplog):
    observer = traced(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("siirl.observe.trace.os.write", full)
    for step in (1, 2):
        with observer.span("node", step):
            pass
    assert caplog.text.count("the trace ends here") == 1
    assert len(observer.spans) == 2
    observer.close()


def test_a_span_that_fails_still_ends(tmp_path):
    observer = traced(tmp_path)
    with observing(observer), pytest.raises(RuntimeError), observer.span("node", 1), phase("part"):
        raise RuntimeError
    assert [entry[2] is not None for entry in intervals(events_of(tmp_path))] == [True, True]
    assert [span.name for span in observer.spans] == ["node/part", "node"]


TWO_STEPS = """
from pathlib import Path
from siirl.observe.memory_probe import HostMemory
try:
    Path("/proc/self/clear_refs").write_text("5")
except OSError:
    raise SystemExit("the kernel keeps its peak")
memory = HostMemory()
memory.begin_step()
block = bytearray(b"x") * (64 << 20)
first = memory.metrics().values()["memory/host_peak_gib"]
del block
memory.begin_step()
second = memory.metrics().values()
print(first, second["memory/host_peak_gib"], second["memory/host_gib"])
"""


def test_the_peak_of_host_memory_is_that_of_the_step():
    """In a process of its own: what other tests have left in this one allocates as it likes."""
    done = subprocess.run([sys.executable, "-c", TWO_STEPS], capture_output=True, text=True, timeout=60)
    if "keeps its peak" in done.stderr:
        pytest.skip("this kernel does not let a process reset its peak of memory")
    first, second, now = map(float, done.stdout.split())
    assert first - second > 0.05
    assert now <= second


class Meter:
    """Records which spans an observer encloses."""

    def __init__(self):
        self.calls = []

    def begin_step(self):
        self.calls.append("step")

    def begin(self):
        self.calls.append("begin")

    def end(self, name, traced):
        self.calls.append(name)
        return {"peak_gib": 1.5}

    def sample(self):
        self.calls.append("sample")

    def metrics(self):
        out = Metrics()
        out.max("memory/peak_gib", 1.5)
        return out


def test_memory_is_measured_around_outermost_spans_only():
    meter = Meter()
    observer = Observer(memory=meter)
    observer.begin_step()
    with observing(observer), observer.span("validation", 1), observer.span("rollout", 1), phase("decode"):
        observer.sample_memory()
    assert meter.calls == ["step", "begin", "sample", "validation"]
    assert observer.metrics().values()["memory/peak_gib"] == 1.5
