"""SGLang's scheduler, in its own process: it draws by seeds, and loads weights from buckets.

Token k of a response is drawn by number k of the stream of its seed, however it is batched, read in parts
or preempted, and its log-prob is given: at the temperature, before top-k and top-p.
Shapes: B rows, V vocabulary.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from siirl.engines.rollout.served.draws import draw
from siirl.engines.weights.shared_buffer import open_buffer

# SGLang 0.5.17 is made for transformers 5.12: later ones have some of the configurations that it registers.
AutoConfig.register = functools.partial(AutoConfig.register, exist_ok=True)

from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.layers.logprob_processor import LogprobResult  # noqa: E402
from sglang.srt.layers.sampler import Sampler, register_sampler_backend  # noqa: E402
from sglang.srt.managers.scheduler import run_scheduler_process  # noqa: E402
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo  # noqa: E402

SAMPLER = "pytorch"
"""Name under which SGLang finds SeedSampler; it takes no new one on a CPU."""
LOADER = f"{__name__}.load_bucket"
"""Name under which it finds load_bucket."""


class SeedSampler(Sampler):
    """Draws as described above."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
    ) -> Tensor:
        """See draw. positions: where the last token stands that each row has read; see NativeEngine.add."""
        logits_BV, top_k_B = logits_output.next_token_logits, sampling_info.top_ks
        token_B, log_prob_B = draw(
            logits_BV,
            sampling_info.temperatures[:, 0],
            sampling_info.sampling_seed,
            positions.to(torch.int64),
            top_k_B if sampling_info.need_top_k_sampling else None,
            sampling_info.top_ps if sampling_info.need_top_p_sampling else None,
        )
        if sampling_info.need_top_k_sampling:  # of equally likely ones the first; what is greedy has top-k 1
            token_B = torch.where(top_k_B == 1, logits_BV.argmax(-1), token_B)
        LogprobResult(token_logprobs=log_prob_B).write_output_to(logits_output)
        return token_B


def load_bucket(model: torch.nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load the tensors of a bucket, which a tensor of JSON describes (see NativeEngine.update)."""
    ((_, told),) = named_tensors
    bucket = json.loads(told.cpu().numpy().tobytes())
    device = next(model.parameters()).device
    buffer = open_buffer(bucket["place"], bucket["size"], device)
    model.load_weights(list(_cut(buffer, bucket)))
    if buffer.is_cuda:
        torch.cuda.synchronize()


def _cut(buffer: Tensor, bucket: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, dtype_name, shape, start in zip(
        bucket["names"], bucket["dtypes"], bucket["shapes"], bucket["starts"], strict=True
    ):
        dtype = getattr(torch, dtype_name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        yield name, buffer[start : start + size].view(dtype).view(shape)


def run_scheduler(*arguments: Any, **options: Any) -> None:
    """SGLang's run_scheduler_process, with what is ours in the place of its own."""
    register_sampler_backend(SAMPLER, SeedSampler)
    SamplingBatchInfo.adjusted_from_schedule_batch = _take_seeds
    ModelConfig._get_hf_eos_token_id = lambda self: None  # requests say what ends them
    run_scheduler_process(*arguments, **options)


def _take_seeds(info: Any, batch: Any, vocab_size: int) -> None:
    """Keep the seeds of a batch's requests, which SGLang does for its own deterministic sampling alone."""
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)
