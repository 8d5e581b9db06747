"""Four strikes in one run, and the table of all cases. The others are in test_chaos_FILE.py."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from chaos_cases import CASES, FILES
from chaos_chains import take
from chaos_runs import FEW_STEPS, STEPS, Result
from document import PAGE, TIMES, with_table


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
def test_four_strikes_in_one_run_change_nothing(inputs, undisturbed, tmp_path):
    take([case for case in CASES if case.fast], inputs, undisturbed, tmp_path, FEW_STEPS)
