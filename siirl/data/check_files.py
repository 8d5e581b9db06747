"""Checks of dataset files without torch or a tokenizer: the launcher runs them before any worker starts."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from siirl.config import Config
from siirl.data.data_files import DataFile, Rows, list_files, read_columns
from siirl.data.dataset_columns import EXTRA_KEY, GROUND_TRUTH_KEY, Columns
from siirl.data.reasoning_gym_rows import first_overlap
from siirl.data.row_values import is_json, is_list, is_text
from siirl.errors import DataError, Place
from siirl.findings import Findings


def inspect_data(cfg: Config, scored: bool = True) -> dict[str, int]:
    """Number of rows of the files that this run reads, as {"train": ..., "val": ...}, each if it is read.

    DataError if files or columns are missing or malformed, or the training files hold less than one batch.
    scored: by functions, which are chosen by the column of data sources and, but for the user's own, find the
    right answer in `reward_model`. Where the files give the responses nothing scores, and those columns are
    needed in their place.
    """
    gives = cfg.actor_rollout_ref.rollout.gives_data
    responses = cfg.data.response_keys if gives else ()
    required = [cfg.data.reward_fn_key] if scored and not gives else []
    if required and cfg.custom_reward_function.path is None:
        required.append(GROUND_TRUTH_KEY)
    counts: dict[str, int] = {}
    found = Findings(Place.DATA)
    for split in splits_read(cfg):
        with found.at():
            files = cfg.data.train_files if split == "train" else cfg.data.val_files
            columns = Columns.of(cfg.data)
            counts[split] = inspect_files(files, columns, required, responses, cfg.data.has_images)
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
    return set().union(*(source_names(cfg, split) for split in splits_read(cfg)))


def source_names(cfg: Config, split: str) -> set[str]:
    """`data_sources` of the files of one split."""
    key, found = cfg.data.reward_fn_key, set()
    for path in list_files(cfg.data.train_files if split == "train" else cfg.data.val_files):
        if not isinstance(path, Path):
            found.add(path.data_source)
            continue
        rows = Columns.of(cfg.data).open(path)
        if key not in rows.schema.names:
            raise DataError(
                f"{path} has no column {key!r}, which names the data source: it has "
                f"{', '.join(rows.names)}. Set data.reward_fn_key, or data.data_source for all rows."
            )
        column = read_columns(path, rows, [key])[key]
        if not is_text(column.type):
            raise DataError(
                f"{path}: column {key!r} has type {column.type}: it selects the reward function, by "
                "name. Store text in it, or set data.reward_fn_key."
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
    columns: Columns | None = None,
    required: Sequence[str] = ("data_source",),
    responses: Sequence[str] = (),
    images: bool = False,
) -> int:
    """Check names and types of the columns of files and return their total number of rows.

    Of parquet and Arrow files it reads no rows. DataError for a missing, unreadable or corrupt file, a
    missing column, a column of the wrong type, no rows.
    """
    columns = columns or Columns()
    num_rows = 0
    found = Findings(Place.DATA)
    for path in list_files(files):
        with found.at():
            rows = columns.open(path)
            check_columns(path, rows, columns, required, responses, images)
            num_rows += rows.num_rows
    found.close()
    if num_rows == 0:
        raise DataError(
            f"no rows in {_names(files)}: the dataset is empty. Check how the files were written."
        )
    return num_rows


def check_columns(
    path: DataFile,
    rows: Rows,
    columns: Columns,
    required: Sequence[str],
    responses: Sequence[str] = (),
    images: bool = False,
) -> None:
    """DataError: a column is missing, the prompt is no chat and no text, or a value is not JSON.

    responses: columns of given responses, which are texts or chats, too. images: whether rows have images.
    """
    found = Findings(Place.DATA)
    found.take(_column_problems(path, rows, columns.prompt, required))
    found.take(_source_problems(path, rows.schema, columns.source))
    found.take(_response_problems(path, rows, columns.prompt, responses))
    found.take(_image_problems(path, rows, columns.images) if images else ())
    found.close()


def _source_problems(path: DataFile, schema: pa.Schema, name: str) -> Iterator[DataError]:
    """A data source is a name: rewards are chosen and counted by it."""
    if schema.names.count(name) != 1 or is_text(kind := schema.field(name).type) or pa.types.is_null(kind):
        return
    what = "values of JSON" if is_json(kind) else f"type {kind}"
    yield DataError(
        f"{path}: column {name!r} has {what}: the data source of a row is a text. Write it as one, or name "
        "another column by data.reward_fn_key."
    )


def _response_problems(
    path: DataFile, rows: Rows, prompt_key: str, responses: Sequence[str]
) -> Iterator[DataError]:
    schema = rows.schema
    for name in responses:
        if name not in schema.names:
            others = [other for other in rows.names if other != prompt_key]
            near = difflib.get_close_matches(name, others, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Set data.response_keys."
            yield DataError(
                f"{path} has no column {name!r} of responses: it has {', '.join(rows.names)}. {hint}"
            )
        elif not is_prompt(schema.field(name).type):
            yield DataError(
                f"{path}: column {name!r} has type {schema.field(name).type}: a response is a string, or a "
                "list of one {role, content} message of the assistant. Convert the column."
            )


def _image_problems(path: DataFile, rows: Rows, name: str) -> Iterator[DataError]:
    if name not in rows.schema.names:
        yield DataError(
            f"{path} has no column {name!r} of images, which data.dataset_type=vlm reads: it has "
            f"{', '.join(rows.names)}. Set data.image_key, or data.dataset_type=llm for prompts of text."
        )
        return
    kind = rows.schema.field(name).type
    if is_json(kind):
        return
    kind = kind.value_type if is_list(kind) else kind
    fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {"": kind}
    held = [fields[key] for key in ("bytes", "path", "image", "") if key in fields]
    if not held or not all(is_text(one) or _is_bytes(one) or pa.types.is_null(one) for one in held):
        yield DataError(
            f"{path}: column {name!r} has type {rows.schema.field(name).type}: an image is the bytes of a "
            "file, a path, or {bytes, path}; a prompt has one or a list. Convert the column."
        )


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _column_problems(
    path: DataFile, rows: Rows, prompt_key: str, required: Sequence[str]
) -> Iterator[DataError]:
    schema = rows.schema
    for name in dict.fromkeys((prompt_key, *required)):
        if name not in schema.names:
            why, fix = _column_use(name, prompt_key)
            near = difflib.get_close_matches(name, rows.names, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            held = ", ".join(rows.names)
            yield DataError(f"{path} has no column {name!r}, {why}: it has {held}. {hint}{fix}.")
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
    if prompt_key in read and not is_prompt(schema.field(prompt_key).type):
        yield DataError(
            f"{path}: column {prompt_key!r} has type {schema.field(prompt_key).type}: a prompt is a list of "
            "{role, content} messages with text content, or a plain string. Convert the column."
        )
    for name in read:
        kind = schema.field(name).type
        if name == GROUND_TRUTH_KEY and not (pa.types.is_struct(kind) or pa.types.is_null(kind)):
            yield DataError(
                f"{path}: column {name!r} has type {kind}: it is read as a struct with the field "
                "ground_truth. Store {'ground_truth': ...} in it, or name the column of the right answer by "
                f"data.columns.ground_truth={name}."
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
            "Name the column of the right answer by data.columns.ground_truth, or score by your own function "
            "(custom_reward_function.path)",
        )
    if name == prompt_key:
        return "which data.prompt_key names", "Name the column of the prompts by data.columns={prompt: ...}"
    fix = "Name the column by data.columns={data_source: ...}, or the source of all rows by data.data_source"
    return "which data.reward_fn_key names", fix


def is_plain_chat(kind: pa.DataType) -> bool:
    """Whether a column holds lists of {role, content} with text content."""
    if not is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    return {"role", "content"} <= set(fields) and is_text(fields["role"]) and is_text(fields["content"])


def is_prompt(kind: pa.DataType) -> bool:
    """Whether a column may hold prompts, as `chat_of` reads them."""
    if is_text(kind) or is_json(kind) or is_plain_chat(kind):
        return True
    if not is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    if {"from", "value"} <= set(fields):
        return is_text(fields["from"]) and is_text(fields["value"])
    content = fields.get("content")
    parts = content is not None and is_list(content) and pa.types.is_struct(content.value_type)
    return "role" in fields and parts and is_text(fields["role"])


def _foreign_leaves(where: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """(dotted name, type) of each value inside `kind` that `plain` makes no JSON of."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _foreign_leaves(f"{where}.{field.name}", field.type)
    elif is_list(kind):
        yield from _foreign_leaves(f"{where}[]", kind.value_type)
    elif pa.types.is_dictionary(kind):
        yield from _foreign_leaves(where, kind.value_type)
    elif not (
        is_text(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
        or pa.types.is_temporal(kind)
        or pa.types.is_decimal(kind)
    ):
        yield where, kind


def _names(files: str | Sequence[str]) -> str:
    return files if isinstance(files, str) else ", ".join(map(str, files))
