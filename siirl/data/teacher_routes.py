"""Which teachers take which rows of a dataset. No torch: the launcher checks it before any worker starts."""

from collections.abc import Collection
from typing import Any

from siirl.config import Config
from siirl.data.check_files import UNREADABLE, list_files, open_rows
from siirl.errors import DataError


def value_of(value: Any, path: str) -> Any:
    """What stands in an object under a dotted name; the object itself for none, None where there is none."""
    for part in path.split(".") if path else ():
        value = value.get(part) if isinstance(value, dict) else None
    return value


def check_routes(cfg: Config, by: str, takes: Collection[str], who: str) -> None:
    """DataError, with the row, unless the training files have a teacher for each row.

    by: data_source, or extra_info.NAME; takes: the values that teachers take; who: who learns.
    """
    field, _, path = by.partition(".")
    column = cfg.data.reward_fn_key if field == "data_source" else field
    for file in list_files(cfg.data.train_files):
        rows = open_rows(file, cfg.data.prompt_key, cfg.data.reward_fn_key)
        if column not in rows.schema.names:
            raise DataError(
                f"{file} has no column {column!r}, by which {who} has teachers (teacher.by={by}): it has "
                f"{', '.join(rows.schema.names)}. Set teacher.by, or leave out teacher.takes."
            )
        try:
            values = rows.read([column])[column].to_pylist()
        except UNREADABLE as error:
            raise DataError(f"{file} is corrupt: {error}. Write the file again.") from error
        for row, value in enumerate(values):
            if str(value_of(value, path)) not in takes:
                raise DataError(
                    f"{file}: row {row} has {by}={value_of(value, path)!r}: no teacher of {who} takes it, "
                    f"they take {', '.join(sorted(takes))}. Name it in teacher.takes of one, or let one take "
                    "all rows (no teacher.takes)."
                )
