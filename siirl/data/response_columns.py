"""Responses that a dataset gives: columns of texts to the tokens that a rollout would have sampled."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from siirl.data.row_values import chat_of
from siirl.errors import DataError


class ResponseColumns:
    """Columns of responses, one for each response of a prompt.

    A response is its text and the token that ends a turn of the model, as a rollout ends: no chat template is
    applied, as the prompt's ends where the assistant begins. One that is written with its end gets no
    second one.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        end_id: int | None = None,
    ):
        """end_id: the token that ends a response of the model; None: the tokenizer's end of sequence."""
        self.names = tuple(names)
        self._tokenizer, self._max_length = tokenizer, max_length
        self._end_id = tokenizer.eos_token_id if end_id is None else end_id
        if names and self._end_id is None:
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
        ended = iter([ids if ids[-1:] == [self._end_id] else [*ids, self._end_id] for ids in tokens])
        return [[next(ended) for _ in self.names] for _ in records]

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
