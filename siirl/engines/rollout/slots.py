"""A KV cache of slots, and attention over it: rows of unlike length run side by side without padding.

Each row has a slot, from its first column on; column c holds the keys and values of the row's token c. A
forward reads any number of new tokens of each row, packed one behind the other: rows that decode bring one,
rows that join bring what their slot does not hold yet of their prompt.
Shapes: N new tokens, R rows, M new tokens of a row at most, S columns, H query heads, K key-value heads,
G = H / K, D head size (of values, it may be another one than of queries and keys).
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.cache_utils import DynamicLayer

SLOT_ATTENTION = "siirl_slots"
"""Name under which transformers finds `slot_attention`; it has no mask function, so no mask is built."""
NO_LIMIT = 1 << 62
GROWTH = 256
"""Columns added to a full cache, at least."""
OTHERS_BETWEEN = 1.0
"""Slots that attention reads over, at most, for each one that it needs, before it gathers those: of rows that
bring one token. Reading over costs as much as the tokens that a row brings."""
MOST_SEEN = 1 << 26
"""Elements of a mask, at most: tokens that need a larger one attend one part after the other."""
ALIKE = 4
"""How many times the pairs of its own a row may be padded to, at most, beside longer rows."""
CHEAP = 1 << 20
"""Pairs of a token and a column that rows may be padded to whatever their lengths: less than another call."""


def alike(counts: Sequence[int], widths: Sequence[int]) -> list[list[int]]:
    """Indices of rows that are best read side by side, ascending in each group: those of a group are padded
    to the most tokens (of counts) and columns (of widths) among them."""
    groups: list[list[int]] = []
    most = width = 0
    for index in sorted(range(len(counts)), key=lambda i: counts[i] * widths[i], reverse=True):
        count, own = counts[index], counts[index] * widths[index]
        padded = max(most, count) * max(width, widths[index])
        if groups and (padded <= ALIKE * own or padded * (len(groups[-1]) + 1) <= CHEAP):
            groups[-1].append(index)
            most, width = max(most, count), max(width, widths[index])
        else:
            groups.append([index])
            most, width = count, widths[index]
    return [sorted(group) for group in groups]


def are_dense(slots: Sequence[int], most: float) -> bool:
    """Whether there are at most so many others between ascending slots, for each of them."""
    return slots[-1] - slots[0] + 1 <= (1 + most) * len(slots)


class Rows:
    """Slots, in ascending order, that bring tokens to one forward: how many tokens each brings, and the
    column of each one's last token."""

    def __init__(
        self, slots: Sequence[int], counts: Sequence[int], last: Sequence[int], device: torch.device
    ) -> None:
        self.most, self.width, self.num_tokens = max(counts), max(last) + 1, sum(counts)
        dense = are_dense(slots, OTHERS_BETWEEN / self.most)
        count_R, last_R = np.array(counts), np.array(last)
        if dense:
            place_R = np.array(slots) - slots[0]
            span = int(place_R[-1]) + 1
            count_R, last_R = _spread(count_R, place_R, span), _spread(last_R, place_R, span)
        self._slots = slice(slots[0], slots[-1] + 1) if dense else torch.tensor(slots, device=device)
        back_M = np.arange(self.most - 1, -1, -1)
        column_RM = last_R[:, None] - back_M
        real_RM = back_M < count_R[:, None]
        self.columns_N = column_RM[real_RM]
        self.slots_N = np.repeat(slots, counts)
        self._column_RM = torch.from_numpy(column_RM.clip(min=0)).to(device)
        padded = self.num_tokens < real_RM.size
        self._place_N = torch.from_numpy(np.flatnonzero(real_RM)).to(device) if padded else None
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, query_HND: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Causal attention of the tokens to their own slots; keys and values of all slots: [N, H, D]."""
        heads, _, size = query_HND.shape
        rows, kv_heads = len(self._column_RM), keys.shape[1]
        if self._place_N is not None:
            padded = query_HND.new_zeros(heads, rows * self.most, size)
            query_HND = padded.index_copy_(1, self._place_N, query_HND)
        query_RHMD = query_HND.reshape(heads, rows, self.most, size).transpose(0, 1)
        keys, values = keys[:, :, : self.width][self._slots], values[:, :, : self.width][self._slots]
        outs = []
        for start, stop in self._parts(heads // kv_heads):
            width = self.width - self.most + stop  # what the last of these tokens sees
            # The query heads that share a key-value head become queries of it: keys are read once.
            out = F.scaled_dot_product_attention(
                query_RHMD[:, :, start:stop].reshape(rows, kv_heads, -1, size),
                keys[:, :, :width],
                values[:, :, :width],
                attn_mask=self._mask(heads // kv_heads, window, query_HND.dtype, start, stop),
                scale=scale,
            )
            outs.append(out.reshape(rows, heads, stop - start, -1))
        out_RHMD = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        out_NHD = out_RHMD.transpose(1, 2).flatten(0, 1)
        return out_NHD if self._place_N is None else out_NHD.index_select(0, self._place_N)

    def _parts(self, group: int) -> list[tuple[int, int]]:
        """[start, stop) of the places that attend at once, so that no mask is too large."""
        length = max(MOST_SEEN // (len(self._column_RM) * group * self.width), 1)
        return [(start, min(start + length, self.most)) for start in range(0, self.most, length)]

    def _mask(self, group: int, window: int | None, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """0 for the columns that a query sees, else minus infinity: [R, 1, G * (stop - start), S]. One of all
        places is made once for all layers. Places without a token see something, for no NaN."""
        if window in self._masks:
            return self._masks[window]
        query_RM1 = self._column_RM[:, start:stop, None]
        column_S = torch.arange(self.width - self.most + stop, device=query_RM1.device)
        unseen_RMS = column_S > query_RM1
        if window is not None:
            unseen_RMS |= column_S <= query_RM1 - window
        mask_RMS = torch.zeros_like(unseen_RMS, dtype=dtype).masked_fill_(unseen_RMS, float("-inf"))
        mask = mask_RMS.repeat(1, group, 1)[:, None]
        if stop - start == self.most:
            self._masks[window] = mask
        return mask


class Reading:
    """The tokens of one forward: those of `rows`, one group behind the other."""

    def __init__(self, rows: Sequence[Rows], num_slots: int, device: torch.device) -> None:
        self.rows, self.num_slots = rows, num_slots
        self.columns_N = torch.from_numpy(np.concatenate([part.columns_N for part in rows])).to(device)
        self.slots_N = torch.from_numpy(np.concatenate([part.slots_N for part in rows])).to(device)
        self.width = max(part.width for part in rows)


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, [slots, K, capacity, D] each: halves of one buffer, whose heads have the
    larger size of both."""

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Called by the first update, or one that a reset came before."""
        super().lazy_initialization(key_states, value_states)
        self._sizes = key_states.shape[3], value_states.shape[3]
        self._hold(key_states.new_zeros(2, 0, key_states.shape[1], 0, max(self._sizes)))

    def _hold(self, both: Tensor) -> None:
        self.both = both
        self.keys, self.values = (part[..., :size] for part, size in zip(both, self._sizes, strict=True))

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write new tokens, [1, K, N, D], where the cache's reading has them; keys, values of all slots."""
        reading = self._cache.reading
        assert reading is not None
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.make_room(reading.num_slots, reading.width)
        self.keys[reading.slots_N, :, reading.columns_N] = key_states[0].transpose(0, 1)
        self.values[reading.slots_N, :, reading.columns_N] = value_states[0].transpose(0, 1)
        return self.keys, self.values

    def make_room(self, num_slots: int, width: int) -> None:
        """Have so many slots and columns at least; new ones are zero, as NaN in a column would be seen
        through any mask. At first no more columns than the longest row is known to need, and never more than
        there is room for: columns behind that are lost when slots are added."""
        _, slots, heads, capacity, size = self.both.shape
        if slots >= num_slots and capacity >= width:
            return
        if capacity < width:
            roomy = max(width + GROWTH, 3 * width // 2)
            capacity = roomy if capacity else max(width, min(roomy, self._cache.longest))
        capacity = max(width, min(capacity, self._cache.room))
        grown = self.both.new_zeros(2, num_slots, heads, capacity, size)
        kept = min(capacity, self.both.shape[3])
        grown[:, :slots, :, :kept] = self.both[:, :num_slots, :, :kept]
        self._hold(grown)


class SlotCache(Cache):
    """The cache of a running batch. reading: where the tokens of the forward that runs now belong. longest:
    how many columns the rows may need that are known so far. room: for how many columns of each slot there is
    memory."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=partial(SlotLayer, self))
        self.reading: Reading | None = None
        self.longest = 0
        self.room = NO_LIMIT

    def release(self) -> None:
        """Give the memory back now: layers and cache refer to each other."""
        self.layers.clear()
        self.reading = None

    def copy(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copy the first `width` columns of slots to other slots."""
        for layer in self.layers:
            held = layer.both[:, :, :, :width]
            source, target = (torch.tensor(slots, device=held.device) for slots in (sources, targets))
            held.index_copy_(1, target, held.index_select(1, source))

    def exchange(self, pairs: Sequence[tuple[int, int, int]], num_slots: int) -> None:
        """Exchange what pairs of num_slots slots hold: one slot, the other, how many columns count."""
        for layer in self.layers:
            layer.make_room(num_slots, max(width for _, _, width in pairs))
            for one, other, width in pairs:
                this, that = layer.both[:, one, :, :width], layer.both[:, other, :, :width]
                kept = this.clone()
                this.copy_(that)
                that.copy_(kept)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    reading: Reading,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """Attention of a reading's tokens, [1, H, N, D], to their slots -> [1, N, H, D]. No communication."""
    outs, start = [], 0
    for rows in reading.rows:
        part_HND = query[0, :, start : start + rows.num_tokens]
        outs.append(rows.attend(part_HND, key, value, scaling, sliding_window))
        start += rows.num_tokens
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)


def _spread(value_R: np.ndarray, place_R: np.ndarray, size: int) -> np.ndarray:
    """Values at their places among so many, the others 0."""
    spread = np.zeros(size, value_R.dtype)
    spread[place_R] = value_R
    return spread
