"""Curriculum: training prompts in the order of their difficulty, which is a function of the epoch alone. No
torch: rows are checked before any worker starts."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from siirl.config import Config
from siirl.config.data import DataConfig
from siirl.data.data_files import list_files, read_columns
from siirl.data.dataset_columns import EXTRA_KEY, Columns
from siirl.data.row_values import values_of
from siirl.errors import DataError


@dataclass(frozen=True)
class Curriculum:
    """An order of prompts that become harder.

    Whoever resumes in the middle of an epoch gets the same order again, since nothing is remembered.
    """

    difficulty: np.ndarray
    """Of each prompt [N]."""
    num_batches: int = 0
    """Over which prompts become harder; 0: an epoch."""

    def order(self, seed: int, epoch: int, batch_size: int) -> np.ndarray:
        """The prompts of an epoch, each once.

        While the curriculum lasts, the k-th of its K batches is drawn from the easiest N (k + 1) / K prompts
        that are left; what is not drawn by its end, and every later epoch, is shuffled. With num_batches = 0
        prompts are sorted outright, equal ones shuffled.
        """
        generator = np.random.default_rng([seed, epoch])
        shuffled = generator.permutation(len(self.difficulty))
        if not self.num_batches:
            return shuffled[np.argsort(self.difficulty[shuffled], kind="stable")]
        batches_before = epoch * (len(self.difficulty) // batch_size)
        left = shuffled[np.argsort(self.difficulty[shuffled], kind="stable")]
        drawn = []
        for batch in range(batches_before, self.num_batches):
            if len(left) < batch_size:
                break
            easy = max(batch_size, len(self.difficulty) * (batch + 1) // self.num_batches)
            chosen = generator.permutation(min(easy, len(left)))[:batch_size]
            drawn.append(left[chosen])
            left = np.delete(left, chosen)
        return np.concatenate([*drawn, generator.permutation(left)])


def make_curriculum(data: DataConfig, extra_infos: Callable[[], Iterable[Any]]) -> Curriculum | None:
    """That of data.curriculum_key, by the extra_info of all prompts; None without one.

    DataError, with the row, for a missing number.
    """
    if data.curriculum_key is None:
        return None
    infos = enumerate(extra_infos())
    difficulty = [difficulty_of(data.curriculum_key, f"training prompt {n}", info) for n, info in infos]
    return Curriculum(np.array(difficulty), data.curriculum_steps)


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
