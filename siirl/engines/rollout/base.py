"""What every rollout engine offers. Token ids in, token ids out: no tokenizer is involved.

An engine belongs to one data-parallel shard of its node; methods are local to the shard's ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from siirl.errors import ConfigError
from siirl.observe.metrics import Metrics


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. temperature 0 (or do_sample False upstream) is greedy; top_k -1 and top_p 1.0 are off.

    stop_token_ids end a response and stay in it. max_tokens counts response tokens. ignore_eos: never stop
    early. ConfigError for values that cannot be sampled with.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value}: must be {bound}"
            for name, value, bound, holds in (
                ("max_tokens", self.max_tokens, "at least 1", self.max_tokens >= 1),
                ("n", self.n, "at least 1", self.n >= 1),
                (
                    "temperature",
                    self.temperature,
                    "0 (greedy) or above",
                    0 <= self.temperature < float("inf"),
                ),
                ("top_k", self.top_k, "at least 1, or -1 for no limit", self.top_k >= -1),
                ("top_p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1),
            )
            if not holds
        ]
        if wrong:
            raise ConfigError(f"sampling parameters out of range: {'; '.join(wrong)}.")


@dataclass(frozen=True)
class Completion:
    """One sampled response.

    log_probs: of each sampled token, in nats, under the distribution at the sampling temperature, before
    top-k/top-p (what the trainer computes at that temperature; for greedy decoding: at temperature 1).
    finish_reason: "stop" (a stop token was sampled) or "length".
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    weight_version: int


class RolloutEngine(ABC):
    """One sampler of one policy.

    Build: `Engine(plan: ModelPlan, cfg: Config, groups: ProcessGroups, device)`.
    """

    name: str
    weight_version: int  # version that its weights came from; -1 before the first sync

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """n completions of each prompt, in order. seeds: one 64-bit int per prompt.

        The result for a prompt depends on (weights, prompt, params, its seed) alone: not on the other
        prompts of the call nor their order, up to float rounding. Zero prompts give an empty list.
        """

    @abstractmethod
    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (full shape, dtype) of every tensor it needs, under HF names; tied tensors once."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, cast to the engine's dtypes; `weight_version` becomes `version`.

        WeightSyncError if a tensor is unknown, missing, repeated or of another shape: the engine then has
        no usable weights (weight_version -1, `generate` raises) until a load succeeds. A tied tensor may
        arrive under any of its names.
        """

    def sleep(self) -> None:
        """Give back device memory between rollouts (weights and KV cache). Nothing to do by default.

        An engine whose weights are gone afterwards sets weight_version to -1, so that the next sync sends
        them again.
        """
        return None

    def wake(self) -> None:
        """Be ready to generate or to take weights again."""
        return None

    def drain_metrics(self) -> Metrics:
        """What the engine counted since the last call; nothing by default."""
        return Metrics()

    def close(self) -> None:
        """Release everything; the engine is not used afterwards."""
        return None
