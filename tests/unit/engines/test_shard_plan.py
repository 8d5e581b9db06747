"""Plans of who sends which rectangle to whom: all that is wanted, from who has it, evenly."""

import itertools
import random
import sys
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from siirl.engines.weights.shard_plan import (
    AlikeTensors,
    box_size,
    largest_loads,
    overlap,
    plan_transfers,
    planned,
)


def grid(rng, shape):
    """A tensor cut at random, along each axis."""
    boxes = [()]
    for size in shape:
        cuts = [0, *sorted(rng.sample(range(1, size), rng.randint(0, min(2, size - 1)))), size]
        boxes = [(*box, edge) for box in boxes for edge in itertools.pairwise(cuts)]
    return boxes


def drawn_groups(rng):
    """Sources on ranks 0 to 5, some of which want weights, too."""
    groups = []
    for number in range(rng.randint(1, 6)):
        shape = tuple(rng.randint(1, 12) for _ in range(rng.choice([1, 2, 2, 3])))
        held = {box: tuple(sorted(rng.sample(range(6), rng.randint(1, 4)))) for box in grid(rng, shape)}
        targets = sorted(rng.sample(range(4, 12), rng.randint(1, 5)))
        if rng.random() < 0.3:
            wanted = {tuple((0, size) for size in shape): tuple(targets)}
        else:
            wanted = {box: (rng.choice(targets),) for box in grid(rng, shape)}
        names = tuple(f"{number}.{place}" for place in range(rng.randint(1, 40)))
        groups.append((shape, AlikeTensors(names, rng.choice([1, 2, 4]), held, wanted)))
    return groups


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_each_rank_gets_what_it_wants_once_from_ranks_that_have_it(seed, relays):
    shapes, groups = zip(*drawn_groups(random.Random(seed)), strict=True)
    transfers = planned(groups, relays)
    counts = {}
    for one in transfers:
        group = groups[one.group]
        assert any(
            overlap(one.box, box) == one.box and one.source in ranks for box, ranks in group.held.items()
        )
        assert one.num_bytes == box_size(one.box) * group.item_bytes * one.count > 0
        places = range(one.first, one.first + one.count)
        for target, place in itertools.product((one.target, *one.relayed), places):
            key = one.group, target, group.names[place]
            seen = counts.setdefault(key, np.zeros(shapes[one.group], int))
            seen[tuple(slice(*edge) for edge in one.box)] += 1
    expected = {}
    for number, group in enumerate(groups):
        for box, targets in group.wanted.items():
            for key in ((number, target, name) for target in targets for name in group.names):
                cells = expected.setdefault(key, np.zeros(shapes[number], int))
                cells[tuple(slice(*edge) for edge in box)] += 1
    assert counts.keys() == expected.keys()
    assert all(np.array_equal(counts[key], expected[key]) for key in expected)
    for one in transfers:
        has_it = any(
            one.target in ranks and overlap(one.box, box) for box, ranks in groups[one.group].held.items()
        )
        assert has_it == (one.source == one.target), "what a rank has itself comes from there"


def least_possible(groups, transfers):
    """The least that the busiest sender may send, by maximum flows: bytes are cut anywhere."""
    amounts = {}
    for one in transfers:
        if one.source != one.target:
            (ranks,) = [ranks for box, ranks in groups[one.group].held.items() if overlap(box, one.box)]
            amounts[ranks] = amounts.get(ranks, 0) + one.num_bytes
    total = sum(amounts.values())
    low, high = 0, total
    while low < high:
        limit = (low + high) // 2
        graph = nx.DiGraph()
        for number, (ranks, amount) in enumerate(amounts.items()):
            graph.add_edge("all", f"set {number}", capacity=amount)
            for rank in ranks:
                graph.add_edge(f"set {number}", rank)
                graph.add_edge(rank, "sent", capacity=limit)
        fits = not total or nx.maximum_flow_value(graph, "all", "sent") == total
        low, high = (low, limit) if fits else (limit + 1, high)
    return low


@pytest.mark.parametrize("seed", range(40))
def test_the_busiest_sender_sends_what_it_must(seed):
    """But for a few pieces, as they are not cut."""
    _, groups = zip(*drawn_groups(random.Random(1000 + seed)), strict=True)
    transfers = planned(groups, relays=False)
    largest_piece = max(box_size(one.box) * groups[one.group].item_bytes for one in transfers)
    sent, _ = largest_loads(transfers)
    least = least_possible(groups, transfers)
    assert least <= sent <= 1.01 * least + 3 * largest_piece


def test_what_nobody_has_is_an_error():
    lacking = AlikeTensors(("w",), 2, {((0, 3),): (0,)}, {((0, 4),): (1,)})
    with pytest.raises(ValueError, match=r"w: of the 4 elements of .* that ranks \(1,\) want 3 are held"):
        plan_transfers([lacking])


def test_plans_of_large_models_take_seconds_and_fill_no_link_in_vain(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    import shard_plans

    for case in shard_plans.CASES.values():
        told = shard_plans.figures(case())
        assert told["plan_cpu_s"] < 5.0, "0.5 by the benchmark; 1.3 was seen beside other tests"
        assert 1.0 <= told["fullest_over_least"] < 1.05
    sys.modules.pop("shard_plans")
