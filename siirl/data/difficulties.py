"""How hard training prompts are, as their rows say it. No torch: it is checked before any worker starts."""

import math
from typing import Any

from siirl.config import Config
from siirl.data.check_files import EXTRA_KEY, UNREADABLE, list_files, open_rows
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
        rows = open_rows(file, cfg.data.prompt_key, cfg.data.reward_fn_key)
        infos: list[Any] = [None]
        if EXTRA_KEY in rows.schema.names:
            try:
                infos = rows.read([EXTRA_KEY])[EXTRA_KEY].to_pylist()
            except UNREADABLE as error:
                raise DataError(f"{file} is corrupt: {error}. Write the file again.") from error
        for row, info in enumerate(infos):
            difficulty_of(key, f"{file}, row {row}", info)
