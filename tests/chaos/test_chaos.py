"""Whatever is struck, in whichever phase: the run comes back or ends with the cause, and leaves nothing."""

import json
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from chaos_cases import CASES, DISKS, NAMED, PHASES, Case
from chaos_runs import Chaos, Result, make_inputs
from document import PAGE, TIMES, with_table

SLOW = [case for case in CASES if not case.fast and case.who not in DISKS]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory) -> Result:
    return Chaos(inputs, tmp_path_factory.mktemp("undisturbed")).run()


def chains(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases that one run takes one after another, each when it has got over the last."""

    def kind(case: Case) -> tuple[str, str]:
        return case.who, case.how

    order = list(PHASES)
    for _, found in groupby(sorted(cases, key=kind), kind):
        yield sorted(found, key=lambda case: order.index(case.phase))


def named(chain: list[Case]) -> str:
    return f"{chain[0].who} {chain[0].how}"


def take(chain: list[Case], inputs, undisturbed: Result, folder: Path) -> None:
    chaos = Chaos(inputs, folder)
    chaos.run(chain).check_equal(undisturbed)
    note_times(chain, chaos.took_s)


def note_times(chain: list[Case], took_s: list[float]) -> None:
    """Into the file that the page's table is made of, if that is asked for."""
    if os.environ.get("CHAOS_TIMES"):
        names = {case.name for case in CASES}
        known = {name: x for name, x in json.loads(TIMES.read_text()).items() if name in names}
        known |= {case.name: round(x, 1) for case, x in zip(chain, took_s, strict=True)}
        TIMES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def test_the_page_has_the_table_of_the_cases():
    assert json.loads(TIMES.read_text()).keys() == {case.name for case in CASES}
    assert with_table(PAGE.read_text()) == PAGE.read_text(), "run tests/chaos/document.py"


def test_a_dozen_strikes_in_one_run_change_nothing(inputs, undisturbed, tmp_path):
    take([case for case in CASES if case.fast], inputs, undisturbed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "chain", list(chains([case for case in CASES if not case.fast and case.who not in DISKS])), ids=named
)
def test_a_run_that_is_struck_again_and_again_ends_as_if_nothing_had_been(
    chain, inputs, undisturbed, tmp_path
):
    take(chain, inputs, undisturbed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(os.system("unshare -m true 2> /dev/null") != 0, reason="needs the right to mount")
@pytest.mark.parametrize("case", [case for case in CASES if case.who in DISKS], ids=lambda case: case.name)
def test_a_disk_that_takes_no_more_is_named_or_done_without(case, inputs, undisturbed, tmp_path):
    chaos = Chaos(inputs, tmp_path, DISKS[case.who])
    if case.then == NAMED:
        chaos.run_to_the_cause(case)
    else:
        chaos.run([case]).check_equal(undisturbed)
    note_times([case], chaos.took_s)
