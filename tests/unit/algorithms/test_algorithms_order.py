"""Which rows are trained on: the weights of PF-PPO, the order of a curriculum."""

import numpy as np
import pytest
import torch

from siirl.algorithms.groups import resampling_weights
from siirl.config import load_config
from siirl.data.curriculum import Curriculum, make_curriculum
from siirl.errors import ConfigError


def test_weights_of_the_draw_follow_the_method():
    score = torch.tensor([0.0, 1.0, -2.0, 1.0])
    cases = {
        ("pow", 2.0): [0, 1, 4, 1],
        ("pow", 1.0): [0, 1, 2, 1],
        ("max_min", 2.0): [0, 1, 1, 1],
        ("max_random", 2.0): [0.1, 0.4, 0.1, 0.4],
    }
    for (method, power), want in cases.items():
        got = resampling_weights(score, reweight_method=method, weight_pow=power)
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-7, rtol=1e-7)
        assert (got > 0).all()
    assert resampling_weights(torch.zeros(3)).unique().numel() == 1
    assert resampling_weights(torch.zeros(0), reweight_method="max_min").shape == (0,)
    with pytest.raises(ConfigError, match="known are pow, max_min, max_random"):
        resampling_weights(score, reweight_method="max")


def test_a_sorted_epoch_has_every_prompt_once_the_easiest_first():
    difficulty = np.array([3.0, 1.0, 2.0, 1.0, 5.0] * 8)
    order = Curriculum(difficulty).order(1, 0, 4)
    assert sorted(order) == list(range(40))
    assert (np.diff(difficulty[order]) >= 0).all()
    assert not np.array_equal(order, Curriculum(difficulty).order(1, 1, 4))
    assert np.array_equal(order, Curriculum(difficulty).order(1, 0, 4))


def test_batches_become_harder_until_the_curriculum_ends():
    difficulty = np.random.default_rng(0).permutation(400).astype(float)
    curriculum = Curriculum(difficulty, num_batches=150)
    epochs = [curriculum.order(1, epoch, 4) for epoch in range(3)]
    for order in epochs:
        assert sorted(order) == list(range(400))
    first = difficulty[epochs[0]].reshape(100, 4).mean(-1)
    assert first[0] <= 4 and first[:30].mean() < first[30:60].mean() < first[60:].mean()
    later = difficulty[epochs[2]].reshape(100, 4).mean(-1)
    assert abs(later[:50].mean() - later[50:].mean()) < 40


def test_a_curriculum_lasts_as_many_batches_as_its_key_says():
    infos = [{"level": float(level)} for level in range(40)]

    def order(*keys):
        data = load_config(["data.curriculum_key=level", *keys]).data
        return make_curriculum(data, lambda: infos).order(1, 0, 4).tolist()

    assert order() == list(range(40))
    batches = np.reshape(order("data.curriculum_steps=5"), (10, 4))
    for number, batch in enumerate(batches[:5]):
        assert batch.max() < 8 * (number + 1) + 4 * number, "the easiest that were left"
    assert batches[0].max() > 3, "drawn from a fifth"
    assert sorted(batches[5:].flat) != batches[5:].flatten().tolist(), "shuffled after it"
