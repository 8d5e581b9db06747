"""Tokens that are kept until a response ends are vLLM's own, of requests that it takes off and back, too."""

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from later import needed
from test_rollout_engine_contract import BLOCK, build, response_log_probs, weights_of
from transformers import AutoModelForCausalLM

from siirl.data.completions import SamplingParams

needed("vllm")
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7, 9, 8], [11], [2, 3, 4, 5, 6, 7, 8]]
TIGHT = f"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size={BLOCK}"
BLOCKS = "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=8"
"""With it twelve rows start, one block each, and not all of them get the second that they need."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return make_tiny_model_dir(path, vocab=16, init_std=0.5, head_dim=32, max_positions=64, tokenizer=False)


SAMPLED = (
    {"stop_token_ids": (1,)},
    {"ignore_eos": True, "temperature": 0.7, "top_k": 6},
)


def test_responses_and_log_probs_are_those_of_the_hf_engine(model_dir):
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    counted = build("vllm", model_dir, TIGHT, BLOCKS, "actor_rollout_ref.rollout.disable_log_stats=false")
    kept, plain = build("vllm", model_dir, TIGHT, BLOCKS), build("hf", model_dir)
    try:
        for engine in {kept, counted, plain}:
            engine.load_weights(weights_of(engine, reference), version=1)
        for sampled in SAMPLED:
            params, seeds = SamplingParams(n=3, max_tokens=45, **sampled), [1 << 63, 5, 77, 123456]
            answers = {engine: engine.generate(PROMPTS, params, seeds) for engine in {kept, counted, plain}}
            engines = [answers[engine] for engine in (kept, counted, plain)]
            for prompt, *samples in zip(PROMPTS, *engines, strict=True):
                for mine, other, wanted in zip(*samples, strict=True):
                    assert mine.token_ids == other.token_ids == wanted.token_ids
                    assert mine.log_probs == other.log_probs
                    assert mine.finish_reason == other.finish_reason == wanted.finish_reason
                    exact = response_log_probs(reference, prompt, mine.token_ids, params.temperature or 1.0)
                    torch.testing.assert_close(torch.tensor(mine.log_probs), exact, atol=1e-4, rtol=0)
            lengths = {len(sample.token_ids) for prompt in engines[0] for sample in prompt}
            assert (lengths == {45}) == ("ignore_eos" in sampled)
        totals = counted.drain_metrics().values()
        assert totals["rollout/vllm_preemptions_total"] > 0
    finally:
        for engine in {kept, counted, plain}:
            engine.close()
