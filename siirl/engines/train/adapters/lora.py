"""LoRA adapters through peft: which weights train, and how they merge into the model's own."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl.config.common import ModelConfig
from siirl.engines.train.adapters.adapter_products import add_in_products
from siirl.engines.train.experts.expert_lora import ADAPTER, ExpertAdapter, add_expert_adapters
from siirl.engines.train.vision.tower import tower_of
from siirl.errors import ConfigError
from siirl.models.adapter_targets import expert_targets


def add_lora(model: PreTrainedModel, cfg: ModelConfig, seed: int) -> None:
    """Insert adapters in place and freeze everything else but a value head; does nothing when lora_rank is 0.

    A model that sees images gets them on its text part. The caller's RNG state is untouched. ConfigError if
    target_modules matches nothing, the output head, or what is no nn.Linear: adapters of others (GPT-2's
    turned matrices, embeddings) do not merge by B A.
    """
    if cfg.lora_rank <= 0:
        return
    head = model.get_output_embeddings()
    value_head = getattr(model, "score", None) if head is None else None
    kind = model.config.get_text_config().model_type
    on_experts = expert_targets(kind, cfg.target_modules)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _add_to_linear_layers(model, cfg, bool(on_experts), value_head)
        if on_experts:
            add_expert_adapters(model, on_experts, cfg.lora_rank, cfg.lora_alpha)
    if value_head is not None:
        value_head.requires_grad_(True)
    elif not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ConfigError(
            f"actor_rollout_ref.model.target_modules={cfg.target_modules!r} includes the output head: "
            "adapters go on the layers only. Use all-linear."
        )


def _add_to_linear_layers(
    model: PreTrainedModel, cfg: ModelConfig, besides_experts: bool, value_head: nn.Module | None
) -> None:
    """Adapters on the linear layers that are asked for, all else frozen. Of a model with adapters on experts
    that may be none."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = cfg.target_modules if isinstance(cfg.target_modules, str) else list(cfg.target_modules)
    inside: nn.Module = model
    if besides_experts:
        targets = [f"model.{name}" for name in linear_layers(model, targets)]
        inside = nn.Module()  # of a transformers model, peft would take names of experts' matrices for itself
        inside.model = model
        if not targets:
            model.requires_grad_(False)
            return
    elif (tower := tower_of(model)) is not None:
        seeing = set(tower.modules())
        targets = [name for name in linear_layers(model, targets) if model.get_submodule(name) not in seeing]
    lora = LoraConfig(
        r=cfg.lora_rank,
        lora_alpha=cfg.lora_alpha,
        target_modules=targets,
        exclude_modules=["score"] if value_head is not None else None,
        lora_dropout=0.0,
    )
    try:
        inject_adapter_in_model(lora, inside, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(
            f"actor_rollout_ref.model.target_modules={cfg.target_modules!r}: {error} "
            "Use all-linear, or names of linear layers."
        ) from error
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is not None and not isinstance(base, nn.Linear):
            raise ConfigError(
                f"actor_rollout_ref.model.target_modules={cfg.target_modules!r} includes {name} "
                f"({type(base).__name__}): adapters go on linear layers. Leave it out, or set lora_rank=0."
            )
    add_in_products(model, ADAPTER)


def linear_layers(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """The linear layers of these names, or all, but the head."""
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not any(module is head for head in heads)
        and (targets == "all-linear" or name.rpartition(".")[2] in targets)
    ]


def hf_name(name: str) -> str | None:
    """Name of a parameter in the model without adapters; None for the adapters' own."""
    if ".lora_" in name:
        return None
    return name.replace(".base_layer.", ".")


def adapter_name(name: str) -> str | None:
    """Name under which an adapter's parameter leaves the model, e.g. X.lora_A.weight; None for other ones."""
    return name.replace(f".{ADAPTER}.", ".") if ".lora_" in name else None


def plain_name(name: str) -> str:
    """Name under which a parameter or buffer of an adapted model leaves it, adapters and base apart."""
    return adapter_name(name) or name.replace(".base_layer.", ".")


def adapters_of(model: nn.Module) -> dict[str, tuple[nn.Parameter, nn.Parameter, float]]:
    """HF name of each adapted weight -> (A [r, in], B [out, r], scale); merged: W + scale * B A."""
    found = {}
    for name, module in model.named_modules():
        is_layer = hasattr(module, "lora_A") and not isinstance(module, ExpertAdapter)
        if is_layer and ADAPTER in module.lora_A:
            pair = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
            found[f"{name}.weight"] = (*pair, module.scaling[ADAPTER])
    return found


def merged_rows(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale * B A in float32: rows of W [n, in], the same rows of B [n, r], and all of A [r, in]."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)
