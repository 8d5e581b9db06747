"""TRL's own trainers on given responses, from files to weights: what training by siirl is held against."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "bf16": False,
    "fp16": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "max_length": None,
}


@dataclass(frozen=True)
class Trained:
    """What a trainer of TRL's has done, an entry for each optimizer step."""

    losses: list[float]
    grad_norms: list[float]
    log: list[dict[str, Any]]
    weights: dict[str, Any]


def train(kind: str, model: str, rows: list[dict[str, Any]], batch: int, lr: float, **more: Any) -> Trained:
    """Train on the rows in their order, once, in float64. kind: SFT, DPO or Reward.

    For a process of its own.
    """
    import torch
    import trl
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    class InOrder(getattr(trl, f"{kind}Trainer")):
        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler(self.train_dataset)

    sizes = {"per_device_train_batch_size": batch, "max_steps": len(rows) // batch, "learning_rate": lr}
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(Path(model) / "trl"), **SETTINGS, **sizes, max_grad_norm=1.0, **more
    )
    torch.manual_seed(0)
    kind_of_model, head = AutoModelForCausalLM, {}
    if kind == "Reward":
        kind_of_model, head = AutoModelForSequenceClassification, {"num_labels": 1}
    start, reference = (kind_of_model.from_pretrained(model, dtype=torch.float64, **head) for _ in range(2))
    trainer = InOrder(
        model=start,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        **({"ref_model": reference} if kind == "DPO" else {}),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    return Trained([x["loss"] for x in steps], [x["grad_norm"] for x in steps], steps, weights)
