"""LoRA adapters as peft stores them: a folder that peft and vLLM read."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], rank: int, alpha: float, base: str | None = None
) -> None:
    """Write an adapter into an existing folder.

    tensors: "<module>.lora_A.weight" [rank, in] and "<module>.lora_B.weight" [out, rank] of each module.
    base: directory or name of the model that it belongs to.
    """
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}),
        "bias": "none",
    }
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
