"""How hard training prompts are, as their rows say it. No torch: it is checked before any worker starts."""

import math
from typing import Any

from siirl.config import Config
from siirl.data.data_files import list_files, read_columns
from siirl.data.dataset_columns import EXTRA_KEY, Columns
from siirl.data.row_values import values_of
from siirl.errors import DataError


def difficulty_of(key: str, who: str, info: Any) -> float:
    """The number of data.curriculum_key in the extra_info of a prompt; DataError without one, naming it."""
    value = info.get(key) if isinstance(info, dict) else None
    if not isinstance(value, int | float) or math.isnan(value):
        raise DataError(
            f"data.curriculum_key={key}: extra_info of {who} has {value!r} under this name. Give every "
            "prompt a number there."
        )
    return float(value)


def check_difficulties(cfg: Config) -> None:
    """DataError unless each row of the training files has a number; rows that may be dropped are left out."""
    key = cfg.data.curriculum_key
    if key is None or cfg.trainer.val_only or cfg.data.filter_overlong_prompts:
        return
    for file in list_files(cfg.data.train_files):
        rows = Columns.of(cfg.data).open(file)
        infos: list[Any] = [None]
        if EXTRA_KEY in rows.schema.names:
            infos = values_of(read_columns(file, rows, [EXTRA_KEY]), EXTRA_KEY, str(file))
        for row, info in enumerate(infos):
            difficulty_of(key, f"{file}, row {row}", info)
