"""Commands run in the order of their numbers, once each, and tenants get equal shares."""

import itertools
import threading

import pytest

from siirl.data.completions import SamplingParams
from siirl.service import desk as desk_module
from siirl.service.commands import Datum, ForwardBackward, Refused, Release, Sample
from siirl.service.desk import BURST_S, MOST_WAITING, ComeBack, Desk


def desk_of(**lanes) -> Desk:
    """Each lane is a tenant's."""
    desk = Desk()
    for lane, number in lanes.items():
        desk.open_lane(lane, number, lane)
    return desk


def tokens(count: int):
    return lambda: ForwardBackward("m", "cross_entropy", {}, [Datum([1] * count, {})], False)


def taken(desk: Desk) -> list[str]:
    return [ticket.id for ticket in iter(lambda: desk.take(0.0), None)]


def put(desk: Desk, lane: str, *numbers: int):
    return [desk.submit(lane, number, lambda: Release("x")) for number in numbers]


@pytest.mark.parametrize("order", [*itertools.permutations((1, 2, 3))])
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
    with pytest.raises(ComeBack):
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


def test_tenants_who_always_ask_get_equal_tokens_whatever_their_commands_and_lanes():
    desk, sizes = Desk(), {"flood": 400, "large": 3000, "small": 25}
    for tenant, lanes in (("flood", 50), ("large", 1), ("small", 1)):
        for lane in range(lanes):
            desk.open_lane(f"{tenant}:{lane}", 1, tenant)
            for number in range(1, 4000 // lanes):
                desk.submit(f"{tenant}:{lane}", number, tokens(sizes[tenant]))
    while desk.tenants()["small"].tokens < 90_000:
        assert desk.take(0.0) is not None
    had = {name: tenant.tokens for name, tenant in desk.tenants().items()}
    assert max(had.values()) < 1.2 * min(had.values()), had


def test_who_was_silent_has_saved_up_no_turns():
    desk = desk_of(a=1, b=1)
    for number in range(1, 101):
        desk.submit("a", number, tokens(100))
    for _ in range(50):
        desk.take(0.0)
    for number in range(1, 101):
        desk.submit("b", number, tokens(100))
    lanes = [desk.take(0.0).lane for _ in range(20)]
    assert lanes.count("a") >= 9


def test_samples_that_end_early_cost_what_they_took():
    desk = desk_of(a=1, b=1)
    for lane in ("a", "b"):
        for number in range(1, 11):
            desk.submit(lane, number, tokens(1000 if lane == "a" else 100))
    for _ in range(20):
        ticket = desk.take(0.0)
        desk.done(ticket, b"", tokens=100)
    assert [one.tokens for one in desk.tenants().values()] == [1000, 1000]


def test_a_tenant_beyond_its_tokens_a_second_is_told_when_to_come_back_and_others_are_not():
    now = [0.0]
    desk = Desk(10.0, lambda: now[0])
    for lane in ("a", "b"):
        desk.open_lane(lane, 1, lane)
    desk.submit("a", 1, tokens(int(15 * BURST_S)))
    with pytest.raises(ComeBack, match="max_tokens_per_s") as told:
        desk.submit("a", 2, tokens(1))
    desk.submit("b", 1, tokens(1))
    assert desk.submit("a", 3, tokens(1), is_new=False).id == "a:3", "an earlier server has accepted it"
    now[0] = told.value.wait_s
    now[0] += 1
    assert desk.submit("a", 2, tokens(1)).id == "a:2"
    assert desk.submit("a", 1, tokens(1)).id == "a:1", "a request that is there already is no new one"

    again = Desk(10.0, lambda: now[0])
    again.restore("a", 3, "a", [])
    with pytest.raises(ComeBack):
        again.submit("a", 3, tokens(1))
    now[0] += 1
    assert again.submit("a", 3, tokens(1)), "a server that is killed gives no new tokens, but those of time"


def test_a_tenant_has_bounds_on_what_waits_and_what_is_kept_that_cost_others_nothing(monkeypatch):
    monkeypatch.setattr(desk_module, "MOST_WAITING_BYTES", 1000)
    monkeypatch.setattr(desk_module, "MOST_KEPT_BYTES", 1000)
    desk = desk_of(a=1, b=1)
    desk.submit("a", 1, tokens(1), 900)
    with pytest.raises(ComeBack, match="requests of this tenant wait"):
        desk.submit("a", 2, tokens(1), 900)
    desk.submit("b", 1, tokens(1), 900)
    for _ in range(2):
        desk.done(desk.take(0.0), b"x" * 300)
    desk.submit("a", 2, tokens(1), 900)
    desk.done(desk.take(0.0), b"x" * 600)
    assert desk.ticket("b:1").answer == b"x" * 300, "what b has not read is no price for what a asks"
    assert desk.ticket("a:1") is None and desk.ticket("a:2") is not None


def test_a_session_that_is_over_leaves_nothing_behind():
    desk = desk_of(**{"x:train:0": 1})
    put(desk, "x:train:0", 1, 2)
    running = desk.take(0.0)
    desk.close_lanes("x:")
    desk.done(running, b"late")
    desk.forget("x:train:0")
    assert not desk._tickets and not desk._lanes and not desk._tenants


def test_a_pass_that_tenants_share_has_one_command_of_each_however_many_models_one_has():
    desk = Desk()
    for tenant, lanes in (("flood", 8), ("a", 1), ("b", 1)):
        for lane in range(lanes):
            desk.open_lane(f"{tenant}:{lane}", 1, tenant)
            for number in range(1, 101):
                desk.submit(f"{tenant}:{lane}", number, tokens(64))
    for _ in range(100):
        together = desk.take_like(desk.take(0.0), lambda command: isinstance(command, ForwardBackward))
        assert len({ticket.tenant for ticket in together}) == len(together) == 3
    desk.take_like(desk.take(0.0), lambda command: isinstance(command, ForwardBackward))
    had = {name: tenant.tokens for name, tenant in desk.tenants().items()}
    assert had["a"] == had["b"] == 6400 and had["flood"] == 6400 + 8 * 64, "alone it has all of its own"


class ClosedLoop:
    """Clients who each wait for their answer, think, and ask again, by a clock of their own."""

    def __init__(self, think_s: float, lanes: dict[str, int]) -> None:
        self.now_s, self.think_s, self.sizes = 0.0, think_s, list[int]()
        self.desk = Desk(clock=lambda: self.now_s)
        self._next: dict[str, int] = {}
        self._asks: dict[str, float] = {}
        for tenant, count in lanes.items():
            for lane in range(count):
                self.desk.open_lane(name := f"{tenant}:{lane}", 1, tenant)
                self._next[name], self._asks[name] = 1, 0.0

    def run(self, num_passes: int) -> dict[str, int]:
        """Tokens of each tenant after so many passes of a second each, and a tenth more for each command."""
        for _ in range(num_passes):
            while (ticket := self.desk.take(0.0)) is None:
                self._until(self.now_s + 0.01)
            together = self.desk.take_like(ticket, lambda one: isinstance(one, ForwardBackward))
            self.sizes.append(len(together))
            self._until(self.now_s + 1 + 0.1 * len(together))
            for one in together:
                self.desk.done(one, b"")
                self._asks[one.lane] = self.now_s + self.think_s * (1 + 0.3 * (len(self.sizes) % 3))
        return {name: one.tokens for name, one in self.desk.tenants().items()}

    def _until(self, end_s: float) -> None:
        """Have clients ask until then."""
        for lane, when_s in sorted(self._asks.items(), key=lambda one: one[1]):
            if when_s <= end_s:
                self.now_s = when_s
                self.desk.submit(lane, self._next[lane], tokens(64))
                self._next[lane] += 1
                del self._asks[lane]
        self.now_s = end_s


def test_a_flood_of_models_gets_no_more_than_clients_who_wait_for_each_answer():
    had = ClosedLoop(0.05, {"flood": 8, "a": 1, "b": 1}).run(100)
    assert max(had.values()) < 1.2 * min(had.values()), had


def test_clients_who_ask_again_at_once_are_in_one_pass_and_who_is_slow_or_gone_is_not_waited_for():
    quick = ClosedLoop(0.05, dict.fromkeys("abcdefgh", 1))
    quick.run(50)
    assert quick.sizes[10:] == [8] * 40
    slow = ClosedLoop(30.0, {"a": 1})
    slow.run(5)
    slow.desk.open_lane("b:0", 1, "b")
    slow.desk.submit("b:0", 1, tokens(64))
    assert slow.desk.take(0.0).lane == "b:0"
    alone = ClosedLoop(0.05, {"a": 8})
    alone.run(20)
    assert alone.sizes[10:] == [8] * 10, "the models of one tenant are together, too"
    gone = ClosedLoop(0.05, {"a": 1, "b": 1})
    gone.run(10)
    gone._asks.pop("b:0", None)
    before_s = gone.now_s
    gone.run(10)
    assert gone.sizes[-9:] == [1] * 9 and gone.now_s - before_s < 10 * 1.3


def test_samples_of_the_only_tenant_wait_for_no_client_that_trains():
    now = [0.0]
    desk = Desk(clock=lambda: now[0])
    desk.open_lane("a:train", 1, "a")
    desk.open_lane("a:sample", None, "a")
    for number in (1, 2):
        desk.submit("a:train", number, tokens(8))
        ticket = desk.take(0.0)
        now[0] += 0.2
        desk.done(ticket, b"")
        now[0] += 0.1
    assert desk._soon(1.5) == ["a:train"], "it is waited for by others that train"
    desk.submit("a:sample", 0, lambda: Sample("", [1], SamplingParams(max_tokens=1), 1, 0))
    assert desk.take(0.0).id == "a:sample:0"


def test_a_client_that_paused_is_soon_waited_for_again():
    loop = ClosedLoop(0.05, {"flood": 8, "a": 1})
    loop.run(20)
    loop._asks["a:0"] += 6.0
    loop.run(5)
    assert "a:0" not in loop.desk._away or loop.desk._lanes["a:0"].away_s < 0.5, "it is back"
    before = {name: one.tokens for name, one in loop.desk.tenants().items()}
    had = {name: tokens - before[name] for name, tokens in loop.run(6).items()}
    assert max(had.values()) < 1.2 * min(had.values()), had


def test_tenants_of_several_models_share_a_pass_by_their_tokens():
    loop = ClosedLoop(0.05, {"a": 4, "b": 4, "c": 8})
    had = loop.run(40)
    assert loop.sizes[-1] == 12 and max(had.values()) < 1.2 * min(had.values())
