"""Muon over sharded parameters: the momentum of each matrix, made orthogonal; AdamW of all that is no matrix.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the scale and the weight
decay of Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982), equation 4: an update has the
root mean square of AdamW's, so that optim.lr and optim.weight_decay are of both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn

from siirl.compiler.backends.fsdp import ADAMW
from siirl.config.common import OptimConfig
from siirl.engines.train.optimizer import ShardAdamW, local_shard, make_adamw

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5 in an iteration."""
RMS = 0.2
"""Of an update of AdamW."""
MOMENTUM = "momentum_buffer"
_EPS = 1e-7


class ShardMuon(torch.optim.Optimizer):
    """Muon on matrices that are cut into runs of rows over the ranks of a group, and AdamW on the rest.

    The first of its param_groups has the matrices. In a step each of as many matrices as there are ranks is
    brought together on one of them, made orthogonal there, and brought back: every rank steps together.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        adamw: ShardAdamW,
        optim: OptimConfig,
        group: dist.ProcessGroup,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: str | None = None,
    ):
        """ns_dtype: of the iterations; None: as the parameters."""
        by_size = sorted(matrices, key=lambda param: -param.numel())  # those of one round take as long
        super().__init__(by_size, {"lr": optim.lr, "weight_decay": optim.weight_decay})
        self._adamw, self._group = adamw, group
        self._momentum, self._nesterov, self._steps = momentum, nesterov, ns_steps
        self._dtype = getattr(torch, ns_dtype or str(by_size[0].dtype).removeprefix("torch."))
        for param in by_size:
            adamw.state[param] = {MOMENTUM: torch.zeros_like(param)}
        self.state = adamw.state
        self.param_groups += adamw.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """One step of every parameter that has a gradient."""
        matrices = [param for param in self.param_groups[0]["params"] if param.grad is not None]
        ranks = dist.get_world_size(self._group)
        for first in range(0, len(matrices), ranks):
            self._step(matrices[first : first + ranks])
        self._adamw.step()

    def _step(self, matrices: Sequence[nn.Parameter]) -> None:
        """A round: one matrix a rank, at most."""
        settings = self.param_groups[0]
        lr, decay = settings["lr"], settings["weight_decay"]
        directions = [self._direction(param) for param in matrices]
        updates = self._orthogonal(directions, [param.shape for param in matrices])
        for param, update in zip(matrices, updates, strict=True):
            shard = local_shard(param)
            shard.mul_(1 - lr * decay)
            shard.add_(update.to(shard.dtype), alpha=-lr * RMS * sqrt(max(param.shape)))

    def _direction(self, param: nn.Parameter) -> Tensor:
        """The momentum of this rank's rows, after this step's gradient; of Nesterov, one gradient ahead."""
        assert param.grad is not None
        grad, momentum = local_shard(param.grad), local_shard(self.state[param][MOMENTUM])
        momentum.lerp_(grad, 1 - self._momentum)
        return grad.lerp(momentum, self._momentum) if self._nesterov else momentum

    def _orthogonal(self, shards: Sequence[Tensor], shapes: Sequence[Size]) -> list[Tensor]:
        """This rank's rows of the orthogonal matrices next to those whose rows it has."""
        ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        rows, columns = shapes[rank] if rank < len(shapes) else (0, 0)
        out = [shard.numel() for shard in shards] + [0] * (ranks - len(shards))
        each = -(-rows // ranks)  # FSDP2 cuts rows into equal runs, the last ones shorter or empty
        into = [max(0, min(each, rows - each * other)) * columns for other in range(ranks)]
        sent = torch.cat([shard.reshape(-1).to(self._dtype) for shard in shards])
        whole = sent.new_empty(rows * columns)
        dist.all_to_all_single(whole, sent, into, out, group=self._group)
        if rows:
            whole = orthogonal(whole.view(rows, columns), self._steps).reshape(-1)
        dist.all_to_all_single(sent, whole, out, into, group=self._group)
        return [
            part.view_as(shard) for part, shard in zip(sent.split(out[: len(shards)]), shards, strict=True)
        ]


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Near U V^T of a matrix U S V^T, by Newton-Schulz iterations: singular values come to about 0.7 to 1.2.

    Source: Jordan et al. (2024), and COEFFICIENTS with it. No communication.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=_EPS)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def make_optimizer(model: nn.Module, optim: OptimConfig, group: dist.ProcessGroup) -> torch.optim.Optimizer:
    """The optimizer of optim.name of what trains in a model, with its state: memory is known, and a
    checkpoint can be read, before the first step.

    group: of the ranks that share one copy of the weights. Muon takes the matrices of its layers, which are
    what stands in lists of modules. ConfigError for options that none takes. No communication.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    if optim.name == "adamw":
        return make_adamw(params, optim)
    layers = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(param) for layer in layers for param in layer.parameters() if param.ndim == 2}
    options: dict[str, Any] = dict(optim.override_optimizer_config or {})
    of_muon = {name: options.pop(name) for name in tuple(options) if name not in ADAMW}
    rest = [param for param in params if id(param) not in inner]
    adamw = make_adamw(rest, replace(optim, override_optimizer_config=options))
    return ShardMuon([param for param in params if id(param) in inner], adamw, optim, group, **of_muon)
