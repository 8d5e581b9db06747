"""Requests on all wires whose content is hostile: each is answered, and costs its own episode at most.

The server is ours, on loopback, in this process.
"""

import json
import math
import random
from collections import Counter
from http.client import HTTPConnection

import pytest
import torch
from episode_cases import Letters
from fuzzing import NASTY, SEED
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from outside_cases import episode, game_of
from test_fuzz_sockets import ANSWERED, CHAT, PLAIN_MESSAGES, RESPONSES, TEXTS

from siirl.agents.contexts import ChatRenderer, Limits
from siirl.agents.outside.endpoint import Endpoint, ProgramLimits
from siirl.agents.outside.program import SessionInfo
from siirl.agents.outside.programs import Programs, starter
from siirl.agents.runner import Played, Speaker, run_all
from siirl.data.completions import Completion, SamplingParams
from siirl.data.rows import make_rows
from siirl.dialect.tool_formats import TOOL_FORMATS
from siirl.nodes.interaction_rows import rows_of

pytestmark = pytest.mark.heavy
OF_AN_EPISODE = 50
"""Requests before the reward."""
TEMPLATE = """
{%- for tool in tools or [] -%}
[{{ tool.function.name }}: {{ tool.function.description | trim }}
{%- for name, what in (tool.function.parameters.properties or {}).items() -%}
{{ name }} {{ what.type if what.type is string else what.type | join("/") }}
{%- for value in what.enum or [] %}{{ value | tojson }}{% endfor -%}
{%- endfor -%}]
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == "system" and not loop.first -%}{{ raise_exception("system comes first") }}{%- endif -%}
{{ message.role }}:{{ message.content | trim }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- for name, value in call.function.arguments | items %}{{ name + ":" + value | string }}{% endfor -%}
{%- endfor -%}
\x03
{%- endfor -%}assistant:"""
"""It does to messages and tools what those of models do."""


class Templated(Letters):
    """Characters behind a template, as the tokenizers of models take them."""

    def __init__(self):
        def refuse(text):
            raise TemplateError(text)

        world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        world.globals["raise_exception"] = refuse
        self._template = world.from_string(TEMPLATE)

    def apply_chat_template(self, conversation, tools=(), **options):
        return self._template.render(messages=conversation, tools=list(tools))

    def encode(self, text, **options):
        text.encode()  # a tokenizer refuses half a surrogate pair
        return super().encode(text)


RAW = {
    **{f"lists {n}": "[" * n + "]" * n for n in (5, 63, 70, 400, 900, 968, 990, 1100, 50000)},
    **{f"objects {n}": '{"a":' * n + "1" + "}" * n for n in (5, 63, 70, 300, 480, 968, 990, 1100, 50000)},
    **{f"digits {n}": "9" * n for n in (19, 39, 308, 309, 400, 4300, 4301, 100000)},
    **{number: number for number in ("1e38", "3.5e38", "-1e308", "1e400", "NaN", "-Infinity", "1e-400")},
    "high": r'"\ud800"',
    "low": r'"a\udfffb"',
    "pair": r'"\ud83d\ude00"',
    "zero": r'"\u0000"',
    "wide": "[" + ",".join(["[]"] * 5000) + "]",
    "huge": "[" + ",".join(["0"] * 300000) + "]",
    "twice": '{"a": 1, "a": 2}',
    "text": '"' + "x" * 20000 + '"',
}
"""Values as JSON writes them: what Python could not write at all."""
PLAIN = (None, True, False, 0, -1, 0.5, 2**63, [], {}, [[]], [None], {"": None}, *NASTY)
MEANT = ("f", "type", "function", "text", "user", "tool_use", "none", {"type": "object"}, {"type": ["x", 1]})
"""What may stand in another place of a request."""


def hostile(rng: random.Random, tree: object) -> str:
    """The JSON of a request with a few of its values replaced, removed, renamed or said twice."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        tree = _changed(rng, tree)
    text = json.dumps(tree)
    for name, raw in RAW.items():
        text = text.replace(f'"@{name}@"', raw)
        text = text.replace(f"@{name}@", json.dumps(raw)[1:-1])
    return text if rng.random() > 0.03 else text[: rng.randrange(len(text))]


def _value(rng: random.Random) -> object:
    kind = rng.random()
    if kind < 0.5:
        return f"@{rng.choice(list(RAW))}@"
    if kind < 0.55:  # the arguments of calls are JSON in a text
        return f' {{"x": @{rng.choice(list(RAW))}@}} '
    return rng.choice(PLAIN if kind < 0.8 else MEANT)


def _changed(rng: random.Random, value: object) -> object:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return _value(rng)
    if isinstance(value, list):
        at, way = rng.randrange(len(value)), rng.random()
        inner = [] if way < 0.1 else [value[at]] * 2 if way < 0.2 else [_changed(rng, value[at])]
        return [*value[:at], *inner, *value[at + 1 :]]
    name, way = rng.choice(list(value)), rng.random()
    rest = {key: item for key, item in value.items() if key != name}
    if way < 0.1:
        return rest
    new = _value(rng) if way < 0.2 else name
    inner = value[name] if way < 0.2 else _changed(rng, value[name])
    return rest | {new if isinstance(new, str) else name: inner}


CALLED = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"x": %s}}</tool_call>',
    "qwen3_coder": "<tool_call><function=f><parameter=x>\n%s\n</parameter></function></tool_call>",
}


class Talker:
    """A policy that calls tools with hostile arguments, now and then."""

    def __init__(self, form: str):
        self.form, self.rng = form, random.Random(SEED)

    async def generate(self, prompt, params, seed, seen=None):
        small = [raw for raw in RAW.values() if len(raw) < 6000]
        text = CALLED[self.form] % self.rng.choice(small) if self.rng.random() < 0.5 else "so"
        tokens = [ord(char) for char in text[: params.max_tokens]] + [3]
        return Completion(tokens, [-1.0] * len(tokens), "stop", 5)


LISTS = {"type": "object", "properties": {"x": {"type": "array"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": LISTS}}]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
ASKED = [
    ("/v1/chat/completions", CHAT | {"max_tokens": 9000}),
    (
        "/v1/chat/completions",
        CHAT | {"messages": PLAIN_MESSAGES, "tools": TOOLS, "max_tokens": 9000, **STREAMED},
    ),
    ("/v1/responses", RESPONSES | {"max_output_tokens": 9000}),
    ("/v1/responses", RESPONSES | {"input": "q", "max_output_tokens": 9000} | STREAMED),
    ("/v1/messages", ANSWERED | {"max_tokens": 9000}),
    ("/v1/messages", ANSWERED | {"messages": PLAIN_MESSAGES, "max_tokens": 9000} | {"stream": True}),
    ("/v1/completions", TEXTS | {"max_tokens": 9000}),
    ("/v1/completions", TEXTS | {"prompt": "q", "max_tokens": 9000} | STREAMED),
]
REWARD = {"reward": 1.0}, {"rewards": {"a": 1.0}}


class Program:
    """Plays an episode by OF_AN_EPISODE requests, and ends it by what is nearly a reward."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []

    def __call__(self, session: SessionInfo) -> object:
        rng = random.Random(f"{SEED}/{session.task['extra_info']['index']}")
        host = session.url.removeprefix("http://")
        connection = HTTPConnection(host, timeout=60)
        head = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
        for _ in range(OF_AN_EPISODE):
            path, tree = rng.choice(ASKED)
            body = hostile(rng, tree)
            self._ask(connection, path, body, head)
        for _ in range(20):
            body = hostile(rng, rng.choice(REWARD))
            if self._ask(connection, "/reward", body, head) in (200, 401):
                break
        connection.close()
        return rng.choice((None, 0.5, 10**400, 1e308, math.nan, {"a": 10**400}, {"a": {}}, [[]]))

    def _ask(self, connection: HTTPConnection, path: str, body: str, head: dict[str, str]) -> int:
        connection.request("POST", path, body.encode("utf-8", "surrogatepass"), head)
        answer = connection.getresponse()
        said = answer.read()
        self.statuses[answer.status] += 1
        if answer.status >= 500 or not _is_whole(said, answer.headers.get("Content-Type", "")):
            self.wrong.append(f"{path} {body[:300]}: {answer.status} {said[-300:]!r}")
        return answer.status


def _is_whole(said: bytes, kind: str) -> bool:
    """Whether an answer is JSON, or a stream of it that came to its end."""
    parts = [said]
    if kind == "text/event-stream":
        parts = [line.removeprefix(b"data: ") for line in said.splitlines() if line.startswith(b"data: ")]
        last = parts[-1].decode()
        if last != "[DONE]" and json.loads(last)["type"] not in (
            *("message_stop", "response.completed", "response.incomplete"),
        ):
            return False
        parts = [part for part in parts if part != b"[DONE]"]
    for part in parts:
        json.loads(part.decode())
    return True


def rows_are_good(played: list[Played], game) -> int:
    """Whether the episodes become rows that can be learnt from and written: how many."""
    good = [one for one in played if one.kind is None]
    columns = {"group_id": [0], "sample_index": [0]}
    for one in good:
        one.episode.task["data_source"] = "d"
    rows = rows_of(game.plan, 0, good, make_rows(columns), len(played))
    assert torch.isfinite(rows["env_reward"]).all()
    assert torch.isfinite(rows["env_reward"].square().sum())
    for one in good:
        json.dumps(one.episode.conversation(), ensure_ascii=False, allow_nan=False).encode()
        for context in one.contexts.values():
            json.dumps([row.messages for row in context.rows], ensure_ascii=False, allow_nan=False).encode()
    return len(rows)


@pytest.mark.parametrize("form", sorted(CALLED))
@pytest.mark.parametrize(
    "num_requests",
    [300, pytest.param(25000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="many")],
)
def test_whatever_requests_hold_no_run_ends_and_each_is_answered(num_requests, form, caplog):
    program, number = Program(), num_requests // OF_AN_EPISODE
    endpoint = Endpoint(starter(program), ProgramLimits(600.0, 1000, 4))
    programs = Programs(endpoint, TOOL_FORMATS[form], False)
    limits = Limits(30000, 20000)
    one = Speaker(Talker(form), SamplingParams(max_tokens=9000), ChatRenderer(Templated(), {}), limits)
    game = game_of({"a": one}, programs)
    episodes = [episode(index, index=index) for index in range(number)]
    try:
        played = run_all(game, episodes, [[] for _ in episodes])
    finally:
        endpoint.close()
    assert program.wrong == [], (len(program.wrong), program.wrong[:5])
    assert {one.kind for one in played} <= {None, "program_unrewarded", "program_raised", "program_silent"}
    assert sum(program.statuses.values()) >= num_requests and set(program.statuses) <= {200, 400, 401, 404}
    assert program.statuses[200] > num_requests / 20 and program.statuses[400] > num_requests / 5
    assert rows_are_good(played, game) > number
    assert not [record for record in caplog.records if record.exc_info]
