"""Placements as users write them, and rank lists as plans store them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl.errors import PlacementError
from siirl.parallel.placement import format_ranks, parse_placement, parse_ranks


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        ("0-3", (0, 1, 2, 3)),
        ("0,2,5", (0, 2, 5)),
        ("5, 0-1", (0, 1, 5)),
        ("0-7:2", (0, 2, 4, 6)),
        (3, (3,)),
        ([4, 1], (1, 4)),
        ({"ranks": "6-7"}, (6, 7)),
        ({"ranks": [0]}, (0,)),
        ("50%", (0, 1, 2, 3)),
        ("50%-100%", (4, 5, 6, 7)),
        ({"share": 0.25}, (0, 1)),
        ({"share": [0.75, 1]}, (6, 7)),
        ({"share": "12.5%"}, (0,)),
    ],
)
def test_a_placement_names_these_ranks_of_eight(value, ranks):
    assert parse_placement(value, 8, "node 'a'") == ranks


@pytest.mark.parametrize(
    ("value", "fragments"),
    [
        ("0-8", ["names rank 8", "has 8 ranks (0-7)", "trainer.nnodes"]),
        ([-1, 2], ["names rank -1"]),
        ("0,0", ["names rank 0 twice"]),
        ([], ["names no rank"]),
        ("", ["names no rank"]),
        ("3-1", ["'3-1' runs backwards"]),
        ("0-7:0", ["steps of 0"]),
        ("0-99999999999", ["past rank"]),
        ("list(range(4))", ["neither a rank nor a range"]),
        ("__import__('os')", ["neither a rank nor a range"]),
        ("33%", ["ranks 0 to 2.64 of a cluster of 8 ranks", "not a whole number"]),
        ("120%", ["between 0 and 1"]),
        ("50%-25%", ["between 0 and 1"]),
        ({"share": 0}, ["between 0 and 1"]),
        ({"rank": "0"}, ["one key, ranks or share"]),
        ({"ranks": [0], "share": 1}, ["one key, ranks or share"]),
        (True, ["not understood"]),
        ([True], ["not understood"]),
        (["0"], ["not understood"]),
        (0.5, ["not understood"]),
    ],
)
def test_a_bad_placement_is_refused_with_node_value_and_fix(value, fragments):
    with pytest.raises(PlacementError) as caught:
        parse_placement(value, 8, "node 'a'")
    assert all(fragment in str(caught.value) for fragment in ["node 'a'", repr(value), *fragments])


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((4,), "4"),
        ((0, 1), "0-1"),
        ((0, 2), "0,2"),
        ((0, 2, 4, 9), "0-4:2,9"),
        (tuple(range(4096)), "0-4095"),
    ],
)
def test_ranks_are_written_as_ranges(ranks, text):
    assert format_ranks(ranks) == text


@given(st.lists(st.integers(0, 40)).map(tuple))
def test_written_ranks_are_read_back_in_the_same_order(ranks):
    assert parse_ranks(format_ranks(ranks)) == ranks
