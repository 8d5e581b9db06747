"""Draws of vLLM's samplers: the Triton kernels, interpreted, and the second model runner, on a GPU only."""

import inspect
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dist_harness import run_interpreted

from siirl.engines.rollout.sampling import invert, uniforms

VOCAB = 30


def test_draws_in_one_pass_are_those_of_float64():
    pytest.importorskip("triton")
    run_interpreted("one_pass_draws")


class Table(SimpleNamespace):
    """A value of each request that runs, as vLLM keeps it: on the host, and on the device."""

    def __init__(self, *values, dtype):
        tensor = torch.tensor(values, dtype=dtype)
        super().__init__(gpu=tensor, np=tensor.numpy())


class SecondSampler:
    """What of the sampler of vLLM's second model runner is used; five requests have a place in its tables."""

    def __init__(self, seeds, temperatures, prompt_lens, top_k=None):
        self.sampling_states = SimpleNamespace(
            temperature=Table(*temperatures, dtype=torch.float32),
            seeds=Table(*seeds, dtype=torch.int64),
            get_top_k_top_p=lambda request_B, rows: (top_k, None),
        )
        self.req_states = SimpleNamespace(prompt_len=Table(*prompt_lens, dtype=torch.int32))

    def sample(self, logits, expanded_idx_mapping, idx_mapping_np, pos, input_ids):
        raise AssertionError("replaced")


@pytest.mark.parametrize("top_k", [None, 3])
def test_the_second_runner_draws_by_the_number_of_the_token_in_its_response(top_k):
    native_draws = pytest.importorskip("siirl.engines.rollout.vllm.native_draws")
    seeds, prompt_lens = [5, -7, 1 << 40, 11, 12], [4, 9, 2, 3, 3]
    limits = None if top_k is None else torch.tensor([top_k] * 3)
    sampler = SecondSampler(seeds, [1.0, 0.5, 1.0, 0.0, 1.0], prompt_lens, limits)
    module = sys.modules[__name__]
    module.compute_topk_logprobs = compute = lambda *args, **options: "all of them"
    native_draws.draw_by_seeds(SimpleNamespace(sampler=sampler))
    logits, request = torch.randn(3, 40), torch.tensor([3, 1, 2])
    numbers = [2, 0, 17]
    pos = torch.tensor([prompt_lens[r] + n - 1 for r, n in zip(request.tolist(), numbers, strict=True)])
    token, column = sampler.sample(
        logits, request, idx_mapping_np=np.array([3, 1, 2]), pos=pos, input_ids=None
    )
    scaled = logits / torch.tensor([1.0, 0.5, 1.0])[:, None]
    probs = scaled.softmax(-1)
    if top_k is not None:
        probs = probs.masked_fill(probs < probs.topk(top_k).values[:, -1:], 0.0)
    uniform = torch.from_numpy(uniforms([11, (1 << 64) - 7, 1 << 40], 1, numbers)[0])
    expected = invert(probs, uniform)
    expected[0] = logits[0].argmax()
    assert token.tolist() == expected.tolist()
    exact = scaled.log_softmax(-1).gather(1, token[:, None])
    assert torch.allclose(column, exact, atol=1e-6)
    given = module.compute_topk_logprobs(column, 0, token, None)
    assert (
        given.logprobs.tolist() == column.tolist()
        and given.logprob_token_ids.tolist() == token[:, None].tolist()
    )
    assert module.compute_topk_logprobs(logits, 0, token) == compute()


def test_each_version_of_vllm_has_what_is_replaced():
    sampler = pytest.importorskip("vllm.v1.worker.gpu.sample.sampler")
    first = pytest.importorskip("vllm.v1.sample.sampler")
    wanted = {"logits", "expanded_idx_mapping", "idx_mapping_np", "pos"}
    assert wanted <= set(inspect.signature(sampler.Sampler.sample).parameters)
    assert hasattr(sampler, "compute_topk_logprobs") != hasattr(sampler, "compute_topk_scores")
    assert {"logits", "sampling_metadata"} <= set(inspect.signature(first.Sampler.forward).parameters)


def test_weights_reach_the_loader_of_a_version_whose_transfer_knows_no_model():
    transfer = pytest.importorskip("siirl.engines.rollout.vllm.native_transfer")
    of_024 = object.__new__(transfer.BucketTransfer)  # has no model_config
    weights = [
        ("model.layers.0.mlp.experts.gate_up_proj", torch.ones(2, 1)),
        ("lm_head.weight", torch.ones(1)),
    ]
    assert list(of_024._for_loaders(weights)) == weights


def test_the_first_runner_draws_by_how_often_it_drew_for_a_request():
    native_draws = pytest.importorskip("siirl.engines.rollout.vllm.native_draws")
    seeds = [5, 1 << 63]
    runner = SimpleNamespace(sampler=SimpleNamespace(forward=None, topk_topp_sampler=None))
    native_draws.draw_by_seeds(runner)
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}
    for step in range(3):
        logits = torch.randn(2, VOCAB)
        settings = SimpleNamespace(
            generators=generators, temperature=torch.ones(2), top_k=None, top_p=None, max_num_logprobs=None
        )
        given = runner.sampler.forward(logits, settings)
        uniform = torch.from_numpy(uniforms(seeds, 1, [step, step])[0])
        assert given.sampled_token_ids[:, 0].tolist() == invert(logits.softmax(-1), uniform).tolist()
