"""The random-number generators of this process, as a state that a checkpoint can hold."""

import random
from typing import Any

import numpy as np
import torch


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
