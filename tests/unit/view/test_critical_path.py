"""The critical path of a traced step, against schedules whose durations are known."""

import itertools
import random

import pytest

from siirl.view.critical_path import BETWEEN, Part, bounds, replay

MEETING = ("reshard", "train")


def drawn(seed: int) -> tuple[int, list[tuple[str, tuple[int, ...], dict[int, float]]]]:
    """(number of ranks, instructions in their one order: name, ranks, seconds on each)"""
    dice = random.Random(seed)
    num_ranks = dice.randrange(1, 6)
    program = []
    for _ in range(dice.randrange(1, 20)):
        ranks = tuple(sorted(dice.sample(range(num_ranks), dice.randrange(1, num_ranks + 1))))
        name = dice.choice(["rollout", "reward", *MEETING])
        program.append((name, ranks, {rank: dice.choice([0.0, 1.0, dice.random() * 3]) for rank in ranks}))
    return num_ranks, program


def schedule(num_ranks, program, faster="") -> list[Part]:
    """What a trace of it would have: an instruction that meets is entered when its rank is free."""
    clock, parts = [0.0] * num_ranks, []
    for name, ranks, seconds in program:
        met = max(clock[rank] for rank in ranks)
        for rank in ranks:
            begin = met if name in MEETING else clock[rank]
            end = begin + seconds[rank] * (0.5 if name == faster else 1)
            parts.append(Part(rank, name, (name, ranks), clock[rank], end))
            clock[rank] = end
    return parts


@pytest.mark.parametrize("seed", range(60))
def test_a_step_run_again_ends_as_a_step_of_those_durations_does(seed):
    num_ranks, program = drawn(seed)
    parts = schedule(num_ranks, program)
    assert replay(parts, MEETING)[0] == pytest.approx(max(part.end for part in parts))
    for name in ("rollout", "reward", "reshard", "train"):
        wanted = max(part.end for part in schedule(num_ranks, program, name))
        assert replay(parts, MEETING, lambda x, name=name: 0.5 if x == name else 1.0)[0] == pytest.approx(
            wanted
        )


@pytest.mark.parametrize("seed", range(60))
def test_the_path_goes_from_the_first_beginning_to_the_last_end_without_a_hole(seed):
    parts = schedule(*drawn(seed))
    total, path = replay(parts, MEETING)
    assert path[0].start == pytest.approx(0.0) and path[-1].end == pytest.approx(total)
    assert all(a.end == pytest.approx(b.start) for a, b in itertools.pairwise(path))
    known = {(part.rank, part.name) for part in parts}
    assert {(segment.rank, segment.name) for segment in path} <= known


def test_who_comes_last_is_on_the_path_and_who_waits_is_not():
    parts = [
        Part(0, "rollout", "a", 0, 2), Part(1, "rollout", "a", 0, 5), Part(0, "train", "b", 2, 8),
        Part(1, "train", "b", 5, 8), Part(0, "save", "c", 9, 10),
    ]  # fmt: skip
    total, path = replay(parts, ["train"])
    assert [(segment.rank, segment.name) for segment in path] == [
        (1, "rollout"), (0, "train"), (0, BETWEEN), (0, "save"),
    ]  # fmt: skip
    told = bounds(7, [Part(p.rank, p.name, p.key, p.start * 1e3, p.end * 1e3) for p in parts], ["train"])
    assert total == 10 and told["faster"][0] == {
        "name": "rollout", "ms": 5000, "share": 0.5, "ranks": [1], "total_ms": 7500,
    }  # fmt: skip
    assert told["text"] == (
        "rollout bounds step 7: 50% of its 10.0 s wait for it on rank 1. Were it twice as fast, the step "
        "would take 7.5 s."
    )


def test_ranks_that_met_in_no_one_order_are_survived():
    parts = [Part(0, "reshard", "a", 0, 1), Part(0, "reshard", "b", 1, 2), Part(1, "reshard", "b", 0, 1),
             Part(1, "reshard", "a", 1, 2)]  # fmt: skip
    assert replay(parts, MEETING)[0] >= 2
