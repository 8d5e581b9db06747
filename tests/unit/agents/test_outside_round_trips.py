"""Clients that send back what they got: every prompt is the template's rendering of what they hold.

Random conversations as clients of OpenAI and Anthropic hold them, and agents of openai-agents, smolagents and
mini-swe-agent, with a policy that says what the template would write. No row begins where one could go on.
"""

import asyncio
import json
import random

import pytest
from later import Later
from outside_cases import episode, game_of
from template_cases import (
    CHAT,
    END,
    JSON_CALLS,
    LAST_USER,
    LATEST,
    OPEN,
    THOUGHT,
    TemplateTokenizer,
    dialect_of,
)

from siirl.agents.contexts import Limits
from siirl.agents.outside import chat_wire, messages_wire, responses_wire
from siirl.agents.outside.episode_session import Session
from siirl.agents.renderer import ChatRenderer
from siirl.agents.runner import Played, Speaker
from siirl.data.completions import Completion, SamplingParams

anthropic_types = Later("anthropic.types")
chat_types, response_types = Later("openai.types.chat"), Later("openai.types.responses")
BODY = (
    "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    + CHAT
    + "{% if m.role == 'tool' %}{{ m.tool_call_id }}: {% endif %}@{{ m.content }}"
    + JSON_CALLS
    + END
    + "{% endfor %}{% if add_generation_prompt %}"
    + OPEN
    + "{% endif %}"
)
TEMPLATES = {"kept": BODY.replace("@", THOUGHT), "dropped": LAST_USER + BODY.replace("@", LATEST)}
"""What becomes of reasoning before the last question."""
TOKENIZERS = {name: TemplateTokenizer(source, name) for name, source in TEMPLATES.items()}
DIALECTS = {name: dialect_of(tokenizer) for name, tokenizer in TOKENIZERS.items()}
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


class Actor:
    """Says a random turn as the template writes it, and keeps what it read and said."""

    def __init__(self, rng, tokenizer):
        self.rng, self.tokenizer = rng, tokenizer
        self.read, self.said, self.message = [], [], {}
        self.may_call = True

    async def generate(self, prompt, params, seed, seen=None):
        self.read.append(list(prompt))
        content = self.rng.choice(["It is 4.", "ok", "a\n\nb", "{4}", "ü 🙂", "ok"])
        self.message = {"role": "assistant", "content": content}
        thought = ""
        if self.rng.random() < 0.5:
            self.message["reasoning_content"] = self.rng.choice(["So it is.", "hm\nwell", "I see <b>"])
            thought = f"<think>\n{self.message['reasoning_content']}\n</think>\n\n"
        calls = ""
        if self.may_call and self.rng.random() < 0.6:
            self.message["content"] = self.rng.choice(["", "Let me see."])
            functions = [
                {"name": "look", "arguments": {"q": self.rng.choice(["x y", "ü"]), "n": [1, 2.5, None]}}
                for _ in range(self.rng.choice([1, 1, 2]))
            ]
            self.message["tool_calls"] = [{"type": "function", "function": one} for one in functions]
            # as tojson of chat templates
            written = [json.dumps(one["arguments"], ensure_ascii=False) for one in functions]
            calls = "".join(
                f'<tool_call>{{"name": "look", "arguments": {one}}}</tool_call>' for one in written
            )
        text = f"{thought}{self.message['content']}{calls}<|im_end|>"
        tokens = self.tokenizer.encode(text)
        self.said.append(tokens)
        return Completion(tokens, [-1.0] * len(tokens), "stop", 0)


class OpenAI:
    """Appends the message that it got, as pydantic or as a dict of it."""

    wire, whole = chat_wire, staticmethod(chat_wire.completion)

    def __init__(self, rng):
        self.rng, self.messages = rng, [{"role": "user", "content": "What is 2+2?"}]
        self.keeps = rng.random() < 0.5
        """Sends reasoning back."""
        if rng.random() < 0.5:
            self.messages.insert(0, {"role": rng.choice(["system", "developer"]), "content": "Be brief."})

    def body(self):
        return {"model": "a", "messages": self.messages, "tools": [TOOL]}

    def hear(self, answer):
        """Take a turn; the ids of its calls."""
        message = chat_types.ChatCompletion.model_validate(answer).choices[0].message
        dumped = message.model_dump(exclude_unset=self.rng.random() < 0.5)
        if not self.keeps:
            dumped.pop("reasoning_content", None)
        self.messages.append(dumped)
        return [call.id for call in message.tool_calls or ()]

    def kept(self, message):
        """What the client holds of a turn that the policy has said."""
        return message

    def results(self, results):
        self.messages += [
            {"role": "tool", "tool_call_id": id, "content": self.content(text)} for id, text in results
        ]

    def content(self, text):
        return self.rng.choice([text, [{"type": "text", "text": text}]])

    def user(self, text):
        self.messages.append({"role": "user", "content": self.content(text)})


class Anthropic(OpenAI):
    """Appends blocks, thinking among them or not."""

    wire, whole = messages_wire, staticmethod(messages_wire.message)

    def __init__(self, rng):
        super().__init__(rng)
        self.system = {"system": self.messages.pop(0)["content"]} if len(self.messages) > 1 else {}

    def body(self):
        tool = {"name": "look", "description": "", "input_schema": PARAMETERS}
        return {"model": "a", "max_tokens": 999, "messages": self.messages, "tools": [tool], **self.system}

    def hear(self, answer):
        blocks = anthropic_types.Message.model_validate(answer).content
        kept = [block.to_dict() for block in blocks if self.keeps or block.type != "thinking"]
        self.messages.append({"role": "assistant", "content": kept})
        return [block.id for block in blocks if block.type == "tool_use"]

    def results(self, results):
        made = [
            {"type": "tool_result", "tool_use_id": id, "content": self.content(text)} for id, text in results
        ]
        self.messages.append({"role": "user", "content": made})


class Responses(OpenAI):
    """The items of an agent of openai-agents by OpenAIResponsesModel."""

    wire, whole = responses_wire, staticmethod(responses_wire.response)

    def body(self):
        tool = {"type": "function", **FUNCTION, "strict": True}
        return {"model": "a", "input": self.messages, "tools": [tool], "include": []}

    def hear(self, answer):
        items = response_types.Response.model_validate(answer).output
        self.messages += [
            item.model_dump(exclude_unset=True) for item in items if self.keeps or item.type != "reasoning"
        ]
        return [item.call_id for item in items if item.type == "function_call"]

    def results(self, results):
        self.messages += [
            {"type": "function_call_output", "call_id": id, "output": text} for id, text in results
        ]

    def content(self, text):
        return self.rng.choice([text, [{"type": "input_text", "text": text}]])


class AgentsChat(OpenAI):
    """The same by OpenAIChatCompletionsModel, whose items become messages again."""

    def __init__(self, rng):
        self.converter = pytest.importorskip("agents.models.chatcmpl_converter").Converter
        super().__init__(rng)
        self.items = [{"role": "user", "content": self.messages.pop()["content"]}]

    def body(self):
        chat = [*self.messages, *self.converter.items_to_messages(self.items)]
        return {"model": "a", "messages": chat, "tools": [TOOL]}

    def hear(self, answer):
        message = chat_types.ChatCompletion.model_validate(answer).choices[0].message
        items = self.converter.message_to_output_items(message)
        self.items += [item.model_dump(exclude_unset=True) for item in items]
        return [call.id for call in message.tool_calls or ()]

    def results(self, results):
        self.items += [
            {"type": "function_call_output", "call_id": id, "output": text} for id, text in results
        ]

    def user(self, text):
        self.items.append({"role": "user", "content": text})


class MiniSwe(OpenAI):
    """litellm's dump of the message, with what it and the agent note there; ids of its own making, maybe."""

    def __init__(self, rng):
        super().__init__(rng)
        self.renames = rng.random() < 0.5

    def hear(self, answer):
        choice = answer["choices"][0]
        noted = {"function_call": None, "provider_specific_fields": {"refusal": None}, "annotations": []}
        message = {"tool_calls": None, **noted, **choice["message"], "extra": {"response": answer, "n": 1.5}}
        if self.renames:
            for call in message["tool_calls"] or ():
                call["id"] = f"call_{self.rng.getrandbits(60):x}"
        self.messages.append(message)
        return [call["id"] for call in message["tool_calls"] or ()]

    def results(self, results):
        for id, text in results:
            self.messages.append(
                {"role": "tool", "tool_call_id": id, "content": text, "extra": {"raw": text}}
            )


class Stopping(OpenAI):
    """An agent without tools of the wire, which stops at a mark and writes it behind the answer again."""

    closing, calls = "</code>", ""

    def body(self):
        stop = ["Observation:", "Calling tools:", self.closing]
        return {"model": "a", "messages": self.messages, "stop": stop}

    def hear(self, answer):
        text = answer["choices"][0]["message"]["content"]
        if not text.strip().endswith(self.closing):
            text += self.closing
        text += self.calls
        self.messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        return []

    def kept(self, message):
        return message | {"content": message["content"] + self.calls}


class SmolCode(Stopping):
    """A CodeAgent of smolagents, which writes behind the answer what it has run."""

    calls = "\nCalling tools:\n[{'id': 'call_1', 'function': {'name': 'python_interpreter'}}]"


CLIENTS = {
    "openai": OpenAI,
    "anthropic": Anthropic,
    "openai-agents, responses": Responses,
    "openai-agents, chat": AgentsChat,
    "mini-swe-agent": MiniSwe,
    "stops and writes it again": Stopping,
    "smolagents": SmolCode,
}


class Coder(Actor):
    """Says code up to the closing mark, and more than is wanted."""

    async def generate(self, prompt, params, seed, seen=None):
        self.read.append(list(prompt))
        text = self.rng.choice(["Thought: so\n<code>\nprint(1)\n</code>", "<code>f('ü')</code>"])
        self.message = {"role": "assistant", "content": text}
        self.said.append(self.tokenizer.encode(text))
        tokens = self.tokenizer.encode(f"{text}\nObservation: 1<|im_end|>")
        return Completion(tokens, [-1.0] * len(tokens), "stop", 0)


async def converse(kind, seed):
    """One conversation: (its turns, its rows)."""
    rng = random.Random(f"{kind}/{seed}")
    name = rng.choice(list(TEMPLATES))
    tokenizer, client = TOKENIZERS[name], CLIENTS[kind](rng)
    actor = (Coder if isinstance(client, Stopping) else Actor)(rng, tokenizer)
    renderer = ChatRenderer(tokenizer, {}, dialect=DIALECTS[name])
    one = Speaker(actor, SamplingParams(max_tokens=1000), renderer, Limits(100_000, 100_000))
    played = Played(episode(), {})
    session = Session(game_of({"a": one}, None), played, None, 999)
    truth = [{"role": "user", "content": "What is 2+2?"}]
    system = client.messages[0] if kind != "anthropic" and client.messages else None
    if (kind == "anthropic" and client.system) or (system and system["role"] in ("system", "developer")):
        truth.insert(0, {"role": "system", "content": "Be brief."})
    rows: list[list[int]] = []
    for _ in range(rng.randrange(1, 4)):
        for left in range(rng.randrange(1, 4), -1, -1):
            actor.may_call = left > 0
            body = json.loads(json.dumps(client.body()))
            answer = client.whole(await session.turns(client.wire.asked_of(body)), 0)
            tools = [TOOL] if "tools" in body else []
            wanted = tokenizer.apply_chat_template(truth, tools, add_generation_prompt=True)
            assert tokenizer.decode(actor.read[-1]) == wanted, (name, body)
            ids = client.hear(json.loads(json.dumps(answer)))
            goes_on = next((row for row in rows if actor.read[-1][: len(row)] == row), None)
            if goes_on is not None:
                rows.remove(goes_on)
            rows.append([*actor.read[-1], *actor.said[-1]])
            held = [[*row.prompt_ids, *row.ids] for row in played.contexts[0].rows]
            assert sorted(held) == sorted(rows) if goes_on is not None else len(held) == len(rows)
            message = client.kept(actor.message)
            calls = message.get("tool_calls", ())
            assert len(ids) == len(calls)
            own = [f"c{len(actor.read) - 1:06d}{index:02d}" for index in range(len(calls))]
            named = [{**call, "id": id} for call, id in zip(calls, own, strict=True)]
            truth.append(message | ({"tool_calls": named} if calls else {}))
            if not calls:
                break
            texts = [rng.choice(["4", "it is\nfour", '{"a": 1}', ""]) for _ in ids]
            order = rng.sample(range(len(ids)), len(ids))  # tools answer when they are ready
            client.results([(ids[place], texts[place]) for place in order])
            truth += [
                {"role": "tool", "tool_call_id": own[place], "content": texts[place]} for place in order
            ]
        text = rng.choice(["And 3+3?", "go on"])
        client.user(text)
        truth.append({"role": "user", "content": text})
    return len(actor.read), len(rows)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("number", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_what_a_client_sends_back_is_read_as_the_template_writes_it_in_as_few_rows_as_can_be(kind, number):
    counts = [asyncio.run(converse(kind, seed)) for seed in range(number)]
    turns, rows = (sum(column) for column in zip(*counts, strict=True))
    assert turns > 1.5 * number and number <= rows < turns
