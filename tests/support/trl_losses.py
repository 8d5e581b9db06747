"""The loss of TRL's trainers on given log-probs, without a model."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def trl_loss(
    b: dict[str, Tensor], loss_type: str, inputs: dict[str, Tensor] | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Value, and gradient of log_prob. b: log_prob, old, advantage, mask [B, T], and entropy where it counts.

    inputs: further ones of the trainer; settings: of its configuration.
    """
    if loss_type == "gmpo":
        trainer = pytest.importorskip("trl.experimental.gmpo").GMPOTrainer
    else:
        trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    log_prob = b["log_prob"].clone().requires_grad_()
    entropy = b.get("entropy", torch.zeros_like(log_prob))
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0)
    args.sapo_temperature_neg = 1.25
    args.vespo_k_pos, args.vespo_lambda_pos, args.vespo_k_neg, args.vespo_lambda_neg = 2.0, 3.0, 3.0, 2.0
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=args,
        loss_type=loss_type,
        importance_sampling_level="token",
        epsilon_low=0.15,
        epsilon_high=0.3,
        beta=0.0,
        max_completion_length=32,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, **_: x,
            pad_across_processes=lambda x, **_: x,
            device="cpu",
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_prob, entropy, None),
    )
    for name in ("get_off_policy_mask", "get_gamma_weights"):
        setattr(stub, name, getattr(trainer, name, None))
    stub.get_high_entropy_mask = lambda *a: trainer.get_high_entropy_mask(stub, *a)
    stub.args.steps_per_generation = 1
    for name, value in settings.items():
        setattr(args if hasattr(args, name) else stub, name, value)
    mask = b["mask"].double()
    ids = torch.zeros_like(mask, dtype=torch.long)
    given = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": b["advantage"][:, 0],
        "old_per_token_logps": b["old"],
        "ref_per_token_logps": b["old"] + 0.1,
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(stub, None, given | (inputs or {}))
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]
