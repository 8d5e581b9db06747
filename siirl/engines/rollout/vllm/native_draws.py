"""How vLLM draws tokens here: by the seeds of the requests, as the HF engine does, and gives their log-probs.

vLLM has two model runners with a sampler each. Both are made to draw token k of a response by number k of the
stream of its seed, however it is batched, read in parts or preempted, and to give the log-prob of that token
alone: at the temperature, before top-k and top-p. So tokens that are guessed ahead cost no exactness: each is
held against the very token that is drawn in its place. Shapes: B requests, R rows of logits, V vocabulary.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from siirl.engines.rollout.served import draws
from siirl.engines.rollout.served.draws import signed

draw = functools.partial(draws.draw, keep=apply_top_k_top_p)
NONE = PLACEHOLDER_TOKEN_ID
"""In the place of a token that is not there."""


def draw_by_seeds(runner: Any) -> None:
    """Have the sampler of a model runner of vLLM draw as described above. Once for each runner."""
    sampler = runner.sampler
    if hasattr(sampler, "topk_topp_sampler"):
        first = _FirstRunner(runner)
        sampler.forward = first.forward
        if first.guesses:
            runner.rejection_sampler.forward = first.check_guesses
    else:
        sampler.sample = _second_runner(sampler)
        _give_what_is_there(sys.modules[type(sampler).__module__])


class _FirstRunner:
    """The samplers of vLLM's first model runner, which keeps a generator for each request that has a seed.

    Its number of draws is counted there: vLLM takes one back where it throws a draw away. Where tokens are
    guessed, vLLM keeps count of those that stay, as each step ends before the next one begins.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self._inner = runner, runner.sampler.forward
        self.guesses = runner.speculative_config is not None
        self._num_draws: WeakKeyDictionary[torch.Generator, int] = WeakKeyDictionary()

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *others: Any, **options: Any
    ) -> SamplerOutput:
        """See draw. What else is asked of it is vLLM's."""
        if others or options:
            return self._inner(logits, sampling_metadata, *others, **options)
        token_B, log_prob_B = self._draw(logits, sampling_metadata, [1] * len(logits))
        wanted = sampling_metadata.max_num_logprobs is not None
        return SamplerOutput(
            sampled_token_ids=token_B.to(torch.int32)[:, None],
            logprobs_tensors=_log_probs(token_B, log_prob_B) if wanted else None,
        )

    def check_guesses(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Of each request the drawn tokens up to the first that was not guessed; the places after it are -1.

        logits: for each request a row in the place of each guess, and one after them.
        """
        num_guessed = metadata.num_draft_tokens
        token_R, log_prob_R = self._draw(logits, sampling_metadata, [count + 1 for count in num_guessed])
        guess_R = torch.full_like(token_R, NONE)
        guess_R[metadata.target_logits_indices.to(torch.int64)] = metadata.draft_token_ids.to(torch.int64)
        width = max(num_guessed) + 1
        last_B1 = metadata.bonus_logits_indices.to(torch.int64)[:, None]
        first_B1 = torch.cat([last_B1.new_zeros(1, 1), last_B1[:-1] + 1])
        row_BW = first_B1 + torch.arange(width, device=logits.device)
        inside_BW, row_BW = row_BW <= last_B1, row_BW.minimum(last_B1)
        missed_BW = (token_R != guess_R)[row_BW].cumsum(1)  # a row after the guesses misses
        missed_BW = torch.cat([torch.zeros_like(missed_BW[:, :1]), missed_BW[:, :-1]], 1)
        token_BW = torch.where(inside_BW & (missed_BW == 0), token_R[row_BW], NONE)
        wanted = sampling_metadata.max_num_logprobs is not None
        return SamplerOutput(
            sampled_token_ids=token_BW.to(torch.int32),
            logprobs_tensors=_log_probs(token_BW.flatten(), log_prob_R[row_BW].flatten()) if wanted else None,
        )

    def _draw(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, counts: list[int]
    ) -> tuple[Tensor, Tensor]:
        """See draw. counts: of each request its rows, which are of consecutive tokens of its response."""
        seeds, numbers = [0] * len(counts), [0] * len(counts)
        for place, generator in sampling_metadata.generators.items():
            seeds[place] = signed(generator.initial_seed())
            numbers[place] = self._num_written(place) if self.guesses else self._number(generator)
        rows = [(place, ahead) for place, count in enumerate(counts) for ahead in range(count)]
        table = [
            [seeds[place] for place, _ in rows],
            [numbers[place] + ahead for place, ahead in rows],
            [place for place, _ in rows],
        ]
        # A copy that waits would hold the host here until the forward pass is done.
        seed_R, number_R, place_R = torch.tensor(table).to(logits.device, non_blocking=True)
        temperature_B = sampling_metadata.temperature
        if temperature_B is None:
            temperature_B = torch.zeros(len(counts), device=logits.device)
        settings = (temperature_B, sampling_metadata.top_k, sampling_metadata.top_p)
        if len(rows) > len(counts):
            settings = tuple(None if value_B is None else value_B[place_R] for value_B in settings)
        temperature_R, top_k_R, top_p_R = settings
        return draw(logits, temperature_R, seed_R, number_R, top_k_R, top_p_R)

    def _num_written(self, place: int) -> int:
        """How many tokens a response has."""
        batch = self._runner.input_batch
        return int(batch.num_tokens_no_spec[place]) - int(batch.num_prompt_tokens[place])

    def _number(self, generator: torch.Generator) -> int:
        """How many draws a generator has counted; counts one more. Of a GPU's its offset counts, by 4."""
        if generator.device.type == "cuda":
            offset = generator.get_offset()
            generator.set_offset(offset + 4)
            return offset // 4
        count = self._num_draws.get(generator, 0)
        self._num_draws[generator] = count + 1
        return count


def _second_runner(sampler: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """`sample` of vLLM's second model runner, which keeps what is asked of requests in tables on the device.

    Its second result takes the place of the logits of which log-probs are then computed, see below.
    """
    signature = inspect.signature(sampler.sample)

    def sample(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        given = signature.bind(*args, **options).arguments
        request_B, states = given["expanded_idx_mapping"], sampler.sampling_states
        # The position is that of the last token that was read, in prompt and response.
        number_B = given["pos"].to(torch.int64) + 1 - sampler.req_states.prompt_len.gpu[request_B]
        temperature_B, seed_B = states.temperature.gpu[request_B], states.seeds.gpu[request_B]
        limits = states.get_top_k_top_p(request_B, given["idx_mapping_np"])
        token_B, log_prob_B = draw(given["logits"], temperature_B, seed_B, number_B, *limits)
        return token_B, log_prob_B[:, None]

    return sample


def _give_what_is_there(module: Any) -> None:
    """Have the second runner take the log-probs that came with the draw: they have one column."""
    names = [name for name in ("compute_topk_logprobs", "compute_topk_scores") if hasattr(module, name)]
    (name,) = names
    compute = getattr(module, name)

    @functools.wraps(compute)
    def taken(logits: Tensor, num_logprobs: int, sampled: Tensor, *others: Any, **options: Any) -> Any:
        if logits.shape[1] == 1:
            return _log_probs(sampled, logits[:, 0])
        return compute(logits, num_logprobs, sampled, *others, **options)

    setattr(module, name, taken)


def _log_probs(token_B: Tensor, log_prob_B: Tensor) -> LogprobsTensors:
    """As vLLM carries them; the ranks of tokens, which nobody reads here, are 0."""
    return LogprobsTensors(token_B.to(torch.int32)[:, None], log_prob_B[:, None], torch.zeros_like(token_B))
