"""A vision model under FSDP2 computes, packed, what plain Hugging Face says of each row alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import train_engine_cases as cases
import vision_cases as vision
from dist_harness import run_workers
from some_cases import some
from train_engine_cases import Scenario
from vision_engine_cases import COMPILED, FROZEN, KEPT, LORA, ROWS_1, VLM, check, check_adapters

from siirl.data.rows import take_rows
from siirl.model_files.weight_slices import write_adapter

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
LAYERS_COMPILED = (
    Scenario("compiled", 1, overrides=(*VLM, *COMPILED)),
    Scenario("compiled, activations kept", 1, overrides=(*VLM, *COMPILED, *KEPT)),
    Scenario("frozen tower, compiled", 1, overrides=(*VLM, *COMPILED, *KEPT, *FROZEN)),
)

ADAPTED = (
    Scenario("adapters", 1, overrides=(*VLM, *LORA)),
    Scenario("adapters, compiled", 1, overrides=(*VLM, *LORA, *COMPILED, *KEPT)),
    Scenario("adapters, two shards", 2, overrides=(*VLM, *LORA, *ROWS_1)),
)


@pytest.fixture(scope="module", params=vision.KINDS)
def folder(request, tmp_path_factory) -> Path:
    return vision.make_vision_model(tmp_path_factory.mktemp(request.param), request.param)


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
    check_adapters(folder, scenarios)


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
