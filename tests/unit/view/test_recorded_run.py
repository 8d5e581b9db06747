"""The page of a recorded run of four agents on eight ranks, opened in a real browser, held against its files.

The run was made by eight processes on a CPU; docs/evidence/dashboard.md has its command.
"""

import gzip
import json
import re
import tarfile
from itertools import pairwise
from pathlib import Path

import pytest
from page_browser import opened_tab
from viewed_runs import write_error

from siirl.compiler.plan_instructions import Serve
from siirl.runs.rank_now import Doing, doing
from siirl.runs.run_files import read_plan
from siirl.runs.run_state import RankState
from siirl.view.view_page import export

RECORDED = Path(__file__).parent / "recorded" / "eight_ranks.tar.gz"
AGENTS = ("solver", "checker", "editor", "verifier")
STEPS, ROWS = (11, 12, 13), 64
"""Traced steps; 16 prompts of four samples each."""

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]


@pytest.fixture
def folder(tmp_path):
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path / "run", filter="data")
    return tmp_path / "run"


@pytest.fixture
def page(folder, tmp_path):
    with opened_tab(tmp_path / "profile") as tab:
        tab.open(export([folder], tmp_path / "page.html").as_uri())
        tab.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")
        yield tab


def shown(tab, section, script):
    """What a script gives of a section."""
    return tab.value(f"(async () => {{ await show('{section}'); await page.written; return {script}; }})()")


def each(tab, selector, what="one.textContent") -> list:
    """Of the elements that a selector finds in the section that is shown."""
    return tab.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => {what})")


def cells(tab, table, *columns) -> list[list[str]]:
    """The rows of a table."""
    texts = each(tab, f"{table} tr", "[...one.cells].map(cell => cell.textContent)")
    return [[row[column] for column in columns] for row in texts[1:]]


def painted(tab, color) -> list[str]:
    """Nodes of a colour."""
    nodes = each(tab, "[data-node]", "[one.dataset.node, one.style.fill]")
    return [name for name, fill in nodes if fill == color]


def events(folder, step) -> list[tuple[int, str, dict]]:
    """(rank, name, arguments) of the outermost intervals of a step, as the ranks wrote them."""
    found, open_spans = [], {}
    for line in gzip.decompress((folder / "trace.json.gz").read_bytes()).decode().splitlines():
        if not line.startswith('{"ph":'):
            continue
        event = json.loads(line.rstrip(",\n"))
        stack = open_spans.setdefault((event["pid"], event.get("tid")), [])
        if event["ph"] == "B":
            stack.append(event["name"])
        elif event["ph"] == "E":
            name = stack.pop()
            if not stack and event["args"].get("step") == step:
                found.append((event["pid"], name, event["args"]))
    return found


def test_the_timeline_has_what_each_of_eight_ranks_did(page, folder):
    lanes = shown(page, "timeline", "run().timeline.lanes.filter(lane => lane.lane === 'instructions')")
    assert [lane["rank"] for lane in lanes] == list(range(8))
    for step in STEPS:
        of_page = [
            (lane["rank"], name)
            for lane in lanes
            for name, _, _, depth, _, args in lane["spans"]
            if depth == 0 and args.get("step") == step
        ]
        assert sorted(of_page) == sorted((rank, name) for rank, name, _ in events(folder, step))
    titles = each(page, "#lanes > text", "one.lastChild.textContent")
    assert [title for title in titles if re.fullmatch(r"rank \d", title)] == [f"rank {n}" for n in range(8)]
    drawn = each(page, "#lanes .span", "one.dataset.name")
    assert {"solver", "serve", *(f"train_{name}" for name in AGENTS)} <= set(drawn)
    page.value("document.getElementById('lanes').focus()")
    for key in ("ArrowRight", "ArrowRight"):
        page.press(key)
    assert "rank 0" in page.value("document.querySelector('.bar [role=status]').textContent")


def test_a_rank_that_answers_turns_is_at_the_agent_that_speaks_there(folder):
    plan = read_plan(folder)
    (serve,) = (at for at, ins in enumerate(plan.instructions) if isinstance(ins, Serve))
    ranks = [RankState(rank, 13, "serve", 0.0, "", "step", (0, serve, 0, serve)) for rank in range(2, 8)]
    found = [doing(plan, ranks)[rank] for rank in range(2, 8)]
    assert found == [Doing("runs", name) for name in ("checker", "editor", "verifier") for _ in range(2)]


def test_the_dag_has_rows_bytes_and_weights_on_its_arrows(page, folder):
    listed = shown(page, "dag", "run().dag.edges")
    nodes = each(page, "[data-node]", "one.dataset.node")
    assert len(nodes) == 16 and {f"{kind}{name}" for name in AGENTS for kind in ("", "train_")} <= set(nodes)
    moved = {}
    for _, name, args in events(folder, STEPS[-1]):
        if name == "reshard":
            moved[args["route"]] = moved.get(args["route"], 0) + args["bytes"]
    assert len(moved) == 3, "rows of all agents but the solver, whose trainer has them, go to other ranks"
    by_name = {tuple(edge["names"]): edge for edge in listed}
    for number, name in enumerate(AGENTS):
        edge = by_name[f"advantage_{name}", f"train_{name}"]
        assert edge["rows"] == ROWS
        assert edge["bytes"] == moved.get(f"agent_{number}.samples/0 -> agent_{number}.samples/1", 0)
    lines = "[...one.querySelectorAll('text')].map(text => text.lastChild.textContent)"
    arrows = dict(each(page, "#picture g[data-edge]", f"[one.dataset.edge, {lines}]"))
    assert arrows["advantage_solver to train_solver"] == ["64 rows"]
    assert all(arrows[f"{name} to reward_{name}"] == ["64 rows"] for name in AGENTS)
    assert all(arrows[f"{one} to {other}"] == ["64 turns"] for one, other in pairwise(AGENTS))
    rows, size = arrows["advantage_checker to train_checker"]
    assert rows == "64 rows" and re.fullmatch(r"[\d.]+ KiB", size)
    weights = each(page, "#picture .weights", "one.lastChild.textContent")
    assert weights == ["weights 12"] * 4, "those after twelve steps sampled the thirteenth"
    ranks = dict(cells(page, "#nodes", 0, 3))
    assert [ranks[name] for name in AGENTS] == ["0-1", "2-3", "4-5", "6-7"]


def test_a_step_can_be_scrubbed_and_says_what_bounds_it(page):
    bound = shown(page, "step", "run().timeline.bounds.at(-1)")
    first = bound["faster"][0]["name"]
    assert bound["step"] == STEPS[-1] and bound["text"].startswith(f"{first} bounds step 13")
    assert each(page, "#bounds") == [bound["text"]]
    assert len(each(page, "#path .span")) == len(bound["path"])
    page.value("slider = document.getElementById('scrub')")
    scrub = "slider.value = {}; slider.dispatchEvent(new Event('input'))"
    start = next(start for _, name, start, _ in bound["path"] if name == "solver") - bound["begin_ms"]
    page.value(scrub.format(start + 5))
    assert "solver on 0, 1" in each(page, "#now")[0]
    busy = painted(page, "rgb(79, 143, 224)")
    assert "solver" in busy and set(busy) <= set(AGENTS), "the others answer turns, or come to it"
    page.value(scrub.format("slider.max"))
    assert len(painted(page, "rgb(63, 155, 108)")) >= 13, "nearly all are done"
    for scheme, bar in (("dark", "light"), ("light", "light dark")):
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        box = "getComputedStyle(document.getElementById('picture'))"
        style = page.value(f"[{box}.colorScheme, {box}.filter]")
        assert style[0] == bar and ("invert" in style[1]) == (scheme == "dark"), (
            "the picture is inverted with its scrollbar, which has to be light for that"
        )


def test_health_has_attempts_engines_errors_and_logs(page, folder, tmp_path):
    shown(page, "health", "0")
    assert each(page, "#panel summary") == [f"rank_{rank}.log" for rank in range(8)]
    assert each(page, "#life")[0].startswith("1 start of this run; no attempt was lost; last heartbeat")
    engines = cells(page, "#engines", 0, 1)
    assert ["perf/idle_s_max", ""] in engines and ["reward/worker_death", "3"] in engines
    assert "No rank has left an error." in each(page, "#panel")[0]
    write_error(folder, 5, "RuntimeError: the editor is lost")
    told = {"run_id": re.search(r"run_id: (.+)", (folder / "run.yaml").read_text())[1], "attempt": 1}
    told |= {"rank": 4, "node": "train_editor", "step": 7, "cause": "killed by SIGKILL", "next": "step 6"}
    (folder / "attempts.jsonl").write_text(json.dumps(told) + "\n")
    page.open(export([folder], tmp_path / "failed.html").as_uri() + "#health")
    page.wait_for("document.getElementById('attempts') !== null")
    assert "killed by SIGKILL" in each(page, "#attempts")[0]
    assert "1 attempt of the last one failed" in each(page, "#life")[0]
    assert each(page, "#panel pre.down") == ["RuntimeError: the editor is lost"]
    opened = each(page, "#panel details[open] > summary")
    assert opened == ["rank_5.log"], "the log of who failed is open"
