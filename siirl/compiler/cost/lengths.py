"""How long the rows of a step are taken to be: alike, of a distribution, or as in a run's folder. No torch.

Responses of a step end at different times. A rollout waits for its longest one, and decodes fewer and fewer
rows meanwhile: the mean alone predicts too little.
"""

import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from siirl.errors import ConfigError
from siirl.guarded_files import json_lines
from siirl.observe.curve import METRICS_FILE, read_series

QUANTILES = 4096
"""Of a distribution: so many equally likely lengths."""
_LAST_STEPS = 10
"""Of a run: responses grow longer while it learns."""
_FEWEST = 16
"""Sampled responses that show how a run's lengths differ."""
_EULER = 0.5772
"""The longest of n geometric lengths has 1 + 1/2 + ... + 1/n means: about ln(n) + this + 1/2n."""


@dataclass(frozen=True)
class RowTokens:
    """How long the rows of a step are."""

    prompt: int
    """On average."""
    response: int
    """On average."""
    lengths: tuple[int, ...] = ()
    """Of equally likely responses, ascending; empty: all have the mean."""

    @property
    def row(self) -> int:
        return self.prompt + self.response

    @property
    def response_square(self) -> float:
        """Mean of the squares of response lengths."""
        return _mean_square(self.lengths) if self.lengths else float(self.response**2)

    @property
    def held(self) -> float:
        """Tokens of a row that a cache holds, averaged over the time in which it decodes: of rows that begin
        one after the other as others end. Rows that all have one length end together, and need all of it."""
        decoded = self.response_square / self.response / 2 if self.lengths else self.response
        return self.prompt + decoded

    def longest(self, rows: int) -> int:
        """Tokens of the longest response of so many."""
        share = 1 - math.exp(-_EULER - 0.5 / rows) / rows
        return self.lengths[int(share * len(self.lengths))] if self.lengths else self.response


@dataclass(frozen=True)
class Lengths:
    """What a user says of the lengths of rows (--tokens)."""

    source: str
    """As a report names them."""
    prompt: int
    """Mean."""
    response: float
    """Mean."""
    sampled: tuple[int, ...] = ()
    """Responses that a run has sampled, ascending; empty: lengths are geometric."""

    def up_to(self, most: int) -> RowTokens:
        """The rows of a run whose responses have at most so many tokens: with the mean as said, or that."""
        mean = min(round(self.response), most)
        return RowTokens(self.prompt, mean, _cut(self.sampled, mean, most) if mean < most else ())


def lengths_of(text: str | None) -> Lengths | None:
    """The lengths of "256+600" or of a run's folder. ConfigError for what is neither."""
    if text is None:
        return None
    if (Path(text) / METRICS_FILE).is_file():
        return _of_run(Path(text))
    prompt, _, response = text.partition("+")
    if not (prompt.isdecimal() and response.isdecimal() and int(prompt) and int(response)):
        raise ConfigError(
            f"--tokens {text}: write the mean tokens of prompt and response, as in 256+600; or the folder of "
            f"a run, whose {METRICS_FILE} tells them."
        )
    return Lengths("geometric with the mean that is said", int(prompt), int(response))


def _of_run(folder: Path) -> Lengths:
    """Means of a run's last steps; lengths differ as those of the responses that it kept do."""
    series = read_series(folder / METRICS_FILE)
    names = ("rollout/response_length", "rollout/tokens", "perf/tokens")
    response, sampled, all_tokens = (_last_mean(series.get(name, {})) for name in names)
    if not response or not sampled:
        raise ConfigError(
            f"--tokens {folder}: {METRICS_FILE} has no {names[0]}: nothing was sampled, or by several "
            "agents, whose rows differ. Write the mean tokens of prompt and response, as in 256+600."
        )
    prompt = max(1, round((all_tokens - sampled) * response / sampled))
    kept = sorted(_kept_lengths(folder / "rollouts" / "train"))
    if len(kept) < _FEWEST:
        return Lengths(f"geometric with the mean of {folder}'s last steps", prompt, response)
    source = f"as {len(kept)} responses of {folder}, with the mean of its last steps"
    return Lengths(source, prompt, response, tuple(kept))


def _last_mean(steps: dict[int, float]) -> float:
    values = [steps[step] for step in sorted(steps)[-_LAST_STEPS:]]
    return fmean(values) if values else 0.0


def _kept_lengths(folder: Path) -> Iterator[int]:
    for file in folder.glob("step_*.jsonl"):
        for row in json_lines(file):
            length = row.get("response_length")
            if isinstance(length, int) and length > 0:
                yield length


@functools.lru_cache(maxsize=256)
def _cut(sampled: tuple[int, ...], mean: int, most: int) -> tuple[int, ...]:
    """Equally likely lengths, none above `most`, whose mean is as said."""
    shares = [(index + 0.5) / QUANTILES for index in range(QUANTILES)]
    units = [sampled[int(share * len(sampled))] if sampled else -math.log1p(-share) for share in shares]
    low, high = 0.0, most / units[0]
    for _ in range(60):
        scale = (low + high) / 2
        found = fmean(min(most, scale * unit) for unit in units)
        low, high = (scale, high) if found < mean else (low, scale)
    return tuple(max(1, round(min(most, low * unit))) for unit in units)


@functools.lru_cache(maxsize=256)
def _mean_square(lengths: tuple[int, ...]) -> float:
    return fmean(length**2 for length in lengths)


@functools.lru_cache(maxsize=1024)
def decoding(tokens: RowTokens, rows: int, at_once: int, engines: int) -> tuple[tuple[float, float], ...]:
    """(steps, rows that decode in each) of the engine that has the longest response.

    rows: that a step takes of each of so many engines. at_once: that an engine decodes; others wait until one
    ends.
    """
    if not tokens.lengths:
        rounds = math.ceil(rows / at_once)
        return ((rounds * tokens.response, rows / rounds),)
    return _in_turn(in_order(tokens, rows, engines), at_once)


def in_order(tokens: RowTokens, rows: int, engines: int) -> list[int]:
    """Lengths of the rows of the engine that has the longest of so many engines, which is amid them."""
    if not tokens.lengths:
        return [tokens.response] * rows
    golden = (math.sqrt(5) - 1) / 2  # spreads lengths evenly over the order in which rows begin
    order = [tokens.lengths[int(golden * row % 1 * len(tokens.lengths))] for row in range(rows)]
    order[rows // 2] = tokens.longest(rows * engines)
    return order


def _in_turn(order: Sequence[int], at_once: int) -> tuple[tuple[float, float], ...]:
    """(steps, rows in each) until all have ended: one begins as another ends."""
    ends = list(order[:at_once])
    heapq.heapify(ends)
    spans, now = [], 0
    for length in [*order[at_once:], *(0 for _ in order[:at_once])]:
        spans.append((ends[0] - now, len(ends)))
        now = heapq.heappop(ends)
        if length:
            heapq.heappush(ends, now + length)
    return _merged(spans)


def _merged(spans: Sequence[tuple[int, int]], most: int = 64) -> tuple[tuple[float, float], ...]:
    """Few spans of about as many steps, with the mean rows of each."""
    each = max(1, sum(steps for steps, _ in spans) // most)
    merged, steps, products = [], 0, 0
    for more, live in spans:
        steps, products = steps + more, products + more * live
        if steps >= each:
            merged.append((steps, products / steps))
            steps = products = 0
    return (*merged, (steps, products / steps)) if steps else tuple(merged)
