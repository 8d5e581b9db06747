"""Gated delta nets and Mamba-2 by the kernels of the package fla-core, for packed rows as they lie, on GPUs.

What `state_layers.py` computes of one part of a packed batch by torch's kernels: the same arguments, and the
same numbers but for rounding. Products are in the type of the values, states in float32.
Source: Yang et al., "Gated Delta Networks" (2024).

Legend: N packed tokens, S segments, C channels of the convolution, W its width, H heads, G groups of them, K
and V features of a head's keys and values.
"""

from typing import Any

import torch
import torch.nn.functional as F
from fla.modules.causal_conv1d import causal_conv1d
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.simple_gla import chunk_simple_gla
from torch import Tensor, nn

from siirl.engines.train.attention.convolution_kernels import WIDEST as WIDEST
from siirl.engines.train.attention.convolution_kernels import convolved as convolved
from siirl.engines.train.packed.sequence_bounds import SequenceBounds


def convolution(
    x_NC: Tensor,
    weight_CW: Tensor,
    bias: Tensor | None,
    activation: str | None,
    part: SequenceBounds,
    state: Tensor | None,
    ends: bool,
) -> tuple[Tensor, Tensor | None]:
    """state: inputs before each segment, [S, C, W], of which the first is not read."""
    y_1NC, last = causal_conv1d(
        x_NC.unsqueeze(0),
        weight=weight_CW,
        bias=bias,
        initial_state=state,
        output_final_state=ends,
        activation=activation,
        cu_seqlens=part.cu_seqlens,
    )
    return y_1NC.squeeze(0), last


def rule(
    *given: Tensor, part: SequenceBounds, state: Tensor | None, ends: bool
) -> tuple[Tensor, Tensor | None]:
    """given: query, key, value, decay, rate. state: [S, H, K, V]."""
    q, k, v, decay, rate = (x.unsqueeze(0) for x in given)
    out_1NHV, last = chunk_gated_delta_rule(
        *(q, k, v),
        g=decay,
        beta=rate,
        initial_state=state,
        output_final_state=ends,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=part.cu_seqlens,
    )
    return out_1NHV.squeeze(0), last


def gated_norm(norm: nn.Module, x_MV: Tensor, gate_MV: Tensor) -> Tensor:
    """What a gated delta net gives its output projection: the norm of x, times the SiLU of its gate.

    Of compiled layers torch's own, of which the compiler makes one kernel too; it does not look into fla's.
    The module's class is one that was made for this.
    """
    if torch.compiler.is_compiling():
        return super(type(norm), norm).forward(x_MV, gate_MV)
    return rms_norm_gated(x_MV, gate_MV, norm.weight, None, activation="swish", eps=norm.variance_epsilon)


def scan(
    x_NHV: Tensor,
    step_NH: Tensor,
    A: Tensor,
    b_NGK: Tensor,
    c_NGK: Tensor,
    *,
    part: SequenceBounds,
    state: Tensor | None,
    ends: bool,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    **extra: Any,
) -> tuple[Tensor, Tensor | None]:
    """state: [S, H, K, V]. A scan is gated linear attention: a step scales what is written, and the decay of
    a head is its exp(A * step)."""
    step_NH = F.softplus(step_NH.to(A.dtype) + dt_bias).clamp(*dt_limit)
    of_group = x_NHV.shape[1] // b_NGK.shape[1]
    key, query = (x.repeat_interleave(of_group, dim=1) for x in (b_NGK, c_NGK))
    out_1NHV, last = chunk_simple_gla(
        query.unsqueeze(0),
        key.unsqueeze(0),
        (x_NHV * step_NH.unsqueeze(-1)).to(x_NHV.dtype).unsqueeze(0),
        g=(A * step_NH).unsqueeze(0),
        scale=1.0,
        initial_state=state,
        output_final_state=ends,
        cu_seqlens=part.cu_seqlens,
    )
    return out_1NHV.squeeze(0) + D.unsqueeze(-1) * x_NHV, last
