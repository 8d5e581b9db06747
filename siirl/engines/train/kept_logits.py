"""How many logits a training micro-batch keeps for its backward pass."""

import torch
from torch import Tensor

from siirl.compiler.memory.estimate import KEPT_LOGITS_BYTES

GRADIENT_BYTES = 12
"""That backward needs for each weight of the head: its gradient in fp32, in the compute type, and sent."""
SPARE_SHARE = 0.05
"""Of a device's memory, which is left alone."""


def kept_logits_bytes(num_tokens: int, weight_VD: Tensor, by_room: bool = True) -> int:
    """Bytes of logits, of so many tokens and words with these weights, that are not computed a second time.

    All where they are few, as the estimate of memory has them. Else as many as there is room for on the GPU
    now, when a pass without recomputing needs the most: behind the head, memory is only given back.
    by_room: false where other micro-batches are under way, which will need memory before this one's backward.
    """
    if not torch.is_grad_enabled():
        return 0
    needed = num_tokens * weight_VD.shape[0] * weight_VD.element_size()
    if needed <= KEPT_LOGITS_BYTES:
        return needed
    return _room(weight_VD) if by_room and weight_VD.is_cuda else 0


def _room(weight_VD: Tensor) -> int:
    """Bytes that are free on the device, with what the allocator holds unused, less what backward needs."""
    device = weight_VD.device
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + unused - GRADIENT_BYTES * weight_VD.numel() - int(SPARE_SHARE * total))
