"""Adapters on experts, against peft's on a linear layer for each matrix of each expert."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import train_engine_cases as cases
from torch import Tensor, nn
from train_engine_cases import Outcome, Scenario

from siirl.models.adapter_targets import ADAPTED, expert_matrices

MODEL = "actor_rollout_ref.model"
SIZES = (f"{MODEL}.lora_rank={cases.LORA_RANK}", f"{MODEL}.lora_alpha={cases.LORA_ALPHA}")
ALL = (*SIZES, f"{MODEL}.target_modules=all-linear")
DOWN = (*SIZES, f"{MODEL}.target_modules=[down_proj]")
DEALT = (("ep", 2),)
SEQUENCE_PARALLEL = "actor_rollout_ref.actor.megatron.sequence_parallel=True"
GROUPED = "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_grouped_gemm=True"


class LinearExperts(nn.ModuleList):
    """Experts as transformers had them once: three linear layers each."""

    def __init__(self, fused: nn.Module, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names = names
        for both, down in zip(fused.gate_up_proj.detach(), fused.down_proj.detach(), strict=True):
            expert = nn.Module()
            for name, weight in zip(names, (*both.chunk(2), down), strict=True):
                layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                layer.weight = nn.Parameter(weight.clone())
                expert.add_module(name, layer)
            self.append(expert)

    def forward(self, hidden_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
        out_ND = torch.zeros_like(hidden_ND)
        for number, expert in enumerate(self):
            gate, up, down = (getattr(expert, name) for name in self.names)
            token, place = (expert_NK == number).nonzero().unbind(1)
            x = hidden_ND[token]
            made = down(F.silu(gate(x)) * up(x)) * weight_NK[token, place].unsqueeze(1)
            out_ND = out_ND.index_add(0, token, made)
        return out_ND


def on_disk(name: str, kind: str) -> str:
    return name.removeprefix("model.").replace(
        ".mlp.", ".block_sparse_moe." if kind == "mixtral" else ".mlp."
    )


def reference(path: str, targets: list[str], start: dict[str, Tensor]) -> Outcome:
    """Plain transformers, peft and AdamW in one process, in float64. start: the adapters' first values."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    kind = model.config.model_type
    for layer in model.model.layers:
        layer.mlp.experts = LinearExperts(layer.mlp.experts, expert_matrices(kind))
    holder = nn.Module()
    holder.model = model
    names = [
        name
        for name, module in holder.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets
    ]
    given = {"r": cases.LORA_RANK, "lora_alpha": cases.LORA_ALPHA, "target_modules": names}
    inject_adapter_in_model(LoraConfig(**given), holder)
    trained = {on_disk(name, kind): p for name, p in holder.named_parameters() if p.requires_grad}
    assert trained.keys() == start.keys()
    with torch.no_grad():
        for name, param in trained.items():
            param.copy_(start[name])
        outcome = Outcome(
            *cases.reference_outputs(model, cases.sample_rows(0)),
            cases._squares(model, cases.sample_rows(0)),
        )
    adamw = torch.optim.AdamW(
        trained.values(),
        lr=cases.LR,
        betas=(cases.BETA1, 0.999),
        eps=cases.EPS,
        weight_decay=cases.WEIGHT_DECAY,
    )
    for step in range(cases.NUM_STEPS):
        rows = cases.sample_rows(step)
        log_prob_BT, entropy_BT = cases.reference_outputs(model, rows)
        mask_BT = rows["response_mask"]
        loss_BT = -rows["advantage"] * log_prob_BT - cases.ENTROPY_COEFF * entropy_BT
        loss = (loss_BT * mask_BT).sum() / mask_BT.sum()
        loss.backward()
        outcome.losses.append(loss.item())
        outcome.grad_norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), cases.CLIP).item())
        if step == 0:
            outcome.grads = {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()
            }
        adamw.step()
        adamw.zero_grad()
    for module in holder.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    outcome.weights = {
        on_disk(name, kind).replace(".base_layer.", "."): p.detach()
        for name, p in holder.named_parameters()
        if ".lora_" not in name
    }
    return outcome


def start_of(kind: str, path: str, targets: list[str]) -> dict[str, Tensor]:
    """Random adapters, of both halves, under the names of the files."""
    from safetensors import safe_open

    draw, found = torch.Generator().manual_seed(5), {}
    with safe_open(Path(path) / "model.safetensors", framework="pt") as file:
        for name in sorted(file.keys()):
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] not in targets or ".layers." not in layer:
                continue
            rows, inputs = file.get_slice(name).get_shape()
            for half, shape in (("A", (cases.LORA_RANK, inputs)), ("B", (rows, cases.LORA_RANK))):
                found[f"{layer}.lora_{half}.default.weight"] = torch.randn(shape, generator=draw) * 0.1
    return found


def targets_of(scenario: Scenario) -> list[str]:
    kind = "mixtral" if scenario.model == "mixtral" else "qwen3_moe"
    return ["down_proj"] if DOWN[-1] in scenario.overrides else [*ADAPTED, *expert_matrices(kind)]


def put(engine: Any, scenario: Scenario, start: dict[str, Tensor]) -> None:
    state = engine.state_dict()
    held = engine._live_pieces()
    if scenario.strategy == "megatron":  # whose optimizer has weights of its own
        held = {name: tensor.pieces for name, tensor in state["model"].items()}
    assert held.keys() <= start.keys()
    for name, pieces in held.items():
        for local, offset in pieces:
            ends = zip(offset, local.shape, strict=True)
            local.copy_(start[name][tuple(slice(at, at + size) for at, size in ends)])
    engine.load_state_dict(state)


def megatron(name: str, world: int, model: str, *keys: str, **sizes: int) -> Scenario:
    keys = keys or (*ALL, "actor_rollout_ref.actor.megatron.use_distributed_optimizer=False")
    return Scenario(name, world, model, "uneven", keys, strategy="megatron", sizes=tuple(sizes.items()))
