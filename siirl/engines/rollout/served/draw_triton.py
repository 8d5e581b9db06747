"""Tokens drawn by seeds, and their log-probs, in one pass over the logits, as Triton kernels.

What `sampling.sample_tokens` does, without a copy of the logits in float32. A row is cut into blocks: the
first kernel reads each block once, the second chooses a block and reads that one again. Needs a CUDA device
and Triton. Shapes: B rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _scaled(at, inside, temperature):
    """Logits over the temperature, float32; -inf outside. Of a greedy row the logits as they are."""
    logits = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    return logits / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def _add_up(
    logits_ptr, stride, temperature_ptr, top_ptr, mass_ptr, best_ptr, vocab, blocks, BLOCK: tl.constexpr
):
    row, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    logits = _scaled(logits_ptr + row.to(tl.int64) * stride + token, token < vocab, temperature)
    top = tl.max(logits, axis=0)
    at = row * blocks + block
    tl.store(top_ptr + at, top)
    # Of a block that is all -inf the mass is 0, and not exp(-inf + inf).
    mass = tl.sum(tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)), axis=0)
    tl.store(mass_ptr + at, mass)
    tl.store(best_ptr + at, block * BLOCK + tl.argmax(logits, axis=0))


@triton.jit
def _uniform(seed, number):
    """sampling.uniforms: number `number` (from 0) of the SplitMix64 stream of a seed, of (0, 1)."""
    state = seed.to(tl.uint64, bitcast=True) + (number + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    bits = (state ^ (state >> 31)) >> 32
    return (bits.to(tl.int64).to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def _passed(mass, target, place):
    """Where the running sum of float64 masses passes target: a place whose mass is above 0."""
    reached = tl.sum((tl.cumsum(mass, axis=0) <= target).to(tl.int32), axis=0)
    return tl.minimum(reached, tl.max(tl.where(mass > 0.0, place, 0), axis=0))


@triton.jit
def _choose(
    logits_ptr,
    stride,
    temperature_ptr,
    seed_ptr,
    number_ptr,
    top_ptr,
    mass_ptr,
    best_ptr,
    token_ptr,
    log_prob_ptr,
    vocab,
    blocks,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCKS)
    here = row * blocks + place
    tops = tl.load(top_ptr + here, mask=place < blocks, other=float("-inf"))
    top = tl.max(tops, axis=0)
    weight = tl.load(mass_ptr + here, mask=place < blocks, other=0.0) * tl.exp(tops - top)
    mass = tl.where(place < blocks, weight, 0.0).to(tl.float64)
    total = tl.sum(mass, axis=0)
    temperature = tl.load(temperature_ptr + row)
    logits_at = logits_ptr + row.to(tl.int64) * stride
    if temperature == 0.0:
        # Of tops that are not numbers the arg-max may be a place past the last block.
        token = tl.load(best_ptr + row * blocks + tl.minimum(tl.argmax(tops, axis=0), blocks - 1))
    else:
        target = _uniform(tl.load(seed_ptr + row), tl.load(number_ptr + row)) * total
        block = _passed(mass, target, place)
        before = tl.sum(tl.where(place < block, mass, 0.0), axis=0)
        within = (target - before) / tl.sum(tl.where(place == block, mass, 0.0), axis=0)
        inner = tl.arange(0, BLOCK)
        tokens = block * BLOCK + inner
        part = tl.exp(_scaled(logits_at + tokens, tokens < vocab, temperature) - top).to(tl.float64)
        token = block * BLOCK + _passed(part, within * tl.sum(part, axis=0), inner)
    # Logits that are not numbers give a token all the same, and a log-prob that is not a number.
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    tl.store(token_ptr + row, token.to(tl.int64))
    chosen = _scaled(logits_at + token, token < vocab, temperature)
    tl.store(log_prob_ptr + row, chosen - top - tl.log(total.to(tl.float32)))


def draw(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, number_B: Tensor) -> tuple[Tensor, Tensor]:
    """(token_B int64, log_prob_B float32, nats, of softmax(logits / temperature)).

    logits_BV: of any float type, each row contiguous. temperature_B: float32; at 0 the arg-max, whose
    log-prob is that of temperature 1. seed_B, number_B: int64, see sampling.uniforms.
    """
    rows, vocab = logits_BV.shape
    assert logits_BV.stride(1) == 1
    blocks = triton.cdiv(vocab, BLOCK)
    top_BN = torch.empty(rows, blocks, dtype=torch.float32, device=logits_BV.device)
    mass_BN = torch.empty_like(top_BN)
    best_BN = torch.empty_like(top_BN, dtype=torch.int32)
    token_B = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    log_prob_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    if rows == 0:
        return token_B, log_prob_B
    stride = logits_BV.stride(0)
    _add_up[(rows, blocks)](
        logits_BV, stride, temperature_B, top_BN, mass_BN, best_BN, vocab, blocks, BLOCK, num_warps=8
    )
    _choose[(rows,)](
        logits_BV,
        stride,
        temperature_B,
        seed_B,
        number_B,
        top_BN,
        mass_BN,
        best_BN,
        token_B,
        log_prob_B,
        vocab,
        blocks,
        triton.next_power_of_2(blocks),
        BLOCK,
        num_warps=8,
    )
    return token_B, log_prob_B
