"""Rows packed for attention, some with a prompt in common; and attention of one row by the definition."""

import random

import torch

from siirl.engines.train.packed.sequence_bounds import SequenceBounds, SharedPrompts

HEADS, KV_HEADS, SIZE = 4, 2, 8


def bounds_of(lengths: list[int]) -> SequenceBounds:
    longest = max(lengths)
    index = [row * longest + place for row, length in enumerate(lengths) for place in range(length)]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return SequenceBounds(ends, torch.tensor(index), longest)


def sample(num_tokens: int, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(1, h, num_tokens, SIZE, generator=draw, dtype=torch.float64) for h in heads]


def alone(query, key, value, scale, window):
    """Attention of one sequence by the definition, [1, L, H, D]."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    length = query.shape[2]
    place = torch.arange(length, device=query.device)
    ago = place[:, None] - place
    hidden = (ago < 0) | (ago >= (window or length))
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def forest_bounds(prompts: list[int], responses: list[list[int]], singles: list[int]) -> SequenceBounds:
    """Prompts first, then the responses of each, then rows that share nothing."""
    lengths = [*prompts, *(n for of_prompt in responses for n in of_prompt if n), *singles]
    plain, totals = bounds_of(lengths), [sum(of_prompt) for of_prompt in responses]
    ends = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (prompts, totals)]
    shared = SharedPrompts(*ends, tuple(prompts), tuple(tuple(n for n in x if n) for x in responses))
    return SequenceBounds(plain.cu_seqlens, plain.padded_index, plain.max_length, shared)


def each_row(prompts: list[int], responses: list[list[int]], singles: list[int]) -> list[tuple[list, list]]:
    """Of each row with tokens of its own: its packed tokens in order, and those of them that are its own."""
    rows, at, end = [], sum(prompts), 0
    for num, of_prompt in zip(prompts, responses, strict=True):
        prompt, end = list(range(end, end + num)), end + num
        rows.append((prompt, prompt))
        for length in of_prompt:
            own, at = list(range(at, at + length)), at + length
            rows.append((prompt + own, own))
    for length in singles:
        own, at = list(range(at, at + length)), at + length
        rows.append((own, own))
    return [row for row in rows if row[1]]


def drawn_forest(seed: int, scale: int = 1) -> tuple[list[int], list[list[int]], list[int]]:
    """Tokens of shared prompts, of the responses of each, of other rows; some responses have none."""
    rng = random.Random(seed)
    prompts = [rng.randint(1, 6 * scale) for _ in range(rng.randint(1, 3))]
    responses = [[rng.randint(0, 5 * scale) for _ in range(rng.randint(1, 4))] for _ in prompts]
    responses[-1].append(2)
    if len(prompts) > 1:
        responses[0] = [0, 0]
    return prompts, responses, [rng.randint(1, 7 * scale) for _ in range(rng.randint(0, 2))]


def rows_alone(query, key, value, prompts, responses, singles, scale):
    """Attention of each row by itself, in its packed places, [1, N, H, D]."""
    expected = torch.zeros_like(query.transpose(1, 2))
    for tokens, own in each_row(prompts, responses, singles):
        of_row = alone(*(x[:, :, tokens] for x in (query, key, value)), scale, None)
        expected = expected.index_copy(1, torch.tensor(own, device=query.device), of_row[:, -len(own) :])
    return expected
