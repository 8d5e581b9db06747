"""vLLM guesses tokens that followed the same ones earlier in a row: responses are those without guesses."""

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from test_rollout_engine_contract import build, response_log_probs, weights_of
from transformers import AutoModelForCausalLM

from siirl.engines.rollout.base import SamplingParams

pytest.importorskip("vllm")
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7, 9, 8], [11], [2, 3, 4, 5, 6, 7, 8]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model that says again what it has said: few tokens, large weights."""
    path = tmp_path_factory.mktemp("model")
    return make_tiny_model_dir(path, vocab=16, init_std=0.5, head_dim=32, max_positions=64, tokenizer=False)


def test_responses_are_those_of_the_hf_engine_and_many_guesses_are_right(model_dir):
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    keys = ("speculative_tokens=4", "disable_log_stats=false", "max_num_seqs=6")
    guessing = build("vllm", model_dir, *(f"actor_rollout_ref.rollout.{key}" for key in keys))
    plain = build("hf", model_dir)
    seeds = [1 << 63, 5, 77, 123456]
    try:
        for engine in (guessing, plain):
            engine.load_weights(weights_of(engine, reference), version=1)
        for temperature, top_k in ((1.0, -1), (0.7, 6), (0.0, -1)):
            params = SamplingParams(n=3, max_tokens=40, temperature=temperature, top_k=top_k, ignore_eos=True)
            found, wanted = (engine.generate(PROMPTS, params, seeds) for engine in (guessing, plain))
            for prompt, samples, expected in zip(PROMPTS, found, wanted, strict=True):
                for sample, other in zip(samples, expected, strict=True):
                    assert sample.token_ids == other.token_ids and len(sample.token_ids) == 40
                    exact = response_log_probs(reference, prompt, sample.token_ids, temperature or 1.0)
                    torch.testing.assert_close(torch.tensor(sample.log_probs), exact, atol=1e-4, rtol=0)
        counted = guessing.drain_metrics().values()
    finally:
        guessing.close()
        plain.close()
    guessed, right = (counted[f"rollout/vllm_guessed_{what}_total"] for what in ("tokens", "right"))
    assert guessed > right > 100, counted
