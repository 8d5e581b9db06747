"""Agents that no edge orders speak at once: what each reads and says follows from edges and seeds alone."""

import asyncio
import hashlib
import random
from dataclasses import replace

import pytest
from episode_cases import END, Letters, play, speaker, stage, text_of
from plan_cases import add_agent, compiled, config
from some_cases import some
from test_interaction_rows import episodes, prompts_of

from siirl.agents.contexts import Limits
from siirl.agents.environments import HostedEnvironment
from siirl.agents.runner import Game, run_all, turn_seed
from siirl.compiler.compile import compile_plan
from siirl.dag.spec import DagBuilder
from siirl.data.completions import Completion
from siirl.data.rows import objects
from siirl.errors import DagError, EpisodeFailed
from siirl.nodes.interaction_rows import rows_of


class Digest:
    """A policy that says what follows from what it reads and its seed, after a while."""

    def __init__(self, delays: random.Random | None, one_by_one: bool = False, fails: str = ""):
        self.delays, self.fails = delays, fails
        self.place = asyncio.Semaphore(1 if one_by_one else 1000)
        self.open = self.most_open = 0

    async def generate(self, prompt, params, seed, seen=None):
        async with self.place:
            self.open += 1
            self.most_open = max(self.open, self.most_open)
            for _ in range(self.delays.randrange(5) if self.delays else 1):
                await asyncio.sleep(0)
            self.open -= 1
        tokens = [*map(ord, digest(text_of(prompt), seed)), END]
        if self.fails and text_of(prompt).count("a:") and digest(text_of(prompt), seed) in self.fails.split():
            raise EpisodeFailed("no", "policy")
        return Completion(tokens, [-0.5] * len(tokens), "stop", 5)


def digest(prompt: str, seed: int) -> str:
    return hashlib.blake2b(f"{prompt}{seed}".encode(), digest_size=2).hexdigest()


def random_dag(rng: random.Random) -> tuple[list[list[int]], dict[int, dict]]:
    """Whom each agent waits for (earlier ones), and at most one loop: agent -> it."""
    parents = [sorted(rng.sample(range(a), rng.randrange(min(a, 2) + 1))) for a in range(rng.randrange(2, 7))]
    count = len(parents)
    above = closure(parents)
    last = [a for a in range(count) if not any(a in up for up in above)]
    if len(last) > 1 and rng.random() < 0.5:  # all meet in the end
        parents.append(last)
        above, last, count = closure(parents), [count], count + 1
    places = [a for a in range(count) if all(a in above[b] or b in above[a] or a == b for b in range(count))]
    at = rng.choice([*places, last[-1]])
    starts = [a for a in range(count) if not parents[a]]
    linked = connected(parents)
    if not linked or rng.random() < 0.7:
        to = {} if linked and rng.random() < 0.5 else {"to": [f"rollout_{a}" for a in starts]}
        at = at if linked else last[-1]
        return parents, {at: {"max_turns": rng.randrange(1, 4), **to}}
    return parents, {}


def closure(parents: list[list[int]]) -> list[set[int]]:
    above: list[set[int]] = []
    for up in parents:
        above.append(set(up).union(*(above[a] for a in up)))
    return above


def connected(parents: list[list[int]]) -> bool:
    joined = {0}
    for _ in parents:
        for agent, up in enumerate(parents):
            if joined & {agent, *up}:
                joined |= {agent, *up}
    return len(joined) == len(parents)


def game_of(parents, loops, policy, limits=None, **options) -> Game:
    dag = DagBuilder("random")
    for agent, up in enumerate(parents):
        loop = {"loop": loops[agent]} if agent in loops else {}
        add_agent(dag, agent, dependencies=[f"rollout_{a}" for a in up], **loop)
    (plan,) = compile_plan(dag.build(), config(), 1)[0].interactions.values()
    speakers = {s.node: speaker(policy, limits or Limits(9000, 9000), **options) for s in plan.speaking}
    return Game(plan, speakers)


def played(game: Game, count: int = 1):
    """Episodes of the task "q", and of each agent all that it read and said, / at the end of turns."""
    made = run_all(game, episodes(count), [Letters().encode(f"u:q{chr(END)}a:") for _ in range(count)])
    return made


def told(one) -> dict[int, str]:
    return {
        agent: "|".join(text_of([*row.prompt_ids, *row.ids]) for row in context.rows)
        for agent, context in sorted(one.contexts.items())
    }


def by_hand(parents, loops, seed: int) -> tuple[dict[int, str], list[tuple[int, int, str]]]:
    """What each agent has read and said, and (agent, turn, text) of all turns, without any of siirl's code.

    Without a loop one sweep over all; with one, the sweep up to it as often as it says, then the rest.
    """
    above, count = closure(parents), len(parents)
    sweeps = [list(range(count))]
    for at, loop in loops.items():
        last = not any(at in up for up in parents)
        part = list(range(count)) if last else [a for a in range(count) if a in above[at] or a == at]
        rest = [a for a in range(count) if a not in part]
        sweeps = [part] * loop["max_turns"] + ([rest] if rest else [])
    texts = dict.fromkeys(range(count), f"u:q{chr(END)}")
    heard = {a: set() for a in range(count)}
    said: list[tuple[int, int, str]] = []
    for sweep in sweeps:
        before = len(said)
        for agent in sweep:
            for number, (other, _, text) in enumerate(said):
                waits = number < before or other in above[agent]
                if waits and number not in heard[agent]:
                    heard[agent].add(number)
                    texts[agent] += f"u:{text}{chr(END)}" if other != agent else ""
            texts[agent] += "a:"
            text = digest(texts[agent].replace(chr(END), "/"), turn_seed(seed, agent, len(said)))
            heard[agent].add(len(said))
            texts[agent] += text + chr(END)
            said.append((agent, len(said), text))
    return {agent: text.replace(chr(END), "/") for agent, text in texts.items()}, said


@pytest.mark.parametrize("seed", some(range(60), *range(25)))
def test_a_random_workflow_is_played_as_by_hand_whoever_is_faster(seed):
    rng = random.Random(seed)
    parents, loops = random_dag(rng)
    results = []
    for delays, one_by_one in [(None, True), *((random.Random(rng.random()), False) for _ in range(3))]:
        game = game_of(parents, loops, Digest(delays, one_by_one))
        (one,) = played(game)
        assert one.kind is None, one.episode.error
        expected, said = by_hand(parents, loops, one.episode.seed)
        assert told(one) == expected, (parents, loops)
        spoken = [(m.agent, m.turn, m.content) for m in one.episode.messages if m.agent is not None]
        assert spoken == said and len(said) <= game.plan.most_turns
        assert one.episode.turns == len(said)
        counts = {f"rollout_{a}": sum(a == agent for agent, *_ in said) for a in range(len(parents))}
        assert one.episode.visits == counts
        results.append([rows_of(game.plan, a, [one], prompts_of(1), 1) for a in range(len(parents))])
    for agent, first in enumerate(results[0]):
        for other in results[1:]:
            assert objects(first, "conversation") == objects(other[agent], "conversation")
            for name in (
                "row_id",
                "response_ids",
                "response_mask",
                "turn_id",
                "rollout_log_prob",
                "prompt_ids",
            ):
                assert first[name].tolist() == other[agent][name].tolist()


ROUND = {2: {"to": [f"rollout_{a}" for a in range(3)], "max_turns": 2}}


def test_a_round_of_three_is_three_requests_at_once_and_each_round_reads_the_one_before():
    policy = Digest(None)
    (one,) = played(game_of([[], [], []], ROUND, policy))
    assert policy.most_open == 3
    first, second = ([m.content for m in one.episode.messages[at : at + 3]] for at in (1, 4))
    for agent in range(3):
        others = "".join(f"u:{text}/" for a, text in enumerate(first) if a != agent)
        assert told(one)[agent] == f"u:q/a:{first[agent]}/{others}a:{second[agent]}/"


def test_a_full_context_or_a_failed_turn_ends_the_episode_and_not_the_turns_beside_it():
    parents, loops = [[], [], [0], [1, 2]], {}
    for seed in range(5):
        game = game_of(parents, loops, Digest(random.Random(seed)))
        small = replace(game.speakers["rollout_1"], limits=Limits(2, 99))
        full = replace(game, speakers={**game.speakers, "rollout_1": small})
        (one,) = played(full)
        assert one.full and one.kind is None and one.node == "rollout_1"
        assert "rollout_1 reads" in one.episode.ended
        expected, _ = by_hand(parents, loops, one.episode.seed)
        assert told(one) == {agent: expected[agent] for agent in (0, 2)} | {1: ""}
        assert one.episode.visits == {"rollout_0": 1, "rollout_1": 1, "rollout_2": 1}
        broken = Digest(None, fails=expected[1][-5:-1])
        failing = replace(game, speakers={**game.speakers, "rollout_1": speaker(broken, Limits(99, 99))})
        (one,) = played(failing)
        assert one.kind == "policy" and one.node == "rollout_1"
        assert [m.agent for m in one.episode.messages] == [None, 0, 2]


def test_an_error_that_ends_the_run_ends_the_turns_beside_it_at_once():
    class Broken(Digest):
        async def generate(self, prompt, params, seed, seen=None):
            raise RuntimeError("engine")

    class Endless(Digest):
        async def generate(self, prompt, params, seed, seen=None):
            try:
                await asyncio.sleep(1000)
            finally:
                ended.append(True)

    ended: list[bool] = []
    game = game_of([[], [], []], ROUND, Endless(None))
    game = replace(game, speakers={**game.speakers, "rollout_1": speaker(Broken(None), Limits(99, 99))})
    with pytest.raises(RuntimeError, match="engine"):
        played(game)
    assert ended == [True, True]


def dag_of(
    parents: list[list[int]],
    env_above: list[int] | None = None,
    env: str = "gymnasium:FrozenLake-v1",
    **options,
) -> DagBuilder:
    dag = DagBuilder("refused")
    for agent, up in enumerate(parents):
        add_agent(dag, agent, dependencies=[f"rollout_{a}" for a in up], **options.get(f"agent_{agent}", {}))
    if env_above is not None:
        dag.node(
            "game",
            "ENV_INTERACT",
            dependencies=[f"rollout_{a}" for a in env_above],
            config={"env_path": env},
        )
    return dag


def loop(*to: int, turns: int = 2) -> dict:
    return {"loop": {"max_turns": turns, **({"to": [f"rollout_{a}" for a in to]} if to else {})}}


REFUSED = {
    "environment beside": (
        lambda: dag_of([[], [0], [0]], [1], "siirl.agents:Any"),
        ["'game'", "would step while 'rollout_2' run", "depend on"],
    ),
    "a package's environment of one agent": (
        lambda: dag_of([[], [0], [0]], [1, 2]),
        ["takes the action of one agent, but 'rollout_0' and 'rollout_1'"],
    ),
    "a package's environment of one agent, from the start": (
        lambda: dag_of([[], []], [0, 1]),
        ["takes the action of one agent, but 'rollout_0' and 'rollout_1'"],
    ),
    "route beside": (
        lambda: dag_of([[], [0], [0]], agent_1={"agent_options": {"route": "siirl.errors:pick"}}),
        ["'rollout_1' has a route and runs at once with 'rollout_2'"],
    ),
    "loop in a branch": (
        lambda: dag_of([[], [0], [0], [1, 2]], agent_1=loop(1)),
        ["'rollout_1' has a loop and runs at once with 'rollout_2'", "Move the loop"],
    ),
    "two loops": (
        lambda: dag_of([[], [0], [0]], agent_1=loop(0), agent_2=loop(0)),
        ["'rollout_1' and 'rollout_2' have a loop each"],
    ),
    "values of turns that do not follow each other": (
        lambda: dag_of([[], [0], [0]]),
        ["adv_estimator=gae_marft", "'rollout_1' speaks at once with 'rollout_2'"],
    ),
    "loop elsewhere": (
        lambda: dag_of([[], [0], [0]], agent_2=loop(1)),
        ["'rollout_2'", "leads to other nodes", "Add rollout_2"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_at_once_is_refused_with_the_fix(name, monkeypatch):
    monkeypatch.setattr("siirl.compiler.interactions.stages.check_reference", lambda *_: None)
    if "package" not in name:
        monkeypatch.setattr("siirl.compiler.interactions.stages.check_environment", lambda *_: None)
    build, fragments = REFUSED[name]
    with pytest.raises(DagError) as caught:
        compiled(build().build(), 1, *(["algorithm.adv_estimator=gae_marft"] if "values" in name else []))
    for fragment in fragments:
        assert fragment in str(caught.value), str(caught.value)


class Pays:
    """A game of two who move at once: each is paid by its own move, and it is over after two rounds."""

    def reset(self, task, seed):
        self.rounds, Pays.moves = 0, []
        return "go"

    def step(self, actions):
        self.rounds += 1
        Pays.moves.append(dict(actions))
        return (
            {0: f"0 saw {self.rounds}"},
            {a: int(text, 16) / 65536 for a, text in actions.items()},
            self.rounds == 2,
        )


def test_an_environment_steps_once_with_what_all_said_at_once_and_pays_each_turn():
    stages = [
        stage("a", 0, following="game", beside=("b",)),
        stage("b", 1, following="game", beside=("a",)),
        stage("game", None, back_to=("a", "b"), max_turns=5),
    ]
    results = []
    for seed in range(3):
        speakers = {name: speaker(Digest(random.Random(seed))) for name in "ab"}
        (one,) = play(stages, speakers, make_env=lambda: HostedEnvironment(Pays, "Pays"))
        assert one.kind is None and one.episode.ended == "game said done", one.episode.error
        said = {m.turn: (m.agent, m.content, m.reward) for m in one.episode.messages if m.agent is not None}
        assert [agent for agent, *_ in said.values()] == [0, 1, 0, 1] and list(said) == [0, 1, 2, 3]
        assert Pays.moves == [{0: said[0][1], 1: said[1][1]}, {0: said[2][1], 1: said[3][1]}]
        assert all(reward == int(text, 16) / 65536 for _, text, reward in said.values())
        for agent, context in one.contexts.items():
            (row,) = context.rows
            paid = [value for value in row.rewards if value]
            assert paid == [reward for who, _, reward in said.values() if who == agent]
        assert "0 saw 1" in told(one)[0] and "0 saw 1" not in told(one)[1]
        results.append((told(one), said))
    assert results[0] == results[1] == results[2]
