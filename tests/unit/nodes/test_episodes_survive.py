"""Episodes in flight that a checkpoint brings back: what was said is neither lost nor said again."""

import json
import random
from collections import Counter
from contextlib import nullcontext
from hashlib import blake2b

import pytest
from episode_cases import END, Letters, speaker, stage
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from siirl.agents.environments import HostedEnvironment, StepResult
from siirl.agents.episode import Episode
from siirl.agents.runner import Game
from siirl.agents.stream_client import StreamClient
from siirl.agents.tool_files import ToolUse
from siirl.agents.tools import Toolbox, ToolLimits
from siirl.compiler.plan import AgentStage, EnvStage, InteractionPlan
from siirl.data.completions import Completion
from siirl.data.loader import PromptLoader
from siirl.dialect.tool_formats import Parsed, ToolCall
from siirl.nodes.episodes_in_flight import EpisodesInFlight

POLICIES = ("agent_0.rollout", "agent_1.rollout")


class Prompts:
    """A dataset whose prompt number i is the token i + 1."""

    def __len__(self):
        return 64

    def rows(self, indices):
        return [{"prompt_ids": [int(i) + 1], "prompt_length": 1, "sample_index": int(i)} for i in indices]


def draw(*what):
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=4).digest(), "big")


class Decoder:
    """Says what follows from a turn's seed and from all that was read before it, a few tokens at a time."""

    def __init__(self, job):
        self.job, self.pending = job, {}

    @property
    def num_pending(self):
        return len(self.pending)

    def submit(self, asks):
        for ask in asks:
            self.pending[ask.key] = [ask, ask.start]
            assert list(ask.prompt[len(ask.prompt) - ask.start :]) == self.turn(ask)[: ask.start]

    def turn(self, ask):
        read = tuple(ask.prompt[: len(ask.prompt) - ask.start])
        length = 15 if draw(ask.seed) % 4 == 0 else 1 + draw(ask.seed) % 4
        return [*(97 + draw(ask.seed, read, i) % 26 for i in range(length)), END]

    def collect(self, timeout_s):
        for entry in self.pending.values():
            entry[1] += self.job.rng.randint(0, 4)
        ended = [key for key, (ask, end) in self.pending.items() if end >= len(self.turn(ask))]
        return [self.answer(key, "stop") for key in ended]

    def answer(self, key, reason):
        ask, end = self.pending.pop(key)
        tokens = self.turn(ask)[ask.start : end]
        self.job.num_sampled += len(tokens)
        return key, Completion(tokens, [-1.0 - draw(t) % 7 for t in tokens], reason, self.job.step)

    def pause(self):
        return [self.answer(key, "paused") for key in list(self.pending)]

    def close(self):
        self.pending = {}


class Table:
    """What it shows and gives follows from its seed and all actions before, and in the end from its world."""

    replayable = True
    world = "here"

    def reset(self, task, seed):
        self.told = [seed]
        return f"go {draw(*self.told) % 99}"

    def step(self, actions):
        self.told.append(sorted(actions.items()))
        if draw(*self.told, "fails") % 9 == 0:
            raise ValueError("no more")
        world = Table.world if len(self.told) == 3 else ""
        return StepResult(f"{draw(*self.told) % 99}{world}", draw(*self.told, "r") % 5, len(self.told) == 5)


class Count:
    """A tool that counts in the episode's state, and in all."""

    calls = 0

    def __init__(self, holds=None):
        self.schema = {"type": "function", "function": {"name": "count"}}
        self.holds = holds

    def __call__(self, arguments, episode):
        Count.calls += 1
        episode.state["count"] = episode.state.get("count", 0) + 1
        if self.holds is not None:
            episode.state["held"] = self.holds
        return f"count {episode.state['count']}"


def called(text):
    """Most turns call the tool."""
    return Parsed(text, [ToolCall("count", {})] if draw(text) % 3 else [])


TALK = [stage("a", 0, following="b"), stage("b", 1, back_to="a", max_turns=3, until="over")]
AT_ONCE = [
    stage("a", 0, beside=("b",)),
    stage("b", 1, policy=0, beside=("a",), back_to=("a", "b"), max_turns=3, until="over"),
]
PLAY = [stage("a", 0, following="table"), stage("table", None, back_to="a", max_turns=4)]
CALLS = [stage("a", 0, back_to="a", max_turns=3, until="over")]


def over(episode):
    return episode.seed % 3 < episode.visits["a"]


class Job:
    """The interactions of a run on some shards, without the rest of it."""

    def __init__(self, shards, batch, n, max_lag, steps, stages, speed=1, tool=None):
        self.shards, self.batch, self.n, self.steps, self.stages = shards, batch, n, steps, stages
        self.loaders = [PromptLoader(Prompts(), batch, s, shards, seed=3) for s in range(shards)]
        self.kept = [EpisodesInFlight(max(max_lag, 1), float(max_lag), batch) for _ in range(shards)]
        self.tool = tool or (Count() if stages is CALLS else None)
        self.rng, self.step, self.num_sampled = random.Random(speed), 0, 0
        self.trained, self.ages, self.restarted, self.replayed = [], [], 0, 0

    def game(self, lines):
        use = None
        if self.tool is not None:
            use = ToolUse(Toolbox({"count": self.tool}), called, ToolLimits(), 3)
        spoken = [one for one in self.stages if isinstance(one, AgentStage)]
        speakers = {one.node: speaker(lines[POLICIES[one.policy]][0], tools=use) for one in spoken}
        acts = any(isinstance(one, EnvStage) for one in self.stages)
        env = lambda: HostedEnvironment(Table, "Table", replayable=Table.replayable)  # noqa: E731
        plan = InteractionPlan("a", tuple(self.stages), POLICIES, 9)
        return Game(plan, speakers, {"over": over}, env if acts else None, 5.0)

    def begin(self, prompts, batches):
        rows = zip(prompts["sample_index"].tolist(), prompts["group_id"].tolist(), batches, strict=True)
        return [
            [
                (
                    Episode(
                        slot * self.n + i,
                        slot,
                        i,
                        draw(batch, slot, i),
                        {"raw_prompt": [{"role": "user", "content": f"{prompt}"}]},
                    ),
                    Letters().encode(f"u:{prompt}{chr(END)}a:"),
                )
                for i in range(self.n)
            ]
            for prompt, slot, batch in rows
        ]

    def advance(self):
        self.step += 1
        both = list(zip(self.loaders, self.kept, strict=True))
        missing = max(kept.num_missing(loader, self.step, self.steps) for loader, kept in both)
        for loader, kept in both:
            kept.admit(kept.load(loader, missing), self.step)
            clients = {name: (StreamClient(lambda: Decoder(self), name, 10.0),) for name in POLICIES}
            opened = lambda clients=clients: nullcontext(clients)  # noqa: E731
            left = kept.play(opened, self.game, self.begin, self.step, {})
            self.restarted, self.replayed = (
                self.restarted + left.num_restarted,
                self.replayed + left.num_replayed,
            )
            self.ages += left.staleness
            samples = [p for p in left.prompts["sample_index"].tolist() for _ in range(self.n)]
            for prompt, age, one in zip(samples, left.staleness, left.played, strict=True):
                self.trained.append((prompt, row_of(one)))
                versions = {v for c in one.contexts.values() for row in c.rows for v in row.versions} - {-1}
                assert self.step - min(versions, default=self.step) == age, "versions are those of before"

    def state(self):
        return json.dumps([[kept.state() for kept in self.kept], self.loaders[0].state_dict()])

    def resume(self, step, text):
        states, position = json.loads(text)
        self.step = step
        for shard, (kept, loader) in enumerate(zip(self.kept, self.loaders, strict=True)):
            kept.load_state(states, shard, self.shards)
            loader.load_state_dict(position)
        return self

    def finish(self):
        while self.step < self.steps:
            self.advance()
        for kept in self.kept:
            kept.close()
        return self


def row_of(one):
    """All that is trained of an episode, and what reward functions read of it."""
    said = tuple((m.role, m.content, m.agent, m.turn, m.reward, m.to) for m in one.episode.messages)
    rows = tuple(
        (agent, tuple(row.prompt_ids), tuple(row.ids), tuple(row.log_probs), tuple(row.rewards))
        for agent, context in sorted(one.contexts.items())
        for row in context.rows
    )
    return (
        said,
        rows,
        one.kind,
        one.episode.ended,
        json.dumps(one.episode.state, sort_keys=True, default=repr),
    )


def held(text):
    """Episodes of a checkpoint that have said something, and the tokens that it has of them."""
    groups = [group for state in json.loads(text)[0] for _, group in state["episodes"]]
    said = [
        sum(len(part["token_ids"]) for *_, part in one["turns"]) for group in groups for one in group if one
    ]
    return len(groups), sum(map(bool, said)), sum(said)


@pytest.fixture(autouse=True)
def fresh_world():
    Table.replayable, Table.world, Count.calls = True, "here", 0


CASES = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(1, 4))


@settings(max_examples=16, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    CASES,
    st.sampled_from([TALK, AT_ONCE, PLAY, CALLS]),
    st.tuples(*[st.integers(1, 2)] * 3),
    st.randoms(use_true_random=False),
)
def test_what_is_trained_is_what_an_undisturbed_run_trains_and_nothing_is_said_twice(
    case, stages, shards, rng
):
    batch, n, max_lag, steps = case
    whole = Job(shards[0], batch, n, max_lag, steps, stages).finish()
    job, saved, trained, said = Job(shards[0], batch, n, max_lag, steps, stages, 2), (0, None), [], 0
    for number in shards[1:]:  # a run that is killed, and one that is killed after its resume
        for _ in range(rng.randint(0, steps - job.step)):
            job.advance()
            if rng.random() < 0.6:
                saved, said = (job.step, job.state()), said + job.num_sampled
                trained, job.trained, job.num_sampled = trained + job.trained, [], 0
        for kept in job.kept:
            kept.close()
        job = Job(number, batch, n, max_lag, steps, stages, 5)
        if saved[1] is not None:
            job.resume(*saved)
    job.finish()
    assert Counter(trained + job.trained) == Counter(whole.trained)
    assert said + job.num_sampled == whole.num_sampled, "what the checkpoint holds is not sampled again"
    assert job.restarted == 0 and max(job.ages, default=0) <= max_lag
    if saved[1] is not None and saved[0] < steps:
        assert job.replayed >= held(saved[1])[1]


def killed(stages, **more):
    """A run that is killed after a step that leaves much behind, and the one that goes on from there."""
    job = Job(1, 4, 2, 2, 6, stages, 2, **more)
    job.advance()
    text, trained = job.state(), job.trained
    for kept in job.kept:
        kept.close()
    return text, trained, Job(1, 4, 2, 2, 6, stages, 5, **more).resume(1, text)


@pytest.mark.parametrize("why", ["not declared", "another world", "a state that is no plain data"])
def test_an_episode_that_cannot_be_brought_back_begins_anew_and_is_counted(why):
    stages, more = (CALLS, {"tool": Count({1, 2})}) if "plain" in why else (PLAY, {})
    Table.replayable = why != "not declared"
    text, trained, job = killed(stages, **more)
    groups, said, _ = held(text)
    Table.world = "there" if why == "another world" else "here"
    job.finish()
    whole = Job(1, 4, 2, 2, 6, stages, **more).finish()
    assert groups > 1 and 0 < job.restarted <= groups
    assert (job.replayed > 0) == (why != "not declared"), "others are brought back"
    if why == "not declared":
        assert said == 0 and job.restarted == groups, "what cannot be used is not kept"
    assert Counter(trained + job.trained) == Counter(
        trained + [one for one in whole.trained if one[0] not in {prompt for prompt, _ in trained}]
    ), "each as if it had begun after the kill"


def test_a_tool_whose_answer_is_known_is_not_called_again():
    text, _, job = killed(CALLS)
    known = [
        one["answers"] for state in json.loads(text)[0] for _, group in state["episodes"] for one in group
    ]
    Count.calls = 0
    job.finish()
    answered = sum(role == "tool" for _, (said, *_) in job.trained for role, *_ in said)
    assert sum(map(len, known)) > 3 and Count.calls == answered - sum(map(len, known))


def test_a_checkpoint_grows_with_the_tokens_in_flight_only():
    text, _, job = killed(PLAY)
    groups, _, tokens = held(text)
    assert len(text) < 3000 + 1200 * 2 * groups + 40 * tokens
    job.finish()
    assert held(job.state())[0] == 0
