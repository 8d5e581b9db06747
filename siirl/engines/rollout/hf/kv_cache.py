"""Keys and values of a batch that is decoded, and states of layers that have these in their place:
transformers' cache interface over buffers that are written in place.

transformers' own dynamic layer concatenates at each token, which copies the whole cache; here a token costs
a token. Layers that attend to a sliding window keep all positions too: the model's mask hides the old ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from siirl.models.sizes import STATES

GROWTH = 256
"""Positions added to a full buffer, at least: few copies, little memory for responses that stop early."""


class BufferedLayer(DynamicLayer):
    """Keys and values of one layer, [B, heads, capacity, head_dim]; the first `length` positions are used."""

    def __init__(self, limit: int) -> None:
        """limit: positions that will ever be needed; the buffer never grows past it."""
        super().__init__()
        self.limit = limit
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append positions; views of all of them, keys and values."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        else:
            if self.length > self.keys.shape[-2]:
                capacity = min(self.limit, max(self.length + GROWTH, 3 * self.length // 2))
                self.keys, self.values = _grown(self.keys, capacity), _grown(self.values, capacity)
            self.keys[:, :, start : self.length] = key_states
            self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Positions in use."""
        return self.length


def new_cache(limit: int, config: PretrainedConfig) -> Cache:
    """An empty cache for a model's text; where its layers are alike, they appear as it writes to them."""
    kinds = getattr(config, "layer_types", None) or ()
    if STATES not in kinds:
        return Cache(layer_class_to_replicate=partial(BufferedLayer, limit))
    return Cache([LinearAttentionLayer() if kind == STATES else BufferedLayer(limit) for kind in kinds])


@dataclass(frozen=True)
class Block:
    """Rows to take from a cache."""

    cache: Cache
    rows: Tensor
    """int64 indices, in order, any of them several times."""

    @property
    def width(self) -> int:
        return self.cache.get_seq_length()


def gather(blocks: Sequence[Block], limit: int) -> Cache:
    """One cache of the rows of all blocks, aligned on the right; empties the blocks' caches layer by layer.

    Positions left of a narrower block are zero (to be masked). limit: positions ever needed.
    """
    width = max(block.width for block in blocks)
    rows = [len(block.rows) for block in blocks]
    cache = Cache([])
    for index in range(len(blocks[0].cache.layers)):
        sources = [block.cache.layers[index] for block in blocks]
        if isinstance(sources[0], LinearAttentionLayer):
            cache.layers.append(_states(sources, blocks))
            continue
        layer = BufferedLayer(limit)
        for name in ("keys", "values"):
            first = getattr(sources[0], name)
            capacity = min(limit, width + GROWTH)
            buffer = first.new_empty(sum(rows), first.shape[1], capacity, first.shape[3])
            for target, source, block in zip(buffer.split(rows), sources, blocks, strict=True):
                pad = width - block.width
                target[:, :, :pad] = 0
                used = getattr(source, name)[:, :, : source.length]
                target[:, :, pad:width] = used.index_select(0, block.rows)
            setattr(layer, name, buffer)
            for source in sources:
                setattr(source, name, None)
        layer.length, layer.is_initialized = width, True
        cache.layers.append(layer)
    return cache


def keep_rows(cache: Cache, rows: Tensor) -> None:
    """Drop all rows but `rows` (int64 indices), in place."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.reorder_cache(rows)
        else:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


def _states(sources: Sequence[LinearAttentionLayer], blocks: Sequence[Block]) -> LinearAttentionLayer:
    """A layer of the rows of all blocks, whose states are of one size however many tokens they have read."""
    for source, block in zip(sources, blocks, strict=True):
        source.reorder_cache(block.rows)
    for states in ("conv_states", "recurrent_states"):
        getattr(sources[0], states)[0] = torch.cat([getattr(source, states)[0] for source in sources])
    return sources[0]


def _grown(buffer: Tensor, capacity: int) -> Tensor:
    grown = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3])
    grown[:, :, : buffer.shape[2]] = buffer
    return grown
