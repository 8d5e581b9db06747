"""Conversations under chat templates without models: tokens are characters and marks, turns are scripted."""

import re

from transformers.utils.chat_template_utils import render_jinja_template

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


class TemplateTokenizer:
    """A vocabulary of characters and of the marks in a template, which are special tokens."""

    def __init__(self, source: str, name: str = "a template"):
        self.chat_template, self.name_or_path = source, name
        self.marks = [EOS, *dict.fromkeys(MARKS.findall(source))]
        self._ids = {mark: 0x110000 + place for place, mark in enumerate(self.marks)}
        self._split = re.compile("|".join(map(re.escape, sorted(self.marks, key=len, reverse=True))))
        self.eos_token = next((end for end in ENDS if end in source), EOS)
        self.eos_token_id: int = self._ids[self.eos_token]
        self.num_renderings = 0

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
        (text,), _ = render_jinja_template(
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


def dialect_of(tokenizer: TemplateTokenizer):
    """Its dialect, without files of a model."""
    return derive(tokenizer, ChatTemplate(tokenizer, {}), {"config.json": {}, "generation_config.json": {}})
