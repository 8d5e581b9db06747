"""Mixture: what share of the training prompts each data source has, whatever its share of the files is."""

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from siirl.config import Config
from siirl.data.check_files import source_names
from siirl.errors import ConfigError, DataError


@dataclass(frozen=True)
class Share:
    """One entry of data.mixture."""

    name: str
    """A data source, or a pattern: of all that no earlier entry fits, together."""
    weight: float
    max_steps: int | None
    """Training steps after which it gives no prompts any more; None: it gives them to the end."""


def parse_shares(mixture: Mapping[str, Any]) -> tuple[Share, ...]:
    """The entries of data.mixture, {source: weight or {weight, max_steps}}. ConfigError if they cannot be."""
    shares = []
    for name, value in mixture.items():
        where = f"data.mixture[{name!r}]"
        options = dict(value) if isinstance(value, Mapping) else {"weight": value}
        weight, max_steps = options.pop("weight", 1.0), options.pop("max_steps", None)
        if options:
            raise ConfigError(f"{where} has no option {next(iter(options))!r}. Known: weight, max_steps.")
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight <= 0:
            raise ConfigError(
                f"{where} has weight {weight!r}: it must be a number above 0. To leave a source out, leave "
                "its files out."
            )
        whole = isinstance(max_steps, int) and not isinstance(max_steps, bool)
        if max_steps is not None and (not whole or max_steps < 1):
            raise ConfigError(f"{where} has max_steps {max_steps!r}: it must be a whole number above 0.")
        shares.append(Share(str(name), float(weight), max_steps))
    if shares and all(share.max_steps is not None for share in shares):
        last = max(shares, key=lambda share: share.max_steps or 0)
        raise ConfigError(
            f"data.mixture: every source ends, the last ({last.name}) after step {last.max_steps}: no "
            "prompts are left then. Leave out max_steps of one."
        )
    return tuple(shares)


def entry_of(shares: Sequence[Share], source: str) -> int | None:
    """The place of the entry that a data source belongs to, the first that fits; None: of no entry."""
    return next((k for k, share in enumerate(shares) if fnmatch.fnmatchcase(source, share.name)), None)


def check_mixture(cfg: Config) -> None:
    """ConfigError or DataError unless data.mixture and the sources of the training files fit each other."""
    if cfg.data.mixture and not cfg.trainer.val_only:
        _require_match(parse_shares(cfg.data.mixture), source_names(cfg, "train"))


def _require_match(shares: Sequence[Share], sources: Collection[str]) -> None:
    there = ", ".join(sorted(sources))
    held = {entry_of(shares, source): source for source in sorted(sources)}
    if None in held:
        raise DataError(
            f"data.mixture has no entry for the data source {held[None]!r} of the training files, which have "
            f"{there}. Give it a weight, or all others one by the entry '*'."
        )
    for place, share in enumerate(shares):
        if place not in held:
            raise DataError(
                f"data.mixture[{share.name!r}] fits no data source of the training files that an earlier "
                f"entry does not take: they have {there}. Correct the name, or leave the entry out."
            )


class Mixture:
    """Draws training prompts of several data sources by weight; those of one entry are a stream of their own.

    Of the first T prompts, an entry with the weight w gives T w / (sum of weights) to within one prompt,
    whatever the batch size (the rule of R. Tijdeman, The chairman assignment problem, 1980). A stream is
    shuffled by the seed; used up, it begins anew in another order. No communication: all ranks draw the same.
    """

    def __init__(
        self, shares: Sequence[Share], sources: Sequence[str], batch_size: int, seed: int, shuffle: bool
    ):
        """sources: of each prompt [N]. DataError where they and the shares do not fit each other."""
        names = list(dict.fromkeys(sources))
        _require_match(shares, names)
        entry = {name: entry_of(shares, name) for name in names}
        entries = np.array([entry[name] for name in sources])
        self._shares, self._batch_size, self._seed, self._shuffle = shares, batch_size, seed, shuffle
        self._prompts = [np.flatnonzero(entries == k) for k in range(len(shares))]
        self._weights = np.array([share.weight for share in shares])
        self._given = np.zeros(len(shares), dtype=np.int64)
        self._owed = np.zeros(len(shares))  # what an entry's share of all prompts so far is above those given
        self._orders = [(-1, np.zeros(0, dtype=np.int64)) for _ in shares]  # (epoch of the stream, its order)

    def take(self, count: int) -> np.ndarray:
        """The next `count` prompts [count], by their places in the dataset."""
        return np.array([self._next() for _ in range(count)], dtype=np.int64)

    def _next(self) -> int:
        steps = int(self._given.sum()) // self._batch_size
        lasts = np.array([share.max_steps is None or steps < share.max_steps for share in self._shares])
        rate = np.where(lasts, self._weights, 0.0) / self._weights[lasts].sum()
        self._owed = np.where(lasts, self._owed, 0.0) + rate * (1 + self._owed[~lasts].sum())
        slack = 1 / (2 * max(1, lasts.sum() - 1))
        late = lasts & (self._owed >= slack - 1e-9)
        late = late if late.any() else lasts
        due = np.full(len(rate), np.inf)
        due[late] = (1 - slack - self._owed[late]) / rate[late]
        chosen = int(due.argmin())
        self._owed[chosen] -= 1
        at = int(self._given[chosen])
        self._given[chosen] += 1
        epoch, place = divmod(at, len(self._prompts[chosen]))
        return int(self._order(chosen, epoch)[place])

    def _order(self, entry: int, epoch: int) -> np.ndarray:
        if self._orders[entry][0] != epoch:
            prompts = self._prompts[entry]
            if self._shuffle:
                prompts = prompts[np.random.default_rng([self._seed, epoch, entry]).permutation(len(prompts))]
            self._orders[entry] = (epoch, prompts)
        return self._orders[entry][1]

    def state(self) -> dict[str, tuple[int, float]]:
        """Entry -> (prompts that it has given, what it is owed)."""
        names = [share.name for share in self._shares]
        return dict(zip(names, zip(self._given.tolist(), self._owed.tolist(), strict=True), strict=True))

    def load_state(self, state: Mapping[str, tuple[int, float]]) -> None:
        """Go on after `state`; weights may have changed since, and a new entry begins at its first prompt."""
        known = [state.get(share.name, (0, 0.0)) for share in self._shares]
        self._given = np.array([given for given, _ in known], dtype=np.int64)
        self._owed = np.array([owed for _, owed in known])
