"""Language models of vLLM 0.24 that it has as a part of vision models alone, and loads by no name.

Imported in an engine process and in vLLM's workers, where vLLM has no such class under its name
(`native.py`); later versions have.
"""

import torch
from torch import Tensor
from vllm.model_executor.models import qwen3_5
from vllm.model_executor.models.interfaces import IsHybrid, SupportsMRoPE


class Qwen3_5ForCausalLM(qwen3_5.Qwen3_5ForCausalLM, IsHybrid, SupportsMRoPE):
    """With what vLLM asks a class for: which states its layers have, and what positions mean."""

    get_mamba_state_dtype_from_config = (
        qwen3_5.Qwen3_5ForConditionalGeneration.get_mamba_state_dtype_from_config
    )
    get_mamba_state_shape_from_config = (
        qwen3_5.Qwen3_5ForConditionalGeneration.get_mamba_state_shape_from_config
    )
    get_mamba_state_copy_func = qwen3_5.Qwen3_5ForConditionalGeneration.get_mamba_state_copy_func

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list) -> tuple[Tensor, int]:
        """Time, height and width of a text's tokens: all three their place, [3, tokens]."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0
