"""What fla-core (0.6) computes of packed rows, token by token, by its functions' names and arguments.

The recurrences as papers have them: Yang et al., "Gated Delta Networks" (2024), equation 10; Dao and Gu,
"Transformers are SSMs" (2024), equation 16, of which gated linear attention is the general form.
"""

import sys
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

CALLS: list[str] = []
"""Names of the functions that were called."""


BESIDE = "siirl.engines.train.attention.convolution_kernels"
"""Kernels of siirl's own that are taken beside fla's, and need a GPU as these do."""


def install(modules: dict[str, Any] = sys.modules, saving: bool = False) -> None:
    """Have `import fla...` find this module's functions, where it looks for modules.

    saving: those that compute nothing, and save for a backward pass what fla's save.
    """
    functions = {
        "fla.modules.causal_conv1d": causal_conv1d,
        "fla.modules.norm.fused_norm_gate": rms_norm_gated,
        "fla.ops.gated_delta_rule": chunk_gated_delta_rule,
        "fla.ops.simple_gla": chunk_simple_gla,
    }
    for name in ("fla", "fla.modules", "fla.modules.norm", "fla.ops"):
        modules[name] = types.ModuleType(name)
    for name, function in functions.items():
        modules[name] = types.ModuleType(name)
        setattr(modules[name], function.__name__, SAVING[function.__name__] if saving else function)
    modules[BESIDE] = types.ModuleType(BESIDE)
    modules[BESIDE].WIDEST, modules[BESIDE].convolved = 0, None  # graphs have its taps, as where fla is not


def _segments(x_1N: Tensor, cu_seqlens: Tensor, initial_state: Tensor | None) -> Iterator[tuple[int, slice]]:
    """As fla does, with its refusals."""
    assert len(x_1N) == 1, "The batch size is expected to be 1"
    ends = cu_seqlens.tolist()
    assert initial_state is None or len(initial_state) == len(ends) - 1, "The number of initial states"
    assert ends[0] == 0 and ends[-1] == x_1N.shape[1]
    return enumerate(slice(*run) for run in pairwise(ends))


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """x [1, N, C], weight [C, W], states [S, C, W]: the last W inputs."""
    CALLS.append("causal_conv1d")
    channels, width = weight.shape
    outs, finals = [], []
    for number, tokens in _segments(x, cu_seqlens, initial_state):
        empty = x.new_zeros(channels, width)
        before = empty if initial_state is None else initial_state[number]
        seen = torch.cat([torch.cat([empty[:, :1], before[:, 1:]], 1), x[0, tokens].T], 1)
        out = (seen.unfold(1, width, 1)[:, 1:] * weight.unsqueeze(1)).sum(-1).T
        out = out if bias is None else out + bias
        outs.append(torch.nn.functional.silu(out) if activation in ("silu", "swish") else out)
        finals.append(seen[:, -width:])
    return torch.cat(outs).unsqueeze(0), torch.stack(finals) if output_final_state else None


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: None,
    activation: str = "swish",
    eps: float = 1e-6,
    **kwargs: Any,
) -> Tensor:
    """x, g [M, V], weight [V]."""
    CALLS.append("rms_norm_gated")
    assert bias is None and activation == "swish"
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight * torch.nn.functional.silu(g)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """q, k [1, N, H, K], v [1, N, H, V], g and beta [1, N, H], states [S, H, K, V]."""
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))

    def after(state: Tensor, at: int) -> Tensor:
        key, rate = k[0, at].unsqueeze(-1), beta[0, at, :, None, None]
        state = state * g[0, at].exp()[:, None, None]
        told = (state * key).sum(1, keepdim=True)
        return state + key * (v[0, at].unsqueeze(1) - told) * rate

    given = (q, v, scale, initial_state, output_final_state, cu_seqlens)
    return _recurrent("chunk_gated_delta_rule", after, *given)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As chunk_gated_delta_rule, without its rate and its correction."""

    def after(state: Tensor, at: int) -> Tensor:
        return state * g[0, at].exp()[:, None, None] + k[0, at].unsqueeze(-1) * v[0, at].unsqueeze(1)

    given = (q, v, scale, initial_state, output_final_state, cu_seqlens)
    return _recurrent("chunk_simple_gla", after, *given)


def _recurrent(
    name: str,
    after: Callable[[Tensor, int], Tensor],
    q: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor | None]:
    CALLS.append(name)
    outs, finals = [], []
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for number, tokens in _segments(q, cu_seqlens, initial_state):
        empty = q.new_zeros(*q.shape[2:], v.shape[-1])
        state = empty if initial_state is None else initial_state[number]
        for at in range(tokens.start, tokens.stop):
            state = after(state, at)
            outs.append(scale * (state * q[0, at].unsqueeze(-1)).sum(1))
        finals.append(state)
    return torch.stack(outs).unsqueeze(0), torch.stack(finals) if output_final_state else None


class _Saved(torch.autograd.Function):
    """Numbers that nobody has computed, of which a backward pass would need others."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, saved: tuple[Tensor | None, ...], *given: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return torch.empty_like(out, memory_format=torch.contiguous_format)


def _of_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Any = None, **_: Any):
    """fla.modules.causal_conv1d.ops.CausalConv1dFunction."""
    return _Saved.apply(x, (x, weight, bias, initial_state), x), None


def _of_norm(x: Tensor, g: Tensor, weight: Tensor, bias: None, **_: Any):
    """fla.modules.norm.fused_norm_gate.LayerNormGatedFunction."""
    rstd = x.new_empty(len(x), dtype=torch.float32)
    return _Saved.apply(x, (x.contiguous(), g.contiguous(), weight, rstd), x, g)


def _of_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Any = None, **_: Any):
    """fla.ops.gated_delta_rule.chunk.ChunkGatedDeltaRuleFunction: norms of q and k, sums of g in a chunk, and
    of each of its 64 tokens a number to each."""
    inverse = v.new_empty(*v.shape[:3], 64)
    norms = [x.new_empty(x.shape[:3], dtype=torch.float32) for x in (q, k)]
    saved = (q.clone(), k.clone(), v.contiguous(), g.float().clone(), beta.contiguous(), inverse, *norms)
    return _Saved.apply(v, (*saved, initial_state), q, k, v, g, beta), None


def _of_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Any = None, **_: Any):
    """fla.ops.simple_gla.chunk.ChunkSimpleGLAFunction."""
    saved = (*(x.contiguous() for x in (q, k, v)), g.clone(), initial_state)
    return _Saved.apply(v, saved, q, k, v, g), None


SAVING = {
    "causal_conv1d": _of_convolution,
    "rms_norm_gated": _of_norm,
    "chunk_gated_delta_rule": _of_rule,
    "chunk_simple_gla": _of_attention,
}
"""Of each function that one of fla 0.6, by whose source it saves what it saves."""
