"""Messages between pipeline stages whose shapes every stage knows: none is sent, none is waited for."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor


class KnownShapes(P2PCommunicator):
    """megatron-core's messages of one run of the 1F1B schedule, without its exchange of shapes.

    That exchange waits for the device twice a message. All stages of a pipeline cut the same rows into the
    same micro-batches, and activations and gradients arrive in their order. Build it inside the model's
    scope; no communication.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, config: Any, shapes: Sequence[tuple[int, ...]]):
        """shapes: of the activations that each micro-batch sends from stage to stage, on this rank."""
        super().__init__(group, config)
        self._activations, self._gradients = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of what arrives from the previous and from the next stage."""
        return next(self._activations) if recv_prev else (), next(self._gradients) if recv_next else ()
