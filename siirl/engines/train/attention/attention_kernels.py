"""Which kernels compute the attention of packed rows."""

import os
from pathlib import Path
from types import ModuleType

import torch

from siirl.config.common import FLA, FLASH_4, why_not_fla
from siirl.engines.train.attention.packed_attention import PACKED_ATTENTION
from siirl.engines.train.attention.shared_attention import FlashKernels
from siirl.errors import ConfigError

FLASH_4_CAPABILITY = (9, 0)
"""CUDA's compute capability from which FlashAttention 4 has the kernels."""
TUNED = {(9, 0): Path(__file__).with_name("fla_hopper")}
"""CUDA's compute capability -> a folder of what autotuning of fla-core 0.6 chose on such a GPU (an H200), a
file for each kernel, as fla reads them."""


def attention_by(kernels: str) -> str:
    """transformers' name of packed attention by these kernels; ConfigError as flash_kernels."""
    if flash_kernels(kernels) is None:
        return PACKED_ATTENTION
    from siirl.engines.train.attention.flash_four import PACKED_BY_FLASH_4

    return PACKED_BY_FLASH_4


def flash_kernels(kernels: str) -> FlashKernels | None:
    """Those of packed attention that a user names (model.attention_kernels); None: torch's.

    ConfigError if they are not there.
    """
    if kernels != FLASH_4:
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < FLASH_4_CAPABILITY:
        raise ConfigError(
            f"model.attention_kernels={kernels}: none for {torch.cuda.get_device_name()} in it. "
            "Set it to torch."
        )
    try:
        from siirl.engines.train.attention.flash_four import FlashFourKernels
    except ImportError as error:
        raise ConfigError(
            f"model.attention_kernels={kernels}: the package flash-attn-4 is not installed, or is of another "
            f"version than siirl knows ({error}). Install it (pip install 'siirl[flash-attn-4]'), or set "
            "attention_kernels=torch."
        ) from error
    return FlashFourKernels()


def state_kernels(kernels: str) -> ModuleType | None:
    """Those of layers with states that a user names (model.attention_kernels); None: torch's.

    ConfigError if they are not there, or would not train on this GPU.
    """
    if kernels != FLA:
        return None
    take_tuned()
    try:
        from siirl.engines.train.attention import fla_kernels
    except ImportError as error:
        raise ConfigError(
            f"model.attention_kernels={FLA}: the package fla-core is not installed, or is of another version "
            f"than siirl knows ({error}). Install it (pip install 'siirl[fla]'), or set "
            "attention_kernels=torch."
        ) from error
    if torch.cuda.is_available():
        import triton

        if problem := why_not_fla(torch.cuda.get_device_capability(), triton.__version__):
            raise ConfigError(f"model.attention_kernels={FLA}: {problem}. Set attention_kernels=torch.")
    return fla_kernels


def take_tuned() -> None:
    """Have fla's kernels be those of TUNED, unless the environment says something of it.

    Before the first import of fla, which transformers does with the modules of its models that have states.
    Otherwise each would be compiled and timed in up to 25 ways, again for other numbers of tokens and types
    of arguments. What is timed, of kernels without a file and on other GPUs, Triton keeps on its disk.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability in TUNED and not os.environ.keys() & {"FLA_CACHE_MODE", "FLA_CONFIG_DIR"}:
        os.environ |= {"FLA_CACHE_MODE": "default", "FLA_CONFIG_DIR": str(TUNED[capability])}
