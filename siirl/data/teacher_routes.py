"""Which teachers take which rows of a dataset. No torch: the launcher checks it before any worker starts."""

from collections.abc import Collection

from siirl.config import Config
from siirl.data.data_files import list_files, read_columns
from siirl.data.dataset_columns import Columns
from siirl.data.row_values import value_at, values_of
from siirl.errors import DataError


def check_routes(cfg: Config, by: str, takes: Collection[str], who: str) -> None:
    """DataError, with the row, unless the training files have a teacher for each row.

    by: data_source, or extra_info.NAME; takes: the values that teachers take; who: who learns.
    """
    field, _, path = by.partition(".")
    column = cfg.data.reward_fn_key if field == "data_source" else field
    for file in list_files(cfg.data.train_files):
        rows = Columns.of(cfg.data).open(file)
        if column not in rows.schema.names:
            raise DataError(
                f"{file} has no column {column!r}, by which {who} has teachers (teacher.by={by}): it has "
                f"{', '.join(rows.schema.names)}. Set teacher.by, or leave out teacher.takes."
            )
        values = values_of(read_columns(file, rows, [column]), column, str(file))
        for row, value in enumerate(values):
            if str(value_at(value, path)) not in takes:
                raise DataError(
                    f"{file}: row {row} has {by}={value_at(value, path)!r}: no teacher of {who} takes it, "
                    f"they take {', '.join(sorted(takes))}. Name it in teacher.takes of one, or let one take "
                    "all rows (no teacher.takes)."
                )
