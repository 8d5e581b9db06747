"""Opponent pools: who is drawn, what is kept, which games count, and that all goes on after a resume."""

import random
from collections import Counter
from fractions import Fraction

import pytest
import torch
from some_cases import some

from siirl.agents.episode import Episode, Message
from siirl.compiler.plan import PoolPlan
from siirl.engines.weights.opponent_pool import DECAY, OpponentPool, sampling_weights
from siirl.nodes.interaction_rows import results_of
from siirl.observe.metrics import Metrics


class Weights:
    """A training engine of one number, which is how many optimizer steps it took."""

    def __init__(self) -> None:
        self.version, self.lends = 0, []

    def copied_weights(self):
        return {"w": torch.tensor([float(self.version)])}

    def lent_weights(self, weights):
        self.lends.append(int(weights["w"]))
        return torch.no_grad()


def plan_of(**changes) -> PoolPlan:
    values = {"agent": 1, "policy": 0, "size": 4, "every_steps": 2, "win_rate": None}
    return PoolPlan(**values | {"sampling": "uniform", "power": 2.0, "current": 0.0} | changes)


def drawn_plan(rng: random.Random) -> PoolPlan:
    return plan_of(
        size=rng.randint(1, 5),
        every_steps=rng.randint(0, 3),
        win_rate=rng.choice([None, 0.3, 0.6]),
        sampling=rng.choice(["uniform", "latest", "pfsp", "pfsp_even"]),
        power=rng.choice([1.0, 2.0]),
        current=rng.choice([0.0, 0.5]),
    )


def play(pool: OpponentPool, engine: Weights, rng: random.Random, step: int) -> int:
    """One step: the version that plays. Games are drawn, and sometimes no optimizer step is taken."""
    pool.bring(Metrics, step, False)
    playing = pool.version
    games = rng.choice([0, 4, 8])
    pool.count(rng.randint(0, 2 * games) / 2, games)
    if rng.random() < 0.3:
        pool.bring(Metrics, step, True)  # a validation changes nothing
    engine.version += rng.random() < 0.8
    return playing


@pytest.mark.parametrize(
    "sampling, power, wanted",
    [
        ("uniform", 2.0, [1, 1, 1]),
        ("latest", 2.0, [0, 0, 1]),
        ("pfsp", 2.0, [Fraction(9, 16), Fraction(1, 4), 0]),
        ("pfsp", 1.0, [Fraction(3, 4), Fraction(1, 2), 0]),
        ("pfsp_even", 2.0, [Fraction(3, 16), Fraction(1, 4), 0]),
    ],
)
def test_versions_are_weighted_by_the_win_rate_against_them(sampling, power, wanted):
    plan = plan_of(sampling=sampling, power=power)
    assert sampling_weights(plan, [0.25, 0.5, 1.0]) == [float(one) for one in wanted]
    beaten = sampling_weights(plan, [1.0, 1.0])  # nobody is left to learn from: all alike
    assert beaten == ([0, 1] if sampling == "latest" else [1, 1])


@pytest.mark.parametrize("sampling", ["uniform", "pfsp", "pfsp_even"])
def test_draws_follow_the_weights_and_the_share_of_the_policy_as_it_is(sampling):
    pool, engine = (
        OpponentPool(plan_of(sampling=sampling, current=0.25, every_steps=1), Weights(), 3),
        Weights(),
    )
    pool._engine = engine
    for step, (won, games) in enumerate([(2, 8), (4, 8), (6, 8)], 1):
        pool.bring(Metrics, step, False)
        pool._playing = pool.versions[-1]
        pool.count(won, games)
        engine.version += 1
    number, rates = 20_000, [Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)]
    weights = {
        "uniform": [1] * 3,
        "pfsp": [(1 - w) ** 2 for w in rates],
        "pfsp_even": [w * (1 - w) for w in rates],
    }
    found = Counter(one and one.number for one in (pool._drawn(step) for step in range(number)))
    wanted = {place: 0.75 * weight / sum(weights[sampling]) for place, weight in enumerate(weights[sampling])}
    for key, share in (wanted | {None: 0.25}).items():
        deviation = (float(share) * (1 - float(share)) / number) ** 0.5
        assert abs(found[key] / number - float(share)) < 4.5 * deviation, (key, found)


@pytest.mark.parametrize("case", some(range(300), *range(100)))
def test_what_is_kept_and_counted_is_what_the_rule_says(case):
    rng = random.Random(case)
    plan, engine = drawn_plan(rng), Weights()
    pool = OpponentPool(plan, engine, case)
    kept: dict[int, list[Fraction]] = {}  # version -> [won, games], by the rule as the page has it
    for step in range(1, 16):
        means = [Fraction(won) / games if games else Fraction(1, 2) for won, games in kept.values()]
        due = not kept or (plan.every_steps and step > 1 and (step - 1) % plan.every_steps == 0)
        bound = plan.win_rate
        due = due or (bound is not None and sum(means) / len(means) >= Fraction(bound))
        if due and engine.version not in kept:
            kept[engine.version] = [Fraction(0), Fraction(0)]
            kept = dict(list(kept.items())[-plan.size :])
        before = [(one.won, one.games) for one in pool.versions]
        pool.bring(Metrics, step, False)
        assert [one.number for one in pool.versions] == [*kept], step
        assert all(float(one.weights["w"]) == one.number for one in pool.versions)
        playing = pool._playing
        assert plan.current or playing is not None
        assert playing is None or playing.number in kept
        assert plan.sampling != "latest" or playing in (None, pool.versions[-1])
        won, games = rng.randint(0, 16) / 2, rng.choice([0, 8])
        pool.count(won, games)
        if games and playing is not None:
            old = kept[playing.number]
            kept[playing.number] = [
                Fraction(DECAY) * x + Fraction(y) for x, y in zip(old, (won, games), strict=True)
            ]
        for one in pool.versions:
            assert (one.won, one.games) == pytest.approx([float(x) for x in kept[one.number]], rel=1e-12), (
                before
            )
        engine.version += rng.random() < 0.8


@pytest.mark.parametrize("case", range(100))
def test_a_pool_that_is_restored_at_any_step_goes_on_as_the_undisturbed_one(case):
    rng = random.Random(case)
    plan, engine, stop = drawn_plan(rng), Weights(), rng.randint(1, 12)
    pool, seen, drawn = OpponentPool(plan, engine, case), [], random.Random(case + 1)
    for step in range(1, 16):
        seen.append(play(pool, engine, drawn, step))
        if step == stop:
            saved, version, at = pool.state_dict(), engine.version, drawn.getstate()
            saved = saved | {"model": {name: tensor.clone() for name, tensor in saved["model"].items()}}
    other = Weights()
    other.version = version
    resumed = OpponentPool(plan, other, case)
    resumed.make_room(saved)
    state = resumed.state_dict()
    assert state["model"].keys() == saved["model"].keys()
    for name, tensor in state["model"].items():
        tensor.copy_(saved["model"][name])  # as a checkpoint is read: in place
    resumed.load_state_dict(state)
    drawn.setstate(at)
    assert [play(resumed, other, drawn, step) for step in range(stop + 1, 16)] == seen[stop:]
    assert resumed.state_dict()["pool"] == pool.state_dict()["pool"]
    assert all(float(one.weights["w"]) == one.number for one in resumed.versions)


def test_the_engine_lends_the_version_that_plays_and_in_validation_the_latest():
    engine = Weights()
    pool = OpponentPool(plan_of(every_steps=1, size=8), engine, 0)
    for step in range(1, 8):
        pool.bring(Metrics, step, False)
        played, lent = pool.version, engine.lends[-1] if engine.lends else None
        assert lent == played or played == engine.version
        pool.bring(Metrics, step, True)
        assert pool.version == pool.versions[-1].number == step - 1
        engine.version += 1
        assert pool.metrics().values()["pool/playing"] == played
    assert engine.lends, "nobody older has played"


class Stage:
    def __init__(self, agent: int, policy: int) -> None:
        self.agent, self.policy = agent, policy


class Talk:
    speaking = (Stage(0, 0), Stage(1, 1), Stage(2, 0))


class Game:
    def __init__(self, *said: tuple[int, float]) -> None:
        self.episode = Episode(0, 0, 0, 0, {})
        self.episode.messages.append(Message("user", "play", reward=0.0))
        for turn, (agent, reward) in enumerate(said):
            self.episode.messages.append(Message("assistant", "", agent, "", turn, reward))


def test_a_game_is_won_by_what_the_environment_gave_the_side_of_the_policy():
    won = Game((0, 1.0), (1, -1.0))
    lost = Game((0, 0.5), (1, 1.0), (0, -1.0))
    drawn = Game((0, 0.0), (1, 5.0))
    by_the_other_seat = Game((2, 2.0), (1, -2.0))
    against_itself = Game((0, 1.0), (2, -1.0))
    alone = Game((1, 1.0))
    games = [won, lost, drawn, by_the_other_seat, against_itself, alone]
    assert results_of(Talk, plan_of(), games) == (2.5, 4)
