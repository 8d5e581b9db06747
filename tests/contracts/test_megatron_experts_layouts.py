"""Mixtures of experts under megatron in every layout of up to four ranks: plain HF, and equal replicas.

Layouts of one number of ranks run in one set of processes, a dozen one after the other: the threads of a
layout's process groups stay as long as its processes, and slow down what comes later. Every parameter,
gradient sum and moment that several ranks hold a copy of must be the same on all of them, bit for bit.
"""

import functools
from itertools import product

import pytest
import train_engine_cases as cases
from dist_harness import run_workers
from expert_cases import assert_equal_training, unequal_replicas
from recorded_cases import case_of, record_outcome
from test_megatron_engine import (
    MEGATRON,
    PLAIN_OPTIMIZER,
    SEQUENCE_PARALLEL,
    TOKEN_BUDGET,
    model_dirs,
    options,
    reference,
)
from train_engine_cases import Outcome, Scenario

pytestmark = pytest.mark.timeout(600)  # the first case of a dozen runs all of them
DOZEN = 12
AXES = ("tp", "ep", "etp", "pp", "cp", "vpp")
OVERLAPS = (
    f"+{MEGATRON}.override_ddp_config.overlap_grad_reduce=True",
    f"+{MEGATRON}.override_ddp_config.overlap_param_gather=True",
)


def layout(world: int, model: str, *overrides: str, split: str = "uneven", **sizes: int) -> Scenario:
    """A scenario named after what it is; with tensor parallelism comes sequence parallelism."""
    used = {axis: size for axis, size in sizes.items() if size > 1}
    words = [f"{axis}{size}" for axis, size in used.items()] or ["dp"]
    words += [override.rpartition(".")[2] for override in overrides if override not in TOKEN_BUDGET]
    if used.get("tp"):
        overrides = (*overrides, SEQUENCE_PARALLEL)
    name = f"{model} on {world}: {' '.join(words)}"
    return Scenario(name, world, model, split, overrides, strategy="megatron", sizes=tuple(used.items()))


def fits(world: int, tp: int, ep: int, etp: int, pp: int, cp: int, vpp: int) -> bool:
    pipelined = vpp == 1 or pp > 1
    return pipelined and world % (tp * pp * cp) == 0 and world % (etp * ep * pp) == 0


def every_layout() -> list[Scenario]:
    """Every choice of sizes 1 and 2 on 1, 2 and 4 ranks: both families and optimizers, and allgather."""
    found: list[Scenario] = []
    sizes = product((1, 2, 4), *[(1, 2)] * len(AXES))
    for number, (world, *chosen) in enumerate(each for each in sizes if fits(*each)):
        named = dict(zip(AXES, chosen, strict=True))
        plain, other = ("qwen3_moe", "mixtral") if number % 2 else ("mixtral", "qwen3_moe")
        found.append(layout(world, plain, PLAIN_OPTIMIZER, *TOKEN_BUDGET, **named))
        found.append(layout(world, other, **named))
        if named["pp"] == 1:
            allgather = options(moe_token_dispatcher_type="allgather")
            found.append(layout(world, plain, *allgather, *OVERLAPS, **named))
    return found


FEW = [
    layout(4, "mixtral", PLAIN_OPTIMIZER, tp=2, ep=2, pp=2),
    layout(4, "qwen3_moe", *TOKEN_BUDGET, *OVERLAPS, ep=2, etp=2, cp=2),
]
EVERY = every_layout()


def batch_of(case: Scenario, few: bool) -> int:
    """Which dozen of the layouts of as many ranks a case is in."""
    return [x.name for x in (FEW if few else EVERY) if x.world == case.world].index(case.name) // DOZEN


@functools.cache
def outcomes(world: int, few: bool, batch: int) -> dict[str, tuple[Outcome, list[str]]]:
    chosen = [
        case for case in (FEW if few else EVERY) if case.world == world and batch_of(case, few) == batch
    ]
    return run_workers(train_all, world, chosen, model_dirs(), deadline_s=300)[0]


def train_all(rank: int, world: int, layouts: list[Scenario], paths: dict[str, str]) -> dict:
    found = {}
    for case in layouts:
        engine, groups = cases.build_engine(case, paths[case.model])
        found[case.name] = (cases.train(engine, case), unequal_replicas(engine))
        cases.release(groups)
    return found if rank == 0 else {}


def check(case: Scenario, few: bool) -> None:
    ours, unequal = outcomes(case.world, few, batch_of(case, few))[case.name]
    assert unequal == []
    assert_equal_training(ours, theirs := reference(case.model))
    record_outcome(case_of(case.model, case), ours, theirs)


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_experts_in_some_layouts_equal_plain_hf_and_their_copies_each_other(case):
    check(case, few=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_experts_in_every_layout_equal_plain_hf_and_their_copies_each_other(case):
    check(case, few=False)
