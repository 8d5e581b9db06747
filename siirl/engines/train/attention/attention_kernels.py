"""Which kernels compute the attention of packed rows."""

from types import ModuleType

import torch

from siirl.config.common import FLA, FLASH_4, why_not_fla
from siirl.engines.train.attention.packed_attention import PACKED_ATTENTION
from siirl.engines.train.attention.shared_attention import FlashKernels
from siirl.errors import ConfigError

FLASH_4_CAPABILITY = (9, 0)
"""CUDA's compute capability from which FlashAttention 4 has the kernels."""


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
