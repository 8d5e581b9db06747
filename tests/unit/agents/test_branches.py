"""Branches of episodes: rows by hand in random trees, seeds, and what refuses them."""

import asyncio
import hashlib
import random
from dataclasses import dataclass, field
from itertools import count

import pytest
from episode_cases import END, Letters, speaker, stage, text_of

from siirl.agents.environments import HostedEnvironment, Observation, StepResult
from siirl.agents.episode import Episode
from siirl.agents.runner import Game, run_all, turn_seed
from siirl.compiler.plan import Branches, InteractionPlan
from siirl.data.completions import Completion
from siirl.types import branching_turn

SEED = 100


def drawn(*what, below: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=4).digest(), "big") % below


class Sampler:
    """Says one of three letters, by what it reads and its seed; slower turns first."""

    def __init__(self, naps: random.Random) -> None:
        self.asked: list[tuple[str, int]] = []
        self.naps = naps

    async def generate(self, prompt, params, seed, seen=None):
        self.asked.append((text_of(prompt), seed))
        for _ in range(self.naps.randrange(4)):
            await asyncio.sleep(0)
        tokens = [ord(line(text_of(prompt), seed)), END]
        return Completion(tokens, [-float(seed % 7 + 1)] * 2, "stop", 5)


def line(read: str, seed: int) -> str:
    return "xyz"[drawn(read, seed, below=3)]


class World:
    """Rewards and shows by all that was said, and ends by chance."""

    replayable = True

    def reset(self, task, seed):
        self.said = [seed]
        return "begin"

    def step(self, actions):
        self.said.append(tuple(sorted(actions.items())))
        return StepResult(*answer(self.said))


class InLoop(HostedEnvironment):
    """World without a thread."""

    def __init__(self) -> None:
        super().__init__(World, "World", replayable=True)
        self.world = World()

    async def reset(self, task, seed, deadline_s):
        return Observation(self.world.reset(task, seed))

    async def step(self, actions, deadline_s):
        return self.world.step(actions)

    async def close(self, deadline_s=0.0):
        return None


def answer(said: list) -> tuple[str, float, bool]:
    return f"o{drawn(said, below=9)}", float(drawn(said, 1, below=5)), drawn(said, 2, below=6) == 0


@dataclass
class Way:
    """An episode by hand."""

    number: int = 0
    begins: int = -1
    path: tuple = ()
    turns: list = field(default_factory=list)  # (agent, what it read, what it said, seed, reward)
    groups: list = field(default_factory=list)  # (turn, parent)
    settled: int = 0  # of these, how many have a best

    def copy(self, **changed) -> "Way":
        return Way(**vars(self) | {"turns": list(self.turns), "groups": list(self.groups)} | changed)

    def since(self, turn: int) -> float:
        return sum(reward for *_, reward in self.turns[turn:])


def by_hand(num_agents: int, rounds: int, size: int, visits: tuple, best: bool) -> list[Way]:
    """All episodes of the tree, each played from its beginning."""

    def read_by(agent: int, way: Way) -> str:
        parts, said = ["u:q/", "u:begin/"], [SEED]
        for at in range(0, len(way.turns), num_agents):
            turns = way.turns[at : at + num_agents]
            parts += [f"{'a' if who == agent else 'u'}:{text}/" for who, _, text, *_ in turns]
            if len(turns) == num_agents:
                said.append(tuple((who, text) for who, _, text, *_ in turns))
                parts.append(f"u:{answer(said)[0]}/")
        return "".join(parts) + "a:"

    def speak(way: Way) -> None:
        agent, seed = (
            len(way.turns) % num_agents,
            turn_seed(SEED, len(way.turns) % num_agents, len(way.turns)),
        )
        path = [f"/{turn}:{candidate}" for turn, candidate in way.path]
        if path:
            text = f"{SEED}/{agent}/{len(way.turns)}{''.join(path)}"
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
        read = read_by(agent, way)
        way.turns.append((agent, read, line(read, seed), seed, 0.0))

    def rounds_of(way: Way) -> list:
        actions = [(who, text) for who, _, text, *_ in way.turns]
        return [SEED, *(tuple(actions[at : at + num_agents]) for at in range(0, len(actions), num_agents))]

    def step(way: Way) -> bool:
        """Whether it is over."""
        _, reward, done = answer(rounds_of(way))
        for place in range(len(way.turns) - num_agents, len(way.turns)):
            way.turns[place] = (*way.turns[place][:-1], reward)
        return done or len(way.turns) == num_agents * rounds

    def on_to_next(way: Way) -> bool:
        """To before the next turn with candidates; False: it is over."""
        while True:
            at, own = divmod(len(way.turns), num_agents)
            branches = own == 0 and (not visits or at in visits)
            settles = own == 0 and best and way.settled < len(way.groups)
            if (branches or settles) and not (way.groups and way.groups[-1][0] == len(way.turns)):
                return True
            speak(way)
            if len(way.turns) % num_agents == 0 and step(way):
                return False

    ended, open_ways = [], [Way()]
    while open_ways:
        way = open_ways.pop(0)
        if not on_to_next(way):
            ended.append(way)
            continue
        turn, place = len(way.turns), len(way.groups)
        way.groups.append((turn, way.number))
        ones = []
        for candidate in range(size):
            number = place * (size - 1) + candidate if best else way.number + candidate * size**place
            more = {"number": number, "begins": turn, "path": (*way.path, (turn, candidate))}
            ones.append(way.copy(**more) if candidate else way)
        if not best:
            open_ways += ones
            continue
        going = [on_to_next(one) for one in ones]
        first = max(range(size), key=lambda c: (ones[c].since(turn), -ones[c].number))
        ended += [one for c, one in enumerate(ones) if c != first or not going[c]]
        ones[first].settled = len(ones[first].groups)
        open_ways += [ones[first]] if going[first] else []
    return ended


def game_of(num_agents, rounds, size, visits, go_on, sampler) -> Game:
    names = [f"a{agent}" for agent in range(num_agents)]
    stages = [
        stage(
            name,
            agent,
            following=(*names, "env")[agent + 1],
            branches=Branches(size, visits, go_on) if not agent else None,
        )
        for agent, name in enumerate(names)
    ]
    stages.append(stage("env", None, back_to="a0", max_turns=rounds))
    policies = tuple(one.model for one in stages[:-1])
    plan = InteractionPlan("a0", tuple(stages), policies, num_agents * rounds)
    return Game(plan, {name: speaker(sampler) for name in names}, {}, InLoop, 5.0, branches=True)


def played_by(game: Game, most: int = 1):
    task = {"raw_prompt": [{"role": "user", "content": "q"}], "extra_info": None}
    return run_all(game, [Episode(7 * most, 0, 0, SEED, task)], [Letters().encode(f"u:q{chr(END)}a:")])


def test_rows_of_branches_equal_those_by_hand_and_no_turn_is_sampled_twice():
    draw = random.Random(5)
    seen_best = seen_nested = 0
    for _ in range(300):
        num_agents, rounds, size = draw.randint(1, 2), draw.randint(1, 3), draw.randint(2, 3)
        go_on = draw.choice(("all", "best"))
        visits = tuple(sorted(draw.sample(range(3), draw.randint(1, 2))))
        visits = () if go_on == "best" and draw.random() < 0.5 else visits
        sampler = Sampler(draw)
        game = game_of(num_agents, rounds, size, visits, go_on, sampler)
        most = game.plan.most_branches
        played = {one.branch.number: one for one in played_by(game, most)}
        ways = {way.number: way for way in by_hand(num_agents, rounds, size, visits, go_on == "best")}
        assert played.keys() == ways.keys() and max(ways) < most
        seen_best += go_on == "best" and len(ways) > size
        seen_nested += go_on == "all" and len(ways) > size
        own_turns = [turn for way in ways.values() for turn in way.turns[max(way.begins, 0) :]]
        assert sorted(sampler.asked) == sorted((read, seed) for _, read, _, seed, _ in own_turns)
        for number, way in ways.items():
            one = played[number]
            assert one.kind is None and one.episode.episode_id == 7 * most + number
            check_rows(one, way, 7 * most)
    assert seen_best > 20 and seen_nested > 20


def check_rows(one, way: Way, base: int) -> None:
    for agent in range(2):
        own = [
            (at, text, reward)
            for at, (who, _, text, _, reward) in enumerate(way.turns)
            if who == agent and at >= way.begins
        ]
        rows = one.contexts[agent].rows if agent in one.contexts else []
        assert len(rows) == (1 if own else 0)
        if not own:
            continue
        (row,) = rows
        assert text_of([*row.prompt_ids, *row.ids]).endswith(f"{way.turns[own[-1][0]][2]}/")
        trained = [
            (turn, token)
            for turn, token, mask in zip(row.turn_ids, row.ids, row.assistant_mask, strict=True)
            if mask
        ]
        assert trained == [(at, token) for at, text, _ in own for token in (ord(text), END)]
        rewards = dict.fromkeys((at for at, *_ in own), 0.0)
        for turn, reward, mask in zip(row.turn_ids, row.rewards, row.assistant_mask, strict=True):
            assert mask == (turn >= 0) and (mask or not reward)
            if mask:
                rewards[turn] += reward
        assert rewards == {at: reward for at, _, reward in own}
        assert all(
            bool(log_prob) == mask and (version == 5) == mask
            for log_prob, version, mask in zip(row.log_probs, row.versions, row.assistant_mask, strict=True)
        )
        for at, *_ in own:
            later = [(turn, parent) for turn, parent in way.groups if turn <= at]
            found = one.branch.branch_id(at)
            assert found == -1 if not later else branching_turn(found) == (base + later[-1][1], later[-1][0])


def test_an_environment_that_is_not_what_it_was_fails_its_branch_alone():
    calls = count()

    class Other(World):
        def reset(self, task, seed):
            super().reset(task, seed)
            return "begin" if next(calls) == 0 else "another"

    game = game_of(1, 1, 3, (0,), "all", Sampler(random.Random(0)))
    other = Game(
        game.plan,
        game.speakers,
        {},
        lambda: HostedEnvironment(Other, "Other", replayable=True),
        5.0,
        branches=True,
    )
    assert [one.kind for one in played_by(other)] == [None, "replay", "replay"]


@pytest.mark.parametrize("go_on", ["all", "best"])
def test_a_branch_that_fails_lets_the_others_go_on(go_on):
    class Fails(World):
        def step(self, actions):
            if actions == {0: line("u:q/u:begin/a:", turn_seed(SEED, 0, 0))}:
                raise ValueError("no")
            return "", 1.0, False

    game = game_of(1, 2, 3, (0,), go_on, Sampler(random.Random(0)))
    fails = Game(
        game.plan,
        game.speakers,
        {},
        lambda: HostedEnvironment(Fails, "Fails", replayable=True),
        5.0,
        branches=True,
    )
    played = played_by(fails)
    kinds = [one.kind for one in played]
    said = [one.episode.messages[2].content for one in played]
    assert [kind is not None for kind in kinds] == [text == said[0] for text in said] and None in kinds
    left = [one for one in played if one.kind is None]
    turns = [one.episode.turns for one in left]
    assert turns == [2] * len(left) if go_on == "all" else sorted(turns) == [1] * (len(left) - 1) + [2]
