"""Seeds, uniform numbers and draws of the rollout engines."""

import numpy as np
import pytest
import torch

from siirl.data.completions import SamplingParams
from siirl.engines.rollout import sampling


def test_uniforms_are_uniform_and_independent_of_the_other_rows():
    table = sampling.uniforms([3, 4, (1 << 63) - 1], 20_000)
    assert table.shape == (20_000, 3)
    np.testing.assert_array_equal(sampling.uniforms([4], 5)[:, 0], table[:5, 1])
    counts = np.stack([np.histogram(column, 50, (0, 1))[0] for column in table.T])
    chi_square = ((counts - 400) ** 2 / 400).sum(1)
    assert (chi_square < 49 + 4.5 * np.sqrt(98)).all()
    assert np.abs(np.corrcoef(table.T) - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(table[:-1, 0], table[1:, 0])[0, 1]) < 0.03
    assert table.min() > 0 and table.max() < 1


def test_seeds_of_samples_of_neighbouring_prompts_do_not_collide():
    seeds = {sampling.derive_seed(prompt, sample) for prompt in range(200) for sample in range(50)}
    assert len(seeds) == 10_000


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((4, 6), -torch.inf)
    logits[:, 2] = 0.0
    uniform = torch.tensor([2.0**-33, 0.3, 0.9, 1 - 2.0**-33], dtype=torch.float64)
    token, log_prob = sampling.sample_tokens(logits, uniform, SamplingParams(max_tokens=1))
    assert token.tolist() == [2] * 4 and log_prob.tolist() == [0.0] * 4


def test_top_p_keeps_at_least_the_likeliest_token():
    logits = torch.tensor([[0.0, 3.0, 1.0]]).repeat(50, 1)
    uniform = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    token, _ = sampling.sample_tokens(logits, uniform, SamplingParams(max_tokens=1, top_p=1e-6))
    assert set(token.tolist()) == {1}


@pytest.mark.parametrize("vocab", [7, 9000, 9216])  # 9,216: whole blocks
def test_a_draw_is_where_the_cumulative_distribution_passes_the_number(vocab):
    torch.manual_seed(0)
    weight_BV = (torch.randn(300, vocab) * 3).softmax(-1)
    uniform_B = torch.rand(300, dtype=torch.float64)
    cumulative_BV = np.cumsum(weight_BV.double().numpy(), axis=1)
    target_B = uniform_B.numpy() * cumulative_BV[:, -1]
    rows = zip(cumulative_BV, target_B, strict=True)
    expected = [int(np.searchsorted(cumulative, target, side="right")) for cumulative, target in rows]
    assert sampling.invert(weight_BV, uniform_B).tolist() == expected


@pytest.mark.parametrize("uniform", [2.0**-33, 0.5, 1 - 2.0**-33, 1.0])  # 1.0: where rounding could lead
@pytest.mark.parametrize("kept", [[1023, 1024, 9000], [5, 8999], [9215]])
def test_a_draw_from_blocks_is_never_of_weight_zero(uniform, kept):
    weight_BV = torch.zeros(3, 9216)
    weight_BV[:, kept] = torch.tensor([[0.1], [1e-30], [7.0]])
    token_B = sampling.invert(weight_BV, torch.full((3,), uniform, dtype=torch.float64))
    assert set(token_B.tolist()) <= set(kept)


@pytest.mark.parametrize("vocab", [7, 9000])
def test_weights_that_are_not_numbers_give_a_token_of_the_vocabulary(vocab):
    token_B = sampling.invert(torch.full((2, vocab), torch.nan), torch.full((2,), 0.5, dtype=torch.float64))
    assert all(0 <= token < vocab for token in token_B.tolist())
