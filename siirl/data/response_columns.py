"""Responses that a dataset gives: columns of texts to the tokens that a rollout would have sampled."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from siirl.data.row_values import chat_of
from siirl.errors import DataError


class ResponseColumns:
    """Columns of responses, one for each response of a prompt.

    A response is its text and the token that ends a turn of the model, as a rollout ends: no chat template is
    applied, as the prompt's ends where the assistant begins. One that is written with an end of the model
    gets no second one, and keeps nothing behind it.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        end_ids: Sequence[int | None] = (),
    ):
        """end_ids: tokens that end a response, first the one that is added; none: the tokenizer's end."""
        self.names = tuple(names)
        self._tokenizer, self._max_length = tokenizer, max_length
        self._end_ids = [end for end in end_ids or (tokenizer.eos_token_id,) if end is not None]
        if names and not self._end_ids:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path} has no end-of-sequence token, so a model that "
                "learns from the data's responses would never learn to end one. "
                "Name another by data.tokenizer."
            )

    def encode(self, records: Sequence[Mapping[str, Any]], wheres: Sequence[str]) -> list[list[list[int]]]:
        """The responses of each row as tokens, cut to the longest that there may be."""
        lists = self.encode_whole(records, wheres)
        return [[ids[: self._max_length] for ids in given] for given in lists]

    def encode_whole(
        self, records: Sequence[Mapping[str, Any]], wheres: Sequence[str]
    ) -> list[list[list[int]]]:
        """The same, whole."""
        texts = [
            _text(record[name], f"{where}: column {name!r}")
            for record, where in zip(records, wheres, strict=True)
            for name in self.names
        ]
        tokens = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        ended = map(self._ended, tokens)
        return [[next(ended) for _ in self.names] for _ in records]

    def _ended(self, ids: list[int]) -> list[int]:
        """A response with one end: the first of those that it is written with, blanks aside."""
        num_said = len(ids)
        while num_said and (ids[num_said - 1] in self._end_ids or self._is_blank(ids[num_said - 1])):
            num_said -= 1
        first = next((at for at in range(num_said, len(ids)) if ids[at] in self._end_ids), None)
        return [*ids, self._end_ids[0]] if first is None else ids[: first + 1]

    def _is_blank(self, token_id: int) -> bool:
        return not self._tokenizer.decode([token_id], skip_special_tokens=False).strip()

    def too_long(self, lists: Sequence[Sequence[Sequence[int]]]) -> Iterator[tuple[int, str, int]]:
        """(place, column, tokens) of the first response of each row that is longer than there may be."""
        for place, given in enumerate(lists):
            found = ((name, len(ids)) for name, ids in zip(self.names, given, strict=True))
            over = next(((name, length) for name, length in found if length > self._max_length), None)
            if over:
                yield place, *over


def _text(value: Any, where: str) -> str:
    chat = chat_of(value, where)
    return chat if isinstance(chat, str) else chat[0]["content"]
