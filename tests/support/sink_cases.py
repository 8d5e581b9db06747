"""Attention with sinks, written out in float64, and inputs for it."""

import torch
from torch import Tensor

HEADS, KV_HEADS, SIZE = 4, 2, 8


def inputs(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    """Queries, keys, values as a model has them, and sinks, of which one takes next to nothing."""
    torch.manual_seed(0)
    num = sum(lengths)
    made = [torch.randn(1, heads, num, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [x.to(device, dtype).requires_grad_() for x in (*made, torch.tensor([0.5, 3.0, -1.0, -30.0]))]


def by_hand(given: list[Tensor], lengths: tuple[int, ...], window: int | None, scale: float) -> Tensor:
    """[1, N, H, D], row by row and head by head."""
    q, k, v, sinks = (x.double() for x in given)
    rows, start = [], 0
    for length in lengths:
        row = slice(start, start + length)
        heads = []
        for head in range(HEADS):
            of_key = head * KV_HEADS // HEADS
            logits = q[0, head, row] @ k[0, of_key, row].t() * scale
            place = torch.arange(length, device=q.device)
            ahead = place[None, :] > place[:, None]
            behind = place[None, :] <= place[:, None] - (window or length)
            logits = logits.masked_fill(ahead | behind, -torch.inf)
            shares = torch.cat([logits, sinks[head].expand(length, 1)], 1).softmax(1)
            heads.append(shares[:, :-1] @ v[0, of_key, row])
        rows.append(torch.stack(heads, 1))
        start += length
    return torch.cat(rows).unsqueeze(0)
