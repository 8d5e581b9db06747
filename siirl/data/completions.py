"""What is asked of an engine, and what it says: the records that a response is on its whole way to a row.

`Request` is what is wanted, `Completion` what an engine, a service or a script has sampled of it, and
`PartialCompletion` what there is of a response that goes on. Engines, agents and nodes hold these as they
are, and messages between processes carry them; no other record says what was sampled.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.data.rows import DTYPES
from siirl.data.seen import NO_IMAGES, Seen
from siirl.errors import ConfigError, RolloutError
from siirl.models.sizes import RouterChoices
from siirl.types import EXPERT_FIELDS

Text = TypeVar("Text", bytes, str)
"""Experts as bytes, or these in hex digits."""


def longer(known: Text | None, found: Text | None) -> Text | None:
    """Those of the first tokens of a row, and the ones that have come of all: what is known is kept."""
    return found if known is None or found is None else known + found[len(known) :]


def no_experts(rows: TensorDict, choices: RouterChoices) -> dict[str, Tensor]:
    """EXPERT_FIELDS of rows of which nothing is known."""
    shapes = (rows[name].shape for name in ("prompt_ids", "response_ids"))
    return {
        name: torch.full((*shape, choices.width), -1, dtype=DTYPES[choices.dtype])
        for name, shape in zip(EXPERT_FIELDS, shapes, strict=True)
    }


def expert_columns(
    rows: TensorDict, experts: Sequence[bytes | None], choices: RouterChoices
) -> dict[str, Tensor]:
    """EXPERT_FIELDS of rows, of what an engine has said of each: [B, P, W] and [B, T, W]."""
    columns = no_experts(rows, choices)
    prompt_BPW, response_BTW = columns.values()
    for row, (said, length) in enumerate(zip(experts, rows["prompt_length"].tolist(), strict=True)):
        if said is None:
            continue
        found_NW = torch.from_numpy(np.frombuffer(said, np.int16).reshape(-1, choices.width).copy())
        of_prompt_NW, of_response_NW = found_NW[:length], found_NW[length:]
        start = prompt_BPW.shape[1] - length
        prompt_BPW[row, start : start + len(of_prompt_NW)] = of_prompt_NW
        response_BTW[row, : len(of_response_NW)] = of_response_NW
    return columns


PAUSED = "paused"
"""finish_reason of a response that was interrupted: it may go on."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; ConfigError for values that cannot be sampled with."""

    max_tokens: int
    """Most tokens of a response."""
    n: int = 1
    """Responses of each prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """Most likely tokens that are drawn from; -1: all."""
    top_p: float = 1.0
    """Probability of the most likely tokens that are drawn from; 1.0: all."""
    stop_token_ids: tuple[int, ...] = ()
    """Each ends a response and stays in it."""
    ignore_eos: bool = False
    """Never stop early."""

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


Key = int | str


@dataclass(frozen=True)
class Request:
    """One response that is wanted of a stream, or the rest of one.

    Its completion is sample number `sample` of `generate([prompt], params, [seed])`; params.n is 1 (else
    RolloutError).
    """

    key: Key
    """The asker's name for it, unique among those unanswered."""
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    """Of the prompt: all its samples have the same."""
    sample: int = 0
    """Its number among the samples of the prompt."""
    start: int = 0
    """Tokens at the end of the prompt that were sampled for this response before it was paused. What follows
    draws the numbers that it would have drawn."""
    seen: Seen = NO_IMAGES
    """The images among its tokens."""

    def __post_init__(self) -> None:
        if self.params.n != 1:
            raise RolloutError(
                f"request {self.key!r} asks for n={self.params.n} responses: a request of a stream has one. "
                "Submit a request, with a seed of its own, for each."
            )


@dataclass(frozen=True)
class Completion:
    """One sampled response, a turn of an agent, or a part of either."""

    token_ids: list[int]
    log_probs: list[float]
    """Of each sampled token, in nats, under the distribution at the sampling temperature, before top-k/top-p
    (what the trainer computes at that temperature; for greedy decoding: at temperature 1)."""
    finish_reason: str
    """ "stop" (a stop token was sampled, which is the last token) or "length"; PAUSED for what was cut off.
    A policy of agents may have others."""
    weight_version: int
    """Of the weights that sampled it, the oldest if there were several."""

    versions: list[int] = field(default_factory=list)
    """Of the weights that sampled each token, where they were not the same for all."""
    experts: bytes | None = None
    """Of each token of prompt and response but the last, which nothing read: what it was computed by, layer
    by layer, int16. None where actor.router_replay does not ask for it."""

    @property
    def token_versions(self) -> list[int]:
        """Of the weights that sampled each token."""
        return self.versions or [self.weight_version] * len(self.token_ids)


@dataclass
class PartialCompletion:
    """A response so far: the parts that were sampled of it, maybe by several weights, one after the other."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of the weights that sampled each token."""
    steps: list[int] = field(default_factory=list)
    """The training step whose weights sampled each token, ascending, where whoever asks counts steps."""
    experts: bytes | None = None
    """See Completion; of each token what it was computed by when it was first read."""
    finish_reason: str | None = None
    """None: it goes on."""

    @property
    def first_step(self) -> int | None:
        """That of its first token; None without one."""
        return self.steps[0] if self.steps else None

    def extend(self, part: Completion, step_of: Callable[[int], int] | None = None) -> None:
        """Add what was sampled of it. step_of: version of weights -> the step that they are those of."""
        self.experts = longer(self.experts, part.experts)
        self.token_ids += part.token_ids
        self.log_probs += part.log_probs
        self.versions += part.token_versions
        if step_of is not None:
            known = {version: step_of(version) for version in set(part.token_versions)}
            self.steps += [known[version] for version in part.token_versions]
        self.finish_reason = None if part.finish_reason == PAUSED else part.finish_reason

    def rest(self, request: Request) -> Request:
        """What is still wanted of it. request: what was asked for the whole."""
        done = len(self.token_ids)
        if not done:
            return request
        return replace(
            request,
            prompt=[*request.prompt, *self.token_ids],
            params=replace(request.params, max_tokens=request.params.max_tokens - done),
            start=request.start + done,
        )

    def completion(self, version: int = -1) -> Completion:
        """What there is of it. version: of the engine's weights, where no token says more."""
        oldest = min(self.versions, default=version)
        mixed = self.versions if len(set(self.versions)) > 1 else []
        reason = PAUSED if self.finish_reason is None else self.finish_reason
        return Completion(self.token_ids, self.log_probs, reason, oldest, mixed, self.experts)

    def state(self) -> dict[str, Any]:
        """As JSON values, for a checkpoint."""
        return asdict(self) | {"experts": self.experts and self.experts.hex()}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "PartialCompletion":
        """What `state` gave; other entries are passed over."""
        values = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        experts = values.get("experts")
        return cls(**values | {"experts": experts and bytes.fromhex(experts)})
