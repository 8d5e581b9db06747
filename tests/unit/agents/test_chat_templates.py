"""Conversations of several agents under chat templates that take users and assistants in turn only."""

import pytest
from fixtures_tiny import make_tiny_tokenizer
from transformers import AutoTokenizer

from siirl.agents.contexts import Context, Limits
from siirl.agents.renderer import ChatRenderer
from siirl.data.chat import encode_prompts
from siirl.data.completions import Completion
from siirl.dialect.tool_formats import TOOL_FORMATS
from siirl.errors import DataError

STRICT = """{%- for message in messages -%}
{%- if message.role not in ("user", "assistant") -%}
{{ raise_exception("no role " + message.role) }}
{%- endif -%}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) -%}
{{ raise_exception("roles must alternate") }}
{%- endif -%}
{{ "u" if message.role == "user" else "a" }}={{ message.content }};
{%- endfor -%}
{%- if add_generation_prompt -%}a={%- endif -%}"""
FORGETS = """{%- for message in messages if message.role in ("user", "assistant") -%}
{{ message.role[0] }}={{ message.content }};
{%- endfor -%}
{%- if add_generation_prompt -%}a={%- endif -%}"""
REFUSES_ALL = '{{ raise_exception("nothing pleases me") }}'
SYSTEM, ASKED, SOLVED = (
    {"role": role, "content": text} for role, text in (("system", "s"), ("user", "q"), ("user", "3"))
)


hermes = TOOL_FORMATS["hermes"]


class Text:
    """A vocabulary of characters with a real chat template."""

    name_or_path = "strict-model"

    def __init__(self, tokenizer):
        self.apply_chat_template = tokenizer.apply_chat_template
        self.chat_template, self.eos_token_id = tokenizer.chat_template, None

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]

    def decode(self, token_ids, skip_special_tokens):
        return "".join(map(chr, token_ids))


@pytest.fixture
def tokenizer(tmp_path):
    return AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture
def renderer(tokenizer):
    def made(template):
        tokenizer.chat_template = template or tokenizer.chat_template
        return ChatRenderer(Text(tokenizer), {})

    return made


def said(tokens):
    return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([ASKED], "u=q;a="),
        ([ASKED, SOLVED], "u=q\n\n3;a="),
        ([SYSTEM, ASKED], "u=s\n\nq;a="),
        ([ASKED, {"role": "assistant", "content": "1"}, {"role": "tool", "content": "2"}], "u=q;a=1;u=2;a="),
        (
            [ASKED, {"role": "assistant", "content": "1"}, {"role": "assistant", "content": "2"}],
            "u=q;a=1\n\n2;a=",
        ),
    ],
)
def test_what_a_template_does_not_take_becomes_users_and_assistants_in_turn(renderer, messages, expected):
    before = [dict(message) for message in messages]
    assert said(renderer(STRICT).start(messages).tokens) == expected
    assert messages == before


def test_what_a_template_leaves_out_silently_is_the_users(renderer):
    """Phi's and Gemma's forget the answers of tools."""
    answered = [ASKED, {"role": "assistant", "content": "1"}, {"role": "tool", "content": "2"}]
    assert said(renderer(FORGETS).start([SYSTEM, *answered]).tokens) == "u=s;u=q;a=1;u=2;a="


def test_a_row_grows_by_several_messages_at_once(renderer):
    context = Context(renderer(STRICT), Limits(100, 100))
    context.speak(context.begin([ASKED, SOLVED]), Completion([ord("y")], [0.0], "length", 0), 0)
    mine = {"role": "assistant", "content": "y"}
    tokens = context.begin([ASKED, SOLVED, mine, SOLVED, ASKED]).tokens
    assert len(context.rows) == 1 and said(tokens) == "u=q\n\n3;a=y;u=3\n\nq;a="


def test_a_template_that_takes_a_conversation_gets_it_as_it_is(renderer):
    free = renderer(None)
    parts = [said(free.start([message]).tokens).split(message["content"])[0] for message in (SYSTEM, ASKED)]
    text = said(free.start([SYSTEM, ASKED, SOLVED]).tokens)
    assert text.startswith(parts[0]) and text.count(parts[1]) == 2 and "\n\n3" not in text


def test_a_template_that_refuses_all_is_named_with_what_it_says(renderer):
    with pytest.raises(
        DataError, match=r"strict-model refuses .* roles user: nothing pleases me.*pre_process"
    ):
        renderer(REFUSES_ALL).start([ASKED, SOLVED])


def test_a_template_that_leaves_out_the_agents_own_turns_is_refused(renderer):
    with pytest.raises(DataError, match="strict-model leaves out what an assistant has said"):
        renderer(FORGETS.replace(', "assistant"', ",")).follow([ASKED], None)


def test_a_dataset_whose_prompts_the_template_refuses_is_refused_with_their_roles(tokenizer):
    tokenizer.chat_template = STRICT
    with pytest.raises(DataError, match=r"refuses a prompt: no role system.* roles system, user\. "):
        encode_prompts(tokenizer, [[SYSTEM, ASKED]], {})


TWO_TOKEN_END = """{%- for message in messages -%}
{{ "<" if message.role == "user" else "[" }}{{ message.content }}{{ ">" if message.role == "user" else "}]" }}
{%- endfor -%}
{%- if add_generation_prompt -%}[{%- endif -%}"""


@pytest.mark.parametrize(
    ("turn", "whole"),
    [
        ("yes}]", "<q>[yes}]<3>["),
        ("yes}", "<q>[yes}]<3>["),
        ("yes]", "<q>[yes]<3>["),
        ("yes", "<q>[yes}]<3>["),
    ],
)
def test_a_turn_end_of_two_tokens_is_not_repeated_whichever_of_them_was_said(renderer, turn, whole):
    """As Cohere's <|END_RESPONSE|><|END_OF_TURN_TOKEN|>, both of which the model says."""
    context = Context(renderer(TWO_TOKEN_END), Limits(prompt=50, response=50))
    opening = context.begin([ASKED])
    tokens = [ord(letter) for letter in turn]
    stopped = "length" if turn == "yes" else "stop"
    answer = context.speak(opening, Completion(tokens, [0.0] * len(tokens), stopped, 0), 0)
    read = context.begin([ASKED, {"role": "assistant", "content": answer}, SOLVED]).tokens
    assert said(read) == whole


CALLING = """{%- for message in messages -%}
{{ message.role[0] }}={{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>
{%- endfor -%}
{%- if message.role == "tool" -%}@{{ message.name }}/{{ message.tool_call_id }}{%- endif -%};
{%- endfor -%}
{%- if add_generation_prompt -%}a={%- endif -%}"""
FORGETFUL = """{%- for message in messages -%}
{{ message.role[0] }}={{ message.content if loop.last else message.content.split("</think>")[-1] }};
{%- endfor -%}
{%- if add_generation_prompt -%}a={%- endif -%}"""


def spoken(context, messages, text):
    tokens = [ord(letter) for letter in text]
    return context.speak(
        context.begin(messages), Completion(tokens, [0.0] * len(tokens), "length", 0), 0, parse=hermes
    )


@pytest.mark.parametrize("space", ["", " "], ids=["as the template writes it", "with other spaces"])
def test_answers_of_tools_have_the_name_and_id_of_their_call_whose_words_are_kept(renderer, space):
    call = f'<tool_call>{{"name": "f",{space or ""} "arguments": {{"x": 1}}}}</tool_call>'
    context = Context(renderer(CALLING), Limits(200, 200))
    spoken(context, [ASKED], call)
    (own,) = context.own_turns.values()
    answer = {"role": "tool", "content": "2", "name": "f", "tool_call_id": own.ids[0]}
    opening = context.begin([ASKED, {"role": "assistant", "content": call}, answer])
    assert len(context.rows) == 1 and opening.row is context.rows[0]
    assert said(opening.tokens) == f"u=q;a={call};t=2@f/c00000000;a="
    assert own["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("history", "text"), [("as_template", "u=q;a=4;u=3;a="), ("grow", "u=q;a=hm</think>4;u=3;a=")]
)
def test_where_a_template_drops_earlier_reasoning_a_new_row_begins_or_the_row_grows(renderer, history, text):
    context = Context(renderer(FORGETFUL), Limits(200, 200, history=history))
    spoken(context, [ASKED], "hm</think>4")
    opening = context.begin([ASKED, {"role": "assistant", "content": "hm</think>4"}, SOLVED])
    assert said(opening.tokens) == text
    assert (opening.row is context.rows[0]) == (history == "grow")
    assert context.num_rewritten == (history == "as_template")


def test_half_a_surrogate_pair_is_readable_and_a_whole_one_a_character(renderer):
    halves = {"role": "user", "content": "\ud83d\ude00 \ud83d!"}
    assert said(renderer(STRICT).start([halves]).tokens) == "u=😀 \\ud83d!;a="
