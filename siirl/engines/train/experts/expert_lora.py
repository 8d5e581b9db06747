"""LoRA adapters on the experts of a layer: on each matrix of each expert that the model's files have.

transformers keeps the matrices of all experts of a layer in one tensor, gate and up together. Adapters lie on
the tensors of the files, as they would if each were a linear layer: so files of adapters are such
as peft reads, and one rank's experts need no more than that rank's adapters.
Legend: E experts, R rank, D inputs, O outputs of a matrix, S pairs of a token and one of its experts.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl.engines.train.experts.expert_parallel import held, modules_of_experts
from siirl.errors import ConfigError
from siirl.model_files.file_parts import FilePart, file_parts

ADAPTER = "default"
ADAPTERS = "adapters"
"""Name under which a module of experts has its adapters."""


class _Stack(nn.Module):
    """One matrix of the adapter of each expert."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class ExpertAdapter(nn.Module):
    """Adapters on one matrix of all experts of a layer: W_e + scale * B_e A_e for every expert e."""

    def __init__(self, like: Tensor, place: "_Place", rank: int, alpha: float) -> None:
        """like: the tensor [E, .., D] of which the matrices are rows; of its type and on its device."""
        super().__init__()
        self.on, self.first, self.rows = place.param, place.first, place.rows
        self.scale = alpha / rank
        num, inputs = like.shape[0], like.shape[2]
        self.lora_A = nn.ModuleDict({ADAPTER: _Stack(like.new_empty(num, rank, inputs))})
        self.lora_B = nn.ModuleDict({ADAPTER: _Stack(like.new_zeros(num, self.rows, rank))})
        for a_RD in self.a.detach():  # as peft begins on a linear layer
            nn.init.kaiming_uniform_(a_RD, a=math.sqrt(5))

    @property
    def a(self) -> nn.Parameter:
        """[E, R, D], or this rank's."""
        return self.lora_A[ADAPTER].weight

    @property
    def b(self) -> nn.Parameter:
        """[E, O, R], likewise."""
        return self.lora_B[ADAPTER].weight


class _Place(NamedTuple):
    """Where the matrices of the same name of all experts are."""

    param: str
    """Name of the tensor in the module of experts."""
    first: int
    """Their first row in the tensor of an expert."""
    rows: int
    modules: tuple[str, ...]
    """Of each expert, the linear layer that its matrix would be."""


def add_expert_adapters(model: PreTrainedModel, targets: Collection[str], rank: int, alpha: float) -> None:
    """Insert adapters in place, on matrices of these names in the model's files.

    Random numbers are drawn from torch's default generator. ConfigError where the files have the experts
    otherwise than one matrix each.
    """
    for prefix, module in list(_experts(model)):
        adapters = nn.ModuleDict()
        for name, place in _places(model, prefix, module).items():
            if name in targets:
                like = getattr(module, place.param)
                adapters[name] = ExpertAdapter(like, place, rank, alpha)
        if len(adapters):
            module.add_module(ADAPTERS, adapters)


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    modules = {id(module) for module in modules_of_experts(model)}
    return ((name, module) for name, module in model.named_modules() if id(module) in modules)


def _places(model: PreTrainedModel, prefix: str, module: nn.Module) -> dict[str, _Place]:
    """Name of a matrix, the same for each expert -> where these are."""
    own = {f"{prefix}.{name}": param for name, param in module.named_parameters(recurse=False)}
    found: dict[str, _Place] = {}
    parts_of = file_parts(model, {name: tuple(param.shape) for name, param in own.items()})
    for name, param in own.items():
        by_leaf: dict[str, list[FilePart]] = {}
        for part in parts_of[name]:
            by_leaf.setdefault(part.name.removesuffix(".weight").rpartition(".")[2], []).append(part)
        for leaf, parts in by_leaf.items():
            parts.sort(key=lambda part: part.first)
            row, size = param.shape[-1], math.prod(param.shape[1:])
            each = [part.first - number * size for number, part in enumerate(parts)]
            rows = parts[0].shape[0]
            plain = all(part.shape == (rows, row) and part.stride == (row, 1) for part in parts)
            if param.ndim != 3 or len(parts) != len(param) or len(set(each)) != 1 or not plain:
                raise ConfigError(
                    f"LoRA adapters on the experts of {type(model).__name__}: its files do not have "
                    f"{name} as one matrix for each expert. Set model.target_modules to names of attention."
                )
            modules = tuple(part.name.removesuffix(".weight") for part in parts)
            found[leaf] = _Place(name.rpartition(".")[2], each[0] // row, rows, modules)
    return found


def adapted(
    experts: nn.Module,
    name: str,
    out_SO: Tensor,
    x_SD: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The outputs of a tensor of experts with what adapters on its rows add.

    product: pairs and a weight [E, .., ..] of this rank's experts -> the pairs' products.
    """
    adapters = [adapter for adapter in getattr(experts, ADAPTERS, {}).values() if adapter.on == name]
    if not adapters:
        return out_SO
    added, at = [], 0
    for adapter in sorted(adapters, key=lambda adapter: adapter.first):
        inner_SR = product(x_SD, held(adapter.a, x_SD.dtype))
        if adapter.first > at:
            added.append(out_SO.new_zeros(len(out_SO), adapter.first - at))
        added.append(product(inner_SR, held(adapter.b, x_SD.dtype)) * adapter.scale)
        at = adapter.first + adapter.rows
    if at < out_SO.shape[1]:
        added.append(out_SO.new_zeros(len(out_SO), out_SO.shape[1] - at))
    return out_SO + torch.cat(added, dim=1)


def adapters_of_experts(model: nn.Module) -> dict[str, list[ExpertAdapter]]:
    """Name of each tensor of experts -> the adapters on its rows."""
    found: dict[str, list[ExpertAdapter]] = {}
    for prefix, module in _experts(model):
        for adapter in getattr(module, ADAPTERS, {}).values():
            found.setdefault(f"{prefix}.{adapter.on}", []).append(adapter)
    return found


def merged_experts(weight_EOD: Tensor, adapters: Iterable[ExpertAdapter]) -> Tensor:
    """W + scale * B A in float32 of this rank's experts, and their adapters."""
    merged_EOD = weight_EOD.to(torch.float32, copy=True)
    for adapter in adapters:
        a_ERD, b_EOR = (param.detach().to_local().float() for param in (adapter.a, adapter.b))
        merged_EOD[:, adapter.first : adapter.first + adapter.rows].baddbmm_(
            b_EOR, a_ERD, alpha=adapter.scale
        )
    return merged_EOD


def adapter_parts(model: PreTrainedModel) -> dict[str, tuple[FilePart, ...]]:
    """Name of each tensor of adapters on experts, as the model has it and as it leaves it -> its parts.

    These are named as if each matrix of an expert were a linear layer with an adapter.
    """
    found: dict[str, tuple[FilePart, ...]] = {}
    for prefix, module in _experts(model):
        if not hasattr(module, ADAPTERS):
            continue
        places = _places(model, prefix, module)
        for leaf, adapter in getattr(module, ADAPTERS).items():
            for half, param in (("lora_A", adapter.a), ("lora_B", adapter.b)):
                shape = tuple(param.shape[1:])
                size = math.prod(shape)
                for end in (f"{half}.{ADAPTER}.weight", f"{half}.weight"):
                    found[f"{prefix}.{ADAPTERS}.{leaf}.{end}"] = tuple(
                        FilePart(f"{name}.{end}", shape, (shape[1], 1), number * size)
                        for number, name in enumerate(places[leaf].modules)
                    )
    return found
