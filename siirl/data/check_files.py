"""Checks of dataset files without torch or a tokenizer: the launcher runs them before any worker starts."""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from siirl.config import Config
from siirl.data import verifiers_rows
from siirl.data.reasoning_gym_rows import PREFIX, GeneratedRows, first_overlap
from siirl.data.verifiers_rows import VerifiersRows
from siirl.errors import DataError, Place
from siirl.findings import Findings

GROUND_TRUTH_KEY = "reward_model"
EXTRA_KEY = "extra_info"
UNREADABLE = (pa.ArrowException, OSError, ValueError)
"""What pyarrow raises for a file that is not what it should be; ValueError: a text that is no UTF-8."""

MADE = {PREFIX: GeneratedRows, verifiers_rows.PREFIX: VerifiersRows}
"""What a name begins with -> the rows that it stands for."""
DataFile = Path | GeneratedRows | VerifiersRows
"""What an entry of data.train_files names: a parquet file, or rows that are made."""


@dataclass(frozen=True)
class Rows:
    """The rows of a DataFile, before any is read."""

    schema: pa.Schema
    num_rows: int
    read: Callable[[list[str]], pa.Table]
    """The rows, of these columns. UNREADABLE for a file that is corrupt."""


def inspect_data(cfg: Config) -> dict[str, int]:
    """Number of rows of the files that this run reads, as {"train": ..., "val": ...}, each if it is read.

    DataError if files or columns are missing or malformed, or the training files hold less than one batch.
    The column `reward_model` may be missing when the user's own reward function does the scoring; where the
    files give the responses nothing scores, and those columns are needed in its place.
    """
    gives = cfg.actor_rollout_ref.rollout.gives_data
    responses = cfg.data.response_keys if gives else ()
    required = [] if gives else [cfg.data.reward_fn_key]
    if not gives and cfg.custom_reward_function.path is None:
        required.append(GROUND_TRUTH_KEY)
    counts: dict[str, int] = {}
    found = Findings(Place.DATA)
    for split in splits_read(cfg):
        with found.at():
            files = cfg.data.train_files if split == "train" else cfg.data.val_files
            source_key = cfg.data.reward_fn_key
            images = cfg.data.image_key if cfg.data.has_images else ""
            counts[split] = inspect_files(files, cfg.data.prompt_key, required, source_key, responses, images)
    with found.at():
        if len(counts) == 2:
            _refuse_overlap(cfg)
    with found.at():
        if counts.get("train", cfg.data.train_batch_size) < cfg.data.train_batch_size:
            raise DataError(
                f"data.train_files hold {counts['train']} prompts, data.train_batch_size is "
                f"{cfg.data.train_batch_size}: there is not one full batch. Lower the batch size or add data."
            )
    found.close()
    return counts


def _refuse_overlap(cfg: Config) -> None:
    overlap = first_overlap(list_files(cfg.data.train_files), list_files(cfg.data.val_files))
    if overlap is not None:
        train, val = overlap
        raise DataError(
            f"data.val_files={val} has rows of data.train_files={train}: reasoning-gym draws row i from "
            f"seed + i. Set a seed of at least {train.options['seed'] + train.options['size']}."
        )


def splits_read(cfg: Config) -> list[str]:
    """Which of "train" and "val" this run reads."""
    trainer = cfg.trainer
    validates = trainer.val_only or trainer.val_before_train or trainer.test_freq > 0
    samples = not cfg.actor_rollout_ref.rollout.gives_data  # what is given is only trained on
    return ["train"] * (not trainer.val_only) + ["val"] * (validates and samples)


def data_sources(cfg: Config) -> set[str]:
    """The distinct values of the column data.reward_fn_key in the files that this run reads.

    Reads that column alone. DataError if it is no text, has rows without a value, or cannot be read.
    """
    key, found = cfg.data.reward_fn_key, set()
    for split in splits_read(cfg):
        for path in list_files(cfg.data.train_files if split == "train" else cfg.data.val_files):
            if not isinstance(path, Path):
                found.add(path.data_source)
                continue
            try:
                column = open_rows(path).read([key])[key]
            except UNREADABLE as error:
                raise DataError(f"{path} is corrupt: {error}. Write the file again.") from error
            kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
            if not _is_text(kind):
                raise DataError(
                    f"{path}: column {key!r} has type {kind}: it selects the reward function, by name. "
                    "Store text in it, or set data.reward_fn_key."
                )
            if column.null_count:
                raise DataError(
                    f"{path}: {column.null_count} rows have no {key!r}: it selects the reward function. "
                    "Fill it in, or remove the rows."
                )
            found.update(column.unique().to_pylist())
    return found


def inspect_files(
    files: str | Sequence[str],
    prompt_key: str = "prompt",
    required: Sequence[str] = ("data_source",),
    source_key: str = "data_source",
    responses: Sequence[str] = (),
    images: str = "",
) -> int:
    """Check the metadata of parquet files and return their total number of rows. Reads no data pages.

    DataError for a missing, unreadable or corrupt file, a missing column, a column of the wrong type, no
    rows.
    """
    num_rows = 0
    found = Findings(Place.DATA)
    for path in list_files(files):
        with found.at():
            rows = open_rows(path, prompt_key, source_key)
            check_columns(path, rows.schema, prompt_key, required, responses, images)
            num_rows += rows.num_rows
    found.close()
    if num_rows == 0:
        raise DataError(
            f"no rows in {_names(files)}: the dataset is empty. Check how the files were written."
        )
    return num_rows


def list_files(files: str | Sequence[str]) -> list[DataFile]:
    """What the names stand for, `~` expanded. DataError for no file at all, or one that does not exist."""
    names = [files] if isinstance(files, str) else files
    paths = [_named(name) for name in names]
    if not paths:
        raise DataError("no dataset files given. Set data.train_files and data.val_files to parquet files.")
    found = Findings(Place.DATA)
    for path in paths:
        if isinstance(path, Path) and not path.is_file():
            what = "is a directory" if path.is_dir() else "does not exist"
            hint = _as_list(path) or _near_files(path)
            found.add(DataError(f"dataset file {path} {what}: expected a parquet file. {hint}"))
    found.close()
    return paths


def _named(name: str) -> DataFile:
    made = next((rows for prefix, rows in MADE.items() if name.startswith(prefix)), None)
    return Path(name).expanduser() if made is None else made(name)


def open_rows(file: DataFile, prompt_key: str = "prompt", source_key: str = "data_source") -> Rows:
    """The rows of a file, memory-mapped. DataError if it cannot be read as parquet, or no rows can be made.

    prompt_key, source_key: columns of rows that are made.
    """
    if not isinstance(file, Path):
        return Rows(
            file.schema(prompt_key, source_key),
            file.num_rows,
            lambda columns: file.table(prompt_key, source_key).select(columns),
        )
    try:
        parquet = pq.ParquetFile(file, memory_map=file.stat().st_size > 0)
    except UNREADABLE as error:
        fix = (
            "Write the file again" if file.suffix == ".parquet" else "Write its rows as parquet: docs/data.md"
        )
        raise DataError(f"{file} cannot be read as parquet: {str(error).rstrip('.')}. {fix}.") from error
    return Rows(parquet.schema_arrow, parquet.metadata.num_rows, parquet.read)


def check_columns(
    path: DataFile,
    schema: pa.Schema,
    prompt_key: str,
    required: Sequence[str],
    responses: Sequence[str] = (),
    images: str = "",
) -> None:
    """DataError: a column is missing, the prompt is no chat and no text, or a value is not JSON.

    responses: columns of given responses, which are texts or chats, too. images: column of images, if any.
    """
    found = Findings(Place.DATA)
    found.take(_column_problems(path, schema, prompt_key, required))
    found.take(_response_problems(path, schema, prompt_key, responses))
    found.take(_image_problems(path, schema, images) if images else ())
    found.close()


def _response_problems(
    path: DataFile, schema: pa.Schema, prompt_key: str, responses: Sequence[str]
) -> Iterator[DataError]:
    for name in responses:
        if name not in schema.names:
            others = [other for other in schema.names if other != prompt_key]
            near = difflib.get_close_matches(name, others, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Set data.response_keys."
            yield DataError(
                f"{path} has no column {name!r} of responses: it has {', '.join(schema.names)}. {hint}"
            )
        elif not (_is_text(schema.field(name).type) or _is_chat(schema.field(name).type)):
            yield DataError(
                f"{path}: column {name!r} has type {schema.field(name).type}: a response is a string, or a "
                "list of one {role, content} message of the assistant. Convert the column."
            )


def _image_problems(path: DataFile, schema: pa.Schema, name: str) -> Iterator[DataError]:
    if name not in schema.names:
        yield DataError(
            f"{path} has no column {name!r} of images, which data.dataset_type=vlm reads: it has "
            f"{', '.join(schema.names)}. Set data.image_key, or data.dataset_type=llm for prompts of text."
        )
        return
    kind = schema.field(name).type
    kind = kind.value_type if is_list(kind) else kind
    fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {"": kind}
    held = [fields[key] for key in ("bytes", "path", "image", "") if key in fields]
    if not held or not all(_is_text(one) or _is_bytes(one) or pa.types.is_null(one) for one in held):
        yield DataError(
            f"{path}: column {name!r} has type {schema.field(name).type}: an image is the bytes of a file, "
            "a path, or {bytes, path}; a prompt has one or a list. Convert the column."
        )


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _column_problems(
    path: DataFile, schema: pa.Schema, prompt_key: str, required: Sequence[str]
) -> Iterator[DataError]:
    for name in dict.fromkeys((prompt_key, *required)):
        if name not in schema.names:
            why, fix = _column_use(name, prompt_key)
            near = difflib.get_close_matches(name, schema.names, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            columns = ", ".join(schema.names)
            yield DataError(f"{path} has no column {name!r}, {why}: it has {columns}. {hint}{fix}.")
    read = [
        n for n in dict.fromkeys((prompt_key, *required, GROUND_TRUTH_KEY, EXTRA_KEY)) if n in schema.names
    ]
    for name in read:
        if schema.names.count(name) > 1:
            yield DataError(
                f"{path} has {schema.names.count(name)} columns {name!r}: nothing says which one is meant. "
                "Rename or drop the others."
            )
            return
    if prompt_key in read and not (
        _is_text(schema.field(prompt_key).type) or _is_chat(schema.field(prompt_key).type)
    ):
        yield DataError(
            f"{path}: column {prompt_key!r} has type {schema.field(prompt_key).type}: a prompt is a list of "
            "{role, content} messages with text content, or a plain string. Convert the column."
        )
    for name in read:
        kind = schema.field(name).type
        if name == GROUND_TRUTH_KEY and not (pa.types.is_struct(kind) or pa.types.is_null(kind)):
            yield DataError(
                f"{path}: column {name!r} has type {kind}: it is read as a struct with the field "
                "ground_truth. Store {'ground_truth': ...} in it."
            )
            continue
        for where, leaf in _foreign_leaves(name, kind) if name != prompt_key else ():
            yield DataError(
                f"{path}: {where} has type {leaf}: rows travel between workers as JSON. "
                "Store it as a string or a number."
            )


def _column_use(name: str, prompt_key: str) -> tuple[str, str]:
    """Why rows have a column, and what to do where they have none."""
    if name == GROUND_TRUTH_KEY:
        return (
            "where rewards find the right answer",
            "Write it as {ground_truth: ...}, or score by your own function (custom_reward_function.path)",
        )
    key = "data.prompt_key" if name == prompt_key else "data.reward_fn_key"
    return f"which {key} names", f"Set {key} to the one that it is"


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_chat(kind: pa.DataType) -> bool:
    if not is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return {"role", "content"} <= set(fields) and _is_text(fields["role"]) and _is_text(fields["content"])


def _foreign_leaves(where: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """(dotted name, type) of each value inside `kind` that JSON does not know."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _foreign_leaves(f"{where}.{field.name}", field.type)
    elif is_list(kind):
        yield from _foreign_leaves(f"{where}[]", kind.value_type)
    elif pa.types.is_dictionary(kind):
        yield from _foreign_leaves(where, kind.value_type)
    elif not (
        _is_text(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    ):
        yield where, kind


def _as_list(path: Path) -> str:
    """How to write several files that stand in one text; empty if it is no such text."""
    parts = re.split(r"[\s,;]+", str(path))
    if len(parts) < 2 or not all(Path(part).expanduser().is_file() for part in parts):
        return ""
    return f"Several files are a list: [{','.join(parts)}]."


def _near_files(path: Path) -> str:
    where = path if path.is_dir() else path.parent
    found = {file.stem: file for file in sorted(where.glob("*.parquet"))}
    if not found:
        what = "has no parquet file" if where.is_dir() else "is no folder"
        return f"{where.absolute()} {what}: check the path, or write the dataset first."
    if near := difflib.get_close_matches(path.stem, found, n=1):
        return f"Did you mean {str(found[near[0]])!r}?"
    return f"Parquet files there: {', '.join(file.name for file in list(found.values())[:5])}."


def _names(files: str | Sequence[str]) -> str:
    return files if isinstance(files, str) else ", ".join(map(str, files))
