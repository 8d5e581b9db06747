"""What each turn of an episode gets and gives: seeds, room, environments, the user's functions, order."""

import _thread
import asyncio
import signal
import threading
from dataclasses import replace

import pytest
from episode_cases import END, Script, play, speaker, stage
from template_cases import TemplateTokenizer, dialect_of

from siirl.agents.contexts import Limits
from siirl.agents.environments import HostedEnvironment
from siirl.agents.renderer import ChatRenderer
from siirl.data.completions import Completion
from siirl.errors import EpisodeFailed, RolloutError


def two(policies, **last):
    """Stages a and b of agents 0 and 1, and their speakers; last: of the plan of b."""
    stages = [stage("a", 0, following="b"), stage("b", 1, **last)]
    return stages, {one.node: speaker(policy) for one, policy in zip(stages, policies, strict=True)}


def test_every_turn_of_every_episode_has_a_seed_of_its_own_and_the_environment_that_of_the_episode():
    made = []

    class Game:
        def reset(self, task, seed):
            made.append(seed)
            return ""

        def step(self, actions):
            return "", 0.0, False

    def seeds():
        policies = Script(*"1" * 4), Script(*"2" * 4)
        stages, speakers = two(policies, following="game")
        stages.append(stage("game", None, back_to="a", max_turns=2))
        play(stages, speakers, make_env=lambda: HostedEnvironment(Game, "game"), num_episodes=2)
        return [sorted(policy.seeds) for policy in policies]

    first = seeds()
    assert len({*first[0], *first[1]}) == 8 and first == seeds()
    assert sorted(made) == [100, 100, 101, 101]


class Referee:
    """Keeps what it is given; pays one to all who acted, and once more to agent 0 after agent 1."""

    def __init__(self, given, closed):
        self.given, self.closed = given, closed

    def reset(self, task, seed):
        return {0: "hello 0", 7: "nobody"}

    def step(self, actions):
        self.given.append(actions)
        number = len(self.given)
        rewards = {0: 0.25, 1: 1.0} if 1 in actions else 1.0
        return {1 - number % 2: f"step {number}"}, rewards, False, {"number": number}

    def close(self):
        self.closed.append(1)


def refereed(shows=True):
    """a, referee, b, referee, twice: (what the environment was given, closings, scripts, the episode)."""
    given, closed = [], []
    uses = {"obs_with_env": shows}
    stages = [
        stage("a", 0, following="after_a"),
        stage("after_a", None, following="b", **uses),
        stage("b", 1, following="after_b"),
        stage("after_b", None, back_to="a", max_turns=2, until="until", **uses),
    ]
    policies = Script("1", "3"), Script("2", "4")
    speakers = {"a": speaker(policies[0]), "b": speaker(policies[1])}
    seen = []

    def until(episode):
        seen.append((episode.state["env"], episode.speaker))
        return False

    (one,) = play(
        stages,
        speakers,
        {"until": until},
        lambda: HostedEnvironment(lambda: Referee(given, closed), "referee"),
    )
    assert one.kind is None, one.episode.error
    assert seen == [({"number": 2}, 1)]
    return given, closed, policies, one


def test_an_environment_is_given_what_was_said_since_it_was_last_asked_and_pays_the_last_turns():
    given, closed, _, one = refereed()
    assert given == [{0: "1"}, {1: "2"}, {0: "3"}, {1: "4"}] and closed == [1]
    spoken = [message for message in one.episode.messages if message.agent is not None]
    assert [message.reward for message in spoken] == [1.25, 1.0, 1.25, 1.0]
    (row,) = one.contexts[0].rows
    ends = [place for place, turn in enumerate(row.turn_ids) if turn >= 0][1::2]
    assert [row.rewards[place] for place in ends] == [1.25, 1.25] and sum(row.rewards) == 2.5


@pytest.mark.parametrize("shows", [True, False])
def test_an_observation_for_one_agent_is_read_by_it_alone(shows):
    _, _, (first, second), one = refereed(shows)
    if not shows:
        assert first.read == ["u:q/a:", "u:q/a:1/u:2/a:"]
        assert second.read == ["u:q/u:1/a:", "u:q/u:1/a:2/u:3/a:"]
        return
    assert first.read == ["u:q/u:hello 0/a:", "u:q/u:hello 0/a:1/u:step 1/u:2/a:"]
    assert second.read == ["u:q/u:1/a:", "u:q/u:1/a:2/u:step 2/u:3/a:"]
    assert not any("nobody" in message.content for message in one.episode.messages)


def test_a_reward_for_all_goes_to_every_agent_that_has_acted():
    class Pays:
        def reset(self, task, seed):
            return ""

        def step(self, actions):
            return "", 0.5, True

    stages, speakers = two([Script("1"), Script("2")], following="pays")
    stages.append(stage("pays", None))
    (one,) = play(stages, speakers, make_env=lambda: HostedEnvironment(Pays, "pays"))
    assert [message.reward for message in one.episode.messages if message.agent is not None] == [0.5, 0.5]
    assert one.episode.done


def test_an_agent_reads_its_own_turns_as_it_said_them_and_others_what_was_made_of_them():
    heard = []

    def shout(text, episode):
        heard.append(episode.speaker)
        return text.upper() + "!"

    stages, speakers = two([Script("one", "three"), Script("two", "four")], back_to="a", max_turns=2)
    speakers["a"] = speaker(speakers["a"].policy, post_process=shout)
    (one,) = play(stages, speakers)
    assert speakers["a"].policy.read == ["u:q/a:", "u:q/a:one/u:two/a:"] and len(one.contexts[0].rows) == 1
    assert speakers["b"].policy.read[-1] == "u:q/u:ONE!/a:two/u:THREE!/a:"
    assert heard == [0, 0]


def test_the_first_turn_reads_what_a_pre_processing_function_made_of_the_prompt():
    policy = Script("1")
    teacher = speaker(policy, pre_process=lambda messages, episode: [{"role": "system", "content": "be"}])
    play([stage("a", 0)], {"a": teacher})
    assert policy.read == ["s:be/a:"]


def test_a_row_ends_as_its_last_turn_does_and_the_conversation_says_how_each_turn_came_about():
    stages, speakers = two([Script("1...", "2"), Script("3", "4...")], back_to="a", max_turns=2)
    (one,) = play(stages, speakers)
    assert [one.contexts[agent].rows[0].finish_reason for agent in (0, 1)] == ["stop", "length"]
    said = [message for message in one.episode.conversation() if message["agent"] is not None]
    assert [(m["finish_reason"], m["tokens"], m["weight_version"]) for m in said] == [
        ("length", 1, 5),
        ("stop", 2, 5),
        ("stop", 2, 5),
        ("length", 1, 5),
    ]


def test_tokens_that_no_text_gives_back_are_kept_as_they_were_sampled():
    """An end within a turn is lost in its text; the row and the next prompt have it nonetheless."""

    class Odd(Script):
        async def generate(self, prompt, params, seed, seen=None):
            await super().generate(prompt, params, seed)
            return Completion([65, END, 66, END], [-1.0, -2.0, -3.0, -4.0], "stop", 5)

    stages, speakers = two([Odd("", ""), Script("2", "4")], back_to="a", max_turns=2)
    (one,) = play(stages, speakers)
    assert speakers["a"].policy.read[-1] == "u:q/a:A/B/u:2/a:"
    (row,) = one.contexts[0].rows
    assert [token for token, own in zip(row.ids, row.assistant_mask, strict=True) if own] == [
        65,
        END,
        66,
        END,
    ] * 2
    assert [value for value in row.log_probs if value] == [-1.0, -2.0, -3.0, -4.0] * 2


@pytest.mark.parametrize(
    ("limits", "most"),
    [(Limits(100, 2000), [1000, 1000]), (Limits(100, 30), [30, 20]), (Limits(100, 30, turn=25), [25, 20])],
)
def test_a_turn_is_as_long_as_there_is_room_and_no_longer_than_is_configured(limits, most):
    stages, speakers = two([Script("123", "4"), Script("5", "6")], back_to="a", max_turns=2)
    speakers["a"] = speaker(speakers["a"].policy, limits)
    play(stages, speakers)
    assert speakers["a"].policy.most_tokens == most  # of 30, 4 are its turn and 6 what it has read since


def test_an_episode_keeps_to_one_of_several_engines():
    engines = [Script(*"1" * 4), Script(*"2" * 4)]
    one = speaker(engines[0], more=(engines[1],))
    play([stage("a", 0, back_to="a", max_turns=2)], {"a": one}, num_episodes=4)
    for number, engine in enumerate(engines):
        assert engine.lines == [] and all(set(read) <= set(f"u:q/a:{number + 1}") for read in engine.read)


def test_a_sample_goes_on_to_the_next_agent_while_others_still_wait_for_the_first():
    """Agent 0 answers in the first episode once agent 1 has spoken twice in the second."""

    spoken = asyncio.Event()

    class Slow(Script):
        async def generate(self, prompt, params, seed, seen=None):
            if not self.seeds:
                self.seeds.append(seed)
                await asyncio.wait_for(spoken.wait(), 5)
            return await super().generate(prompt, params, seed)

    class Counting(Script):
        async def generate(self, prompt, params, seed, seen=None):
            if len(self.seeds) == 1:
                spoken.set()
            return await super().generate(prompt, params, seed)

    policies = Slow(*"1" * 4), Counting(*"2" * 4)
    stages, speakers = two(policies, back_to="a", max_turns=2)
    made = play(stages, speakers, num_episodes=2)
    assert [one.kind for one in made] == [None, None] and not policies[1].lines


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pre_process": lambda messages, episode: "q"}, r"'a': pre_process gave 'q', no list of messages"),
        ({"pre_process": lambda messages, episode: [{"role": "user"}]}, "no list of messages with role and"),
        ({"pre_process": lambda messages, episode: []}, r"pre_process gave \[\]"),
        ({"post_process": lambda text, episode: 3}, r"'a': post_process gave 3, which is no text"),
        ({"pre_process": lambda messages, episode: 1 / 0}, r"'a': pre_process raised ZeroDivisionError"),
        ({"post_process": lambda text, episode: 1 / 0}, r"'a': post_process raised ZeroDivisionError"),
        ({"until": lambda episode: 1 / 0}, r"'a': until raised ZeroDivisionError.*raise siirl.errors"),
        ({"route": lambda episode: 1 / 0}, r"'a': route raised ZeroDivisionError"),
        ({"route": lambda episode: "c"}, r"'a': route route gave 'c', which is no node.*\(a, b\)"),
    ],
)
def test_code_of_the_user_that_fails_ends_the_run_with_its_node(options, words):
    functions = {name: options.pop(name) for name in ("until", "route") if name in options}
    first = stage("a", 0, following="b", back_to="a", max_turns=2, **{name: name for name in functions})
    speakers = {"a": speaker(Script("1", "1"), **options), "b": speaker(Script("2"))}
    with pytest.raises(RolloutError, match=words):
        play([first, stage("b", 1)], speakers, functions)


def test_code_of_the_user_may_drop_an_episode_which_costs_that_one_alone():
    def until(episode):
        if episode.sample == 1:
            raise EpisodeFailed("too dull", "dull")
        return True

    first = stage("a", 0, back_to="a", max_turns=3, until="until")
    made = play([first], {"a": speaker(Script(*"1" * 3))}, {"until": until}, num_episodes=3)
    assert [(one.kind, one.episode.error) for one in made] == [
        (None, None),
        ("dull", "too dull"),
        (None, None),
    ]


def test_a_route_goes_back_no_more_often_than_the_loop_allows():
    stages, speakers = two([Script(*"1" * 9), Script(*"2" * 9)], back_to="a", max_turns=3, route="route")
    stages.append(stage("c", 2))
    stages[1] = stage("b", 1, back_to="a", max_turns=3, route="route", following="c")
    speakers["c"] = speaker(Script("3"))
    (one,) = play(stages, speakers, {"route": lambda episode: "a"})
    assert one.episode.visits == {"a": 3, "b": 3, "c": 1}


@pytest.mark.parametrize(("tokens", "log_probs"), [([], []), ([65, 3], [-1.0])])
def test_a_policy_that_says_nothing_costs_the_episode(tokens, log_probs):
    class Broken:
        async def generate(self, prompt, params, seed, seen=None):
            return Completion(tokens, log_probs, "stop", 1)

    (one,) = play([stage("a", 0)], {"a": speaker(Broken())})
    assert one.kind == "policy" and "the policy gave" in one.episode.error


@pytest.mark.timeout(30)
def test_an_interruption_that_no_call_is_interrupted_by_is_heeded():
    class Silent:
        async def generate(self, prompt, params, seed, seen=None):
            threading.Timer(0.1, _thread.interrupt_main).start()
            await asyncio.get_running_loop().create_future()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            play([stage("talk", 0)], {"talk": speaker(Silent())})
    finally:
        signal.signal(signal.SIGINT, before)


MARKED = (  # of which [THINK], [/THINK] and the end of turn are tokens
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}"
    "[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("heard_text", "heard"),
    [("whole", ["[THINK]5[/THINK]4", "[THINK]no"]), ("answer", ["4", ""])],
)
def test_nothing_that_others_hear_is_joined_over_a_token_that_was_skipped(heard_text, heard):
    vocabulary, read, acted = TemplateTokenizer(MARKED), [], []
    lines = {"a": [("[THINK]5[/THINK]4", "stop"), ("[THINK]no", "length")], "b": [("yes", "stop")] * 2}

    class Says:
        def __init__(self, name):
            self.name = name

        async def generate(self, prompt, params, seed, seen=None):
            read.append(vocabulary.decode(prompt))
            text, reason = lines[self.name].pop(0)
            tokens = vocabulary.encode(text + "</s>" * (reason == "stop"))
            return Completion(tokens, [-1.0] * len(tokens), reason, 0)

    class Acts:
        def reset(self, task, seed):
            return ""

        def step(self, actions):
            acted.append(actions)
            return "", 0.0, False

    stages, speakers = two([Says("a"), Says("b")], following="game")
    stages.append(stage("game", None, back_to="a", max_turns=2))
    dialect = dialect_of(vocabulary)
    renderer = ChatRenderer(vocabulary, {}, dialect=dialect)
    speakers = {name: replace(one, renderer=renderer) for name, one in speakers.items()}
    speakers["a"] = replace(speakers["a"], heard_text=heard_text)
    (one,) = play(stages, speakers, make_env=lambda: HostedEnvironment(Acts, "game"))
    assert one.kind is None, one.episode.error
    assert [actions[0] for actions in acted] == heard
    assert read[1].endswith(f"user: {heard[0]}</s>assistant: ") and f"user: {heard[1]}</s>" in read[3]
    spoken = [message for message in one.episode.messages if message.agent == 0]
    assert [message.said.answer for message in spoken] == ["4", ""]
    assert [message.said.reasoning for message in spoken] == ["5", "no"]
    assert "[THINK]5[/THINK]4</s>" in read[2]  # its own turn is as it said it
