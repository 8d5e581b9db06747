"""Attention over packed rows of which several share one prompt, as functions with a backward of their own.

A token of a response attends to its own segment, causally, and to all of its prompt, which stands in the
batch once. GPUs do it in one call, for which the keys and values of each row are laid side by side
(RowAttention). CPUs do it in two, and GPUs where prompts are too long for that
(SharedAttention): to its own, and to its prompt, joined by the logarithms of their normalisers. The softmax
over both is that over each times its share of the sum, and the gradients of both follow from the joined
output and normaliser. Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023).

Legend: N packed tokens, P those of shared prompts, R those of their responses, H query heads, K key-value
heads, D head size, S segments, L the longest, M keys that rows read.
"""

import functools
import inspect
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from siirl.engines.train.packed.sequence_bounds import RowKeys, SequenceBounds, SharedPrompts

if torch.cuda.is_available():
    from siirl.engines.train import triton_kernels
else:
    triton_kernels = None

aten = torch.ops.aten


class Attended(NamedTuple):
    """What a part of the attention gives."""

    out: Tensor
    """[N, H, D]."""
    lse: Tensor
    """[H, N], the log of the softmax's normaliser."""
    more: tuple[Tensor, ...] = ()
    """What the backward of the kernel needs besides."""


Grads = tuple[Tensor, Tensor, Tensor]


class Kernels(Protocol):
    """The parts, forward and backward; grad, out and lse are those of the joined attention."""

    def own(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: SequenceBounds,
        scale: float | None,
        window: int | None = None,
    ) -> Attended:
        """Causal attention within each segment. window: tokens that a query sees, itself included.

        Of FlashKernels within each row, where bounds.keys says what these read.
        """

    def own_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Attended,
        bounds: SequenceBounds,
        scale: Any,
        window: int | None = None,
    ) -> Grads: ...

    def prompt(self, q: Tensor, k: Tensor, v: Tensor, shared: SharedPrompts, scale: float | None) -> Attended:
        """Responses [R, H, D] to all of their prompts [P, K, D]."""

    def prompt_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        at: Attended,
        shared: SharedPrompts,
        scale: Any,
        into: Grads,
    ) -> None:
        """Adds the gradients to those of the other part."""


class FlashKernels:
    """torch's variable-length kernels, in bf16 or fp16 on CUDA."""

    takes_strides = False
    """Whether tokens and heads may lie anyhow, and the gradients lie as the inputs."""

    def alone(self, q, k, v, bounds, scale, window):
        """Causal attention of rows that share nothing, [N, H, D], with gradients."""
        attend, options = varlen_kernel()
        left = -1 if window is None else window - 1
        cu, longest = bounds.cu_seqlens, bounds.max_length
        return attend(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(left, 0), **options)

    def shared(self, q, k, v, bounds, scale):
        """Causal attention of rows of which some share a prompt, [N, H, D], with gradients."""
        attention = SharedAttention if bounds.keys is None else RowAttention
        return attention.apply(q, k, v, bounds, scale, self)

    def own(self, q, k, v, bounds, scale, window=None):
        row_k, row_v = gathered(k, v, bounds.keys)
        return self._forward(q, row_k, row_v, *self._within(bounds), True, scale, window)

    def own_backward(self, grad, q, k, v, at, bounds, scale, window=None):
        row_k, row_v = gathered(k, v, bounds.keys)
        dq, dk, dv = self._backward(grad, q, row_k, row_v, at, *self._within(bounds), True, scale, window)
        return dq, *added_up(dk, dv, k, v, bounds.keys)

    def prompt(self, q, k, v, shared, scale):
        return self._forward(q, k, v, *self._between(shared), False, scale)

    def prompt_backward(self, grad, q, k, v, at, shared, scale, into):
        found = self._backward(grad, q, k, v, at, *self._between(shared), False, scale)
        for to, x in zip(into, found, strict=True):
            to += x

    @staticmethod
    def _within(bounds: SequenceBounds) -> tuple[Tensor, Tensor, int, int]:
        cu, longest, keys = bounds.cu_seqlens, bounds.max_length, bounds.keys
        return (cu, cu, longest, longest) if keys is None else (cu, keys.ends, longest, keys.longest)

    @staticmethod
    def _between(shared: SharedPrompts) -> tuple[Tensor, Tensor, int, int]:
        longest = max(shared.totals), max(shared.prompt_lengths)
        return shared.response_ends, shared.prompt_ends, *longest

    @staticmethod
    def _forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window=None) -> Attended:
        seen = _flash_window(window)
        out, lse, *more, _ = aten._flash_attention_forward(
            *(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal and not seen, False), scale=scale, **seen
        )
        return Attended(out, lse, tuple(more))

    @staticmethod
    def _backward(grad, q, k, v, at, cu_q, cu_k, max_q, max_k, causal, scale, window=None) -> Grads:
        seen = _flash_window(window)
        return aten._flash_attention_backward(
            *(grad, q, k, v, at.out, at.lse, cu_q, cu_k, max_q, max_k, 0.0, causal and not seen, *at.more),
            scale=scale,
            **seen,
        )


def _flash_window(window: int | None) -> dict[str, int]:
    """How torch's variable-length kernels are told of it: it says what is causal, too."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


@functools.cache
def varlen_kernel():
    """torch's kernel, and the option to share key-value heads: implied up to torch 2.11, named since."""
    from torch.nn.attention.varlen import varlen_attn

    named = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return varlen_attn, {"enable_gqa": True} if named else {}


class PaddedKernels:
    """torch's kernel of the CPU: segments as a right-padded batch, each prompt with its responses by itself.

    It knows no shared key-value heads: these are repeated.
    """

    def shared(self, q, k, v, bounds, scale):
        """As FlashKernels'; in two parts."""
        return SharedAttention.apply(q, k, v, bounds, scale, self)

    def own(self, q, k, v, bounds, scale, window=None):
        k, v = _repeated(q, k, v)
        out, lse = torch.empty_like(q), []
        for tokens, part in bounds.parts:
            columns, mask = (_padded(x[tokens], part) for x in (q, k, v)), _band_of(part, window, q.dtype)
            found = aten._scaled_dot_product_flash_attention_for_cpu(
                *columns, 0.0, mask is None, attn_mask=mask, scale=scale
            )
            out[tokens] = _packed(found[0], part)
            lse.append(_packed(found[1].unsqueeze(-1), part).squeeze(-1).t())
        return Attended(out, torch.cat(lse, 1))

    def own_backward(self, grad, q, k, v, at, bounds, scale, window=None):
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        every = (grad, q, *_repeated(q, k, v), at.out, at.lse.t().unsqueeze(-1))
        for tokens, part in bounds.parts:
            *columns, lse = (_padded(x[tokens], part) for x in every)
            mask = _band_of(part, window, q.dtype)
            found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *columns,
                lse.squeeze(-1).contiguous(),
                0.0,
                mask is None,
                attn_mask=mask,
                scale=scale,
            )
            for to, x in zip(grads, found, strict=True):
                to[tokens] = _summed(_packed(x, part), to.shape[1])
        return grads

    def prompt(self, q, k, v, shared, scale):
        k, v = _repeated(q, k, v)
        found = [
            aten._scaled_dot_product_flash_attention_for_cpu(*map(_alone, part), 0.0, False, scale=scale)
            for part in _by_prompt(shared, (q,), (k, v))
        ]
        return Attended(
            torch.cat([out[0].transpose(0, 1) for out, _ in found]),
            torch.cat([lse[0] for _, lse in found], 1),
        )

    def prompt_backward(self, grad, q, k, v, at, shared, scale, into):
        to_q, *to_prompt = into
        lse = at.lse.t().contiguous()
        parts = zip(
            _by_prompt(shared, (grad, q, at.out, lse.unsqueeze(-1)), _repeated(q, k, v)),
            _by_prompt(shared, (to_q,), tuple(to_prompt)),
            strict=True,
        )
        for columns, places in parts:
            of_grad, of_q, of_out, of_lse, of_k, of_v = map(_alone, columns)
            found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(of_grad, of_q, of_k, of_v, of_out, of_lse.squeeze(-1).contiguous(), 0.0, False), scale=scale
            )
            for to, x in zip(places, found, strict=True):
                to += _summed(x[0].transpose(0, 1), to.shape[1])


def _by_prompt(shared: SharedPrompts, responses: tuple[Tensor, ...], prompts: tuple[Tensor, ...]):
    """For each prompt that has tokens after it: its responses of some columns, itself of others."""
    cuts = [x.split(shared.totals) for x in responses] + [x.split(shared.prompt_lengths) for x in prompts]
    return [part for part in zip(*cuts, strict=True) if len(part[0])]


def _alone(x_NHD: Tensor) -> Tensor:
    """As a batch of one, [1, H, N, D]."""
    return x_NHD.transpose(0, 1).unsqueeze(0)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def _summed(grad_NHD: Tensor, heads: int) -> Tensor:
    """The gradient of repeated heads, [N, K, D]."""
    tokens, repeated, size = grad_NHD.shape
    return grad_NHD if heads == repeated else grad_NHD.reshape(tokens, heads, -1, size).sum(2)


def _band_of(bounds: SequenceBounds, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """What hides the keys outside of a window in the longest segment, if it hides any."""
    length = bounds.max_length
    if window is None or window >= length:
        return None
    hidden = ~band(length, window, bounds.cu_seqlens.device)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -torch.inf)


def band(length: int, window: int, device: torch.device) -> Tensor:
    """Causal mask of a sliding window, [L, L]: a query sees itself and the window - 1 tokens before it."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


def _padded(x_NHD: Tensor, bounds: SequenceBounds) -> Tensor:
    """[S, H, L, D], zeros behind each segment."""
    rows, length = bounds.num_sequences, bounds.max_length
    if rows * length != x_NHD.shape[0]:
        shape = (rows * length, *x_NHD.shape[1:])
        x_NHD = x_NHD.new_zeros(shape).index_copy(0, bounds.padded_index, x_NHD)
    return x_NHD.reshape(rows, length, *x_NHD.shape[1:]).transpose(1, 2)


def _packed(x_SHLD: Tensor, bounds: SequenceBounds) -> Tensor:
    """[N, H, D] of what _padded gave."""
    flat = x_SHLD.transpose(1, 2).flatten(0, 1)
    return flat if len(flat) == len(bounds.padded_index) else flat.index_select(0, bounds.padded_index)


def join_(out_RHD: Tensor, lse_HR: Tensor, more_RHD: Tensor, more_lse_HR: Tensor) -> None:
    """out and lse of one part of the attention become those of both parts."""
    if out_RHD.is_cuda and triton_kernels is not None:
        triton_kernels.join_(out_RHD, lse_HR, more_RHD, more_lse_HR)
        return
    joined = torch.logaddexp(lse_HR, more_lse_HR)
    ours, theirs = ((of_part - joined).exp().t().unsqueeze(-1) for of_part in (lse_HR, more_lse_HR))
    out_RHD.mul_(ours).addcmul_(more_RHD, theirs)
    lse_HR.copy_(joined)


class RowAttention(torch.autograd.Function):
    """Attention of rows by one call: (query [N, H, D], key and value [N, K, D], bounds, scale, kernels) ->
    [N, H, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: SequenceBounds,
        scale: float | None,
        kernels: FlashKernels,
    ) -> Tensor:
        out, lse, more = kernels.own(q, k, v, bounds, scale)
        ctx.save_for_backward(q, k, v, out, lse, *more)
        ctx.extra = bounds, scale, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *more = ctx.saved_tensors
        bounds, scale, kernels = ctx.extra
        at = Attended(out, lse, tuple(more))
        found = kernels.own_backward(grads[0].contiguous(), q, k, v, at, bounds, scale)
        return *found, None, None, None


class SharedAttention(torch.autograd.Function):
    """The same of bounds with shared prompts, by two calls; their keys are None, or the kernels know none."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: SequenceBounds,
        scale: float | None,
        kernels: Kernels,
    ) -> Tensor:
        shared = bounds.shared
        assert shared is not None
        prompts, responses = shared.prompts, shared.responses
        own = kernels.own(q, k, v, bounds, scale)
        prompt = kernels.prompt(q[responses], k[prompts], v[prompts], shared, scale)
        out, lse = own.out, own.lse
        join_(out[responses], lse[:, responses], prompt.out, prompt.lse)
        ctx.save_for_backward(q, k, v, out, lse, *own.more, *prompt.more)
        ctx.extra = bounds, scale, kernels, len(own.more)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *more = ctx.saved_tensors
        bounds, scale, kernels, num_own = ctx.extra
        prompts, responses = bounds.shared.prompts, bounds.shared.responses
        grad = grads[0].contiguous()
        own = Attended(out, lse, tuple(more[:num_own]))
        dq, dk, dv = kernels.own_backward(grad, q, k, v, own, bounds, scale)
        prompt = Attended(out[responses], lse[:, responses].contiguous(), tuple(more[num_own:]))
        kernels.prompt_backward(
            *(grad[responses], q[responses], k[prompts], v[prompts], prompt, bounds.shared, scale),
            into=(dq[responses], dk[prompts], dv[prompts]),
        )
        return dq, dk, dv, None, None, None


def gathered(k_NKD: Tensor, v_NKD: Tensor, keys: RowKeys | None) -> tuple[Tensor, Tensor]:
    """Keys and values [M, K, D] as whole rows read them, in that order; the given ones, if keys is None.

    They live as long as the attention of a layer: a backward pass gathers them again. They are M x K x D
    numbers twice, and in a backward pass their gradients as many: what rows with prompts of their own have.
    """
    if keys is None:
        return k_NKD, v_NKD
    if k_NKD.is_cuda and triton_kernels is not None:
        return triton_kernels.gathered(k_NKD, v_NKD, keys)
    return k_NKD.index_select(0, keys.index), v_NKD.index_select(0, keys.index)


def added_up(
    dk_MKD: Tensor, dv_MKD: Tensor, k_NKD: Tensor, v_NKD: Tensor, keys: RowKeys | None
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v, which lie as these do, of those of the gathered ones.

    Added up in fp32 at least, in the order of the M: the same in every run.
    """
    if keys is None:
        return dk_MKD, dv_MKD
    if dk_MKD.is_cuda and triton_kernels is not None:
        return triton_kernels.added_up(dk_MKD, dv_MKD, k_NKD, v_NKD, keys)
    pairs = ((k_NKD, dk_MKD), (v_NKD, dv_MKD))
    dk, dv = (torch.zeros_like(x).index_add_(0, keys.index, grad) for x, grad in pairs)  # it rounds once
    return dk, dv
