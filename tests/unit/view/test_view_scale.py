"""The page of a run of 204 nodes, 4,096 ranks, 2,000 steps and 10,000 conversations, in a real browser."""

import threading
import time

import pytest
from large_run import CONVERSATIONS, NEEDLE, PER_MACHINE, SLOW_RANK, STEPS, WORLD_SIZE, write_large_run
from page_browser import browser_path, opened_tab

from siirl.view.page_server import PageServer
from siirl.view.run_parts import RunParts
from siirl.view.view_page import export

MOST_PAINT_MS, MOST_MIB = 2_000, 300
LOOK = """
const look = () => document.getElementById("state")
  ? requestAnimationFrame(() => requestAnimationFrame(() => { window.shownAt = performance.now(); }))
  : requestAnimationFrame(look);
requestAnimationFrame(look);
"""
"""Notes when the run's state has been painted, in milliseconds since the address was asked for."""
SHOWN = {
    "overview": "#places td",
    "dag": "#picture path[data-node], #nodes td",
    "step": "#path .span",
    "timeline": "#lanes .span",
    "memory": "#memory-bars .span",
    "curves": "figure polyline",
    "conversations": "#episodes .message",
    "health": "details pre",
}
"""Section -> what is there when it is shown."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_500)]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    browser_path()
    return write_large_run(tmp_path_factory.mktemp("large") / "run")


@pytest.fixture(params=["served", "file"])
def address(request, large, tmp_path):
    if request.param == "file":
        yield export([large], tmp_path / "page.html").as_uri()
        return
    with PageServer([large]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def test_a_large_run_is_painted_within_2_s_and_its_page_takes_less_than_300_mb(address, tmp_path):
    with opened_tab(tmp_path / "profile") as tab:
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=LOOK)
        paints = []
        for _ in range(3):  # the best of three: other programs run here, too
            tab.open(address)
            tab.wait_for("location.href !== 'about:blank' && window.shownAt !== undefined")
            paints.append(tab.value("shownAt"))
        print(f"\npainted after {', '.join(f'{at_ms:.0f}' for at_ms in paints)} ms")
        assert min(paints) < MOST_PAINT_MS
        places = tab.value("document.getElementById('places').textContent")
        assert str(WORLD_SIZE // 3)[:2] in places and f"{PER_MACHINE}" in places
        tab.wait_for("document.readyState === 'complete'")
        taken = {}
        for section in tab.value("SECTIONS.map(item => item.id)"):
            began_s = time.monotonic()
            shown = f"location.hash = '{section}'; await show('{section}'); await page.written;"
            tab.value(f"(async () => {{ {shown} }})()")
            taken[section] = time.monotonic() - began_s
            problem = tab.value("document.querySelector('#panel > .down')?.textContent || ''")
            assert problem == "", problem
            assert tab.value("document.querySelectorAll('*').length") < 40_000
            shown = tab.value(f"document.querySelectorAll('{SHOWN[section]}').length")
            assert shown > 0, section
        print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in taken.items()))
        print(f"{tab.memory_mib():.0f} MiB after all sections")
        assert tab.memory_mib() < MOST_MIB


def test_words_are_found_in_ten_thousand_conversations(address, tmp_path):
    with opened_tab(tmp_path / "profile") as tab:
        tab.open(f"{address}#conversations")
        tab.wait_for("document.querySelectorAll('#episodes details').length > 0")
        tab.value("document.querySelector('input[type=search]').focus()")
        tab.call("Input.insertText", text=f"{NEEDLE} {STEPS}.")
        took_s = tab.wait_for(
            f"document.getElementById('panel').textContent.includes('1 of {CONVERSATIONS} conversations')"
        )
        print(f"\nsearched in {took_s:.1f} s, {tab.memory_mib():.0f} MiB")
        assert tab.memory_mib() < MOST_MIB


def test_a_rank_that_comes_late_is_found_among_thousands(large):
    parts = RunParts(large)
    shown = parts.read("timeline").value
    machines = shown["groups"]["machines"]
    assert machines["of"] == WORLD_SIZE // PER_MACHINE and len(machines["lanes"]) <= 64
    assert any(lane["label"].startswith(f"machine {SLOW_RANK // PER_MACHINE}:") for lane in machines["lanes"])
    (bound,) = shown["bounds"][-1:]
    assert SLOW_RANK in {rank for rank, name, _, _ in bound["path"] if name.startswith("rollout")}
    cells = parts.read("overview").value["groups"]["machines"]
    places = parts.read("overview").value["places"]
    behind = [label for label, counts in cells if places[counts[0][0]]["step"] < STEPS]
    assert [label.split(":")[0] for label in behind] == [f"machine {SLOW_RANK // PER_MACHINE}"]
