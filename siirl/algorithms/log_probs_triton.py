"""The row-wise parts of log_probs.py as Triton kernels: one pass over a chunk's logits, no fp32 copy of them.

One program works on one token: its row of V logits, a block at a time. Needs a CUDA device and Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
LANE = tl.constexpr(8)
"""Words of a lane, which one thread reads at once."""
FAR = tl.constexpr(-1e30)
NUM_WARPS = 16


@triton.jit
def _forward(
    logits_ptr,
    row_stride,
    target_ptr,
    log_prob_ptr,
    entropy_ptr,
    norm_ptr,
    vocab,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    columns = tl.arange(0, BLOCK)
    # Of each lane's words: the greatest z so far, the sum of exp(z - greatest), and of that times
    # (z - greatest). FAR stands for nothing: what it adds up to is nothing when a greater z has come.
    greatest = tl.full([BLOCK // LANE], FAR, tl.float32)
    total = tl.zeros([BLOCK // LANE], tl.float32)
    weighted = tl.zeros([BLOCK // LANE], tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        z = tl.load(row_ptr + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
        z = tl.reshape(tl.where(inside, z, FAR), [BLOCK // LANE, LANE])
        highest = tl.maximum(greatest, tl.max(z, 1))
        shift = greatest - highest
        keep = tl.exp(shift)
        distance = z - highest[:, None]
        gain = tl.exp(distance)
        weighted = keep * (weighted + total * shift) + tl.sum(gain * distance, 1)
        total = keep * total + tl.sum(gain, 1)
        greatest = highest
    top = tl.max(greatest, 0)
    shift = greatest - top
    keep = tl.exp(shift)
    sum_weighted = tl.sum(keep * (weighted + total * shift), 0)
    sum_total = tl.sum(keep * total, 0)
    log_sum = tl.log(sum_total)
    target_z = tl.load(row_ptr + tl.load(target_ptr + row)).to(tl.float32) * scale
    tl.store(log_prob_ptr + row, target_z - top - log_sum)
    tl.store(entropy_ptr + row, log_sum - sum_weighted / sum_total)
    tl.store(norm_ptr + 2 * row, top)
    tl.store(norm_ptr + 2 * row + 1, log_sum)


@triton.jit
def _backward(
    logits_ptr,
    row_stride,
    grad_ptr,
    grad_stride,
    target_ptr,
    norm_ptr,
    entropy_ptr,
    grad_log_prob_ptr,
    grad_entropy_ptr,
    vocab,
    scale,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    top = tl.load(norm_ptr + 2 * row)
    log_sum = tl.load(norm_ptr + 2 * row + 1)
    grad_log_prob = tl.load(grad_log_prob_ptr + row)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    z = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    log_p = z * scale - top - log_sum
    inner = grad_log_prob
    if HAS_ENTROPY:
        inner += tl.load(grad_entropy_ptr + row) * (log_p + tl.load(entropy_ptr + row))
    grad = tl.where(columns == target, grad_log_prob, 0.0) - tl.where(inside, tl.exp(log_p) * inner, 0.0)
    tl.store(
        grad_ptr + row * grad_stride + columns, (grad * scale).to(grad_ptr.dtype.element_ty), mask=inside
    )


def forward_chunk(logits_CV: Tensor, target_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of the target, entropy, norm [C, 2]), fp32, of a chunk; see log_probs.py."""
    log_prob_C = torch.empty(len(target_C), dtype=torch.float32, device=logits_CV.device)
    entropy_C, norm_C2 = torch.empty_like(log_prob_C), log_prob_C.new_empty(len(target_C), 2)
    if len(target_C):
        _forward[(len(target_C),)](
            logits_CV,
            logits_CV.stride(0),
            target_C,
            log_prob_C,
            entropy_C,
            norm_C2,
            logits_CV.shape[1],
            1.0 / temperature,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return log_prob_C, entropy_C, norm_C2


def backward_chunk(
    logits_CV: Tensor,
    target_C: Tensor,
    temperature: float,
    norm_C2: Tensor,
    grad_log_prob_C: Tensor,
    entropy_C: Tensor,
    grad_entropy_C: Tensor | None,
    out_CV: Tensor,
) -> None:
    """The gradient to a chunk's logits, into out_CV, which may be logits_CV itself."""
    grad_log_prob_C = grad_log_prob_C.contiguous()
    grad_entropy_C = None if grad_entropy_C is None else grad_entropy_C.contiguous()
    if len(target_C):
        _backward[(len(target_C), triton.cdiv(logits_CV.shape[1], BLOCK))](
            logits_CV,
            logits_CV.stride(0),
            out_CV,
            out_CV.stride(0),
            target_C,
            norm_C2,
            entropy_C,
            grad_log_prob_C,
            grad_log_prob_C if grad_entropy_C is None else grad_entropy_C,
            logits_CV.shape[1],
            1.0 / temperature,
            HAS_ENTROPY=grad_entropy_C is not None,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
