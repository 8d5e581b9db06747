"""The experts of a layer over packed tokens: the experts function that our language models are built with.

Legend: N packed tokens, K experts of each, S = N K pairs in the order of their experts, E experts, D hidden
size, O outputs of a product.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from siirl.engines.train.experts.expert_lora import adapted
from siirl.engines.train.experts.expert_parallel import computed_elsewhere, held, ranks_of
from siirl.engines.train.experts.grouped_product import GROUPED_MULTIPLE, GroupedProduct, expert_by_expert

if torch.cuda.is_available():
    from siirl.engines.train.experts import expert_kernels
else:
    expert_kernels = None

GROUPED_EXPERTS = "siirl_grouped"
"""Name under which transformers finds `grouped_experts`."""
KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)
SILU = type(ACT2FN["silu"]), nn.SiLU


def grouped_experts(experts: nn.Module, hidden_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """What the experts of each token make of it, by the router's weights: [N, D].

    Collective where experts are sharded over ranks (expert_parallel). On a GPU tokens come to the order of
    their experts and back by kernels of one pass each, which sum in float32.

    experts: a module whose weights transformers has fused, [E, ...]. Every expert gets a gradient, of zeros
    if no token has chosen it, so that all ranks reduce the same tensors.
    """
    top_k, hidden = expert_NK.shape[1], hidden_ND.shape[1]
    expert_S, order_S = expert_NK.flatten().sort(stable=True)
    kernels, group = _kernels(hidden_ND), ranks_of(experts)
    place_NK = None
    if kernels is not None:
        ascending_S = torch.arange(len(order_S), device=order_S.device)
        place_NK = torch.empty_like(order_S).scatter_(0, order_S, ascending_S).view(-1, top_k)
        x_SD = kernels.Spread.apply(hidden_ND, place_NK)
    else:
        x_SD = hidden_ND[order_S // top_k]
    if group is None:
        out_SD = _outputs(experts, x_SD, expert_S, experts.num_experts)
    else:
        own = experts.num_experts // group.size()
        run = functools.partial(_outputs, experts, num_experts=own)
        out_SD = computed_elsewhere(x_SD, expert_S, experts.num_experts, group, run)
    if kernels is not None:
        return kernels.Collect.apply(out_SD, weight_NK, place_NK).to(hidden_ND.dtype)
    out_SD = out_SD * weight_NK.flatten()[order_S].unsqueeze(-1)
    out_ND = torch.zeros_like(out_SD).index_copy(0, order_S, out_SD).view(-1, top_k, hidden).sum(dim=1)
    return out_ND.to(hidden_ND.dtype)


def _kernels(x: Tensor) -> ModuleType | None:
    """Those that compute with such tensors."""
    return expert_kernels if x.is_cuda and x.dtype in KERNEL_TYPES else None


def _gated(experts: nn.Module, both_S2F: Tensor) -> Tensor:
    kernels = _kernels(both_S2F)
    plain = getattr(experts._apply_gate, "__func__", None) is _default_apply_gate
    if kernels is not None and plain and isinstance(experts.act_fn, SILU):
        return kernels.GatedSilu.apply(both_S2F)
    return experts._apply_gate(both_S2F)


def _outputs(experts: nn.Module, x_SD: Tensor, expert_S: Tensor, num_experts: int) -> Tensor:
    """What this rank's experts make of pairs that are in their order: [S, D]."""
    expert_E = torch.arange(num_experts, device=expert_S.device)
    ends_E = torch.searchsorted(expert_S, expert_E, right=True, out_int32=True)

    def product(x_SD: Tensor, name: str) -> Tensor:
        weight = held(getattr(experts, name), x_SD.dtype)
        weight_EOD = weight.transpose(1, 2) if experts.is_transposed else weight
        out_SO = grouped_product(x_SD, weight_EOD, ends_E)
        out_SO = adapted(experts, name, out_SO, x_SD, functools.partial(grouped_product, ends_E=ends_E))
        if not experts.has_bias:
            return out_SO
        return out_SO + held(getattr(experts, f"{name}_bias"), x_SD.dtype)[expert_S]

    inner = product(x_SD, "gate_up_proj" if experts.has_gate else "up_proj")
    inner = _gated(experts, inner) if experts.has_gate else experts.act_fn(inner)
    return product(inner, "down_proj")


ALL_EXPERTS_FUNCTIONS.register(GROUPED_EXPERTS, grouped_experts)


def grouped_product(x_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """The rows of each expert times its weight: [S, O]; ends_E: int32, where the rows of each end.

    In bf16 on CUDA by torch's grouped product, where sides are multiples of 8; otherwise expert by expert.
    """
    sides = weight_EOD.shape[1:]
    if x_SD.is_cuda and x_SD.dtype == torch.bfloat16 and not any(side % GROUPED_MULTIPLE for side in sides):
        return GroupedProduct.apply(x_SD, ends_E, weight_EOD)
    counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return expert_by_expert(x_SD, weight_EOD.unbind(), counts)
