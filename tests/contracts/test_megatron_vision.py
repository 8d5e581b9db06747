"""A vision model under Megatron-Core computes in every layout what plain Hugging Face says of each row."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import train_engine_cases as cases
import vision_cases as vision
from dist_harness import run_workers
from expert_cases import unequal_replicas
from recorded_cases import distance
from safetensors.torch import load_file
from some_cases import some
from train_engine_cases import Scenario
from vision_engine_cases import FROZEN, KEPT, LORA, ROWS_1, VLM, check, check_adapters, expected, run

from siirl.data.rows import take_rows

MEGATRON = "actor_rollout_ref.actor.megatron"
SPLIT = (f"{MEGATRON}.sequence_parallel=True",)
PLAIN = (f"{MEGATRON}.use_distributed_optimizer=False",)
EARLY = tuple(
    f"+{MEGATRON}.override_ddp_config.{key}"
    for key in ("overlap_grad_reduce=True", "overlap_param_gather=True", "bucket_size=20000")
)
BF16 = (f"{MEGATRON}.param_dtype=bfloat16",)
HOST = (
    "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True",
    "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=0.5",
)
SEVERAL = tuple(
    f"+{MEGATRON}.override_transformer_config.recompute_{key}"
    for key in ("granularity=full", "method=uniform", "num_layers=4")
)
PARTS = (
    f"+{MEGATRON}.override_transformer_config.recompute_granularity=selective",
    f"+{MEGATRON}.override_transformer_config.recompute_modules=[core_attn,mlp]",
)
LAYERS = 8


def layout(name: str, world: int, *overrides: str, split: str = "even", **sizes: int) -> Scenario:
    keys, used = (*VLM, *overrides), tuple(sizes.items())
    return Scenario(name, world, split=split, overrides=keys, strategy="megatron", sizes=used)


ONE = (
    layout("packed", 1),
    layout("a row at a time, activations kept", 1, *ROWS_1, *KEPT),
    layout("frozen tower", 1, *FROZEN),
)
TWO = (
    layout("a sequence in two, images beside texts", 2, *SPLIT, *ROWS_1, tp=2),
    layout("two stages", 2, pp=2),
    layout("all rows on the first rank", 2, split="first_rank"),
    layout("frozen tower, a sequence in two", 2, *SPLIT, *FROZEN, tp=2),
)
MORE = (
    layout("weights in two", 2, tp=2),
    layout("weights in two, activations kept", 2, *SPLIT, *KEPT, tp=2),
    layout("two stages, images beside texts", 2, *ROWS_1, pp=2),
    layout("four chunks on two stages", 2, *ROWS_1, pp=2, vpp=2),
    layout("context in two", 2, cp=2),
    layout("context in two, images beside texts", 2, *ROWS_1, *PLAIN, cp=2),
    layout("two replicas, images beside texts", 2, *ROWS_1),
    layout("several layers computed again at once", 2, *SPLIT, *SEVERAL, tp=2),
    layout("parts of layers computed again", 2, *PARTS, pp=2),
    layout("frozen tower, two stages", 2, *FROZEN, pp=2),
    layout("frozen tower, context in two", 2, *FROZEN, cp=2),
    layout("frozen tower, two replicas", 2, *FROZEN, *EARLY),
)
FOUR = (
    layout("all at once", 4, *SPLIT, *ROWS_1, tp=2, pp=2),
    layout("context and weights in two", 4, *SPLIT, tp=2, cp=2),
    layout("two of two stages", 4, *PLAIN, pp=2),
)
ADAPTED = (
    layout("adapters", 1, *LORA),
    layout("adapters, a sequence in two", 2, *SPLIT, *LORA, tp=2),
    layout("adapters, two stages", 2, *LORA, *ROWS_1, pp=2),
    layout("adapters, context in two", 2, *LORA, *KEPT, cp=2),
)
QWEN3 = vision.KINDS[1]


@pytest.fixture(scope="module", params=vision.KINDS)
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    return vision.make_vision_model(path, request.param, layers=LAYERS)


def test_packed_rows_with_images_are_what_hugging_face_computes_of_each_alone(folder):
    tower = {name: grad for name, grad in check(folder, ONE)["packed"].grads.items() if "visual." in name}
    assert tower and all(float(grad.abs().max()) > 0 for grad in tower.values())


@pytest.mark.parametrize("folder", some(vision.KINDS, QWEN3), indirect=True)
def test_two_ranks_agree(folder):
    stored = load_file(folder / "model.safetensors")
    for seen in check(folder, TWO).values():
        assert seen.exported.keys() == stored.keys()
        assert all(torch.equal(seen.exported[name], stored[name]) for name in stored)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenarios", [MORE, FOUR], ids=["two ranks", "four ranks"])
def test_ranks_of_other_layouts_agree(folder, scenarios):
    check(folder, scenarios, deadline_s=800)


@pytest.mark.slow
def test_in_bfloat16_it_is_off_by_its_rounding(folder):
    """2^-9 of each number."""
    scenarios = [
        layout("a sequence in two", 2, *BF16, *SPLIT, tp=2),
        layout("two stages", 2, *BF16, *ROWS_1, pp=2),
        layout("two replicas", 2, *BF16, *EARLY, *HOST),
    ]
    wanted = expected(folder, True, False)
    for seen in run_workers(run, 2, scenarios, str(folder), True, deadline_s=200)[0].values():
        assert float((seen.log_prob - wanted.log_prob).abs().mean()) < 0.03
        assert distance(seen.grads, wanted.grads) < 0.06
        tower = [{n: x for n, x in one.grads.items() if "visual." in n} for one in (seen, wanted)]
        assert distance(*tower) < 0.06


@pytest.mark.slow
def test_an_embedding_that_is_the_output_head_too(tmp_path):
    """As small models of both families have it."""
    folder = vision.make_vision_model(tmp_path / f"{QWEN3}_tied", QWEN3, layers=LAYERS, tied=True)
    for scenarios in (ONE[:1], TWO):
        check(folder, scenarios)


@pytest.mark.slow
def test_layers_that_see_a_window(tmp_path):
    kind = vision.KINDS[0]
    folder = vision.make_vision_model(tmp_path / f"{kind}_window", kind, layers=LAYERS, window=5)
    for scenarios in (ONE[:1], (*TWO[:2], MORE[4])):
        check(folder, scenarios)


@pytest.mark.parametrize("folder", some(vision.KINDS, QWEN3), indirect=True)
def test_without_any_image_the_tower_has_a_gradient_of_zeros(folder):
    scenario = layout("a sequence in two", 2, *SPLIT, *ROWS_1, tp=2)
    seen = check(folder, (scenario,), with_images=False)[scenario.name]
    assert not any(float(grad.abs().max()) for name, grad in seen.grads.items() if "visual." in name)


@pytest.mark.parametrize(
    ("scenarios", "folder"),
    [(ADAPTED[:2], QWEN3), *(pytest.param(ADAPTED, kind, marks=pytest.mark.slow) for kind in vision.KINDS)],
    indirect=["folder"],
    ids=["a few", *vision.KINDS],
)
def test_adapters_train_on_the_text_part_as_those_of_peft(folder, scenarios):
    check_adapters(folder, scenarios)


def steps(engine, scenario: Scenario, folder: str, which: range) -> None:
    for step in which:
        rows = vision.vision_rows(Path(folder), step=step, with_images=step % 3 != 1)
        mine = take_rows(rows, cases.rows_of_rank(engine.dp_rank, engine.dp_size, scenario.split))
        engine.train_mini_batch(mine, cases.policy_loss, ("log_prob", "entropy"), cases.TEMPERATURE)


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.export_weights(torch.float32)}


def save_after_two_steps(rank: int, world: int, folder: str, saved: str, scenario: Scenario) -> dict:
    engine, _ = cases.build_engine(scenario, folder)
    steps(engine, scenario, folder, range(2))
    dcp.save(engine.state_dict(), checkpoint_id=saved)
    steps(engine, scenario, folder, range(2, 3))
    trained = weights(engine)
    assert scenario.strategy == "fsdp" or world == engine._dims.pp or not unequal_replicas(engine)
    return trained


def resume_last_step(rank: int, world: int, folder: str, saved: str, scenario: Scenario) -> dict:
    engine, _ = cases.build_engine(scenario, folder)
    steps(engine, scenario, folder, range(1))  # whatever is there must be overwritten
    state = engine.state_dict()
    dcp.load(state, checkpoint_id=saved)
    engine.load_state_dict(state)
    steps(engine, scenario, folder, range(2, 3))
    trained = weights(engine)
    assert scenario.strategy == "fsdp" or world == engine._dims.pp or not unequal_replicas(engine)
    return trained


FSDP = Scenario("fsdp", 2, overrides=VLM)
REPLICAS = layout("two replicas", 2)
RESUMED = [
    (REPLICAS, [REPLICAS, layout("a sequence in two", 2, *SPLIT, tp=2)]),
    (FSDP, [layout("two stages", 2, pp=2), layout("context in two", 2, cp=2)]),
    (layout("two stages", 2, pp=2), [layout("two stages", 2, pp=2), FSDP]),
    (layout("frozen tower", 2, *FROZEN), [layout("frozen tower", 2, *FROZEN, tp=2)]),
    (layout("early", 2, *EARLY), [layout("early", 2, *EARLY), REPLICAS]),
]
"""Pieces of the distributed optimizer begin and end in the middle of the kernel of a convolution."""


@pytest.mark.parametrize(
    ("folder", "saved", "resumed"),
    [
        (QWEN3, *RESUMED[0]),
        *(
            pytest.param(kind, *case, marks=[pytest.mark.slow, pytest.mark.timeout(600)])
            for kind in vision.KINDS
            for case in RESUMED[(kind == QWEN3) :]
        ),
    ],
    indirect=["folder"],
    ids=lambda value: value.name if isinstance(value, Scenario) else "",
)
def test_a_checkpoint_continues_exactly_and_on_other_layouts(folder, tmp_path, saved, resumed):
    trained = run_workers(
        save_after_two_steps, saved.world, str(folder), str(tmp_path), saved, deadline_s=300
    )[0]
    stored = load_file(folder / "model.safetensors")
    moved = {name for name in stored if not torch.equal(trained[name], stored[name])}
    assert moved == {name for name in stored if "visual." not in name or "frozen" not in saved.name}
    for scenario in resumed:
        found = run_workers(
            resume_last_step, scenario.world, str(folder), str(tmp_path), scenario, deadline_s=300
        )[0]
        assert found.keys() == trained.keys()
        for name in trained:
            assert scenario != saved or torch.equal(found[name], trained[name]), name
            gap = float((found[name] - trained[name]).abs().max())
            assert gap < 0.01 * cases.LR, (scenario.name, name, gap)


def adapter_of(rank: int, world: int, folder: str, scenarios: list[Scenario]) -> list[dict]:
    found = []
    for scenario in scenarios:
        engine, _ = cases.build_engine(scenario, folder)
        found.append({name: x.clone() for name, x in engine.export_adapter(torch.float32)})
    return found


def test_an_adapter_leaves_under_the_names_that_fsdp_gives_it(folder):
    both = [ADAPTED[0], Scenario("fsdp", 1, overrides=(*VLM, *LORA))]
    ((ours, theirs),) = run_workers(adapter_of, 1, str(folder), both, deadline_s=200)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def read_converted(rank: int, world: int, folder: str, stored: str, scenarios: list[Scenario]) -> list[dict]:
    from siirl.checkpoint.convert import to_distributed

    if rank == 0:
        to_distributed(Path(folder), Path(stored), chunk_bytes=4096)
    torch.distributed.barrier()
    return [weights(cases.build_engine(scenario, folder)[0]) for scenario in scenarios]


@pytest.mark.slow
def test_a_converted_checkpoint_has_the_weights_of_the_files(folder, tmp_path):
    stored = tmp_path / "stored"
    keys = (f"{MEGATRON}.use_dist_checkpointing=True", f"{MEGATRON}.dist_checkpointing_path={stored}")
    scenarios = [layout("weights in two", 2, *keys, tp=2), layout("two stages", 2, *keys, pp=2)]
    files = load_file(folder / "model.safetensors")
    for found in run_workers(read_converted, 2, str(folder), str(stored), scenarios)[0]:
        assert found.keys() == files.keys()
        assert all(torch.equal(found[name], files[name]) for name in files)
