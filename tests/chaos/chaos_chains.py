"""Chains of cases, that one run takes one after another, and what each of them must come to."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest
from chaos_cases import CASES, CUT, DISKS, FILES, NAMED, OUT_OF_MEMORY, PHASES, Case
from chaos_runs import CONTROL_GROUPS, STEPS, Chaos, Result
from document import TIMES
from job_harness import Inputs
from ray_machines import can_lay_cables, side_by_side, with_a_cable

Undisturbed = Callable[..., Result]


def chains_of(file: str) -> pytest.MarkDecorator:
    """Parametrizes the test of test_chaos_FILE.py by the chains of those who are struck in it."""
    slow = [case for case in CASES if not case.fast and case.who in FILES[file]]
    return pytest.mark.parametrize(
        "chain", [pytest.param(chain, id=named(chain), marks=needs(chain)) for chain in chains(slow)]
    )


def chains(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases that one run takes one after another, each when it has got over the last."""

    def kind(case: Case) -> tuple[str, ...]:
        if case.then == NAMED or case.who in DISKS:
            return case.who, case.how, case.phase  # the run ends with it, or its disk stays as it is then
        if case.strikes_rank_of_engine:
            return case.job, case.who  # each has an engine restarted in the end
        if case.job != "local":
            return (case.job,)  # a cluster, or an engine, takes long to start
        return case.who, case.how

    order = list(PHASES)
    for _, found in groupby(sorted(cases, key=kind), kind):
        yield sorted(found, key=lambda case: order.index(case.phase))


def named(chain: list[Case]) -> str:
    if len(chain) == 1:
        return chain[0].name
    return f"{chain[0].who} {chain[0].how}" if len({case.how for case in chain}) == 1 else chain[0].job


def needs(chain: list[Case]) -> list[pytest.MarkDecorator]:
    """What the machine must have for it."""
    lacks = {
        "clock": ("a C compiler", shutil.which("cc") is None),
        CUT: ("the right to make networks", not can_lay_cables()),
        OUT_OF_MEMORY: ("control groups of memory", not os.access(CONTROL_GROUPS / "tasks", os.W_OK)),
        **dict.fromkeys(DISKS, ("the right to mount", CANNOT_MOUNT)),
    }
    return [
        pytest.mark.skipif(lack, reason=f"needs {what}")
        for word, (what, lack) in lacks.items()
        if word in (chain[0].who, chain[0].how)
    ]


CANNOT_MOUNT = os.system("unshare -m true 2> /dev/null") != 0


def take(
    chain: list[Case], inputs: Inputs, undisturbed: Undisturbed, folder: Path, steps: int = STEPS
) -> Chaos:
    """Strike a run as the cases say: it comes back each time and ends as if nothing had been, or says why."""
    kind, with_clock = chain[0].job, any(case.who == "clock" for case in chain)
    disk = DISKS.get(chain[0].who, "")
    machines = side_by_side if chain[0].how != CUT else with_a_cable
    with machines() if kind == "Ray" else contextlib.nullcontext() as cluster:
        chaos = Chaos(inputs, folder, disk, with_clock, kind, cluster, steps)
        if chain[0].then == NAMED:
            chaos.run_to_the_cause(chain[0])
        else:
            chaos.run(chain).check_equal(undisturbed(kind, steps))
    note_times(chain, chaos.took_s)
    return chaos


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
