"""A state (nested dicts and lists with tensors inside) as JSON plus named tensors: no pickle is ever read. So
are the random-number generators of a process.
"""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siirl.errors import CheckpointError

_TENSOR, _TUPLE, _ITEMS = "$tensor", "$tuple", "$items"


def split(state: Any, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """(JSON value, {name: tensor}); names follow the path below `prefix`, e.g. "model/layers.0.weight".

    Leaves are tensors, numbers, texts, bools or None; anything else is a CheckpointError that names its
    place.
    """
    tensors: dict[str, Tensor] = {}
    return _split(state, prefix, tensors), tensors


def join(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The state that `split` took apart."""
    if isinstance(value, list):
        return [join(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(join(item, tensors) for item in value[_TUPLE])
    if _ITEMS in value:
        return {key: join(item, tensors) for key, item in value[_ITEMS]}
    return {key: join(item, tensors) for key, item in value.items()}


def _split(state: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(state, Tensor):
        tensors[path] = state
        return {_TENSOR: path}
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    if isinstance(state, tuple):
        return {_TUPLE: [_split(item, f"{path}/{index}", tensors) for index, item in enumerate(state)]}
    if isinstance(state, list):
        return [_split(item, f"{path}/{index}", tensors) for index, item in enumerate(state)]
    if isinstance(state, dict):
        pairs = [(key, _split(item, f"{path}/{key}", tensors)) for key, item in state.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in state):
            return dict(pairs)
        if all(isinstance(key, (int, str)) for key in state):
            return {_ITEMS: [list(pair) for pair in pairs]}
    raise CheckpointError(
        f"{path} cannot be saved: {type(state).__name__} is neither a tensor, a JSON value, nor a dict with "
        "text or integer keys. Convert it in state_dict()."
    )


def rng_state(device: torch.device) -> dict[str, Any]:
    """State of the torch (CPU, and `device` if CUDA), numpy and Python generators."""
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [algorithm, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python": random.getstate(),
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what rng_state gave; the CUDA part only if it was saved on CUDA and `device` is CUDA."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    algorithm, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    random.setstate(state["python"])
