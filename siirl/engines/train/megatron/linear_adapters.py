"""LoRA adapters on megatron-core's parallel linear layers: those of peft, by name and by value.

Of a linear layer that holds several of Hugging Face's (queries, keys and values; gate and up) the halves A
lie one below the other, and the rows of B lie as those of the weight. So tensor parallelism cuts an adapter
as it cuts the weight, and `W + scale * B A` is computed of what a rank has.

Legend: N packed tokens, I inputs and O outputs on this rank, R ranks of all adapters of a layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from transformers import PretrainedConfig

from siirl.compiler.plan import Head
from siirl.engines.train.adapters.lora import ADAPTER, add_lora, merged_rows
from siirl.engines.train.experts.expert_lora import adapter_parts
from siirl.engines.train.hf_model import VALUE_HEAD, empty_source
from siirl.engines.train.megatron.layers import new_parameter
from siirl.engines.train.megatron.parameter_entries import Block, Entry, runs
from siirl.engines.train.settings import EngineSettings
from siirl.errors import NotSupportedError

_A, _B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
_LINEAR = (".linear_qkv.weight", ".linear_proj.weight", ".linear_fc1.weight", ".linear_fc2.weight")


def new_adapters(whole: PretrainedConfig, head: Head, settings: EngineSettings) -> dict[str, Tensor]:
    """Name -> values of all adapters at the start, whole: those that the same settings give under FSDP2.

    whole: of the model, with its vision tower if it has one. {} without adapters. No communication: every
    rank draws them alike.
    """
    if not settings.model.lora_rank:
        return {}
    model = empty_source(whole, settings.model, head)
    add_lora(model, settings.model, settings.seed)
    of_experts, found = adapter_parts(model), {}
    for name, param in model.named_parameters():
        if name in of_experts:
            found |= {part.name: part.of(param.detach()) for part in of_experts[name]}
        elif ".lora_" in name:
            found[name] = param.detach()
    return found


def adapter_entries(found: list[Entry], adapters: Mapping[str, Tensor]) -> list[Entry]:
    """The entries of the adapters of those in `found`, whose names are those of transformers' modules;
    NotSupportedError for adapters of other layers."""
    entries, left = [], set(adapters)
    for entry in found:
        modules = dict.fromkeys(_module(block) for block in entry.blocks)
        adapted = [module for module in modules if module + _A in adapters]
        if not adapted or not entry.name.endswith(_LINEAR):
            continue
        rank, stem = len(adapters[adapted[0] + _A]), entry.name.removesuffix(".weight")
        cut = entry.cut if entry.cut == "columns" else "whole"
        stacked = tuple(Block(module + _A, 0, rank) for module in adapted)
        rows = tuple(
            block._replace(hf=_module(block) + _B if _module(block) in adapted else "")
            for block in entry.blocks
        )
        a = Entry(f"{stem}.lora.a", stacked, entry.columns, cut, entry.layer, entry.expert, entry.name)
        whole = "whole" if entry.cut == "columns" else entry.cut
        entries += [a, replace(a, name=f"{stem}.lora.b", blocks=rows, columns=rank, cut=whole)]
        left -= {module + half for module in adapted for half in (_A, _B)}
    if left:
        layer = min(left).partition(".lora_")[0]
        raise NotSupportedError(
            f"not supported yet: strategy=megatron: LoRA adapters on {layer}. "
            "Set model.target_modules to names among q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and "
            "down_proj."
        )
    return entries


def _module(block: Block) -> str:
    """Hugging Face's name of the module whose weight a block is of."""
    return block.hf.removesuffix(".weight") if block.hf.endswith(".weight") else ""


class LinearAdapter(nn.Module):
    """What the adapters of a linear layer add to its output. Every rank has its cut of A or of B."""

    def __init__(self, config: Any, a: Entry, b: Entry, scale: float, group: dist.ProcessGroup):
        """group: the tensor-parallel ranks."""
        super().__init__()
        self.scale, self._group = scale, group
        self._scatters = config.sequence_parallel
        self._cuts_input = a.cut == "columns"
        self.a = new_parameter(config, a.local_shape(group.size()))
        self.b = new_parameter(config, b.local_shape(group.size()))
        if config.sequence_parallel:  # of the half that is whole a rank has the gradient of its tokens
            (self.b if self._cuts_input else self.a).sequence_parallel = True
        self.register_buffer("_own_OR", _own_columns(a, b, group, self.b), persistent=False)

    def forward(self, x_NI: Tensor) -> Tensor:
        low_NR = F.linear(x_NI, self.a)
        if self._cuts_input:
            join = (
                reduce_scatter_to_sequence_parallel_region
                if self._scatters
                else reduce_from_tensor_model_parallel_region
            )
            low_NR = join(low_NR, group=self._group)
        elif self._scatters:
            low_NR = gather_from_sequence_parallel_region(low_NR, group=self._group)
        else:
            low_NR = copy_to_tensor_model_parallel_region(low_NR, group=self._group)
        return F.linear(low_NR, self._wide_b()) * self.scale

    def merged(self, weight_OI: Tensor) -> Tensor:
        """The layer's weight, or this rank's part, with the adapters in it; fp32."""
        return merged_rows(weight_OI, self.a, self._wide_b(), self.scale)

    def _wide_b(self) -> Tensor:
        """B as it multiplies all A's: a row has its numbers in the columns of its own A, zeros elsewhere."""
        if self._own_OR is None:
            return self.b
        return self.b.repeat(1, self._own_OR.shape[1] // self.b.shape[1]) * self._own_OR


class ExpertAdapter(LinearAdapter):
    """The same of a linear layer of an expert: its tokens are whole on each expert tensor-parallel rank, and
    what these make of them is summed elsewhere, so that the gradient of the whole half is left to sum."""

    def __init__(self, config: Any, a: Entry, b: Entry, scale: float, group: dist.ProcessGroup):
        """group: the expert-tensor-parallel ranks."""
        super().__init__(config, a, b, scale, group)
        for half in (self.a, self.b):
            half.sequence_parallel = False

    def halves(self) -> tuple[Tensor, Tensor]:
        """A and wide B, to multiply with."""
        a, b = self.a, self._wide_b()
        if self._cuts_input:
            return a, copy_to_tensor_model_parallel_region(b, group=self._group)
        return copy_to_tensor_model_parallel_region(a, group=self._group), b

    def forward(self, x_NI: Tensor) -> Tensor:
        a, b = self.halves()
        return F.linear(F.linear(x_NI, a), b) * self.scale


def _own_columns(a: Entry, b: Entry, group: dist.ProcessGroup, like: Tensor) -> Tensor | None:
    """[O, R]: 1 where a row's own A is; None where all rows have the only one."""
    rank = like.shape[1]
    order = {block.hf.replace(_A, _B): number for number, block in enumerate(a.blocks)}
    if len(order) == 1 and all(block.hf for block in b.blocks):
        return None
    own_OR = torch.zeros(len(like), rank * len(order), dtype=like.dtype, device=like.device)
    for run in runs(b, group.rank() if b.cut != "whole" else 0, group.size() if b.cut != "whole" else 1):
        first = order[run.hf] * rank
        own_OR[run.start : run.start + run.num_rows, first : first + rank] = 1
    return own_OR


def put_adapter(stage: nn.Module, linear: str, adapter: LinearAdapter) -> None:
    """Let a linear layer of a stage add what its adapter says."""
    module = stage.get_submodule(linear)
    module.add_module("lora", adapter)
    module.register_forward_hook(_add)


def _add(module: nn.Module, given: tuple[Tensor, ...], found: tuple[Tensor, Tensor | None]) -> Any:
    out, bias = found
    return out + module.lora(given[0]), bias


def freeze_base(stage: Any) -> None:
    """Train the adapters and a value head alone.

    The embedded tokens say that they need a gradient: a layer that is computed again in the backward pass
    gives its adapters one only if its input needs it.
    """
    for name, param in stage.named_parameters():
        param.requires_grad_(".lora." in name or name.startswith(VALUE_HEAD))
    if stage.pre_process:
        stage.embedding.register_forward_hook(_needs_gradient)


def _needs_gradient(module: nn.Module, given: tuple[Tensor, ...], embedded: Tensor) -> None:
    if torch.is_grad_enabled():
        embedded.requires_grad_()
