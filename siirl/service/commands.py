"""What clients ask the engines for: one record for each kind of request, as the desk hands them on."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from siirl.data.completions import SamplingParams
from siirl.engines.train.base import AdamStep


class Refused(Exception):
    """What is wrong with a request, in words for whoever wrote the client; it costs this request alone."""


@dataclass(frozen=True)
class AdapterSpec:
    """What a training client trains."""

    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True


@dataclass(frozen=True)
class Datum:
    """A sequence of N tokens, and what a loss reads of each: position i predicts target_tokens[i]."""

    tokens: list[int]
    inputs: dict[str, np.ndarray]
    """[N] or [N, K] each."""


@dataclass(frozen=True)
class CreateModel:
    model: str
    spec: AdapterSpec


@dataclass(frozen=True)
class ForwardBackward:
    model: str
    loss: str
    options: Mapping[str, float | str]
    data: Sequence[Datum]
    forward_only: bool


@dataclass(frozen=True)
class OptimStep:
    model: str
    adam: AdamStep


@dataclass(frozen=True)
class SaveState:
    """Adapter and optimizer, to a file."""

    model: str
    path: str
    overwrite: bool


@dataclass(frozen=True)
class SaveSampler:
    """The adapter alone as it is now, to a file, or in memory under the id of a sampling session."""

    model: str
    path: str | None
    session: str | None
    overwrite: bool = False


@dataclass(frozen=True)
class LoadState:
    """Into a model that is there, or a new one."""

    model: str
    path: str
    optimizer: bool
    creates: bool


@dataclass(frozen=True)
class Sample:
    source: str
    """BASE, a path of sampler weights, or the id of a sampling session."""
    prompt: list[int]
    params: SamplingParams
    num_samples: int
    seed: int
    stops: tuple[str, ...] = ()
    """Texts that end a response."""
    prompt_log_probs: bool = False


@dataclass(frozen=True)
class Release:
    """A session is over: its models and snapshots go."""

    session: str


PATH = re.compile(r"tinker://([\w:-]+)/(weights|sampler_weights)/(\w[\w.-]{0,127})")
"""What names saved weights: the model, the kind, the name."""
BASE = ""
"""The source of a sample that the model without adapters gives."""
Command = CreateModel | ForwardBackward | OptimStep | SaveState | SaveSampler | LoadState | Sample | Release


@dataclass(frozen=True)
class Trained:
    """What comes of a ForwardBackward."""

    log_probs: list[np.ndarray]
    """Of the target tokens of each datum, float32 of their shape."""
    loss: float
    """The sum."""


@dataclass(frozen=True)
class Sampled:
    """What comes of a Sample."""

    sequences: list[tuple[list[int], list[float], bool]]
    """Tokens, log-probs, whether it stopped by itself."""
    prompt_log_probs: list[float] = field(default_factory=list)
    """Of each token of the prompt, NaN for the first; empty if not asked for."""
