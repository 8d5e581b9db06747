"""Curriculum: training prompts in the order of their difficulty, which is a function of the epoch alone."""

from dataclasses import dataclass

import numpy as np

from siirl.config.data import DataConfig
from siirl.data.dataset import PromptDataset
from siirl.data.difficulties import difficulty_of


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


def make_curriculum(data: DataConfig, dataset: PromptDataset) -> Curriculum | None:
    """That of data.curriculum_key; None without one. DataError, with the row, for a missing number."""
    if data.curriculum_key is None:
        return None
    infos = enumerate(dataset.extra_infos())
    difficulty = [difficulty_of(data.curriculum_key, f"training prompt {n}", info) for n, info in infos]
    return Curriculum(np.array(difficulty), data.curriculum_steps)
