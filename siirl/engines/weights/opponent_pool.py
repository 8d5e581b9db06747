"""Opponent pools: versions of a policy that are kept, one of which an opponent plays as in each step.

Older versions as opponents: Heinrich et al., "Fictitious Self-Play in Extensive-Form Games" (2015), and
Bansal et al., "Emergent Complexity via Multi-Agent Competition" (2018). Prioritised fictitious self-play
(PFSP), with win rates in which older games count less: Vinyals et al., "Grandmaster level in StarCraft II
using multi-agent reinforcement learning" (AlphaStar, 2019).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from siirl.compiler.plan import PoolPlan
from siirl.engines.train.base import TrainEngine
from siirl.engines.train.pieces import Piece
from siirl.engines.weights.bucket import LiveWeights
from siirl.observe.metrics import Metrics

DECAY = 0.9
"""What the games of a version still count after each further step of them."""
UNPLAYED = 0.5
"""Win rate against a version without games, as in AlphaStar."""


@dataclass
class Version:
    """Weights that the policy had before a step, and its games against them."""

    number: int
    """Optimizer steps taken."""
    step: int
    weights: dict[str, Tensor]
    """What this rank has of them, in host memory."""
    won: float = 0.0
    games: float = 0.0

    @property
    def win_rate(self) -> float:
        """Of the policy in training; a draw is half a win."""
        return self.won / self.games if self.games else UNPLAYED


def sampling_weights(plan: PoolPlan, win_rates: Sequence[float]) -> list[float]:
    """How likely each version is drawn, up to a factor; win_rates: from the oldest to the latest."""
    if plan.sampling == "latest":
        return [0.0] * (len(win_rates) - 1) + [1.0]
    if plan.sampling == "uniform":
        return [1.0] * len(win_rates)
    hard = plan.sampling == "pfsp"
    found = [(1 - rate) ** plan.power if hard else rate * (1 - rate) for rate in win_rates]
    return found if any(found) else [1.0] * len(found)


class OpponentPool:
    """The versions of one opponent, on each rank of its weight link, whose source it is.

    All ranks draw, count and keep the same. Without weights in it there is none: the first step, or the
    validation before it, keeps those that the policy begins with.
    """

    def __init__(self, plan: PoolPlan, engine: TrainEngine, seed: int) -> None:
        """engine: has the policy. seed: of the run."""
        self.plan, self.versions = plan, list[Version]()
        self._engine, self._seed = engine, seed
        self._playing: Version | None = None
        self._drawn_number, self._last = 0, (0.0, 0.0)

    @property
    def version(self) -> int:
        """Of the weights that play: what the link compares."""
        return self._engine.version if self._playing is None else self._playing.number

    def bring(self, push: Callable[[], Metrics], step: int, validate: bool) -> Metrics:
        """Bring the weights that play now to the opponent, by the `push` of its link.

        In a step that begins the policy's weights are kept if they are due, and a version is drawn. In
        validation the latest one plays. Collective over the link's ranks.
        """
        if not self.versions:
            self._keep(step + validate)
        if validate:
            self._playing = self.versions[-1]
        else:
            self.begin(step)
        with self._lent():
            return push()

    def begin(self, step: int) -> None:
        """Keep the policy's weights if they are due, and draw who plays in this step. No communication."""
        if self._is_due(step):
            self._keep(step)
        self._playing = self._drawn(step)
        self._drawn_number, self._last = self.version, (0.0, 0.0)

    def _lent(self) -> AbstractContextManager[None]:
        """Meanwhile the engine has the weights that play."""
        if self._playing is None or self._playing.number == self._engine.version:
            return nullcontext()
        return self._engine.lent_weights(self._playing.weights)

    def count(self, won: float, games: float) -> None:
        """Add the games of a step, over all ranks, to the version that has played. A draw is half a win."""
        self._last = won, games
        if games and self._playing is not None:
            self._playing.won = DECAY * self._playing.won + won
            self._playing.games = DECAY * self._playing.games + games

    def metrics(self) -> Metrics:
        """Of the step that has ended, the same on all ranks."""
        metrics = Metrics()
        metrics.max("pool/size", len(self.versions))
        metrics.max("pool/playing", self._drawn_number)
        metrics.mean("pool/win_rate", *self._last)
        for version in self.versions:
            if version.games:
                metrics.max(f"pool/win_rate/version_{version.number}", version.win_rate)
        return metrics

    def _is_due(self, step: int) -> bool:
        every, bound = self.plan.every_steps, self.plan.win_rate
        rates = [version.win_rate for version in self.versions]
        by_steps = step > 1 and every > 0 and (step - 1) % every == 0
        return by_steps or (bound is not None and sum(rates) >= bound * len(rates))

    def _keep(self, step: int) -> None:
        number = self._engine.version
        if all(version.number != number for version in self.versions):
            self.versions.append(Version(number, step, self._engine.copied_weights()))
            del self.versions[: -self.plan.size]

    def _drawn(self, step: int) -> Version | None:
        """A version, or None for the policy as it is: a function of the seed, the step and the pool."""
        rng = random.Random(f"{self._seed} {self.plan.agent} {step}")
        if rng.random() < self.plan.current:
            return None
        weights = sampling_weights(self.plan, [version.win_rate for version in self.versions])
        return rng.choices(self.versions, weights)[0]

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """See TrainEngine, as the next ones."""
        return self._engine.weight_specs()

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return self._engine.export_weights(dtype)

    def export_adapter(
        self, dtype: torch.dtype | None = None, with_base: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        return self._engine.export_adapter(dtype, with_base)

    def live_weights(self) -> LiveWeights | None:
        return self._engine.live_weights()

    def held_pieces(self) -> dict[str, list[Piece]] | None:
        return self._engine.held_pieces()

    @property
    def device(self) -> torch.device:
        return self._engine.device

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: all versions, and the games against each."""
        tensors = {
            f"{one.number}/{name}": tensor for one in self.versions for name, tensor in one.weights.items()
        }
        return {"model": tensors, "pool": [[x.number, x.step, x.won, x.games] for x in self.versions]}

    def make_room(self, saved: dict[str, Any]) -> None:
        """Have as many versions as a state that was saved, whose tensors are to be read in place."""
        self.versions = [
            Version(number, step, self._engine.copied_weights(), won, games)
            for number, step, won, games in saved["pool"]
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict gave, of which the tensors are where `make_room` has made room."""
        del self.versions[: -self.plan.size]
