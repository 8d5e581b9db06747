"""Numbers that follow from the bits of tensors, by which two processes compare what they hold."""

import torch
from torch import Tensor

INT_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SAMPLED = 1 << 14
"""Numbers of a buffer that are added up, unless all are."""
AT_ONCE = 1 << 22
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)


def sampled_sum(data: Tensor, number: int, whole: bool) -> Tensor:
    """The sum of some 4-byte integers of a buffer of bytes, or of all, on its device.

    number: of the call; other ones take other integers.
    """
    values = data[: len(data) // 4 * 4].view(torch.int32)
    step = 1 if whole else max(1, len(values) // SAMPLED)
    return values[number % step :: step].sum(dtype=torch.int64)


def fingerprint(tensor: Tensor) -> Tensor:
    """A number on the tensor's device that differs, but for chance, where any element or its place does."""
    values = tensor.detach().contiguous().view(-1)
    values = values.view(INT_OF_BYTES[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, len(values), AT_ONCE):
        part = values.narrow(0, begin, min(AT_ONCE, len(values) - begin)).to(torch.int64)
        place = torch.arange(begin + 1, begin + 1 + len(part), device=part.device)
        mixed = (part + 1) * (place * MULTIPLIER)
        total = total + (mixed ^ (mixed >> 31)).sum()
    return total
