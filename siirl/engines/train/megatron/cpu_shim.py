"""Lets unmodified megatron-core run on CPU tensors over gloo; does nothing where CUDA exists.

megatron-core names "cuda" in many places where any device would do: `device=torch.cuda.current_device()`,
`torch.zeros(..., device="cuda")`, `tensor.cuda()`, streams and events. `enter` replaces these names of
torch by CPU equivalents until the function that it returns is called, so that they live only as long as
Megatron code runs (see scope.py). Checked with megatron-core 0.16.1; can go when it is device-neutral.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
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


def enter() -> Callable[[], None]:
    """Put the replacements in place, compiled functions off; call the result to leave. Nothing with CUDA."""
    if torch.cuda.is_available():
        return _nothing
    if not _replacements:
        _repair_generators()
        _repair_dispatcher()
        _repair_uneven_parts()
        _replacements.extend(_make_replacements())
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in _replacements]
    for owner, name, value in _replacements:
        setattr(owner, name, value)
    stance = torch.compiler.set_stance("force_eager")  # on CPUs compiling takes longer than it can gain

    def leave() -> None:
        stance.__exit__(None, None, None)
        for owner, name, value in saved:
            setattr(owner, name, value)

    return leave


def _repair_generators() -> None:
    """Megatron keeps CUDA generator states: without CUDA these are states of the CPU generator."""
    import megatron.core.tensor_parallel.random as generators

    generators._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    generators._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(generators.__name__).setLevel(logging.ERROR)  # it would warn that this state moved


def _repair_dispatcher() -> None:
    """Split sizes of the experts' exchange must be numbers: Megatron converts only CUDA tensors."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def to_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return value.numpy() if as_numpy and torch.is_tensor(value) else value

    dispatcher.maybe_move_tensor_to_cpu = to_host


def _repair_uneven_parts() -> None:
    """gloo gathers and scatters parts of one length only, where NCCL takes any: fill them up to the longest.

    Experts that are cut over ranks (etp > 1) exchange parts of unequal lengths.
    """
    import megatron.core.tensor_parallel.mappings as mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def filled(part: torch.Tensor, length: int) -> torch.Tensor:
        return torch.cat([part, part.new_zeros(length - len(part), *part.shape[1:])])

    def gather_parts(value: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(value, group, None, *args)
        lengths = [int(length) for length in output_split_sizes]
        parts = gather(filled(value, max(lengths)), group).split(max(lengths))
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def scatter_parts(value: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(value, group, None, *args)
        lengths = [int(length) for length in input_split_sizes]
        parts = torch.cat([filled(part, max(lengths)) for part in value.split(lengths)])
        return scatter(parts, group)[: lengths[group.rank()]]

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts
