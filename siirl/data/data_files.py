"""Files of rows in the formats that people have: what a name stands for, and how it is read. No torch."""

import difflib
import functools
import glob
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from siirl.data import nemo_gym_rows, verifiers_rows
from siirl.data.made_rows import MadeRows
from siirl.data.nemo_gym_rows import NemoGymRows
from siirl.data.reasoning_gym_rows import PREFIX, GeneratedRows
from siirl.data.row_values import JSON_TYPE, as_json_cell
from siirl.data.task_folders import TaskRows, tasks_in
from siirl.data.verifiers_rows import VerifiersRows
from siirl.errors import DataError, Place
from siirl.findings import Findings

UNREADABLE = (pa.ArrowException, OSError, ValueError)
"""What pyarrow raises for a file that is not what it should be; ValueError: a text that is no UTF-8."""

MADE = {
    PREFIX: GeneratedRows,
    verifiers_rows.PREFIX: VerifiersRows,
    nemo_gym_rows.PREFIX: NemoGymRows,
}
"""What a name begins with -> the rows that it stands for."""
DataFile = Path | MadeRows
"""What an entry of data.train_files names: a file of a format of READERS, or rows that are made."""


@dataclass(frozen=True)
class Rows:
    """The rows of a DataFile, before any is read."""

    schema: pa.Schema
    num_rows: int
    read: Callable[[list[str]], pa.Table]
    """The rows, of these columns. UNREADABLE for a file that is corrupt."""
    file_columns: tuple[str, ...] = ()
    """Of the file itself, if the schema has others besides that are made of them; see `names`."""

    @property
    def names(self) -> Sequence[str]:
        """The columns of the file itself, which messages name."""
        return self.file_columns or self.schema.names


def list_files(files: str | Sequence[str]) -> list[DataFile]:
    """What the names stand for: `~` expanded, patterns and folders as their files, sorted by name.

    DataError for no file at all, or one that does not exist.
    """
    names = [files] if isinstance(files, str) else files
    found, listed = Findings(Place.DATA), list[DataFile]()
    for name in names:
        with found.at():
            listed += _named(name)
    found.close()
    if not listed:
        raise DataError(
            "data.train_files names no file (data.val_files for a run that only validates): there are no "
            "prompts. Name files of rows, as data.train_files=train.parquet."
        )
    return listed


def _named(name: str) -> list[DataFile]:
    made = next((rows for prefix, rows in MADE.items() if name.startswith(prefix)), None)
    if made is not None:
        return [made(name)]
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return [TaskRows(path)] if tasks_in(path) else list(_in_folder(path))
    if glob.has_magic(name):
        matched = [Path(file) for file in sorted(glob.glob(str(path), recursive=True))]
        if files := [file for file in matched if file.is_file()]:
            return [*files]
        raise DataError(f"no dataset file matches the pattern {name}. {_near_files(path)}")
    hint = _as_list(path) or _near_files(path)
    raise DataError(f"dataset file {path} does not exist: expected a file of rows. {hint}")


def _in_folder(folder: Path) -> Sequence[Path]:
    """The files of a data set that is a folder: as `save_to_disk` writes it, or files of one format."""
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits", [])
        named = f"Name one, as {folder / splits[0]}" if splits else "Write it again"
        raise DataError(f"{folder} is a folder of several data sets: {', '.join(splits)}. {named}.")
    if (folder / "state.json").is_file():
        state = _read_json(folder / "state.json")
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise DataError(
                f"{folder} is a selection of rows of another data set. Write it with flatten_indices()."
            )
        files = [folder / item["filename"] for item in state.get("_data_files", [])]
        if missing := [file.name for file in files if not file.is_file()]:
            lacks = ", ".join(missing)
            raise DataError(f"{folder} lacks {lacks}, which its state.json names. Copy the folder again.")
        if not files:
            raise DataError(f"{folder} is a data set without rows. Check how it was written.")
        return files
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and _format(file) is not None]
    files = [file for file in files if file.name not in ("dataset_info.json", "dataset_infos.json")]
    if not files:
        inner = sorted({file.parent for file in folder.glob("*/*") if _format(file) is not None})
        hint = f"Its folder {inner[0].name} has: name that." if inner else "Check the path."
        raise DataError(f"{folder} is a directory without a file of rows ({_formats()}). {hint}")
    splits = sorted({found[0] for file in files if (found := SPLIT.match(file.name))})
    if len(splits) > 1:
        raise DataError(
            f"{folder} is a directory with files of several splits: {', '.join(splits)}. Name one of them, "
            f"as {folder / splits[0]}*."
        )
    return files


SPLIT = re.compile(r"(train|test|val(idation)?|dev|eval)(?![A-Za-z])")
"""How the name of a file begins that holds one part of a data set."""


def open_rows(file: DataFile, prompt_key: str = "prompt", source_key: str = "data_source") -> Rows:
    """The rows of a file. DataError if it cannot be read, or no rows can be made.

    prompt_key, source_key: columns of rows that are made.
    """
    if not isinstance(file, Path):
        return Rows(
            file.schema(prompt_key, source_key),
            file.num_rows,
            lambda columns: file.table(prompt_key, source_key).select(columns),
        )
    kind = _format(file) or "parquet"
    try:
        rows = READERS[kind](file)
    except DataError:
        raise
    except UNREADABLE as error:
        known = _format(file) is not None
        fix = "Write the file again" if known else f"Formats: {_formats()}; docs/data.md"
        raise DataError(f"{file} cannot be read as {kind}: {str(error).rstrip('.')}. {fix}.") from error
    return _plain_types(rows)


def read_columns(file: DataFile, rows: Rows, columns: Sequence[str]) -> pa.Table:
    """The rows of a file, of these columns. DataError if it is corrupt."""
    try:
        return rows.read(list(columns))
    except DataError:
        raise
    except UNREADABLE as error:
        raise DataError(f"{file} is corrupt: {error}. Write the file again.") from error


def _format(file: Path) -> str | None:
    """The key of READERS that a file's name says; None for another."""
    ending = file.suffix.lower()
    if ending in COMPRESSED:
        inner = ENDINGS.get(Path(file.stem).suffix.lower())
        return inner if inner in ("json", "csv") else None
    return ENDINGS.get(ending)


def _formats() -> str:
    return ", ".join(ENDINGS)


def _plain_types(rows: Rows) -> Rows:
    """Rows whose values of categories and of views, at any depth, are plain texts, numbers and lists.

    Numbers of 32 bits become those of 64 bits that are written in the same way: 7.1 stays 7.1.
    """
    written, schema = (_with_types(rows.schema, single) for single in (pa.string(), pa.float64()))
    if schema.types == rows.schema.types:
        return rows

    def read(columns: list[str]) -> pa.Table:
        table = rows.read(columns)
        for target in (written, schema):
            table = table.cast(pa.schema([target.field(name) for name in columns]))
        return table

    return Rows(schema, rows.num_rows, read)


def _with_types(schema: pa.Schema, single: pa.DataType) -> pa.Schema:
    fields = [field.with_type(_plain_type(field.type, single)) for field in schema]
    return pa.schema(fields, schema.metadata)


def _plain_type(kind: pa.DataType, single: pa.DataType) -> pa.DataType:
    """The type of plain values of a type; single: in the place of numbers of 32 bits."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type, single)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type, single)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type, single)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain_type(kind.value_type, single)))
    if pa.types.is_float32(kind):
        return single
    return pa.string() if pa.types.is_string_view(kind) else kind


def _of_table(table: pa.Table) -> Rows:
    return Rows(table.schema, table.num_rows, lambda columns: table.select(columns))


def _parquet(file: Path) -> Rows:
    parquet = pq.ParquetFile(file, memory_map=file.stat().st_size > 0)
    return Rows(parquet.schema_arrow, parquet.metadata.num_rows, parquet.read)


def _arrow(file: Path) -> Rows:
    """An Arrow file, or an Arrow stream, which is what `datasets` writes."""
    source = pa.memory_map(str(file))
    try:
        return _of_table(pa.ipc.open_file(source).read_all())
    except pa.ArrowInvalid:
        source.seek(0)
        return _of_table(pa.ipc.open_stream(source).read_all())


def _csv(file: Path) -> Rows:
    """A text with a line of names: every column is text, and an empty cell is none."""
    state = file.stat()
    return _of_table(_csv_table(file, state.st_mtime_ns, state.st_size))


@functools.lru_cache(maxsize=4)
def _csv_table(file: Path, mtime_ns: int, size: int) -> pa.Table:
    tabs = any(suffix.lower() == ".tsv" for suffix in file.suffixes)
    parse = pa_csv.ParseOptions(delimiter="\t" if tabs else ",", newlines_in_values=True)
    with _opened(file) as source:
        names = pa_csv.open_csv(source, parse_options=parse).schema.names
    convert = pa_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        null_values=[""],
    )
    with _opened(file) as source:
        return pa_csv.read_csv(source, parse_options=parse, convert_options=convert)


def _opened(file: Path) -> pa.NativeFile:
    return pa.input_stream(str(file), compression="detect")


def _json(file: Path) -> Rows:
    """Objects: one on each line, or a list of them. A column of other values than texts or numbers of one
    type holds JSON, so that an object has the keys that were written, and no others.
    """
    state = file.stat()
    return _of_table(_json_table(file, state.st_mtime_ns, state.st_size))


@functools.lru_cache(maxsize=4)
def _json_table(file: Path, mtime_ns: int, size: int) -> pa.Table:
    with _opened(file) as source:
        text = source.read().decode("utf-8-sig")
    names: dict[str, None] = {}
    rows = list(_json_rows(file, text))
    if not rows:
        raise DataError(f"{file} has no rows: it is empty. Check how it was written.")
    for row in rows:
        names.update(dict.fromkeys(row))
    return pa.table({name: _json_column(file, name, [row.get(name) for row in rows]) for name in names})


def _json_rows(file: Path, text: str) -> Iterator[dict[str, Any]]:
    whole = None
    if text.lstrip()[:1] == "[" or ".json" in file.name.lower().replace(".jsonl", ""):
        try:
            whole = json.loads(text)
        except ValueError as error:
            if text.lstrip()[:1] == "[":
                raise DataError(f"{file} is no JSON: {error}. Write the file again.") from error
    if isinstance(whole, dict):  # of rows under a name, or a single row
        rows = next((whole[name] for name in ROWS_OF if _is_rows(whole.get(name))), None)
        whole = rows or _of_columns(whole) or [whole]
    if whole is not None:
        if not _is_rows(whole) and whole != []:
            raise DataError(f"{file} is no list of objects: each row is one, {{column: value}}. Convert it.")
        yield from whole
        return
    for number, line in enumerate(text.split("\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{file}, line {number + 1} is no JSON: {error}. Each line is one object; mend the line."
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{file}, line {number + 1} is {type(row).__name__}: each line is one object, "
                "{column: value}. Convert it."
            )
        yield row


ROWS_OF = ("data", "rows", "examples", "instances", "train", "test", "validation")
"""Under what names a file of one object has its rows."""


def _of_columns(whole: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The rows of {column: [value, ...]}, or of {column: {"0": value, ...}}, as pandas has it; else None."""
    columns = [
        list(column.values()) if isinstance(column, dict) and all(map(str.isdecimal, column)) else column
        for column in whole.values()
    ]
    if len(columns) < 2 or not all(isinstance(column, list) for column in columns):
        return None
    if len({len(column) for column in columns}) > 1:
        return None
    return [dict(zip(whole, values, strict=True)) for values in zip(*columns, strict=True)]


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _json_column(file: Path, name: str, values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    try:
        if kinds <= {str}:
            return pa.array(values, pa.string())
        if len(kinds) == 1 and kinds <= {int, float, bool}:
            return pa.array(values)
    except UnicodeEncodeError as error:
        row = next(row for row, value in enumerate(values) if value and not _is_unicode(value))
        raise DataError(
            f"{file}, row {row}: column {name!r} holds half a character ({error.object[error.start]!r}), "
            "which is no text. Mend the row."
        ) from error
    except (OverflowError, pa.ArrowInvalid):
        pass  # integers of more than 64 bits
    return pa.array([None if value is None else as_json_cell(value) for value in values], JSON_TYPE)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


READERS: dict[str, Callable[[Path], Rows]] = {
    "parquet": _parquet,
    "json": _json,
    "csv": _csv,
    "arrow": _arrow,
}
ENDINGS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
"""How the name of a file ends -> how it is read. A file of another name is tried as parquet."""
COMPRESSED = (".gz", ".bz2", ".zst")
"""Endings behind those of JSON and CSV."""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Copy the folder again.") from error
    return value if isinstance(value, dict) else {}


def _as_list(path: Path) -> str:
    """How to write several files that stand in one text; empty if it is no such text."""
    parts = re.split(r"[\s,;]+", str(path))
    if len(parts) < 2 or not all(Path(part).expanduser().is_file() for part in parts):
        return ""
    return f"Several files are a list: [{','.join(parts)}]."


def _near_files(path: Path) -> str:
    where = path.parent
    if not where.is_dir():
        what = "is no folder"
        return f"{where.absolute()} {what}: check the path, or write the dataset first."
    found = {file.stem: file for file in sorted(where.iterdir()) if _format(file) is not None}
    if not found:
        return f"{where.absolute()} has no file of rows: check the path, or write the dataset first."
    if near := difflib.get_close_matches(path.stem, found, n=1):
        return f"Did you mean {str(found[near[0]])!r}?"
    return f"Files there: {', '.join(file.name for file in list(found.values())[:5])}."
