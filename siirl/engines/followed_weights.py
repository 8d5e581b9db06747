"""A model on a training engine as the target of a weight link: a teacher that is a policy, older."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from siirl.engines.rollout.base import WeightPart
from siirl.engines.rollout.weight_loading import WeightSpecs, checked_weights
from siirl.engines.train.base import TrainEngine


class WeightTarget(Protocol):
    """What a weight link asks of the engine that it brings weights to; see RolloutEngine."""

    takes: WeightPart
    weight_version: int
    reads_live: bool
    """Whether it takes weights where they are trained (LiveWeights), if its rank has them whole."""

    def weight_specs(self) -> WeightSpecs: ...

    def expect_weights(self) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...


class FollowedWeights:
    """Takes a share of the weights that arrive; the rest stays what the model has."""

    takes: WeightPart = "merged"
    weight_version = -1
    """None: a moving average moves also where the policy did not."""
    reads_live = False

    def __init__(self, engine: TrainEngine, share: float):
        self._engine, self._share = engine, share

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._engine.weight_specs()

    def expect_weights(self) -> None:
        """Its weights are on the device already."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """WeightSyncError unless every weight of the model arrives once; no communication."""
        checked = checked_weights(weights, self.weight_specs(), {}, self._engine.name)
        self._engine.take_weights(checked, self._share)
