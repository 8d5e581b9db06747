"""LoRA adapters through peft: which weights train, and how they merge into the model's own."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl.config.common import ModelConfig
from siirl.errors import ConfigError

ADAPTER = "default"


def add_lora(model: PreTrainedModel, cfg: ModelConfig, seed: int) -> None:
    """Insert adapters in place and freeze everything else but a value head; does nothing when lora_rank is 0.

    The caller's RNG state is untouched. ConfigError if target_modules matches nothing, the output head, or
    what is no nn.Linear: adapters of others (GPT-2's turned matrices, embeddings) do not merge by B A.
    """
    if cfg.lora_rank <= 0:
        return
    from peft import LoraConfig, inject_adapter_in_model

    targets = cfg.target_modules if isinstance(cfg.target_modules, str) else list(cfg.target_modules)
    head = model.get_output_embeddings()
    value_head = getattr(model, "score", None) if head is None else None
    lora = LoraConfig(
        r=cfg.lora_rank,
        lora_alpha=cfg.lora_alpha,
        target_modules=targets,
        exclude_modules=["score"] if value_head is not None else None,
        lora_dropout=0.0,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(lora, model, adapter_name=ADAPTER)
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
    if value_head is not None:
        value_head.requires_grad_(True)
    elif not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ConfigError(
            f"actor_rollout_ref.model.target_modules={cfg.target_modules!r} includes the output head: "
            "adapters go on the layers only. Use all-linear."
        )


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
        if hasattr(module, "lora_A") and ADAPTER in module.lora_A:
            pair = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
            found[f"{name}.weight"] = (*pair, module.scaling[ADAPTER])
    return found


def merged_rows(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale * B A in float32: rows of W [n, in], the same rows of B [n, r], and all of A [r, in]."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)
