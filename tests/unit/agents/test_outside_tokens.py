"""What is sampled is what is trained, whatever histories a program sends: random conversations."""

import asyncio
import json
import random
from dataclasses import replace

import pytest
from episode_cases import END, Letters, Script, speaker, text_of
from jinja2 import TemplateError
from outside_cases import episode, game_of

from siirl.agents.contexts import Limits
from siirl.agents.outside import messages_wire
from siirl.agents.outside.chat_wire import asked_of, completion
from siirl.agents.outside.content import BadRequest
from siirl.agents.outside.episode_session import Session
from siirl.agents.outside.exchange import Said
from siirl.agents.runner import Played, turn_seed
from siirl.data.completions import Completion
from siirl.dialect.formats.json_calls import hermes
from siirl.dialect.marks import KNOWN

WORDS = [
    "yes",
    " no ",
    "",
    "a\nb",
    "<tool_call>",
    '{"name": "f", "arguments": {"x": [1, "ü"]}}',
    "</tool_call>",
]
CALL = '<tool_call>{"name": "f",  "arguments": {"x": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
NAMES = ("planner", "worker")


class Sampler:
    """Says random tokens, and remembers after which tokens it said which."""

    def __init__(self, rng):
        self.rng, self.samples = rng, {}

    async def generate(self, prompt, params, seed, seen=None):
        await asyncio.sleep(0)
        text = "".join(self.rng.choices([*WORDS, CALL], k=self.rng.randrange(1, 4))) or "."
        tokens = [ord(letter) for letter in text][: params.max_tokens]
        stops = len(tokens) < params.max_tokens and self.rng.random() < 0.8
        tokens += [END] * stops
        log_probs = [-self.rng.random() for _ in tokens]
        self.samples[seed] = prompt, list(tokens), list(log_probs)
        return Completion(tokens, log_probs, "stop" if stops else "length", self.rng.randrange(3))


class Renamed(Letters):
    """Letters, whose template shows calls, so that a row may begin with them."""

    def apply_chat_template(self, conversation, tools=(), **options):
        shown = [
            {**m, "content": m["content"] + "".join(f"<{c['function']['name']}>" for c in m["tool_calls"])}
            if "tool_calls" in m
            else m
            for m in conversation
        ]
        return super().apply_chat_template(shown, tools, **options)


def next_history(rng, histories):
    """A conversation to go on with: a new one, one as it was, one cut off, or one that is rewritten."""
    chosen = rng.choice([[], *histories])
    messages = [dict(message) for message in chosen]
    kind = rng.random()
    if messages and kind < 0.2:
        messages = messages[: rng.randrange(len(messages))]
    elif messages and kind < 0.3:
        messages[rng.randrange(len(messages))] = {"role": "user", "content": "rewritten"}
    elif messages and kind < 0.4:
        messages = [{"role": "system", "content": "summary"}, *messages[-2:]]
    if rng.random() < 0.8 or not messages:
        roles = ["user", "system", "developer", "tool", "assistant"]
        content = rng.choice(["more", "", [{"type": "text", "text": "in parts"}], "z" * rng.randrange(40)])
        messages.append({"role": rng.choice(roles), "content": content})
    return messages


async def one_conversation(rng, num_requests):
    """(what was sampled by seed, the episode) of a program that does not know what it wants."""
    samplers = {name: Sampler(rng) for name in NAMES}
    played = Played(episode(), {})
    game = game_of({name: speaker(samplers[name], Limits(200, 120)) for name in NAMES}, None)
    for one in game.speakers.values():
        one.renderer.tokenizer = Renamed()
    session = Session(game, played, hermes, num_requests)
    histories, refused = {name: [] for name in NAMES}, 0

    async def ask(name, messages):
        nonlocal refused
        body = {"model": name, "messages": messages, "tools": rng.choice([[], TOOLS[:1], TOOLS])}
        if rng.random() < 0.2:
            body["max_tokens"] = rng.randrange(1, 9)
        asked = asked_of(json.loads(json.dumps(body)))
        asking = asyncio.create_task(session.turns(asked))
        if rng.random() < 0.1:
            await asyncio.sleep(0)
            asking.cancel()
        try:
            answer = json.loads(json.dumps(completion(await asking, 0)))
        except (BadRequest, asyncio.CancelledError):
            refused += 1
            return
        said = answer["choices"][0]["message"]
        turn = int(answer["id"].rpartition("-")[2])
        read, *_ = samplers[name].samples[turn_seed(played.episode.seed, NAMES.index(name), turn)]
        spelled = session._asked._own[NAMES.index(name)].read(asked.messages)[1]
        asked_text = Renamed().apply_chat_template(spelled, asked.tools)
        # A turn that is gone on from is read as it was sampled: the template strips, and puts a call last.
        wanted = text_of(map(ord, asked_text))
        assert sorted("".join(text_of(read).split())) == sorted("".join(wanted.split()))
        if rng.random() < 0.3:  # as pydantic dumps it
            said |= {"refusal": None, "audio": None, "function_call": None}
        histories[name].append([*messages, said])

    for _ in range(num_requests // 2):
        first, second = rng.choices(NAMES, k=2)
        one, other = next_history(rng, histories[first]), next_history(rng, histories[second])
        if first == second and rng.random() < 0.5:  # the same history at once
            other = one
        await asyncio.gather(ask(first, one), ask(second, other))
    await session.finish()
    return samplers, played, refused


def check_tokens(samplers, played):
    """Every turn of the rows is a sample, after what was read then, and nothing else is trained."""
    found = 0
    for agent, name in enumerate(NAMES):
        samples = list(samplers[name].samples.values())
        context = played.contexts.get(agent)
        for row in context.rows if context else ():
            assert len(row.prompt_ids) <= 200 and len(row.ids) <= 120
            lists = (row.assistant_mask, row.log_probs, row.turn_ids, row.rewards, row.versions)
            assert {len(column) for column in lists} == {len(row.ids)}
            for turn in dict.fromkeys(t for t in row.turn_ids if t >= 0):
                where = [index for index, t in enumerate(row.turn_ids) if t == turn]
                assert where == list(range(where[0], where[-1] + 1)) and all(
                    row.assistant_mask[index] for index in where
                )
                tokens, log_probs = ([column[i] for i in where] for column in (row.ids, row.log_probs))
                read = row.prompt_ids + row.ids[: where[0]]
                assert (read, tokens, log_probs) in samples
                found += 1
            assert sum(row.assistant_mask) == sum(t >= 0 for t in row.turn_ids)
    turns = [message for message in played.episode.messages if message.turn is not None]
    assert found == len(turns) == len({message.turn for message in turns})


@pytest.mark.parametrize("number", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_trained_tokens_are_the_sampled_ones(number):
    kinds = {"rows": 0, "turns": 0, "refused": 0, "calls": 0}
    for seed in range(number):
        rng = random.Random(seed)
        samplers, played, refused = asyncio.run(one_conversation(rng, rng.randrange(2, 20)))
        check_tokens(samplers, played)
        rows = [row for context in played.contexts.values() for row in context.rows]
        kinds["rows"] += len(rows)
        kinds["turns"] += sum(len(set(row.turn_ids) - {-1}) for row in rows)
        kinds["refused"] += refused
        kinds["calls"] += sum("tool_calls" in message for row in rows for message in row.shown)
    assert kinds["turns"] > kinds["rows"] > number and min(kinds.values()) > number / 4, kinds


class Strict(Letters):
    """A template that does not take everything."""

    def apply_chat_template(self, conversation, tools=(), **options):
        if any("forbidden" in message["content"] for message in conversation):
            raise TemplateError("no such words")
        return super().apply_chat_template(conversation, tools, **options)


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        ({"content": "forbidden"}, "invalid_value", "no such words"),
        ({"content": "x" * 60}, "context_length_exceeded", "data.max_prompt_length=50"),
        ({"content": [{"type": "image_url", "image_url": "x"}]}, "invalid_value", "as data:image"),
        ({"role": "robot", "content": "x"}, "invalid_value", "no role"),
        ({"role": ["user"], "content": "x"}, "invalid_value", "no role"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "invalid_value", "has not made"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "invalid_value", "no call"),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_and_the_episode_goes_on(wrong, code, words):
    async def both():
        played, sampler = Played(episode(), {}), Sampler(random.Random(0))
        game = game_of({"a": speaker(sampler, Limits(50, 50))}, None)
        game.speakers["a"].renderer.tokenizer = Strict()
        session = Session(game, played, hermes, 9)
        with pytest.raises(BadRequest, match=words) as error:
            await session.turns(asked_of({"model": "a", "messages": [{"role": "user", **wrong}]}))
        assert error.value.code == code and not sampler.samples
        await session.turns(asked_of({"model": "a", "messages": [{"role": "user", "content": "ok"}]}))
        await session.finish()
        session.settle(needs_reward=False)
        return played

    played = asyncio.run(both())
    assert [len(row.messages) for row in played.contexts[0].rows] == [1]
    assert played.full is (code == "context_length_exceeded") is ("max_prompt_length" in played.episode.ended)


def test_reasoning_is_apart_from_the_answer_and_the_turn_is_known_again_without_it():
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    lines = [f"<think>f? {call}</think>\n\n4", f"<think>now</think>{call}", "done"]

    async def three():
        played, script = Played(episode(), {}), Script(*lines)
        game = game_of({"a": speaker(script, Limits(500, 500))}, None)
        one = game.speakers["a"].renderer
        one.dialect = replace(one.dialect, reasoning=KNOWN[0])
        session = Session(game, played, hermes, 9)
        messages, answers = [], []
        for text in ("q", "again", "more"):
            messages.append({"role": "user", "content": text})
            body = {"model": "a", "messages": messages, "tools": TOOLS}
            said = completion(await session.turns(asked_of(json.loads(json.dumps(body)))), 0)
            answers.append(said["choices"][0]["message"])
            messages.append({k: v for k, v in answers[-1].items() if k != "reasoning_content"})
        await session.finish()
        return played, script, answers

    played, script, answers = asyncio.run(three())
    assert [one.get("reasoning_content") for one in answers] == [f"f? {call}", "now", None]
    assert [one["content"] for one in answers] == ["4", None, "done"]
    assert [len(one.get("tool_calls", ())) for one in answers] == [0, 1, 0]
    assert len(played.contexts[0].rows) == 1  # each turn goes on behind what was said word for word
    assert script.read[1].startswith(f"{script.read[0]}{lines[0]}/") and lines[1] in script.read[2]


def test_both_wires_say_the_same_of_a_conversation():
    call = {"id": "c00000400", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    said = Said(
        "0-4", "a", 4, {"role": "assistant", "content": "so", "tool_calls": [call]}, "tool_calls", 7, 9
    )
    asked = []
    for answer, wire in (
        (completion([said], 0), asked_of),
        (messages_wire.message([said], 0), messages_wire.asked_of),
    ):
        mine = answer["choices"][0]["message"] if "choices" in answer else answer
        block = {"type": "tool_result", "tool_use_id": "c00000400", "content": "1"}
        results = [{"role": "tool", "tool_call_id": "c00000400", "content": "1"}]
        if "choices" not in answer:
            results = [{"role": "user", "content": [block]}]
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", **mine}, *results]
        asked.append(wire(json.loads(json.dumps({"model": "a", "max_tokens": 5, "messages": messages}))))
    assert (
        asked[0].messages
        == asked[1].messages
        == [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "so", "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "c00000400"},
        ]
    )
    assert asked[0].most_tokens == asked[1].most_tokens == 5
    parts = [json.loads(part.split(b"data: ")[1]) for part in messages_wire.Stream(0, True).end([said])]
    assert [part["type"].rpartition("_")[2] for part in parts] == [
        *("start", *["start", "delta", "stop"] * 2, "delta", "stop")
    ]


def test_a_type_of_block_that_is_no_text_is_refused():
    asked = {"model": "a", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": ["text"]}]}]}
    with pytest.raises(BadRequest, match="there are text, images and tools"):
        messages_wire.asked_of(asked)
