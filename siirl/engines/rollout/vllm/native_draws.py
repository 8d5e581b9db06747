"""How vLLM draws tokens here: by the seeds of the requests, as the HF engine does, and gives their log-probs.

vLLM has two model runners with a sampler each. Both are made to draw token k of a response by number k of the
stream of its seed, however it is batched, read in parts or preempted, and to give the log-prob of that token
alone: at the temperature, before top-k and top-p. Shapes: B requests, V vocabulary.
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

from siirl.engines.rollout.served import draws
from siirl.engines.rollout.served.draws import signed

draw = functools.partial(draws.draw, keep=apply_top_k_top_p)


def draw_by_seeds(runner: Any) -> None:
    """Have the sampler of a model runner of vLLM draw as described above. Once for each runner."""
    sampler = runner.sampler
    if hasattr(sampler, "topk_topp_sampler"):
        sampler.forward = _FirstRunner(sampler).forward
    else:
        sampler.sample = _second_runner(sampler)
        _give_what_is_there(sys.modules[type(sampler).__module__])


class _FirstRunner:
    """The sampler of vLLM's first model runner, which keeps a generator for each request that has a seed.

    Its number of draws is counted there: vLLM takes one back where it throws a draw away.
    """

    def __init__(self, sampler: Any) -> None:
        self._inner = sampler.forward
        self._num_draws: WeakKeyDictionary[torch.Generator, int] = WeakKeyDictionary()

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *others: Any, **options: Any
    ) -> SamplerOutput:
        """See draw. What else is asked of it is vLLM's."""
        if others or options:
            return self._inner(logits, sampling_metadata, *others, **options)
        token_B, log_prob_B = self._draw(logits, sampling_metadata)
        wanted = sampling_metadata.max_num_logprobs is not None
        return SamplerOutput(
            sampled_token_ids=token_B.to(torch.int32)[:, None],
            logprobs_tensors=_log_probs(token_B, log_prob_B) if wanted else None,
        )

    def _draw(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> tuple[Tensor, Tensor]:
        """See draw; one row of logits for each request."""
        seeds, numbers = [0] * len(logits), [0] * len(logits)
        for place, generator in sampling_metadata.generators.items():
            seeds[place], numbers[place] = signed(generator.initial_seed()), self._number(generator)
        # A copy that waits would hold the host here until the forward pass is done.
        seed_B, number_B = torch.tensor([seeds, numbers]).to(logits.device, non_blocking=True)
        temperature_B = sampling_metadata.temperature
        if temperature_B is None:
            temperature_B = torch.zeros(len(logits), device=logits.device)
        return draw(logits, temperature_B, seed_B, number_B, sampling_metadata.top_k, sampling_metadata.top_p)

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
