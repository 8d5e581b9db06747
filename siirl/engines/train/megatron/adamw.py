"""AdamW whose moments may be narrow, and which for a share of the weights runs in host memory.

Megatron-Core's own forms of both need Transformer Engine; this one needs torch. Main weights of the host's
share are on the device from the end of a step until `release`, so that Megatron can copy them to the model's;
where the model computes in them, they stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from siirl.config.common import OptimConfig
from siirl.engines.train.optimizer import MOMENTS
from siirl.parallel.host_threads import all_host_threads

HOST_OPTIONS = ("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")
DTYPE_OPTIONS = tuple(f"{name}_dtype" for name in MOMENTS)
OWN_OPTIONS = (*HOST_OPTIONS, "use_precision_aware_optimizer", *DTYPE_OPTIONS)
"""Options of Megatron's OptimizerConfig that this module answers for."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StatePlace:
    """Where moments are, and in which types."""

    host_share: float = 0.0
    """Share of the elements whose moments are in host memory."""
    overlaps: bool = False
    """Copies run beside updates."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float32)
    """Of the first and the second moment."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's AdamW does all that is asked."""
        return not self.host_share and set(self.dtypes) == {torch.float32}


def state_place(optim: OptimConfig) -> StatePlace:
    """What override_optimizer_config asks for; `siirl check` has refused what makes no sense."""
    options = optim.override_optimizer_config or {}
    wide = not options.get("use_precision_aware_optimizer")
    first, second = (_DTYPES["fp32" if wide else options.get(name, "fp32")] for name in DTYPE_OPTIONS)
    share = options.get("optimizer_offload_fraction", 1.0) if options.get("optimizer_cpu_offload") else 0.0
    return StatePlace(float(share), bool(options.get("overlap_cpu_optimizer_d2h_h2d")), (first, second))


class PlacedAdamW(torch.optim.Optimizer):
    """See the module; its state is allocated at once. Groups as of torch's AdamW, the parameters in fp32."""

    def __init__(self, groups: Sequence[dict[str, Any]], place: StatePlace, model_storages: set[int]):
        """model_storages: those of the model's own parameters, by _cdata."""
        super().__init__([torch.empty(0)], {})
        self.param_groups = list(groups)  # among them views of parameters, which the constructor refuses
        self._place = place
        self._copies: dict[Tensor, tuple[Tensor, Tensor]] = {}  # on the host: (weight, gradient)
        self._kept: set[Tensor] = set()  # weights of the host's share that stay on the device
        params = [param for group in self.param_groups for param in group["params"]]
        room = place.host_share * sum(param.numel() for param in params)
        for param in params:
            on_host = room > 0
            room -= param.numel()
            device = torch.device("cpu") if on_host else param.device
            if on_host:
                self._copies[param] = (_host_like(param, torch.float32), _host_like(param, torch.float32))
                self._copies[param][0].copy_(param.detach())
                if param.untyped_storage()._cdata in model_storages:
                    self._kept.add(param)
            moments = {
                name: _host_like(param, dtype).zero_() if on_host else torch.zeros_like(param, dtype=dtype)
                for name, dtype in zip(MOMENTS, place.dtypes, strict=True)
            }
            self.state[param] = {"step": torch.zeros((), device=device)} | moments
        self.release()

    def weight(self, param: Tensor) -> Tensor:
        """The fp32 weight that the next step starts from: the tensor itself, on the host or the device."""
        return self._copies[param][0] if param in self._copies and param not in self._kept else param

    @torch.no_grad()
    def fill(self) -> None:
        """Bring the host's weights to the device."""
        for param, (weight, _) in self._copies.items():
            if param not in self._kept:
                self._take_up(param, weight)

    def release(self) -> None:
        """Give back the device memory of the host's weights."""
        for param in self._copies.keys() - self._kept:
            param.untyped_storage().resize_(0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step of every parameter that has a gradient."""
        here = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        away = [(group, param) for group, param in here if param in self._copies]
        sent = self._send([param for _, param in away]) if self._place.overlaps else {}
        for group, param in here:
            if param not in self._copies:
                _update(param, param.grad, self.state[param], group)
        with all_host_threads():
            for group, param in away:
                if param not in sent:
                    self._copy_down(param, blocking=True)
                elif sent[param] is not None:
                    sent[param].synchronize()
                weight, grad = self._copies[param]
                _update(weight, grad, self.state[param], group)
                self._take_up(param, weight)

    def _send(self, params: list[Tensor]) -> dict[Tensor, Any]:
        """Start the copies of all weights and gradients to the host; an event for each, None off CUDA."""
        if not params or not params[0].is_cuda:
            for param in params:
                self._copy_down(param, blocking=True)
            return dict.fromkeys(params)
        stream, events = torch.cuda.Stream(), {}
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for param in params:
                self._copy_down(param, blocking=False)
                events[param] = stream.record_event()
                param.grad.record_stream(stream)
        return events

    def _copy_down(self, param: Tensor, blocking: bool) -> None:
        weight, grad = self._copies[param]
        if param in self._kept:
            weight.copy_(param, non_blocking=not blocking)
        grad.copy_(param.grad, non_blocking=not blocking)

    def _take_up(self, param: Tensor, weight: Tensor) -> None:
        if param not in self._kept:
            param.untyped_storage().resize_(weight.untyped_storage().nbytes())
        param.copy_(weight, non_blocking=self._place.overlaps)


def _host_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(param.shape, dtype=dtype, device="cpu", pin_memory=param.is_cuda)


def _update(param: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """AdamW of one parameter in fp32, in place; narrow moments are rounded to nearest after it."""
    first, second = (state[name] for name in MOMENTS)
    wide = [moment.float() for moment in (first, second)]  # the moments themselves, if they are wide
    (beta1, beta2), step = group["betas"], state["step"]
    adamw(
        [param.view(-1)],
        [grad.view(-1).float()],
        [wide[0].view(-1)],
        [wide[1].view(-1)],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for moment, value in zip((first, second), wide, strict=True):
        if moment is not value:
            moment.copy_(value)
