"""Lets unmodified megatron-core run on CPU tensors over gloo; does nothing where CUDA exists.

megatron-core names "cuda" in many places where any device would do: `device=torch.cuda.current_device()`,
`torch.zeros(..., device="cuda")`, `tensor.cuda()`, streams and events. `enter` replaces these names of
torch by CPU equivalents and `leave` puts the originals back, so that the replacements live only as long as
Megatron code runs (see scope.py). Checked with megatron-core 0.16.1; can go when it is device-neutral.
"""

import contextlib
import functools
import logging
import sys
from typing import Any

import torch
import torch.cuda.nvtx

_MAKERS = (
    *("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "as_tensor"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
)


class _NoStream:
    """Stands for torch.cuda.Stream and torch.cuda.Event: work on a CPU is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def query(self) -> bool:
        return True


def _on_cpu(make: Any) -> Any:
    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return wrapped


def _type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Tensor.type; to Megatron's optimizers, which sort parameters by it, CPU tensors are CUDA tensors."""
    found = _REAL_TYPE(tensor, *args, **kwargs)
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if not args and not kwargs and caller.startswith("megatron.core.optimizer"):
        found = found.replace("torch.", "torch.cuda.", 1)
    return found


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _itself(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


_REAL_TYPE = torch.Tensor.type
_replacements: list[tuple[Any, str, Any]] = []


def _make_replacements() -> list[tuple[Any, str, Any]]:
    cuda = torch.cuda
    seed = torch.default_generator.manual_seed
    return [
        *((torch, name, _on_cpu(getattr(torch, name))) for name in _MAKERS),
        (torch.Tensor, "cuda", _itself),
        (torch.Tensor, "type", _type_of),
        (torch.nn.Module, "cuda", _itself),
        (cuda, "current_device", lambda: torch.device("cpu")),
        (cuda, "set_device", _nothing),
        (cuda, "synchronize", _nothing),
        (cuda, "empty_cache", _nothing),
        (cuda, "Stream", _NoStream),
        (cuda, "Event", _NoStream),
        (cuda, "current_stream", _NoStream),
        (cuda, "default_stream", _NoStream),
        (cuda, "stream", lambda stream: contextlib.nullcontext()),
        (cuda.nvtx, "range_push", _nothing),
        (cuda.nvtx, "range_pop", _nothing),
        (cuda, "get_rng_state", lambda *args: torch.get_rng_state()),
        (cuda, "set_rng_state", lambda state, *args: torch.set_rng_state(state)),
        (cuda, "manual_seed", lambda number: seed(number)),
    ]


def enter() -> list[tuple[Any, str, Any]]:
    """Put the replacements in place; returns what `leave` needs. An empty list where CUDA exists."""
    if torch.cuda.is_available():
        return []
    if not _replacements:
        _repair_generators()
        _replacements.extend(_make_replacements())
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in _replacements]
    for owner, name, value in _replacements:
        setattr(owner, name, value)
    return saved


def leave(saved: list[tuple[Any, str, Any]]) -> None:
    """Put back what `enter` replaced."""
    for owner, name, value in saved:
        setattr(owner, name, value)


def _repair_generators() -> None:
    """Megatron keeps CUDA generator states: without CUDA these are states of the CPU generator."""
    import megatron.core.tensor_parallel.random as generators

    generators._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    generators._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(generators.__name__).setLevel(logging.ERROR)  # it would warn that this state moved
