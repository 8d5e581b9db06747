"""One traced run with most features on: its trace, its profiles, and the names of its metrics against the
documentation."""

import ast
import gzip
import itertools
import json
import re
from pathlib import Path

import pytest
from job_harness import Inputs, overrides, run_job
from package_sources import package_nodes

from siirl.observe.metrics import todays_name

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
TRACED = (1, 3)
PROFILED = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    inputs = Inputs.make(tmp_path_factory.mktemp("inputs"))
    return run_job(
        2,
        overrides(
            inputs,
            tmp_path_factory.mktemp("traced"),
            "trainer.trace=True",
            f"trainer.trace_steps=[{','.join(map(str, TRACED))}]",
            "actor_rollout_ref.actor.use_kl_loss=True",
            "actor_rollout_ref.actor.entropy_coeff=0.01",
            "trainer.balance_batch=True",
            "trainer.save_freq=3",
            "trainer.export_hf=False",
            "profiler.enable=True",
            f"profiler.profile_steps=[{PROFILED}]",
            "profiler.all_ranks=True",
            "profiler.roles=[train_actor]",
        ),
    )


@pytest.fixture(scope="module")
def intervals(run):
    """(rank, lane, depth, name, start, end, args) in order of their ends; none is left open."""
    with gzip.open(run.output / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    found, stacks = [], {}
    for event in events:
        if event["ph"] not in "BE":
            continue
        where = (event["pid"], event["tid"])
        stack = stacks.setdefault(where, [])
        if event["ph"] == "B":
            stack.append(event)
        else:
            begun = stack.pop()
            assert begun["ts"] <= event["ts"]
            span = (begun["name"], begun["ts"], event["ts"], event["args"])
            found.append((event["pid"], lanes[where], len(stack), *span))
    assert not any(stacks.values())
    return found


def test_every_rank_has_its_instructions_in_the_trace_of_the_asked_steps(intervals):
    for rank in (0, 1):
        mine = [x for x in intervals if x[:3] == (rank, "instructions", 0)]
        assert {x[6]["step"] for x in mine} == set(TRACED)
        trained = [x for x in mine if x[3] == "actor_train"]
        assert [x[6]["step"] for x in trained] == list(TRACED)
        assert all(x[6]["rows"] > 0 and x[6]["tokens"] > 0 for x in trained)
        names = {x[3] for x in mine}
        assert names >= {"load", "weight_sync", "rollout_actor", "reshard", "checkpoint", "report"}
        assert all(later[4] >= earlier[5] - 1 for earlier, later in itertools.pairwise(mine))
    assert any(x[3] == "score" and x[1] != "instructions" for x in intervals), "rewards have a lane"


def test_phases_lie_inside_their_instructions(intervals):
    parts = {(x[3], x[1]) for x in intervals if x[2] > 0}
    names = {name for name, _ in parts}
    assert names >= {"micro_batch", "optimizer_step", "prefill", "decode", "transfer", "headers", "rows"}
    sent = [x[6]["bytes"] for x in intervals if x[3] == "transfer"]
    assert len(set(sent)) == 1 and sent[0] > 1000


def test_ranks_share_a_clock(intervals):
    """Nobody leaves an exchange of headers before all have entered it."""
    by_rank = [[x for x in intervals if x[0] == rank and x[3] == "headers"] for rank in (0, 1)]
    assert len(by_rank[0]) == len(by_rank[1]) > 0
    for one, other in zip(*by_rank, strict=True):
        late_us = max(one[4], other[4]) - min(one[5], other[5])
        assert late_us < 20_000, "half a round trip of the start, on a busy machine"


def test_each_rank_has_a_profile_of_the_asked_node_alone_in_the_asked_step(run):
    folder = run.output / "profile"
    names = [f"step_{PROFILED}_rank_{rank}_actor_train.pt.trace.json.gz" for rank in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        with gzip.open(folder / name, "rt") as file:
            events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
        ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        assert {"actor_train", "micro_batch", "optimizer_step"} <= ranges
        assert not {"rollout_actor", "decode", "actor_old_log_prob", "reshard"} & ranges
        (node,) = (event for event in events if event["name"] == "actor_train")
        ops = [event for event in events if event["name"].startswith("aten::")]
        assert {"aten::mm", "aten::_fused_adamw_"} <= {op["name"] for op in ops}
        assert all(node["ts"] <= op["ts"] <= node["ts"] + node["dur"] for op in ops)


@pytest.mark.slow
def test_a_run_with_profiles_computes_what_one_without_does(tmp_path):
    inputs = Inputs.make(tmp_path / "inputs")
    asked = (
        "profiler.enable=True",
        "profiler.profile_steps=[1,3]",
        "profiler.ranks=[1]",
        f"profiler.save_path={tmp_path / 'elsewhere'}",
        "profiler.with_memory=True",
        "profiler.record_shapes=True",
    )
    runs = {
        name: run_job(2, overrides(inputs, tmp_path / name, "trainer.val_before_train=False", *more))
        for name, more in {"without": (), "profiled": asked}.items()
    }
    own = ("time", "memory", "perf", "reward/scoring_s")
    without, profiled = (
        [{name: value for name, value in line.items() if not name.startswith(own)} for line in run.lines]
        for run in runs.values()
    )
    assert len(without) == 3 and without == profiled
    for name, weight in runs["without"].weights().items():
        assert weight.equal(runs["profiled"].weights()[name]), name
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == [
        f"step_{step}_rank_1.pt.trace.json.gz" for step in (1, 3)
    ]
    assert not (tmp_path / "profiled" / "profile").exists()


def documented() -> dict[str, re.Pattern]:
    """Metric names of the documentation -> what they stand for; <x> is any text."""
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell) if "." not in name]
    metrics = [name for name in names if "/" in name and name.islower()]
    return {name: re.compile(re.sub(r"<[^>]+>", ".+", re.escape(name))) for name in metrics}


def test_every_metric_of_a_run_is_documented(run):
    patterns = documented().values()
    names = {todays_name(name) for line in run.lines for name in line} - {"step", "time_s"}
    assert len(names) > 50
    unknown = sorted(name for name in names if not any(p.fullmatch(name) for p in patterns))
    assert not unknown, f"add them to {PAGE.name}"


def reported() -> set[str]:
    """Names that the source gives to metrics, as far as they are written out."""
    found = set()
    for in_file in package_nodes().values():
        for node in in_file:
            match node:
                case ast.Call(func=ast.Attribute(attr="mean" | "sum" | "max" | "min"), args=[name, *_]):
                    if isinstance(name, ast.Constant) and isinstance(name.value, str):
                        found.add(name.value)
    return found


def test_every_metric_that_the_source_names_is_documented():
    names = documented()
    unknown = sorted(
        name for name in reported() if not any(known == name or known.endswith("/" + name) for known in names)
    )
    assert not unknown, f"add them to {PAGE.name}"


def test_every_documented_metric_is_named_in_the_source():
    text = "".join(file.read_text() for file in (ROOT / "siirl").rglob("*.py"))
    endings = {name: name.rsplit("/", 1)[-1].removesuffix("_s") for name in documented() if "<" not in name}
    stale = [name for name, ending in endings.items() if ending not in text]
    assert not stale, "the documentation names metrics that nothing reports"
