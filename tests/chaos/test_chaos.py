"""Four strikes in one run, and the table of all cases. The others are in test_chaos_FILE.py."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
from chaos_cases import CASES, FAST, FILES
from chaos_chains import take
from chaos_runs import FEW_STEPS, STEPS, Result
from document import PAGE, TIMES, with_table

from siirl.cli import main
from siirl.main_dag import main as run
from siirl.runs.run_state import read_run


def test_the_page_has_the_table_of_the_cases():
    assert json.loads(TIMES.read_text()).keys() == {case.name for case in CASES}
    assert with_table(PAGE.read_text()) == PAGE.read_text(), "run tests/chaos/document.py"


def test_who_is_struck_is_in_one_file():
    struck = [who for found in FILES.values() for who in found]
    assert sorted(struck) == sorted({case.who for case in CASES})
    assert {path.stem for path in Path(__file__).parent.glob("test_chaos_*.py")} == {
        f"test_chaos_{file}" for file in FILES
    }


@pytest.mark.parametrize(
    ("metric", "differs_by", "equal"),
    [
        ("actor/loss", 0.0, True),
        ("actor/loss", 1e-9, False),
        ("actor/rollout_log_prob_diff", 1e-7, True),
        ("actor/rollout_log_prob_diff", 1e-4, False),
    ],
)
def test_results_are_equal_but_for_what_rounding_changes(metric, differs_by, equal):
    """In the last step something differs."""
    lines = [{"step": step, metric: 0.5, "none": None} for step in range(1, STEPS + 1)]
    expected = Result(lines, {f"layer_{index}": torch.ones(2) for index in range(6)})
    changed = Result([*lines[:-1], lines[-1] | {metric: 0.5 + differs_by}], expected.weights)
    with contextlib.nullcontext() if equal else pytest.raises(AssertionError):
        changed.check_equal(expected)


@pytest.mark.timeout(900)
def test_four_strikes_in_one_run_change_nothing(inputs, undisturbed, tmp_path, capsys):
    """And what is said of the one that ended an attempt, by the launcher, in the folder, and by commands."""
    struck = {(case.who, case.phase, case.how): case for case in CASES}
    chain = [struck[strike] for strike in FAST]
    chaos = take(chain, inputs, undisturbed, tmp_path, FEW_STEPS)
    console, output = chaos.console, chaos.output
    assert "siirl: attempt 1 failed: rank 1 on " in console and "killed by SIGKILL" in console
    assert "siirl: the run goes on from global_step_3 in memory" in console, console
    assert "(restart 1 of at most 3 without a new checkpoint)" in console
    assert not Path(json.loads((output / "job.json").read_text())["memory_dir"]).exists()
    logs = [(folder / "logs" / "rank_0.log").read_text() for folder in (output / "attempts" / "1", output)]
    assert [re.findall(r"resumed from .*global_step_(\d)", log) for log in logs] == [["2"], ["3"]]
    (attempt,) = chaos.attempts()
    assert (attempt["rank"], attempt["cause"]) == (1, "killed by SIGKILL")
    state = read_run(output)
    assert (state.status, state.starts, len(state.attempts)) == ("ended", 2, 1)
    assert main(["watch", str(output), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "after 1 that failed\n" in shown and ": killed by SIGKILL; went on from global" in shown
    assert main(["ls", str(tmp_path), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert [attempt["cause"] for attempt in listed["attempts"]] == ["killed by SIGKILL"]
    changed = [*chaos.keys, "actor_rollout_ref.actor.optim.lr=0.5", "trainer.total_training_steps=99"]
    assert run(changed) == 2
    said = capsys.readouterr().err
    assert "actor_rollout_ref.actor.optim.lr: 0.01 in the checkpoint, 0.5 now\n" in said
    assert "trainer.resume_changed=true" in said and "total_training_steps" not in said
