"""What the rows of a run's files hold: counted by source, refused where a run would trip. No torch."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from siirl.config import Config
from siirl.data.check_files import is_plain_chat, splits_read
from siirl.data.data_files import DataFile, list_files, read_columns
from siirl.data.dataset_columns import GROUND_TRUTH_KEY, Columns
from siirl.data.prompt_lengths import PromptLengths
from siirl.data.row_values import (
    CHAT_START,
    CHAT_TEXT,
    chat_of,
    is_blank,
    is_text,
    plain,
    truth_of,
    values_of,
    written_chat,
)
from siirl.errors import DataError, Place
from siirl.findings import Findings

TruthCheck = Callable[[str, Any], None]
"""Raises DataError unless a row of a data source can be scored by a right answer; None: there is none."""
MOST_SOURCES = 8  # of a line


@dataclass
class RowCounts:
    """Of the rows of a split."""

    split: str
    rows: Counter[str] = field(default_factory=Counter)
    """By data source; "" where rows have none."""
    without_truth: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    """As longer than data.max_prompt_length."""
    cut: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        told = [f"{self.split}: {sum(self.rows.values()):,} rows{_by_source(self.rows)}"]
        for counts, what in (
            (self.without_truth, "without ground truth"),
            (self.dropped, "dropped as too long"),
            (self.cut, "cut as too long"),
        ):
            if number := sum(counts.values()):
                told.append(f"{number:,} {what}{_by_source(counts)}")
        return "; ".join(told)


def count_rows(cfg: Config, checks_truth: TruthCheck | None) -> list[RowCounts]:
    """The rows of the files that this run reads, of each split.

    DataError, all of them at once, for prompts that are empty, no chats, or chats that nobody has read, and
    for right answers that checks_truth refuses (None: nothing scores by them); with the tokenizer here also
    for prompts that are too long, unless they are dropped or cut.
    """
    lengths = PromptLengths.of(cfg)
    found, counts = Findings(Place.DATA), []
    columns = Columns.of(cfg.data)
    given = cfg.data.response_keys if cfg.actor_rollout_ref.rollout.gives_data else ()
    for split in splits_read(cfg):
        counts.append(RowCounts(split))
        for file in list_files(cfg.data.train_files if split == "train" else cfg.data.val_files):
            with found.at():
                rows = columns.open(file)
                names = (columns.prompt, columns.source, GROUND_TRUTH_KEY, *given)
                held = [name for name in names if name in rows.schema.names]
                table = read_columns(file, rows, held)
                so_far = len(found)
                found.take(_prompt_problems(file, table, columns.prompt, cfg.data.has_images))
                found.take(response_problems(table, given, lambda row, file=file: f"{file}, row {row}"))
                found.take(_count_truths(file, table, columns.source, counts[-1], checks_truth))
                if lengths is not None and len(found) == so_far:
                    _count_lengths(file, table, cfg, lengths, counts[-1])
    found.close()
    for one in counts:
        left, dropped = sum(one.rows.values()) - sum(one.dropped.values()), sum(one.dropped.values())
        least = cfg.data.train_batch_size if one.split == "train" else 1
        if dropped and left < least:
            raise DataError(
                f"data.filter_overlong_prompts=True drops {dropped} of {left + dropped} prompts of "
                f"data.{one.split}_files, those of more than "
                f"data.max_prompt_length={cfg.data.max_prompt_length} tokens: {left} are left, and {least} "
                "are needed. Raise max_prompt_length."
            )
    return counts


def _count_lengths(
    file: DataFile, table: pa.Table, cfg: Config, lengths: PromptLengths, counts: RowCounts
) -> None:
    """Add the prompts of a file that are too long to the counts. DataError if such prompts are refused."""
    key, source_key = cfg.data.prompt_key, cfg.data.reward_fn_key
    try:
        overlong = lengths.overlong(table[key]) or []
    except DataError as error:
        raise DataError(f"{file}, {error}") from error
    if overlong and not cfg.data.filter_overlong_prompts and cfg.data.truncation == "error":
        row, tokens = overlong[0]
        raise DataError(
            f"{file}, row {row}: the prompt has {tokens} tokens, data.max_prompt_length is {lengths.limit}, "
            f"and data.truncation=error{_and_others(len(overlong))}. Raise max_prompt_length to "
            f"{max(tokens for _, tokens in overlong)}, drop such rows by data.filter_overlong_prompts=True, "
            "or cut them by data.truncation=left|right|middle."
        )
    named = source_key in table.column_names
    sources = [table[source_key][row].as_py() or "" if named else "" for row, _ in overlong]
    (counts.dropped if cfg.data.filter_overlong_prompts else counts.cut).update(sources)


def _prompt_problems(file: DataFile, table: pa.Table, name: str, images: bool) -> Iterator[DataError]:
    prompts = table[name]
    if is_text(prompts.type):
        empty = pc.fill_null(pc.equal(pc.binary_length(prompts), 0), True)
        yield from _empty(file, name, _numbers(empty))
        chats = _numbers(pc.fill_null(pc.match_substring_regex(prompts, CHAT_TEXT), False))
        written = {row: how for row in chats if (how := written_chat(prompts[row].as_py()))}
        if written:
            yield _unread_chats(file, name, written)
        return
    cells = enumerate(prompts.to_pylist()) if not is_plain_chat(prompts.type) else ()
    if is_plain_chat(prompts.type):
        yield from _empty(
            file, name, _numbers(pc.fill_null(pc.equal(pc.list_value_length(prompts), 0), True))
        )
        cells = ((row, prompts[row].as_py()) for row in _suspects(prompts))
    wrong: dict[int, DataError] = {}
    for row, written in cells:
        where = f"{file}, row {row}: the prompt"
        cell = plain(written, f"{where} in column {name!r}")
        if cell in (None, "", []):
            if not is_plain_chat(prompts.type):
                yield from _empty(file, name, np.array([row]))
                return
            continue
        try:
            chat = chat_of(cell, where, images)
            if cell is not chat and _is_answered(cell, chat):
                raise DataError(
                    f"{where} ends with the answer: it would be read as the beginning of the response. Leave "
                    "out the last message, or write it to a column of its own (data.response_keys)."
                )
        except DataError as error:
            wrong[row] = error
    if wrong:
        first = next(iter(wrong.values()))
        yield (
            DataError(f"{first} ({len(wrong)} of {len(prompts)} rows are like this.)")
            if len(wrong) > 1
            else first
        )


ONE_MESSAGE = (
    "a response is a string, or a list of one message of the assistant; earlier turns belong to the prompt"
)


def response_problems(
    table: pa.Table, names: Sequence[str], where: Callable[[int], str]
) -> Iterator[DataError]:
    """The first row of each column without a response, or with a chat of another form. where: names a row."""
    for name in names:
        for row, cell in enumerate(values_of(table, name)):
            if isinstance(cell, str) and not (CHAT_START.match(cell) and written_chat(cell)):
                continue
            if isinstance(cell, str):
                why = f"holds a chat that was written as text: set data.json_columns=[{name}]"
            elif not isinstance(cell, list) or len(cell) != 1:
                why = f"holds no response: {ONE_MESSAGE}"
            elif (said := chat_of(cell, f"{where(row)}: column {name!r}")[0])["role"] != "assistant":
                why = f"holds a message of role {said['role']!r}: {ONE_MESSAGE}"
            elif "content" not in said:
                why = f"holds no response: {ONE_MESSAGE}"
            else:
                continue
            yield DataError(f"{where(row)}: column {name!r} {why}.")
            break


def _is_answered(cell: Any, chat: Any) -> bool:
    """Whether a conversation of ShareGPT ends with what the model said."""
    return isinstance(cell, list) and "from" in cell[-1] and chat[-1]["role"] == "assistant"


def _empty(file: DataFile, name: str, rows: np.ndarray) -> Iterator[DataError]:
    if len(rows):
        yield DataError(
            f"{file}, row {rows[0]}: the prompt in column {name!r} is empty{_and_others(len(rows))}. Remove "
            "the row or fill it in."
        )


def _unread_chats(file: DataFile, name: str, written: dict[int, str]) -> DataError:
    row, how = next(iter(written.items()))
    fix = f"Set data.json_columns=[{name}], and it is read as messages"
    if how == "python":
        fix = f"Write it as JSON (json.dumps) and set data.json_columns=[{name}], or write parquet"
    notation = {"json": "the JSON text of a chat", "python": "a chat as Python prints it"}[how]
    return DataError(
        f"{file}, row {row}: the prompt in column {name!r} is {notation}{_and_others(len(written))}: as a "
        f"text, it would be continued as it stands. {fix}."
    )


def _suspects(prompts: pa.ChunkedArray) -> list[int]:
    """Rows of chats with a message that has no role or no content."""
    found, start = [], 0
    for chunk in prompts.chunks:
        turns = pc.list_flatten(chunk)
        lacks = pc.or_(*(pc.is_null(pc.struct_field(turns, key)) for key in ("role", "content")))
        owners = pc.list_parent_indices(chunk).filter(lacks).unique().to_pylist()
        found += [start + owner for owner in owners]
        start += len(chunk)
    return found


def _count_truths(
    file: DataFile, table: pa.Table, source_key: str, counts: RowCounts, checks_truth: TruthCheck | None
) -> Iterator[DataError]:
    """Add the rows of a file to the counts. DataError for the first of each source that cannot be scored."""
    nothing = [None] * len(table)
    sources = table[source_key].to_pylist() if source_key in table.column_names else nothing
    has_truth = GROUND_TRUTH_KEY in table.column_names
    cells = values_of(table, GROUND_TRUTH_KEY, str(file)) if has_truth else nothing
    seen: set[int] = set()
    wrong: dict[tuple[str, str], list[int]] = {}
    for row, (source, cell) in enumerate(zip(sources, cells, strict=True)):
        source, truth = source or "", truth_of(cell)
        counts.rows[source] += 1
        counts.without_truth[source] += is_blank(truth)
        key = hash((source, repr(truth)))
        if checks_truth is None or key in seen:
            continue
        try:
            checks_truth(source, truth)
        except DataError as error:
            wrong.setdefault((source, str(error).rstrip(".")), []).append(row)
        else:
            seen.add(key)
    for (source, why), rows in wrong.items():
        yield DataError(
            f"{file}, row {rows[0]}, of data source {source!r}: {why}{_and_others(len(rows))}. Mend or "
            "remove such rows, or name the column of the right answer by data.columns.ground_truth."
        )


def _and_others(count: int) -> str:
    return f" (as in {count - 1} other rows)" if count > 1 else ""


def _by_source(counts: Counter[str]) -> str:
    named = [f"{source or 'no source'} {count:,}" for source, count in counts.most_common() if count]
    more = [f"{len(named) - MOST_SOURCES} more"] if len(named) > MOST_SOURCES else []
    return f" ({', '.join([*named[:MOST_SOURCES], *more])})" if named else ""


def _numbers(mask: pa.ChunkedArray) -> np.ndarray:
    """The rows for which a mask holds."""
    return np.array(pc.indices_nonzero(mask).to_pylist(), dtype=np.int64)
