"""Conversations under chat templates without models: tokens are characters and marks, turns are scripted."""

import functools
import re
from types import MappingProxyType

from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from siirl.dialect.dialect import derive
from siirl.dialect.template import ChatTemplate

MARKS = re.compile(
    r"<[|｜][^<>{}'\"\s]{1,40}?[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\[/?[A-Z_]{3,20}\]|\[\|[a-z]+\|\]"
    r"|</?s>|<SPECIAL_\d+>|<(?:start|end)_of_turn>|<end_of_utterance>|\]~!b\[|\[e~\[|\]~b\]|<seed:(?:bos|eos)>"
    r"|</?think>|</?tool_calls?>|</?tool_response>|<[A-Z_]+_TOKEN>|<e?bos>|<eos>"
)
EOS = "<EOS>"
ENDS = ("<|END_OF_TURN_TOKEN|>", "<|end_of_msg|>", "<|im_end|>", "<|eot_id|>", "<|eot|>", "[|endofturn|]")
"""Ends of sequences of families, where their templates do not write eos_token."""

_compile = chat_template_utils._compile_jinja_template.__wrapped__
chat_template_utils._compile_jinja_template = functools.cache(_compile)  # it keeps 128, and these are more


class TemplateTokenizer:
    """A vocabulary of characters and of the marks in a template, which are special tokens."""

    def __init__(self, source: str, name: str = "a template", more: tuple[str, ...] = ()):
        """more: further marks."""
        self.chat_template, self.name_or_path, self.num_renderings = source, name, 0
        self.marks = list(dict.fromkeys([EOS, *MARKS.findall(source + self._example()), *more]))
        self._ids = {mark: 0x110000 + place for place, mark in enumerate(self.marks)}
        self._split = re.compile("|".join(map(re.escape, sorted(self.marks, key=len, reverse=True))))
        self.eos_token = next((end for end in ENDS if end in source), EOS)
        self.eos_token_id: int = self._ids[self.eos_token]
        self.num_renderings = 0

    def _example(self):
        """A conversation: the marks that a template puts together."""
        said, asked = {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}
        self.eos_token = EOS
        try:
            return self.apply_chat_template([asked, said, asked, said], add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return ""

    def get_added_vocab(self):
        return dict(self._ids)

    def apply_chat_template(self, conversation, tools=None, tokenize=False, **options):
        self.num_renderings += 1
        variables = {
            "bos_token": "<BOS>",
            "eos_token": self.eos_token,
            "pad_token": "<PAD>",
            "unk_token": "<UNK>",
        }
        (text,), _ = chat_template_utils.render_jinja_template(
            [conversation], tools=tools, chat_template=self.chat_template, **variables, **options
        )
        return text

    def encode(self, text, **options):
        ids, at = [], 0
        for found in self._split.finditer(text):
            ids += [*map(ord, text[at : found.start()]), self._ids[found[0]]]
            at = found.end()
        return [*ids, *map(ord, text[at:])]

    def decode(self, token_ids, skip_special_tokens=False, **options):
        known = {id: "" if skip_special_tokens else mark for mark, id in self._ids.items()}
        return "".join(known[id] if id in known else chr(id) for id in map(int, token_ids))


def dialect_of(tokenizer: TemplateTokenizer, options=MappingProxyType({})):
    """Its dialect, without files of a model."""
    return derive(
        tokenizer, ChatTemplate(tokenizer, options), {"config.json": {}, "generation_config.json": {}}
    )


def _template(turn: str, prompt: str, *, begin: str = "", tools: str = "", refuses: str = "") -> str:
    """A template that writes each message m by `turn`, and `prompt` where the assistant's turn begins."""
    shown = (
        "{%- if tools %}" + tools + "{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '\\n' }}{% endif -%}"
    )
    return (
        begin + (shown if tools else "") + "{%- for m in messages -%}" + refuses + turn + "{%- endfor -%}"
        "{%- if add_generation_prompt -%}" + prompt + "{%- endif -%}"
    )  # fmt: skip


CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
JSON_CALLS = (
    CALLS + '{{ \'<tool_call>{"name": "\' + f.name + \'", "arguments": \' }}{{ f.arguments | tojson }}'
    "{{ '}</tool_call>' }}{% endfor %}"
)
STRICT = (
    "{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('users and assistants in turn only') }}{% endif %}"
)
LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
LATEST = "{% if loop.index0 > ns.last %}" + THOUGHT + "{% endif %}"
CHAT = "<|im_start|>{{ m.role }}\n"
END = "<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"
OWN = {
    "chatml": _template(CHAT + "{{ m.content }}" + END, OPEN),
    "chatml with calls": _template(CHAT + "{{ m.content }}" + JSON_CALLS + END, OPEN, tools="# Tools: "),
    "content is trimmed": _template(CHAT + "{{ m.content | trim }}" + END, OPEN),
    "a blank before each answer": _template(
        "{{ 'ASSISTANT: ' if m.role == 'assistant' else 'USER: ' }}{{ m.content }}</s>", "ASSISTANT:"
    ),
    "no token ends a turn": _template("{{ m.role | upper }}: {{ m.content }}\n", "ASSISTANT: "),
    "users and assistants in turn": _template(
        "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n",
        "<start_of_turn>assistant\n",
        refuses=STRICT,
    ),
    "only users and assistants are shown": _template(
        "{% if m.role in ('user', 'assistant') %}" + CHAT + "{{ m.content }}" + END + "{% endif %}", OPEN
    ),
    "reasoning stays": _template(CHAT + THOUGHT + "{{ m.content }}" + JSON_CALLS + END, OPEN),
    "reasoning of earlier questions is dropped": _template(
        CHAT + LATEST + "{{ m.content }}" + JSON_CALLS + END, OPEN, begin=LAST_USER, tools="Tools: "
    ),
    "the prompt opens the reasoning": _template(
        CHAT + LATEST + "{{ m.content }}" + END, OPEN + "<think>\n", begin=LAST_USER
    ),
    "the prompt closes the reasoning": _template(
        CHAT + "{{ m.content }}" + END, OPEN + "<think>\n\n</think>\n\n"
    ),
    "inline reasoning is cut off": _template(
        CHAT + "{{ (m.content.split('</think>') | last).lstrip('\n') }}" + END, OPEN + "<think>\n"
    ),
    "arguments are JSON": _template(
        CHAT + "{{ m.content }}" + CALLS + "[TOOL_CALLS]{{ f.name + '[A]' + f.arguments }}{% endfor %}" + END,
        OPEN,
    ),
    "no content beside calls": _template(
        CHAT + "{% if m.tool_calls %}" + JSON_CALLS + "{% else %}{{ m.content }}{% endif %}" + END, OPEN
    ),
    "content is null beside calls": _template(
        CHAT + "{% if m.content is none %}" + JSON_CALLS + "{% else %}{{ m.content }}{% endif %}" + END, OPEN
    ),
    "answers name their call": _template(
        CHAT + "{% if m.role == 'tool' %}{{ m.name + ' ' + m.tool_call_id }}: {% endif %}{{ m.content }}"
        + JSON_CALLS + END, OPEN
    ),
    "answers need a call": _template(
        CHAT + "{{ m.content }}" + JSON_CALLS + END, OPEN, refuses="{% if m.role == 'tool' and not "
        "(messages[loop.index0 - 1].tool_calls or messages[loop.index0 - 1].role == 'tool') %}"
        "{{ raise_exception('an answer to no call') }}{% endif %}",
    ),
    "another end after a last turn": _template(
        CHAT + "{{ m.content }}{{ '<|end|>' if loop.last or m.role != 'assistant' else '<|im_end|>' }}", OPEN
    ),
    "marks around an answer": _template(
        "{% if m.role == 'assistant' %}" + OPEN + "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
        "{% else %}" + CHAT + "{{ m.content }}{% endif %}" + END, OPEN
    ),
    "content is a list of parts": _template(
        CHAT + "{% for x in m.content %}{% if x['type'] == 'text' %}{{ x.text }}"
        "{% elif x['type'] == 'image' %}<image>{% endif %}{% endfor %}" + END, OPEN
    ),
    "an answer that says nothing is refused": _template(
        CHAT + "{{ m.content }}" + END, OPEN, refuses="{% if m.role == 'assistant' and not m.content %}"
        "{{ raise_exception('nothing was said') }}{% endif %}",
    ),
    "tools stand with the last user": _template(
        "{% if m.role == 'user' and loop.index0 == ns.last and tools %}{{ tools | tojson }}{% endif %}" + CHAT
        + "{{ m.content }}" + JSON_CALLS + END, OPEN, begin=LAST_USER
    ),
}  # fmt: skip
"""Templates of the kinds that there are, short."""
