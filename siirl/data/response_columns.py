"""Responses that a dataset gives: columns of texts to the tokens that a rollout would have sampled."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from siirl.errors import DataError

ONE_MESSAGE = (
    "a response is a string, or a list of one message of the assistant; earlier turns belong to the prompt"
)


class ResponseColumns:
    """Columns of responses, one for each response of a prompt.

    A response is its text and the token that ends a turn of the model, as a rollout ends: no chat template is
    applied, as the prompt's ends where the assistant begins.
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
                "learns from given responses would never learn to end one. Name another by data.tokenizer."
            )

    def check(self, table: pa.Table, where: Callable[[int], str]) -> None:
        """DataError for rows without a response, or with a chat of another form. where: names a row."""
        for name in self.names:
            column = table[name]
            wrong = pc.is_null(column)
            if pa.types.is_nested(column.type):
                wrong = pc.or_kleene(wrong, pc.not_equal(pc.list_value_length(column), 1))
            rows = np.flatnonzero(wrong.to_numpy(zero_copy_only=False).astype(bool))
            if len(rows):
                raise DataError(f"{where(int(rows[0]))}: column {name!r} holds no response: {ONE_MESSAGE}.")

    def encode(self, records: Sequence[Mapping[str, Any]], wheres: Sequence[str]) -> list[list[list[int]]]:
        """The responses of each row as tokens, cut to the longest that there may be."""
        lists = self.encode_whole(records, wheres)
        return [[ids[: self._max_length] for ids in given] for given in lists]

    def encode_whole(
        self, records: Sequence[Mapping[str, Any]], wheres: Sequence[str]
    ) -> list[list[list[int]]]:
        """The same, whole."""
        texts = [
            self._text(record[name], name, where)
            for record, where in zip(records, wheres, strict=True)
            for name in self.names
        ]
        ids = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        ended = iter([[*tokens, self._end_id] for tokens in ids])
        return [[next(ended) for _ in self.names] for _ in records]

    def too_long(self, lists: Sequence[Sequence[Sequence[int]]]) -> Iterator[tuple[int, str, int]]:
        """(place, column, tokens) of the first response of each row that is longer than there may be."""
        for place, given in enumerate(lists):
            found = ((name, len(ids)) for name, ids in zip(self.names, given, strict=True))
            over = next(((name, length) for name, length in found if length > self._max_length), None)
            if over:
                yield place, *over

    def _text(self, value: str | list[dict[str, Any]], name: str, where: str) -> str:
        if isinstance(value, str):
            return value
        (message,) = value
        if message.get("role") != "assistant" or message.get("content") is None:
            raise DataError(
                f"{where}: column {name!r} holds a message of role {message.get('role')!r}: {ONE_MESSAGE}."
            )
        return message["content"]
