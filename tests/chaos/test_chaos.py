"""Whatever is struck, in whichever phase: the run comes back or ends with the cause, and leaves nothing."""

import contextlib
import fcntl
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest
from chaos_cases import CASES, CUT, DISKS, NAMED, OUT_OF_MEMORY, PHASES, Case
from chaos_runs import CONTROL_GROUPS, Chaos, Result, make_inputs
from document import PAGE, TIMES, with_table
from ray_machines import can_lay_cables, side_by_side, with_a_cable

SLOW = [case for case in CASES if not case.fast and case.who not in DISKS]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory) -> Callable[[str], Result]:
    """What a job of a kind gives that nobody strikes; but for vLLM that of the local launcher."""

    @functools.cache
    def of(kind: str) -> Result:
        return Chaos(inputs, tmp_path_factory.mktemp("undisturbed"), kind=kind).run()

    return lambda kind: of(kind if kind == "vLLM" else "local")


def chains(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases that one run takes one after another, each when it has got over the last."""

    def kind(case: Case) -> tuple[str, str]:
        if case.job != "local" and case.then != NAMED:
            return case.job, ""  # a cluster, or an engine, takes long to start
        return case.who, case.how

    order = list(PHASES)
    for _, found in groupby(sorted(cases, key=kind), kind):
        yield sorted(found, key=lambda case: order.index(case.phase))


def named(chain: list[Case]) -> str:
    return f"{chain[0].who} {chain[0].how}" if len({case.how for case in chain}) == 1 else chain[0].job


def needs(chain: list[Case]) -> list[pytest.MarkDecorator]:
    """What the machine must have for it."""
    lacks = {
        "clock": ("a C compiler", shutil.which("cc") is None),
        CUT: ("the right to make networks", not can_lay_cables()),
        OUT_OF_MEMORY: ("control groups of memory", not os.access(CONTROL_GROUPS / "tasks", os.W_OK)),
    }
    return [
        pytest.mark.skipif(lack, reason=f"needs {what}")
        for word, (what, lack) in lacks.items()
        if word in (chain[0].who, chain[0].how)
    ]


def take(chain: list[Case], inputs, undisturbed: Callable[[str], Result], folder: Path) -> None:
    kind, with_clock = chain[0].job, any(case.who == "clock" for case in chain)
    machines = side_by_side if chain[0].how != CUT else with_a_cable
    with machines() if kind == "Ray" else contextlib.nullcontext() as cluster:
        chaos = Chaos(inputs, folder, with_clock=with_clock, kind=kind, cluster=cluster)
        if chain[0].then == NAMED:
            chaos.run_to_the_cause(chain[0])
        else:
            chaos.run(chain).check_equal(undisturbed(kind))
    note_times(chain, chaos.took_s)


def note_times(chain: list[Case], took_s: list[float]) -> None:
    """Into the file that the page's table is made of, if that is asked for."""
    if os.environ.get("CHAOS_TIMES"):
        names = {case.name for case in CASES}
        with TIMES.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # tests may run side by side
            known = {name: x for name, x in json.load(file).items() if name in names}
            known |= {case.name: round(x, 1) for case, x in zip(chain, took_s, strict=True)}
            file.seek(0)
            file.truncate()
            file.write(json.dumps(known, indent=1, sort_keys=True) + "\n")


def test_the_page_has_the_table_of_the_cases():
    assert json.loads(TIMES.read_text()).keys() == {case.name for case in CASES}
    assert with_table(PAGE.read_text()) == PAGE.read_text(), "run tests/chaos/document.py"


@pytest.mark.timeout(900)
def test_a_dozen_strikes_in_one_run_change_nothing(inputs, undisturbed, tmp_path):
    take([case for case in CASES if case.fast], inputs, undisturbed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "chain", [pytest.param(chain, id=named(chain), marks=needs(chain)) for chain in chains(SLOW)]
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
        chaos.run([case]).check_equal(undisturbed("local"))
    note_times([case], chaos.took_s)
