"""A vision model under FSDP2 computes, packed, what plain Hugging Face says of each row alone."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import train_engine_cases as cases
import vision_cases as vision
from dist_harness import run_workers
from proven_models import TRAINING
from recorded_cases import case_of, record_outcome
from some_cases import some
from torch import Tensor
from train_engine_cases import Scenario

from siirl.data.rows import take_rows
from siirl.model_files.weight_slices import write_adapter

VLM = ("data.dataset_type=vlm",)
ROWS_1 = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",)
KEPT = ("actor_rollout_ref.model.enable_gradient_checkpointing=false",)
FROZEN = ("actor_rollout_ref.actor.freeze_vision_tower=true",)
WHOLE = ("actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false",)
ONE = (
    Scenario("packed", 1, overrides=VLM),
    Scenario("a row at a time, activations kept", 1, overrides=(*VLM, *ROWS_1, *KEPT)),
    Scenario("frozen tower", 1, overrides=(*VLM, *FROZEN)),
)
TWO = (
    Scenario("two shards, images beside texts", 2, overrides=(*VLM, *ROWS_1)),
    Scenario("all rows on the first rank", 2, split="first_rank", overrides=VLM),
    Scenario("frozen tower, as a large model", 2, overrides=(*VLM, *FROZEN), large=True),
)
MORE = (
    Scenario("two replicas", 2, fsdp_size=1, overrides=VLM),
    Scenario("frozen tower, two shards", 2, overrides=(*VLM, *FROZEN)),
    Scenario("as a large model, each layer gathered when it runs", 2, overrides=VLM, large=True),
    Scenario("frozen tower, a large model whole", 2, overrides=(*VLM, *ROWS_1, *FROZEN, *WHOLE), large=True),
)
COMPILED = ("actor_rollout_ref.model.compile_layers=true",)
LAYERS_COMPILED = (
    Scenario("compiled", 1, overrides=(*VLM, *COMPILED)),
    Scenario("compiled, activations kept", 1, overrides=(*VLM, *COMPILED, *KEPT)),
    Scenario("frozen tower, compiled", 1, overrides=(*VLM, *COMPILED, *KEPT, *FROZEN)),
)

LORA = (
    f"actor_rollout_ref.model.lora_rank={cases.LORA_RANK}",
    f"actor_rollout_ref.model.lora_alpha={cases.LORA_ALPHA}",
)
ADAPTED = (
    Scenario("adapters", 1, overrides=(*VLM, *LORA)),
    Scenario("adapters, compiled", 1, overrides=(*VLM, *LORA, *COMPILED, *KEPT)),
    Scenario("adapters, two shards", 2, overrides=(*VLM, *LORA, *ROWS_1)),
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


@pytest.fixture(scope="module", params=vision.KINDS)
def folder(request, tmp_path_factory) -> Path:
    return vision.make_vision_model(tmp_path_factory.mktemp(request.param), request.param)


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


def test_packed_rows_with_images_are_what_hugging_face_computes_of_each_alone(folder):
    from safetensors.torch import load_file

    found = check(folder, ONE)
    tower = {name for name in found["packed"].grads if "visual." in name}
    assert tower and not [name for name in tower if float(found["packed"].grads[name].abs().max()) == 0]
    stored = load_file(folder / "model.safetensors")
    exported = found["packed"].exported
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


@pytest.mark.parametrize("folder", some(vision.KINDS, vision.KINDS[1]), indirect=True)
def test_ranks_with_images_without_them_and_without_rows_agree(folder):
    check(folder, TWO)


@pytest.mark.slow
def test_ranks_of_other_layouts_agree(folder):
    check(folder, MORE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_layers_compute_the_same(folder):
    """Those of the text; the tower's stay."""
    check(folder, LAYERS_COMPILED, deadline_s=600)


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


@pytest.mark.parametrize(
    ("scenarios", "folder"),
    [
        *((ADAPTED[:1], kind) for kind in vision.KINDS),
        pytest.param(ADAPTED[1:], vision.KINDS[1], marks=(pytest.mark.slow, pytest.mark.timeout(700))),
    ],
    indirect=["folder"],
    ids=[*vision.KINDS, "compiled, and two ranks"],
)
def test_adapters_train_on_the_text_part_as_those_of_peft(scenarios, folder):
    wanted = adapted_by_peft(folder)
    for world in sorted({scenario.world for scenario in scenarios}):
        some_of = [scenario for scenario in scenarios if scenario.world == world]
        (found, *_) = run_workers(adapted, world, some_of, str(folder), deadline_s=600)
        for name, weights in found.items():
            assert wanted.keys() < weights.keys(), name
            gap = {key: float((weights[key] - wanted[key]).abs().max()) for key in wanted}
            assert max(gap.values()) < 1e-5, (name, max(gap, key=lambda key: gap[key]))


def test_an_exported_adapter_is_one_of_the_text_part_alone_to_peft(tmp_path):
    """Layers of the tower of a Qwen2.5-VL end in the same names."""
    from peft import PeftModel

    folder = vision.make_vision_model(tmp_path / "qwen2_5_vl", "qwen2_5_vl")
    ours = cases.plain_lora(vision.hf_model(folder), r".*language_model.*\.(q|gate)_proj")
    tensors = {
        name.removeprefix("base_model.model.").replace(".default.", "."): p.detach()
        for name, p in ours.named_parameters()
        if ".lora_" in name
    }
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", tensors, cases.LORA_RANK, cases.LORA_ALPHA)
    read = PeftModel.from_pretrained(vision.hf_model(folder), tmp_path / "adapter")
    found = {name for name, module in read.named_modules() if hasattr(module, "lora_A")}
    assert len(found) == 2 * 3 and all("language_model" in name for name in found)


def graphs_after_each_step(rank: int, world: int, folder: str) -> list[int]:
    """In steps whose rows have other lengths, and other numbers of images, or none."""
    engine, _ = cases.build_engine(Scenario("", world, overrides=(*VLM, *COMPILED, *KEPT)), folder)
    found = []
    for step in range(8):
        rows = vision.vision_rows(Path(folder), step=step, with_images=step % 3 != 1)
        rows = take_rows(rows, list(range(step % 4, vision.NUM_ROWS - step % 3)))
        engine.compute(rows, ("log_prob", "entropy"), cases.TEMPERATURE)
        engine.train_mini_batch(rows, cases.policy_loss, ("log_prob", "entropy"), cases.TEMPERATURE)
        found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_with_other_numbers_of_images_compile_nothing_after_some_steps(folder):
    (found,) = run_workers(graphs_after_each_step, 1, str(folder), deadline_s=600)
    assert found[0] > 0 and found[3] == found[-1]


@pytest.mark.parametrize("folder", some(vision.KINDS, vision.KINDS[1]), indirect=True)
def test_a_vision_model_learns_from_rows_without_images(folder):
    check(folder, ONE[:1], with_images=False)


def test_positions_are_those_of_transformers(folder):
    from siirl.data.image_reader import ImageReader
    from siirl.data.rows import seen_of

    model, reader = vision.hf_model(folder), ImageReader(str(folder))
    rows = vision.vision_rows(folder)
    for row, (seen, starts) in enumerate(seen_of(rows)):
        length = int(rows["prompt_length"][row])
        prompt = rows["prompt_ids"][row, -length:].tolist()
        answer = rows["response_ids"][row, : rows["response_length"][row]].tolist()
        inputs: Any = vision.hf_inputs(folder, prompt, answer, seen, starts)
        inputs.pop("pixel_values", None)
        wanted, _ = model.model.get_rope_index(**inputs)
        grids = reader.read(seen).grids if seen else ()
        assert reader.positions([*prompt, *answer], starts, grids).tolist() == wanted[:, 0].tolist()
