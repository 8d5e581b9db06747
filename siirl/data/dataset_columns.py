"""Which columns of a file hold what rows are made of, as group data of the configuration says. No torch."""

import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from siirl.config.data import DataConfig
from siirl.data.data_files import DataFile, Rows, open_rows
from siirl.data.row_values import (
    JSON_TYPE,
    as_json_cell,
    chat_of,
    is_json,
    is_text,
    json_cells,
    plain,
    truth_of,
    value_at,
)
from siirl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # `siirl check` reads columns without it

GROUND_TRUTH_KEY = "reward_model"
"""The column of right answers, {ground_truth: ...}: of the file, or made of another column of it."""
EXTRA_KEY = "extra_info"
TRUTH = "ground_truth"


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a file."""

    prompt: str = "prompt"
    source: str = "data_source"
    images: str = "images"
    ground_truth: str | None = None
    """A column, or a dotted name within one; None: reward_model.ground_truth, else ground_truth."""
    extra_info: str = EXTRA_KEY
    of_json: tuple[str, ...] = ()
    """Columns of text that is JSON."""
    source_of_all: str | Mapping[str, str] | None = None
    """The data source of the rows of a file that has no such column; of several files by name or pattern."""

    @classmethod
    def of(cls, data: DataConfig) -> "Columns":
        """Those of a configuration."""
        return cls(
            data.prompt_key,
            data.reward_fn_key,
            data.image_key,
            data.columns.ground_truth,
            data.columns.extra_info,
            data.json_columns,
            data.data_source,
        )

    def open(self, file: DataFile) -> Rows:
        """The rows of a file with its right answers in GROUND_TRUTH_KEY and the rest in EXTRA_KEY.

        DataError if it cannot be read, or lacks a column that only the configuration names.
        """
        rows = open_rows(file, self.prompt, self.source)
        if not isinstance(file, Path):
            return rows
        self._check(file, rows.schema)
        schema = self._laid_out(file, rows.schema.empty_table()).schema
        if schema == rows.schema:
            return rows
        held = rows.schema.names
        made_of: dict[str, list[str]] = {
            EXTRA_KEY: [self.extra_info],
            GROUND_TRUTH_KEY: [GROUND_TRUTH_KEY, TRUTH],
        }
        if self.ground_truth is not None:
            made_of[GROUND_TRUTH_KEY] = [_column_of(self.ground_truth, rows.schema)]

        def read(columns: list[str]) -> pa.Table:
            wanted = dict.fromkeys(source for name in columns for source in made_of.get(name, [name]))
            known = [name for name in wanted if name in held] or held[:1]
            return self._laid_out(file, rows.read(known)).select(columns)

        return Rows(schema, rows.num_rows, read, tuple(held))

    def _laid_out(self, file: DataFile, table: pa.Table) -> pa.Table:
        """The table with the columns that are made of others; what is made of absent ones is left out."""
        for name in (*self.of_json, GROUND_TRUTH_KEY):
            if name in table.column_names and is_text(table.schema.field(name).type):
                table = _with(table, name, json_cells(table[name]))
        path = self.ground_truth or TRUTH
        if (column := _column_of(path, table.schema)) in table.column_names:
            found = _within(file, table, column, path)
            if self.ground_truth is None and GROUND_TRUTH_KEY in table.column_names:
                found = _first_of(table[GROUND_TRUTH_KEY], found)
            table = _with(table, GROUND_TRUTH_KEY, _boxed(found))
        if self.extra_info != EXTRA_KEY and self.extra_info in table.column_names:
            table = _with(table, EXTRA_KEY, table[self.extra_info])
        source = self._source_of(file)
        if source is not None and self.source not in table.column_names:
            table = _with(table, self.source, pa.chunked_array([pa.repeat(source, len(table))]))
        return table

    def _source_of(self, file: DataFile) -> str | None:
        """What data.data_source says of a file: the first entry whose pattern its name or its path fits."""
        if not isinstance(self.source_of_all, Mapping) or not isinstance(file, Path):
            return None if isinstance(self.source_of_all, Mapping) else self.source_of_all
        names = (file.name, str(file))
        fits = (
            str(source)
            for pattern, source in self.source_of_all.items()
            if any(fnmatch.fnmatchcase(name, str(Path(pattern).expanduser())) for name in names)
        )
        return next(fits, None)

    def _check(self, file: Path, schema: pa.Schema) -> None:
        named = {"data.json_columns": self.of_json}
        if self.ground_truth is not None:
            named["data.columns.ground_truth"] = (_column_of(self.ground_truth, schema),)
        if self.extra_info != EXTRA_KEY:
            named["data.columns.extra_info"] = (self.extra_info,)
        for key, names in named.items():
            for name in names:
                if name not in schema.names:
                    near = difflib.get_close_matches(name, schema.names, n=1)
                    hint = f"Did you mean {near[0]!r}?" if near else f"Set {key} to one of them."
                    raise DataError(
                        f"{file} has no column {name!r}, which {key} names: it has "
                        f"{', '.join(schema.names)}. {hint}"
                    )
        for name in self.of_json:
            kind = schema.field(name).type
            if not is_text(kind) and not pa.types.is_nested(kind):
                raise DataError(
                    f"{file}: column {name!r}, which data.json_columns names, has type {kind}: it is no text "
                    "that could be JSON. Leave it out."
                )


def _column_of(path: str, schema: pa.Schema) -> str:
    """The column that a dotted name begins with."""
    return path if path in schema.names else path.partition(".")[0]


def _with(table: pa.Table, name: str, column: pa.ChunkedArray) -> pa.Table:
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)


def _within(file: DataFile, table: pa.Table, column: str, path: str) -> pa.ChunkedArray:
    """What a column holds under a dotted name. DataError if its type has no such field."""
    path = path.removeprefix(column).removeprefix(".")
    names = path.split(".") if path else []
    values = table[column]
    kind = values.type
    if names and is_text(kind):
        values, kind = json_cells(values), JSON_TYPE
    if is_json(kind):
        cells = values.to_pylist()
        found = [
            value_at(plain(cell, f"{file}, row {row}: column {column!r}"), path)
            for row, cell in enumerate(cells)
        ]
        return pa.chunked_array([pa.array([_cell(value) for value in found], JSON_TYPE)])
    for name in names:
        if not _has_field(kind, name):
            fields = ", ".join(field.name for field in kind) if pa.types.is_struct(kind) else str(kind)
            raise DataError(
                f"{file}: data.columns.ground_truth={path}: column {column!r} has no {name!r}, it has "
                f"{fields}. Name what holds the right answer."
            )
        values = pc.struct_field(values, name)
        kind = values.type
    return values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values])


def _first_of(own: pa.ChunkedArray, other: pa.ChunkedArray) -> pa.ChunkedArray:
    """ground_truth of the first column where it has one, else the values of the other."""
    if not (is_json(own.type) or _has_field(own.type, TRUTH)):
        return other
    pairs = zip(own.to_pylist(), other.to_pylist(), strict=True)
    found = [first if (first := truth_of(plain(cell))) is not None else plain(value) for cell, value in pairs]
    return pa.chunked_array([pa.array([_cell(value) for value in found], JSON_TYPE)])


def _cell(value: Any) -> dict[str, str] | None:
    return None if value is None else as_json_cell(value)


def _boxed(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """{ground_truth: value} of each value."""
    field = pa.field(TRUTH, values.type)
    chunks = [pa.StructArray.from_arrays([chunk], fields=[field]) for chunk in values.chunks]
    return pa.chunked_array(chunks, pa.struct([field]))


def _has_field(kind: pa.DataType, name: str) -> bool:
    return pa.types.is_struct(kind) and kind.get_field_index(name) >= 0


class ResponseColumns:
    """Columns of responses, one for each response of a prompt.

    A response is its text and the token that ends a turn of the model, as a rollout ends: no chat template is
    applied, as the prompt's ends where the assistant begins. One that is written with an end of the model
    gets no second one, and keeps nothing behind it.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
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
