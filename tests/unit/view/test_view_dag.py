"""The DAG of the page in a real browser: what each rank does now, and what goes along the edges."""

import pytest
from page_browser import opened_tab
from plan_cases import add_agent, compiled
from viewed_runs import write_error, write_run

from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Run
from siirl.dag.spec import DagBuilder
from siirl.observe.position import AT_END, PositionFile
from siirl.view.view_page import export

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

NODES = """[...document.querySelectorAll('[data-state]')].map(
  one => [one.dataset.node, one.dataset.state, getComputedStyle(one).fill, one.firstChild.textContent])"""
ROWS = "[...document.querySelectorAll('#nodes tr')].map(row => [...row.cells].map(cell => cell.textContent))"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Agents 0 and 1 on ranks 0-3 and 4-7."""
    dag = DagBuilder("two")
    add_agent(dag, 0, placement="0-3")
    add_agent(dag, 1, placement="4-7")
    return compiled(dag.build(), 8)


def stand(folder, plan, rank, name) -> None:
    """A rank comes to a node; "": it has done its part of the step."""
    file = PositionFile(folder / "status" / f"rank_{rank}")
    if name:
        numbers = {ins.node: at for at, ins in enumerate(plan.instructions) if isinstance(ins, Run)}
        file.set(6, name, "step", (0, numbers[name]))
    else:
        file.set(6, "end of step", AT_END, (1,))
    file.close()


def test_a_node_runs_waits_for_whom_is_idle_or_has_failed(tmp_path, plan):
    folder = write_run(tmp_path / "run", world_size=8, plan=plan)
    (folder / "progress.jsonl").unlink()
    for rank, name in enumerate(["train_0", "train_0", "train_0", "reward_0", "rollout_1", "", "", ""]):
        stand(folder, plan, rank, name)
    write_error(folder, 4, "RuntimeError: out of memory")
    with opened_tab(tmp_path / "profile") as tab:
        tab.open(export([folder], tmp_path / "page.html").as_uri() + "#dag")
        tab.wait_for("document.querySelectorAll('[data-state]').length > 0")
        nodes = tab.value(NODES)
        states = {name: state for name, state, _, _ in nodes}
        busy = {"train_0": "waits", "reward_0": "runs", "rollout_1": "failed"}
        assert states == dict.fromkeys(plan.nodes, "idle") | busy
        assert len({color for _, _, color, _ in nodes}) == 4, "each state has a colour of its own"
        assert {name: title.splitlines()[1] for name, _, _, title in nodes}["train_0"] == "0-2 wait for 3"
        assert tab.value("document.getElementById('doing').textContent") == (
            "8 ranks: 1 failed, 1 runs, 3 wait, 3 idle"
        )
        now = {cells[0]: cells[-1] for cells in tab.value(ROWS)}
        assert (now["train_0"], now["reward_0"], now["rollout_0"]) == ("0-2 wait for 3", "3", "")
        tab.value("show('overview')")
        assert "idle until 0-4 are done" in tab.value("document.getElementById('places').textContent")
