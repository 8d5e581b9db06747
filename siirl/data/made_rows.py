"""Rows that no file has: they are made of what stands in the place of its name. No torch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import pyarrow as pa

CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
REWARD = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])
Made = tuple[list[dict[str, str]], str, dict[str, Any]]
"""Chat, ground truth, extra_info."""


class MadeRows(ABC):
    """The same rows on every rank and in every run; str() is what they are made of."""

    extra: ClassVar[pa.StructType]
    """The type of extra_info."""

    @property
    @abstractmethod
    def data_source(self) -> str:
        """Of all rows."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """How many there are. DataError if they cannot be made."""

    @abstractmethod
    def rows(self) -> Iterator[Made]:
        """All of them. DataError for one that cannot be made."""

    def schema(self, prompt_key: str, source_key: str) -> pa.Schema:
        """The columns, under the names that the configuration gives them."""
        columns = {prompt_key: CHAT, source_key: pa.string(), "reward_model": REWARD}
        return pa.schema([*columns.items(), ("extra_info", self.extra)])

    def table(self, prompt_key: str, source_key: str) -> pa.Table:
        """All rows. Errors as of `rows`."""
        schema = self.schema(prompt_key, source_key)
        cells = (
            (chat, self.data_source, {"style": "rule", "ground_truth": truth}, extra)
            for chat, truth, extra in self.rows()
        )
        return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in cells], schema)
