"""A vision model in a training engine: what it says of rows with images, and what plain Hugging Face does."""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import train_engine_cases as cases
import vision_cases as vision
from dist_harness import run_workers
from proven_models import TRAINING
from recorded_cases import case_of, record_outcome
from torch import Tensor
from train_engine_cases import Scenario

from siirl.data.rows import take_rows

VLM = ("data.dataset_type=vlm",)
ROWS_1 = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",)
KEPT = ("actor_rollout_ref.model.enable_gradient_checkpointing=false",)
FROZEN = ("actor_rollout_ref.actor.freeze_vision_tower=true",)
COMPILED = ("actor_rollout_ref.model.compile_layers=true",)
LORA = (
    f"actor_rollout_ref.model.lora_rank={cases.LORA_RANK}",
    f"actor_rollout_ref.model.lora_alpha={cases.LORA_ALPHA}",
)


@dataclass
class Seen:
    """What an engine says of the rows."""

    log_prob: Tensor
    entropy: Tensor
    grad_norm: float
    grads: dict[str, Tensor] = field(default_factory=dict)
    exported: dict[str, Tensor] = field(default_factory=dict)


def run(rank: int, world: int, scenarios: list[Scenario], folder: str, with_images: bool) -> dict[str, Seen]:
    rows = vision.vision_rows(Path(folder), with_images=with_images)
    found = {}
    for scenario in scenarios:
        engine, _ = cases.build_engine(scenario, folder)
        before = {name: x.clone() for name, x in engine.export_weights(torch.float32)}
        mine = take_rows(rows, cases.rows_of_rank(engine.dp_rank, engine.dp_size, scenario.split))
        columns = engine.compute(mine, ("log_prob", "entropy"), cases.TEMPERATURE)
        whole = torch.zeros(2, vision.NUM_ROWS, vision.WIDTH)
        whole[:, mine["row_id"]] = torch.stack([columns["log_prob"], columns["entropy"]])
        dist.all_reduce(whole)
        whole /= world // engine.dp_size  # ranks that share a model have the same rows
        metrics = engine.train_mini_batch(mine, cases.policy_loss, ("log_prob", "entropy"), cases.TEMPERATURE)
        grads = cases.first_step_gradients(engine)
        found[scenario.name] = Seen(whole[0], whole[1], metrics.values()["grad_norm"], grads, before)
        assert engine.flops(mine, backward=False) > 0 or not len(mine)
    return found if rank == 0 else {}


@functools.cache
def expected(folder: Path, with_images: bool, frozen: bool) -> Seen:
    model = vision.hf_model(folder)
    if frozen:
        model.model.visual.requires_grad_(False)
    rows = vision.vision_rows(folder, with_images=with_images)
    log_prob_BT, entropy_BT = vision.hf_outputs(model, folder, rows, cases.TEMPERATURE)
    mask_BT = rows["response_mask"]
    loss_BT = -rows["advantage"] * log_prob_BT - cases.ENTROPY_COEFF * entropy_BT
    ((loss_BT * mask_BT).sum() / mask_BT.sum()).backward()
    trained = {in_files(name, folder): p for name, p in model.named_parameters() if p.requires_grad}
    norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), cases.CLIP))
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    if vision.is_tied(folder):
        return Seen(log_prob_BT.detach(), entropy_BT.detach(), norm, grads)
    table = next(grad for name, grad in grads.items() if "embed_tokens" in name)
    assert float(table[vision.TWIN].abs().sum()) > 0, "a row has sampled the image token"
    table[vision.IMAGE], table[vision.TWIN] = table[vision.TWIN].clone(), 0.0
    return Seen(log_prob_BT.detach(), entropy_BT.detach(), norm, grads)


def in_files(name: str, folder: Path) -> str:
    """The name of a parameter in the files of its model: the older one's are not those of its modules."""
    if not folder.name.startswith("qwen2_5_vl"):
        return name
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def assert_same(found: Seen, wanted: Seen) -> None:
    for name in ("log_prob", "entropy"):
        assert float((getattr(found, name) - getattr(wanted, name)).abs().max()) < 1e-5, name
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert found.grads.keys() == wanted.grads.keys()
    for name, grad in wanted.grads.items():
        assert float((found.grads[name] - grad).abs().max()) < 1e-5, name


def check(
    folder: Path, scenarios: tuple[Scenario, ...], with_images: bool = True, deadline_s: float = 200
) -> dict[str, Seen]:
    (found, *_) = run_workers(
        run, scenarios[0].world, list(scenarios), str(folder), with_images, deadline_s=deadline_s
    )
    for scenario in scenarios:
        frozen, seen = "frozen" in scenario.name, found[scenario.name]
        assert_same(seen, wanted := expected(folder, with_images, frozen))
        kind = next(kind for kind in vision.KINDS if folder.name.startswith(kind))
        part = "frozen tower" if frozen else TRAINING if with_images else "rows without images"
        part = "compiled layers" if COMPILED[0] in scenario.overrides else part
        record_outcome(case_of(kind, scenario, part), seen, wanted)
    return found


def adapted(rank: int, world: int, scenarios: list[Scenario], folder: str) -> dict[str, dict[str, Tensor]]:
    """The merged weights after two steps of a text part with adapters."""
    rows, found = vision.vision_rows(Path(folder)), {}
    for scenario in scenarios:
        engine, _ = cases.build_engine(scenario, folder)
        mine = take_rows(rows, cases.rows_of_rank(engine.dp_rank, engine.dp_size, scenario.split))
        for _ in range(2):
            engine.train_mini_batch(mine, cases.policy_loss, ("log_prob", "entropy"), cases.TEMPERATURE)
        found[scenario.name] = {name: x.clone() for name, x in engine.export_weights(torch.float32)}
    return found if rank == 0 else {}


def adapted_by_peft(folder: Path) -> dict[str, Tensor]:
    model = vision.hf_model(folder)
    before = {in_files(name, folder): p.detach().clone() for name, p in model.named_parameters()}
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    ours = cases.plain_lora(model, [name for name in linear if "language_model" in name])
    trained = [p for p in ours.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(
        trained, lr=cases.LR, betas=(cases.BETA1, 0.999), eps=cases.EPS, weight_decay=cases.WEIGHT_DECAY
    )
    rows = vision.vision_rows(folder)
    mask_BT = rows["response_mask"]
    for _ in range(2):
        outputs = vision.hf_outputs(ours.get_base_model(), folder, rows, cases.TEMPERATURE)
        loss_BT = -rows["advantage"] * outputs[0] - cases.ENTROPY_COEFF * outputs[1]
        ((loss_BT * mask_BT).sum() / mask_BT.sum()).backward()
        torch.nn.utils.clip_grad_norm_(trained, cases.CLIP)
        adamw.step()
        adamw.zero_grad()
    merged = ours.merge_and_unload().named_parameters()
    after = {in_files(name, folder): p.detach() for name, p in merged}
    moved = {name for name in after if float((after[name] - before[name]).abs().max()) > 1e-3}
    assert len(moved) == len([name for name in linear if "language_model" in name])
    return {name: tensor for name, tensor in after.items() if "embed_tokens" not in name}  # see TWIN


def check_adapters(folder: Path, scenarios: tuple[Scenario, ...]) -> None:
    wanted = adapted_by_peft(folder)
    for world in sorted({scenario.world for scenario in scenarios}):
        some_of = [scenario for scenario in scenarios if scenario.world == world]
        (found, *_) = run_workers(adapted, world, some_of, str(folder), deadline_s=600)
        for name, weights in found.items():
            assert wanted.keys() < weights.keys(), name
            gap = {key: float((weights[key] - wanted[key]).abs().max()) for key in wanted}
            assert max(gap.values()) < 1e-5, (name, max(gap, key=lambda key: gap[key]))
