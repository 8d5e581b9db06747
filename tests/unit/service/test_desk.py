"""Commands run in the order of their numbers, once each, and lanes take turns."""

import itertools
import threading

import pytest

from siirl.service.commands import Refused, Release
from siirl.service.desk import MOST_WAITING, Desk, LaneFull


def desk_of(**lanes) -> Desk:
    desk = Desk()
    for lane, number in lanes.items():
        desk.open_lane(lane, number)
    return desk


def taken(desk: Desk) -> list[str]:
    return [ticket.id for ticket in iter(lambda: desk.take(0.0), None)]


def put(desk: Desk, lane: str, *numbers: int):
    return [desk.submit(lane, number, lambda: Release("x")) for number in numbers]


@pytest.mark.parametrize("order", itertools.permutations((1, 2, 3)))
def test_commands_of_a_lane_run_in_the_order_of_their_numbers_however_they_come(order):
    desk = desk_of(a=1)
    put(desk, "a", *order)
    assert taken(desk) == ["a:1", "a:2", "a:3"]


def test_a_later_command_waits_for_one_that_has_not_come():
    desk = desk_of(a=1)
    put(desk, "a", 2, 3)
    assert taken(desk) == []
    put(desk, "a", 1)
    assert taken(desk) == ["a:1", "a:2", "a:3"]


def test_a_number_that_comes_again_is_the_same_request_before_and_after_it_has_run():
    desk, made = desk_of(a=1), []

    def make():
        made.append(1)
        return Release("x")

    first = desk.submit("a", 1, make)
    assert desk.submit("a", 1, make) is first
    desk.done(desk.take(0.0), b"answer")
    again = desk.submit("a", 1, make)
    assert again.answer == b"answer" and taken(desk) == [] and len(made) == 1
    assert desk.ticket("a:1").answer == desk.ticket("a:1").answer == b"answer"


def test_lanes_take_turns_and_a_flood_of_one_costs_another_one_turn():
    desk = desk_of(a=1, b=1)
    put(desk, "a", *range(1, 6))
    put(desk, "b", 1, 2)
    assert taken(desk)[:4] in (["a:1", "b:1", "a:2", "b:2"], ["b:1", "a:1", "b:2", "a:2"])
    put(desk, "a", *range(6, 6 + MOST_WAITING))
    with pytest.raises(LaneFull):
        put(desk, "a", 6 + MOST_WAITING)
    put(desk, "b", 3)
    assert "b:3" in [desk.take(0.0).id, desk.take(0.0).id]


def test_a_command_that_is_refused_counts_and_those_after_it_run():
    desk = desk_of(a=1)

    def refused():
        raise Refused("no")

    ticket = desk.submit("a", 1, refused)
    put(desk, "a", 2)
    assert taken(desk) == ["a:2"]
    assert str(ticket.answer) == "no"


def test_samples_are_taken_together_in_the_order_in_which_they_came():
    desk = desk_of(s=None, t=None)
    put(desk, "s", 5, 3)
    put(desk, "t", 1)
    together = desk.take_like(desk.take(0.0), lambda command: True, 10)
    assert sorted(ticket.id for ticket in together) == ["s:3", "s:5", "t:1"]
    assert [ticket.id for ticket in together if ticket.lane == "s"] == ["s:5", "s:3"]


def test_what_waits_in_a_session_that_is_over_is_refused_and_others_go_on():
    desk = desk_of(**{"x:train:0": 1, "y:train:0": 1})
    (mine,) = put(desk, "x:train:0", 2)
    put(desk, "y:train:0", 1)
    desk.close_lanes("x:")
    assert isinstance(mine.answer, Refused) and taken(desk) == ["y:train:0:1"]


def test_who_waits_is_woken_by_a_command_and_by_the_end():
    desk = desk_of(a=1)
    threading.Timer(0.05, put, (desk, "a", 1)).start()
    assert desk.take(10.0).id == "a:1"
    threading.Timer(0.05, desk.close).start()
    assert desk.take(10.0) is None
