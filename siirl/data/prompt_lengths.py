"""How long prompts are: bounds from their bytes, and exact counts by the files of a tokenizer. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl.config import Config
from siirl.data.row_values import chat_of, is_list, is_text, plain, text_bytes
from siirl.dialect.file_vocabulary import FileVocabulary
from siirl.dialect.template import (
    PROBE_TOOL,
    ChatTemplate,
    TemplateRefused,
    chosen_template,
    template_options,
)
from siirl.errors import DataError
from siirl.observe.printable import encodable

TEMPLATE_TOKENS = 64  # allowance for what a chat template adds to a prompt, and
MESSAGE_TOKENS = 16  # to each of its messages
MOST_COUNTED = 20_000  # prompts that a check tokenises: more take a minute
ASKED = [{"role": "user", "content": ""}]


@dataclass(frozen=True)
class PromptLengths:
    """Counts the tokens of prompts as a run will, where the tokenizer is here and prompts are text alone."""

    vocabulary: FileVocabulary
    template: ChatTemplate
    limit: int
    """data.max_prompt_length."""
    tools: tuple[dict[str, Any], ...] = ()
    """What stands for the tools of a run that has some, which this process does not load."""

    @classmethod
    def of(cls, cfg: Config) -> "PromptLengths | None":
        """None where a check cannot know: images, or a tokenizer that is not here."""
        folder = Path(cfg.data.tokenizer or cfg.actor_rollout_ref.model.path).expanduser()
        if not (folder / "tokenizer.json").is_file() or cfg.data.has_images:
            return None
        try:
            vocabulary = FileVocabulary(folder)
        except Exception:  # noqa: BLE001 - the edge to tokenizers; checks of model files say what is wrong
            return None
        vocabulary.chat_template = chosen_template(vocabulary.chat_template, cfg, str(folder))
        tools = (PROBE_TOOL,) if cfg.actor_rollout_ref.rollout.multi_turn.enable else ()
        template = ChatTemplate(vocabulary, template_options(cfg))
        return cls(vocabulary, template, cfg.data.max_prompt_length, tools)

    def overlong(self, prompts: pa.ChunkedArray) -> list[tuple[int, int]] | None:
        """(row, tokens) of each prompt above the limit; None where there are too many to count, or they tell
        of tools. DataError where the template does not take the first, of any length, or one that is counted.
        """
        beside = TEMPLATE_TOKENS
        if len(prompts):
            self._count(plain(prompts[0].as_py()), 0)
        if self.tools:
            return None
        if self.vocabulary.chat_template:
            beside += len(self.vocabulary.encode(self.template.attempt(ASKED, (), True)))
        suspects = np.flatnonzero(token_bounds(prompts, beside) > self.limit)
        if len(suspects) > MOST_COUNTED:
            return None
        counts = ((int(row), self._count(plain(prompts[int(row)].as_py()), int(row))) for row in suspects)
        return [(row, count) for row, count in counts if count > self.limit]

    def _count(self, cell: Any, row: int) -> int:
        prompt = chat_of(cell, f"row {row}")
        if isinstance(prompt, str):
            return len(self.vocabulary.encode(encodable(prompt)))
        if not self.vocabulary.chat_template:
            raise DataError(
                f"the prompts are chat messages, but the tokenizer of {self.vocabulary.name_or_path} has no "
                "chat template. Use a chat model's tokenizer (data.tokenizer), or write the prompts as plain "
                "strings."
            )
        try:
            text = self.template.prompt(prompt, self.tools)
        except TemplateRefused as error:
            roles, beside = ", ".join(turn["role"] for turn in prompt), " beside tools" if self.tools else ""
            raise DataError(
                f"row {row}: the chat template of {self.template.name} refuses the prompt{beside}: "
                f"{error}. It has the roles {roles}. Write it with roles that the template takes, or give "
                "the tokenizer another one."
            ) from error
        return len(self.vocabulary.encode(encodable(text), add_special_tokens=False))


def token_bounds(prompts: pa.ChunkedArray, beside: int) -> np.ndarray:
    """An upper bound of the number of tokens of each prompt, from the bytes of its text.

    beside: what a template adds to any.
    """
    bounds = []
    for chunk in prompts.chunks:
        if is_text(chunk.type):
            bounds.append(_byte_lengths(chunk) + beside)
        elif is_list(chunk.type) and _holds_texts_alone(chunk.type.value_type):
            owner = _numbers(pc.list_parent_indices(chunk))
            turns = pc.list_flatten(chunk)
            sizes = sum(_byte_lengths(pc.struct_field(turns, key)) for key in ("content", "role"))
            per_row = np.bincount(owner, weights=sizes + MESSAGE_TOKENS, minlength=len(chunk))
            bounds.append(per_row.astype(np.int64) + beside)
        else:
            sizes = [_most_tokens_of(plain(cell)) + beside for cell in chunk.to_pylist()]
            bounds.append(np.array(sizes, np.int64))
    return np.concatenate(bounds) if bounds else np.zeros(0, dtype=np.int64)


def _holds_texts_alone(kind: pa.DataType) -> bool:
    """Whether messages are {role, content} and nothing else, both text."""
    return (
        pa.types.is_struct(kind)
        and {field.name for field in kind} == {"role", "content"}
        and all(is_text(field.type) for field in kind)
    )


def _most_tokens_of(cell: Any) -> int:
    turns = len(cell) if isinstance(cell, list) else 0
    return sum(text_bytes(cell)) + MESSAGE_TOKENS * turns


def _byte_lengths(texts: pa.Array) -> np.ndarray:
    return _numbers(pc.fill_null(pc.binary_length(texts), 0)).astype(np.int64)


def _numbers(of: pa.Array) -> np.ndarray:
    """The values of an array without nulls. Its own `to_numpy` imports pandas, which takes a second."""
    return np.from_dlpack(of)
