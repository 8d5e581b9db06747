"""Draws of vLLM's samplers: the Triton kernels, interpreted, and the second model runner, on a GPU only."""

import inspect
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from siirl.engines.rollout.sampling import invert, uniforms
from siirl.engines.rollout.served import draws

VOCAB = 30
SUPPORT = Path(__file__).resolve().parents[2] / "support"


def test_draws_in_one_pass_are_those_of_float64():
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "one_pass_draws.py")], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


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
    rejection = pytest.importorskip("vllm.v1.sample.rejection_sampler")
    wanted = {"logits", "expanded_idx_mapping", "idx_mapping_np", "pos"}
    assert wanted <= set(inspect.signature(sampler.Sampler.sample).parameters)
    assert hasattr(sampler, "compute_topk_logprobs") != hasattr(sampler, "compute_topk_scores")
    assert {"logits", "sampling_metadata"} <= set(inspect.signature(first.Sampler.forward).parameters)
    guessed = ["self", "metadata", "draft_probs", "logits", "sampling_metadata"]
    assert list(inspect.signature(rejection.RejectionSampler.forward).parameters) == guessed


class FirstRunner(SimpleNamespace):
    """What of vLLM's first model runner is used where tokens are guessed."""

    def __init__(self, prompt_lens, written):
        never = SimpleNamespace(forward=None, topk_topp_sampler=None)
        batch = SimpleNamespace(
            num_prompt_tokens=np.array(prompt_lens), num_tokens_no_spec=np.array(prompt_lens) + written
        )
        super().__init__(
            sampler=never, rejection_sampler=SimpleNamespace(), speculative_config="ngram", input_batch=batch
        )


def random_guesses(rng, tokens):
    """Some of the first of these tokens, the last one wrong now and then."""
    guesses = tokens[: rng.randrange(len(tokens) + 1)]
    if guesses and rng.random() < 0.5:
        at = rng.randrange(len(guesses))
        guesses[at] = (guesses[at] + 1) % VOCAB
    return guesses


@pytest.mark.parametrize("seed", range(30))
def test_guesses_change_nothing_but_how_many_tokens_come_at_once(seed):
    """Of each request come the tokens that are drawn without drafts, up to the first wrong guess."""
    native_draws = pytest.importorskip("siirl.engines.rollout.vllm.native_draws")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count = rng.randrange(1, 6)
    seeds = [rng.getrandbits(64) for _ in range(count)]
    written = [rng.randrange(40) for _ in range(count)]
    runner = FirstRunner([rng.randrange(1, 9) for _ in range(count)], written)
    native_draws.draw_by_seeds(runner)
    temperature = torch.tensor([rng.choice([0.0, 0.6, 1.0]) for _ in range(count)])
    limits = torch.tensor([rng.choice([3, VOCAB]) for _ in range(count)]) if rng.random() < 0.5 else None
    logits = torch.randn(count, 5, VOCAB) * 3
    drawn, log_probs = [], []
    for row in range(count):
        of_row = [torch.tensor([value] * 5) for value in (temperature[row].item(), draws.signed(seeds[row]))]
        number, top_k = written[row] + torch.arange(5), None if limits is None else limits[row].repeat(5)
        token_5, log_prob_5 = draws.draw(logits[row], *of_row, number, top_k)
        drawn.append(token_5.tolist())
        log_probs.append(log_prob_5)
    guesses = [random_guesses(rng, tokens[:4]) for tokens in drawn]
    rows = [(row, ahead) for row in range(count) for ahead in range(len(guesses[row]) + 1)]
    guessed = [at for at, (row, ahead) in enumerate(rows) if ahead < len(guesses[row])]
    metadata = SimpleNamespace(
        num_draft_tokens=[len(tokens) for tokens in guesses],
        draft_token_ids=torch.tensor([token for tokens in guesses for token in tokens], dtype=torch.int32),
        target_logits_indices=torch.tensor(guessed, dtype=torch.int32),
        bonus_logits_indices=torch.tensor([len(tokens) + 1 for tokens in guesses]).cumsum(0) - 1,
    )
    settings = SimpleNamespace(
        generators={row: torch.Generator().manual_seed(seeds[row]) for row in range(count)},
        temperature=temperature,
        top_k=limits,
        top_p=None,
        max_num_logprobs=0,
    )
    flat = torch.stack([logits[row, ahead] for row, ahead in rows])
    given = runner.rejection_sampler.forward(metadata, None, flat, settings)
    width = max(map(len, guesses)) + 1
    assert given.sampled_token_ids.shape == (count, width)
    of_places = given.logprobs_tensors.logprobs.view(count, width)
    for row, tokens in enumerate(given.sampled_token_ids.tolist()):
        right = [guess == token for guess, token in zip(guesses[row], drawn[row], strict=False)]
        kept = (right.index(False) if False in right else len(right)) + 1
        assert tokens == drawn[row][:kept] + [-1] * (width - kept)
        assert torch.equal(of_places[row, :kept], log_probs[row][:kept])


def test_where_nobody_guesses_a_step_draws_by_the_tokens_that_are_there():
    native_draws = pytest.importorskip("siirl.engines.rollout.vllm.native_draws")
    runner, seeds = FirstRunner([4, 9], [7, 0]), [5, 1 << 63]
    native_draws.draw_by_seeds(runner)
    logits = torch.randn(2, VOCAB)
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}
    settings = SimpleNamespace(
        generators=generators, temperature=torch.ones(2), top_k=None, top_p=None, max_num_logprobs=None
    )
    given = runner.sampler.forward(logits, settings)
    uniform = torch.from_numpy(uniforms(seeds, 1, [7, 0])[0])
    assert given.sampled_token_ids[:, 0].tolist() == invert(logits.softmax(-1), uniform).tolist()
