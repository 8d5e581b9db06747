"""A packed micro-batch in the form in which Megatron's schedules take it.

Legend: N packed tokens.
"""

import inspect
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig

from siirl.engines.train.attention.shared_attention import FlashKernels
from siirl.engines.train.megatron.context_parallel import context_shard
from siirl.engines.train.megatron.layers import PackedRows, Rope
from siirl.engines.train.packed.packing import PackedBatch
from siirl.engines.train.packed.sequence_bounds import with_segment
from siirl.engines.train.packed.shared_rows import own_predictions


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a micro-batch, packed, and the arguments of a stage's forward for them."""

    rows: TensorDict
    packed: PackedBatch
    input_ids: Tensor
    position_ids: Tensor
    arguments: PackedRows
    own_n: Tensor
    """Places of the tokens that this rank's layers compute among the packed ones; beyond these, fillers."""


def make_rope(config: PretrainedConfig, device: torch.device) -> nn.Module:
    """The rotary embedding of the model's config.json, scaled as it says: transformers' of its type."""
    code = inspect.getmodule(AutoModel._model_mapping[type(config)])
    names = (name for name in vars(code) if name.endswith("RotaryEmbedding") and "Vision" not in name)
    return vars(code)[next(names)](config).to(device)


def _ropes(rope: nn.Module, like: Tensor, position_ids: Tensor) -> dict[bool, Rope]:
    """What a rotary embedding gives layers with a sliding window (True), and others."""

    def of(*kind: str) -> Rope:
        turns = rope(like, position_ids, *kind)
        if torch.is_tensor(turns):  # DeepSeek-V2's: complex numbers, one for two dimensions
            turns = tuple(torch.cat([part, part], dim=-1).to(like.dtype) for part in (turns.real, turns.imag))
        cos, sin = turns
        if cos.shape[-1] == getattr(rope, "inv_freq", cos[..., :0]).shape[-1]:  # gpt-oss: of one in two
            cos, sin = (torch.cat([part, part], dim=-1) for part in (cos, sin))
        return cos[0], sin[0]

    kinds = getattr(rope, "layer_types", None)  # of an embedding that tells them apart
    if kinds is None:
        return dict.fromkeys((True, False), of())
    return {kind == "sliding_attention": of(kind) for kind in kinds}


def make_micro_batch(
    rows: TensorDict,
    packed: PackedBatch,
    rope: nn.Module,
    length: int,
    context_group: dist.ProcessGroup,
    sequence_group: dist.ProcessGroup | None,
    dtype: torch.dtype,
    temperature: float,
    outputs: tuple[str, ...],
    flash: FlashKernels | None,
) -> MicroBatch:
    """Fill the packed tokens up to `length` by one more sequence, and take this rank's share.

    sequence_group: whose ranks each have a run of the share in the layers. dtype: of the model's activations.
    No communication.
    """
    num_tokens = packed.input_ids.shape[1]
    extra = length - num_tokens
    input_ids = F.pad(packed.input_ids, (0, extra))
    position_ids, bounds = packed.position_ids, packed.bounds
    if extra:
        filler = torch.arange(extra, device=position_ids.device)
        position_ids = torch.cat([position_ids, filler.expand(*position_ids.shape[:-1], extra)], dim=-1)
        bounds = with_segment(bounds, extra)
    shard, own_n = None, torch.arange(length, device=input_ids.device)
    if context_group.size() > 1:
        shard = context_shard(bounds, context_group, input_ids.device)
        own_n = shard.index_n
        input_ids, position_ids = input_ids[:, shard.index_n], position_ids[..., shard.index_n]
        packed = own_predictions(packed, shard.index_n, length)
    if sequence_group is not None:
        own_n = own_n.chunk(sequence_group.size())[sequence_group.rank()]
    experts = packed.experts
    if experts is not None:
        experts = F.pad(experts, (0, 0, 0, extra), value=-1)[own_n]
    seen_at = None
    if packed.images is not None:
        place_N = torch.full((length,), len(own_n), device=own_n.device)
        place_N[own_n] = torch.arange(len(own_n), device=own_n.device)
        seen_at = place_N[packed.images.index]
    like = torch.empty((), dtype=dtype, device=input_ids.device)
    arguments = PackedRows(
        qkv_format="thd",
        cu_seqlens_q=bounds.cu_seqlens,
        cu_seqlens_kv=bounds.cu_seqlens,
        max_seqlen_q=bounds.max_length,
        max_seqlen_kv=bounds.max_length,
        bounds=bounds,
        context=shard,
        ropes=_ropes(rope, like, position_ids),
        predict_index=packed.predict_index,
        target=packed.target,
        temperature=temperature,
        outputs=outputs,
        ref_hidden=packed.ref_hidden,
        top_ids=packed.top_ids,
        flash=flash,
        images=packed.images,
        seen_at=seen_at,
        experts=experts,
    )
    return MicroBatch(rows, packed, input_ids, position_ids, arguments, own_n)
