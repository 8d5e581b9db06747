"""A stream tells a turn while it is being said, and in all what the answer in one piece has."""

import asyncio
import json
import random
from dataclasses import replace

import pytest
from episode_cases import END, Letters, speaker
from outside_cases import episode, game_of

from siirl.agents.contexts import Limits
from siirl.agents.outside.endpoint import WIRES
from siirl.agents.outside.episode_session import Session
from siirl.agents.runner import Played
from siirl.agents.stream_client import StreamClient
from siirl.data.completions import Completion
from siirl.dialect.formats.json_calls import hermes
from siirl.dialect.marks import KNOWN, ReasoningMarks
from siirl.dialect.tool_formats import BEGINS, TOOL_FORMATS, call_begins

CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"x": "ü"}}</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
    "qwen3_coder": "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>",
    "command_a": '<|START_ACTION|>[{"tool_name": "f", "parameters": {"x": 1}}]<|END_ACTION|>',
    "json": '```json\n{"name": "f", "arguments": {"x": 1}}\n```',
    "pythonic": "[f(x=1)]",
}
WORDS = ["so ", "  ", "a", "\n\n", "ü", "€", "😀 ", "<", "[", "`", "the answer ", "stop", "st", "."]
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "q"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "q"}]},
    "/v1/responses": {"input": "q"},
    "/v1/completions": {"prompt": "q"},
}
NUM_TURNS = 60
SCHEMA = {"type": "object"}
TOOLS = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    "/v1/messages": {"name": "f", "input_schema": SCHEMA},
    "/v1/responses": {"type": "function", "name": "f", "parameters": SCHEMA},
}


class Bytes(Letters):
    """A vocabulary of bytes; its prompts end with what opens the reasoning, if anything does."""

    opens = ""

    def apply_chat_template(self, conversation, tools=(), **options):
        return super().apply_chat_template(conversation, tools, **options) + self.opens

    def encode(self, text, **options):
        return list(text.encode())

    def decode(self, token_ids, **options):
        return bytes(token for token in token_ids if token != END).decode(errors="replace")


class Engine(StreamClient):
    """Says a text in the parts in which it is asked for."""

    def __init__(self, text, ends):
        self.ids, self.ends, self.said = [*text.encode(), *[END] * ends], ends, []

    async def generate(self, prompt, params, seed, seen=None, start=0):
        await asyncio.sleep(0)
        ids = self.ids[start : start + params.max_tokens]
        self.said.append(len(ids))
        log_probs = [-float(start + index) for index in range(len(ids))]
        is_end = self.ends and start + len(ids) == len(self.ids)
        return Completion(ids, log_probs, "stop" if is_end else "length", 5)


def answered(path, body, text, ends, parse, marks, opens, streams):
    """(the answer in one piece, as events, the sizes of parts, the events' number then, the row)."""
    wire, engine, played = WIRES[path], Engine(text, ends), Played(episode(), {})
    one = speaker(engine, Limits(500, len(engine.ids)))
    one.renderer.tokenizer = Bytes()
    one.renderer.tokenizer.opens = opens
    one.renderer.dialect = replace(one.renderer.dialect, reasoning=marks)
    stream, events = wire.stream(0, True), []

    def tell(index, said):
        events.append((len(engine.said), b"".join(stream.more(index, said))))

    async def ask():
        session = Session(game_of({"a": one}, None), played, parse, 9)
        said = await session.turns(wire.asked_of({"model": "a", **body}), tell if streams else None)
        await session.finish()
        return said

    said = asyncio.run(ask())
    events.append((len(engine.said), b"".join(stream.end(said))))
    return wire.whole(said, 0), events, engine.said, played.contexts[0].rows


def data_of(events):
    lines = b"".join(one for _, one in events).decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def heard(path, events):
    """What a client makes of a stream: the same as it has of the answer in one piece, as `told` has it."""
    reasoning = answer = ""
    calls, data = [], data_of(events)
    for one in data:
        if path == "/v1/completions":
            answer += "".join(choice["text"] for choice in one["choices"])
        elif path == "/v1/chat/completions":
            for delta in (choice["delta"] for choice in one["choices"]):
                reasoning += delta.get("reasoning_content", "")
                answer += delta.get("content") or ""
                calls += [(x["id"], x["function"]) for x in delta.get("tool_calls", ())]
        elif path == "/v1/messages":
            delta = one.get("delta", {})
            reasoning, answer = reasoning + delta.get("thinking", ""), answer + delta.get("text", "")
            if one.get("content_block", {}).get("type") == "tool_use":
                calls.append([one["content_block"]["id"], one["content_block"]["name"], ""])
            if "partial_json" in delta:
                calls[-1][-1] += delta["partial_json"]
        else:
            kind = one["type"].removeprefix("response.")
            reasoning += one["delta"] if kind == "reasoning_text.delta" else ""
            answer += one["delta"] if kind == "output_text.delta" else ""
            if kind == "function_call_arguments.done":
                calls.append((one["name"], one["arguments"]))
    return reasoning, answer, calls


def told(path, whole):
    """(reasoning, answer, calls) of an answer in one piece."""
    if path == "/v1/completions":
        return "", whole["choices"][0]["text"], []
    if path == "/v1/chat/completions":
        message = whole["choices"][0]["message"]
        calls = [(x["id"], x["function"]) for x in message.get("tool_calls", ())]
        return message.get("reasoning_content", ""), message["content"] or "", calls
    key = "content" if path == "/v1/messages" else "output"
    parts = {kind: [x for x in whole[key] if x["type"] == kind] for kind in {x["type"] for x in whole[key]}}
    if path == "/v1/messages":
        calls = [
            [x["id"], x["name"], json.dumps(x["input"], ensure_ascii=False)]
            for x in parts.get("tool_use", ())
        ]
        thought = "".join(x["thinking"] for x in parts.get("thinking", ()))
        return thought, "".join(x["text"] for x in parts.get("text", ())), calls
    calls = [(x["name"], x["arguments"]) for x in parts.get("function_call", ())]
    thought, said = (
        "".join(x["content"][0]["text"] for x in parts.get(k, ())) for k in ("reasoning", "message")
    )
    return thought, said, calls


def random_turn(rng):
    """(marks, what the prompt opens, format, the text of a turn)."""
    marks = rng.choice([None, *KNOWN])
    opens = marks.begin if marks is not None and rng.random() < 0.3 else ""
    if marks is not None and not opens and rng.random() < 0.3:
        marks = replace(marks, closed=True)
    name = rng.choice(list(CALLS))
    pieces = [*WORDS, *WORDS, CALLS[name], CALLS[name][:9]]
    head = ""
    if marks is not None:
        pieces += [marks.begin, marks.end, marks.begin[:3], marks.end[:-1], *marks.answer]
        head = rng.choice(["", "", marks.begin if not opens else ""])
        head += rng.choice(["", f"hm ü\n{marks.end}\n\n{marks.answer[0]}"])
    return marks, opens, name, head + "".join(rng.choices(pieces, k=rng.randrange(1, 25))) or "."


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_says_in_all_what_the_answer_in_one_piece_has(path):
    rng, num_early = random.Random(path), 0
    for _ in range(NUM_TURNS):
        marks, opens, name, text = random_turn(rng)
        body = dict(BODIES[path], max_tokens=500)
        if path == "/v1/responses":
            body["max_output_tokens"] = body.pop("max_tokens")
        if path in TOOLS and rng.random() < 0.6:
            body["tools"] = [TOOLS[path]]
        if rng.random() < 0.4:
            body["stop_sequences" if path == "/v1/messages" else "stop"] = ["stop", "€."]
        given = path, body, text, rng.random() < 0.7, TOOL_FORMATS[name], marks, opens
        whole, _, _, (row,) = answered(*given, streams=False)
        again, events, sizes, (streamed,) = answered(*given, streams=True)
        assert again == whole, given
        assert (streamed.ids, streamed.log_probs) == (row.ids, row.log_probs)
        assert heard(path, events) == told(path, whole), given
        num_early += any(one and at < len(sizes) for at, one in events)
        if path == "/v1/responses":
            data = data_of(events)
            assert [one["sequence_number"] for one in data] == list(range(len(data)))
            assert data[-1]["response"] == whole
    assert num_early > NUM_TURNS // 6  # many are short


@pytest.mark.parametrize("name", BEGINS)
def test_before_a_call_may_begin_a_turn_is_its_content(name):
    rng, read = random.Random(name), TOOL_FORMATS[name]
    begins = call_begins(read)
    assert begins is not None
    pieces = ["so ", "\n", "[f(x=1)]", '{"name": "f"}', "<f>", "```", "|>", '"', ":", *begins]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 9)))
        first = min([at for mark in begins if (at := text.find(mark)) >= 0], default=len(text))
        content = read(text).content
        assert content.strip().startswith(text[:first].strip()), (text, content)
        assert first < len(text) or (content == text and not read(text).calls)


def test_text_comes_as_it_is_said_and_what_may_be_something_else_waits():
    call = CALLS["hermes"]
    text = f"<think>{'hm ' * 40}</think>\n\n{'ü so ' * 40}{call}"
    body = dict(BODIES["/v1/chat/completions"], tools=[TOOLS["/v1/chat/completions"]])
    _, events, sizes, _ = answered(
        "/v1/chat/completions", body, text, True, hermes, ReasoningMarks("<think>", "</think>"), "", True
    )
    assert sizes[:6] == [8, 16, 32, 64, 64, 64] and sum(sizes) == len(text.encode()) + 1
    kinds = []
    for at, one in events:
        deltas = [choice["delta"] for x in data_of([(at, one)]) for choice in x["choices"]]
        kinds.append([key for delta in deltas for key in delta if key != "role"])
    assert kinds[0] == [] and kinds[1:5] == [["reasoning_content"]] * 4
    assert sum(kind == ["content"] for kind in kinds) >= 2
    assert "tool_calls" in kinds[-1] and not any("tool_calls" in kind for kind in kinds[:-1])
