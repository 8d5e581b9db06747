"""The bound of log-probs of vLLM's float32 kernels on GPUs is far below what a wrong key would do."""

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from sampling_reference import possible_cuts, truncated
from tf32_noise import hidden_key, in_tf32, tf32_noise
from transformers import AutoModelForCausalLM


def test_tf32_has_ten_bits_of_a_fraction():
    exact = torch.randn(1000)
    rounded = in_tf32(exact)
    assert (rounded * 2.0**10 / 2.0 ** exact.abs().log2().floor() % 1 == 0).all()
    assert ((rounded - exact).abs() <= 2.0**-11 * 2.0 ** exact.abs().log2().floor()).all()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_key_that_is_not_seen_is_no_noise(family, tmp_path):
    shape = {"hidden": 128, "heads": 2, "kv_heads": 2, "head_dim": 64, "init_std": 0.1}
    path = make_tiny_model_dir(tmp_path / "model", family, vocab=24, tokenizer=False, **shape)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows = [[(7 * row + place) % 20 + 2 for place in range(17 + row % 5)] for row in range(24)]
    noise = tf32_noise(model, rows)
    assert 1e-3 < noise < 1.2e-2
    assert min(hidden_key(model, row) for row in rows[:4]) > 4 * noise


@pytest.mark.parametrize("top_k", [-1, 1, 3, 12, 30])
def test_the_likeliest_words_of_noisy_log_probs_are_one_of_the_cuts(top_k):
    draw = torch.Generator().manual_seed(5)
    several = 0
    for _ in range(50):
        exact = torch.randn(12, generator=draw, dtype=torch.float64).log_softmax(-1)
        assert list(possible_cuts(exact, top_k, 0.0)) == [pytest.approx(truncated(exact, top_k, 1.0))]
        cuts = list(possible_cuts(exact, top_k, 0.05))
        several += len(cuts) > 1
        for _ in range(20):
            noisy = exact + 0.1 * torch.rand(12, generator=draw, dtype=torch.float64) - 0.05
            kept = truncated(noisy, top_k, 1.0).keys()
            (probs,) = [cut for cut in cuts if cut.keys() == kept]
            assert sum(probs.values()) == pytest.approx(1)
    assert (several > 3) == (0 < top_k < 12)
