"""What clients ask the engines for: one record for each kind of request, as the desk hands them on."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
class Cells:
    """A [N, K] tensor, of which some cells have a value."""

    values: np.ndarray
    """Row by row, [C]."""
    shape: tuple[int, int]
    starts: np.ndarray | None = None
    """Where each row begins among the values, and where the last ends, [N + 1]; None: all cells have one."""
    columns: np.ndarray | None = None
    """[C]."""

    @property
    def rows(self) -> np.ndarray:
        """Of each value, [C]."""
        each = self.shape[1] if self.starts is None else np.diff(self.starts)
        return np.repeat(np.arange(self.shape[0]), each)


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
    labels: Mapping[str, Any] = field(default_factory=dict)
    """What its owner says of it: user_metadata, expires_s (a time)."""


@dataclass(frozen=True)
class SaveSampler:
    """The adapter alone as it is now, to a file, or in memory under the id of a sampling session."""

    model: str
    path: str | None
    session: str | None
    overwrite: bool = False
    labels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveExternal:
    """The adapter alone, to files that other programs read: those of peft."""

    model: str
    path: str
    labels: Mapping[str, Any] = field(default_factory=dict)


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
    top_prompt: int = 0
    """So many of the likeliest words, at each token of the prompt but the first."""
    top_samples: int = 0
    """Likewise at each token of a response."""
    last: int | None = None
    """Of so many tokens at the end of the prompt these are told; None: of all but the first."""
    drawn_prompt: int = 0
    """So many words are drawn at each token of the prompt but the first."""
    targets: Cells | None = None
    """Words whose log-probs are told, int64, at each token of the prompt but the first; -1: none."""


@dataclass(frozen=True)
class Release:
    """A session is over: its models and snapshots go."""

    session: str


PATH = re.compile(r"tinker://([\w:-]+)/(weights|sampler_weights|external_weights)/(\w[\w.-]{0,127})")
"""What names saved weights: the model, the kind, the name."""
BASE = ""
"""The source of a sample that the model without adapters gives."""
Saving = SaveState | SaveSampler | SaveExternal
Command = CreateModel | ForwardBackward | OptimStep | Saving | LoadState | Sample | Release


def num_tokens(command: Command) -> int:
    """What a command takes at most: tokens that are trained on, read and sampled."""
    match command:
        case ForwardBackward(data=data):
            return sum(len(one.tokens) for one in data)
        case Sample(prompt=prompt, params=params, num_samples=count):
            return len(prompt) + count * params.max_tokens
    return 0


@dataclass(frozen=True)
class Trained:
    """What comes of a ForwardBackward."""

    log_probs: list[np.ndarray]
    """Of the target tokens of each datum, float32 of their shape."""
    loss: float
    """The sum."""


@dataclass(frozen=True)
class Top:
    """Words at each of some tokens: the likeliest, or drawn ones."""

    words: np.ndarray
    """int32 [N, K], the likeliest first."""
    log_probs: np.ndarray
    """float32 [N, K], at temperature 1."""


@dataclass(frozen=True)
class Sampled:
    """What comes of a Sample."""

    sequences: list[tuple[list[int], list[float], bool]]
    """Tokens, log-probs, whether it stopped by itself."""
    prompt_log_probs: list[float] = field(default_factory=list)
    """Of each token of the prompt, NaN for the first; empty if not asked for."""
    top_prompt: list[Top] = field(default_factory=list)
    """Of the prompt from its second token on, if asked for and it has one."""
    top_samples: list[Top] = field(default_factory=list)
    """Of each sequence, if asked for."""
    drawn_prompt: list[Top] = field(default_factory=list)
    """Words that were drawn, if asked for."""
    targets: list[Cells] = field(default_factory=list)
    """Log-probs of the words that the request names, if it does, float32, 0 where it has none."""


def tokens_of(command: Any, found: Any) -> int | None:
    """What a command took; None: what it asked for."""
    if not (isinstance(command, Sample) and isinstance(found, Sampled)):
        return None
    return len(command.prompt) + sum(len(tokens) for tokens, *_ in found.sequences)
