"""A vision model with a value or score head computes, packed, what plain transformers says of each row alone:
in float64, one linear layer on the states of its text part.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import train_engine_cases as cases
import value_head_cases as heads
import vision_cases as vision
from dist_harness import run_workers
from proven_models import record
from recorded_cases import case_of, distance
from safetensors.torch import load_file, save_file
from some_cases import some
from tensordict import TensorDict
from torch import Tensor
from train_engine_cases import Scenario

from siirl.checkpoint.export import save_hf
from siirl.data.rows import seen_of, take_rows
from siirl.nodes.value_model import make_value_loss_fn
from siirl.parallel.process_groups import ProcessGroupManager

VLM = ("data.dataset_type=vlm",)
ROWS_1 = ("critic.ppo_micro_batch_size_per_gpu=1",)
FROZEN = ("critic.freeze_vision_tower=true",)
COMPILED = ("critic.model.compile_layers=true", "critic.model.enable_gradient_checkpointing=false")
ONE = (
    Scenario("packed", 1, overrides=VLM),
    Scenario("a row at a time", 1, overrides=(*VLM, *ROWS_1)),
    Scenario("frozen tower", 1, overrides=(*VLM, *FROZEN)),
)
TWO = (
    Scenario("two shards, images beside texts", 2, overrides=(*VLM, *ROWS_1)),
    Scenario("all rows on the first rank", 2, split="first_rank", overrides=VLM),
)
MORE = (Scenario("compiled", 1, overrides=(*VLM, *COMPILED)),)
LORA = (f"critic.model.lora_rank={cases.LORA_RANK}", f"critic.model.lora_alpha={cases.LORA_ALPHA}")


def with_head(folder: Path, bias: bool = True) -> Path:
    """Put a head of random numbers in the place of the language head of a model."""
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(7)
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.randn(1, 64, generator=draw) / 4
    if bias:
        tensors["score.bias"] = torch.tensor([0.3])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=vision.KINDS)
def folder(request, tmp_path_factory) -> Path:
    made = vision.make_vision_model(tmp_path_factory.mktemp(request.param), request.param)
    return with_head(made)


def critic_rows(folder: Path) -> TensorDict:
    """vision_rows with returns, and old values from which some values are clipped."""
    rows, draw = vision.vision_rows(folder), torch.Generator().manual_seed(1)
    rows["return_"] = torch.randn(rows["advantage"].shape, generator=draw)
    rows["value"] = torch.randn(rows["advantage"].shape, generator=draw) * 0.3
    return rows


@dataclass
class Critic:
    """Values, the gradient of the first step and its norm, and the values after it."""

    value: Tensor
    grads: dict[str, Tensor]
    grad_norm: float


def in_files(name: str, folder: Path) -> str:
    """The name of a parameter in the files of its model."""
    if folder.name.startswith("qwen2_5_vl"):
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    return name


class PlainCritic(torch.nn.Module):
    """The model that transformers has, without its language head, and a linear layer."""

    def __init__(self, folder: Path, adapted: bool = False):
        super().__init__()
        self.model = vision.hf_model(folder).model
        stored = load_file(folder / "model.safetensors")
        self.score = torch.nn.Linear(64, 1)
        if adapted:
            names = [name for name, module in self.named_modules() if isinstance(module, torch.nn.Linear)]
            cases.plain_lora(self, [name for name in names if "language_model" in name])
            self.score.requires_grad_(True)
        with torch.no_grad():
            self.score.weight.copy_(stored["score.weight"])
            self.score.bias.copy_(stored.get("score.bias", torch.zeros(1)))
        self.double()

    def of_row(self, folder: Path, ids: list[int], num_prompt: int, seen: Any) -> Tensor:
        """The number at each token of a row."""
        inputs = vision.hf_inputs(folder, ids[:num_prompt], ids[num_prompt:], *seen)
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].double()
        return self.score(self.model(**inputs).last_hidden_state)[0, :, 0]

    def values(self, folder: Path, rows: TensorDict) -> Tensor:
        """[B, T], each row alone."""
        value_BT = torch.zeros(len(rows), vision.WIDTH, dtype=torch.float64)
        for row, seen in enumerate(seen_of(rows)):
            length, num = int(rows["prompt_length"][row]), int(rows["response_length"][row])
            ids = rows["prompt_ids"][row, rows["prompt_ids"].shape[1] - length :].tolist()
            ids += rows["response_ids"][row, :num].tolist()
            if num:
                value_BT[row, :num] = self.of_row(folder, ids, length, seen)[length - 1 : -1]
        return value_BT

    def named(self, folder: Path) -> dict[str, torch.nn.Parameter]:
        return {in_files(name, folder): p for name, p in self.named_parameters() if p.requires_grad}


def loss_of(value_BT: Tensor, rows: TensorDict) -> Tensor:
    """The clipped value loss, a mean over tokens, written out."""
    old, target, mask = rows["value"], rows["return_"], rows["response_mask"]
    near = torch.maximum(torch.minimum(value_BT, old + heads.CLIP_RANGE), old - heads.CLIP_RANGE)
    loss_BT = 0.5 * torch.maximum((value_BT - target) ** 2, (near - target) ** 2)
    return (loss_BT * mask).sum() / mask.sum()


def expected(folder: Path, frozen: bool) -> Critic:
    critic, rows = PlainCritic(folder), critic_rows(folder)
    critic.model.visual.requires_grad_(not frozen)
    value_BT = critic.values(folder, rows)
    loss_of(value_BT, rows).backward()
    trained = critic.named(folder)
    norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0))
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    table = next(grad for name, grad in grads.items() if "embed_tokens" in name)
    assert float(table[vision.TWIN].abs().sum()) > 0, "a row has sampled the image token"
    table[vision.IMAGE], table[vision.TWIN] = table[vision.TWIN].clone(), 0.0
    return Critic(value_BT.detach(), grads, norm)


def engines(rank: int, world: int, scenarios: list[Scenario], folder: str, out: str) -> dict[str, Critic]:
    """A step of a critic in each scenario, which is exported to `out` before."""
    rows, found, ranks = critic_rows(Path(folder)), {}, tuple(range(world))
    for scenario in scenarios:
        groups = ProcessGroupManager(cases.dims_of(scenario, ranks)[1], "gloo", 60)
        engine, cfg = heads.make_critic(scenario, folder, groups, ranks)
        if out:
            save_hf(engine.export_weights(), folder, Path(out), rank, engine.hf_config_changes())
        mine = take_rows(rows, cases.rows_of_rank(engine.dp_rank, engine.dp_size, scenario.split))
        value_BT = torch.zeros(vision.NUM_ROWS, vision.WIDTH)
        value_BT[mine["row_id"]] = engine.compute(mine, ("value",), 1.0)["value"]
        dist.all_reduce(value_BT)
        metrics = engine.train_mini_batch(mine, make_value_loss_fn(cfg.critic), ("value",), 1.0)
        grads = cases.first_step_gradients(engine)
        found[scenario.name] = Critic(value_BT, grads, metrics.values()["grad_norm"])
        assert engine.flops(mine, backward=True) > 0 or not len(mine)
    return found if rank == 0 else {}


def check(folder: Path, scenarios: tuple[Scenario, ...], out: str = "", deadline_s: float = 200) -> dict:
    (found, *_) = run_workers(
        engines, scenarios[0].world, list(scenarios), str(folder), out, deadline_s=deadline_s
    )
    for scenario in scenarios:
        wanted, seen = expected(folder, "frozen" in scenario.name), found[scenario.name]
        assert float((seen.value - wanted.value).abs().max()) < 1e-5, scenario.name
        assert float(wanted.value.abs().max()) > 0.5
        assert seen.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
        assert seen.grads.keys() == wanted.grads.keys()
        for name, grad in wanted.grads.items():
            assert float((seen.grads[name] - grad).abs().max()) < 1e-5, (scenario.name, name)
        gap = float((seen.value - wanted.value).abs().max())
        kind = next(kind for kind in vision.KINDS if folder.name.startswith(kind))
        record(case_of(kind, scenario, "values"), gap, distance(seen.grads, wanted.grads))
    return found


def test_values_of_packed_rows_with_images_are_a_linear_layer_on_the_states_of_each_alone(folder, tmp_path):
    found = check(folder, ONE, out=str(tmp_path / "hf"))
    tower = {name for name in found["packed"].grads if "visual." in name}
    assert tower and not [name for name in tower if float(found["packed"].grads[name].abs().max()) == 0]
    assert not [name for name in found["frozen tower"].grads if "visual." in name]
    stored, exported = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


@pytest.mark.parametrize("folder", some(vision.KINDS, vision.KINDS[1]), indirect=True)
def test_ranks_of_a_critic_with_images_and_without_rows_agree(folder):
    check(folder, TWO)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_critic_of_compiled_layers_says_the_same(folder):
    check(folder, MORE, deadline_s=600)


def trained_critic(rank: int, world: int, folder: str, out: str, *keys: str) -> tuple[Tensor, Tensor]:
    """Values before and after two steps; then the critic is exported."""
    scenario = Scenario("", world, overrides=(*VLM, f"trainer.seed={cases.SEED}", *keys))
    groups = ProcessGroupManager(cases.dims_of(scenario, tuple(range(world)))[1], "gloo", 60)
    engine, cfg = heads.make_critic(scenario, folder, groups, tuple(range(world)))
    rows, found = critic_rows(Path(folder)), []
    for _ in range(2):
        found.append(engine.compute(rows, ("value",), 1.0)["value"])
        engine.train_mini_batch(rows, make_value_loss_fn(cfg.critic), ("value",), 1.0)
    found.append(engine.compute(rows, ("value",), 1.0)["value"])
    save_hf(engine.export_weights(), folder, Path(out), rank, engine.hf_config_changes())
    return found[0], found[-1]


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapters"])
def test_two_steps_of_a_critic_are_adamw_s_and_its_export_is_read_by_transformers(folder, tmp_path, adapted):
    plain, rows = PlainCritic(folder, adapted), critic_rows(folder)
    adamw = torch.optim.AdamW(
        plain.named(folder).values(), lr=heads.LR, eps=cases.EPS, weight_decay=cases.WEIGHT_DECAY
    )
    table = plain.model.get_input_embeddings().weight
    for _ in range(2):
        loss_of(plain.values(folder, rows), rows).backward()
        if table.grad is not None:
            table.grad[vision.IMAGE] += table.grad[vision.TWIN]
            table.grad[vision.TWIN] = 0.0
        torch.nn.utils.clip_grad_norm_(plain.named(folder).values(), 1.0)
        adamw.step()
        adamw.zero_grad()
        with torch.no_grad():
            table[vision.TWIN] = table[vision.IMAGE]
    out, keys = tmp_path / folder.name, LORA if adapted else ()
    before, after = run_workers(trained_critic, 1, str(folder), str(out), *keys)[0]
    with torch.no_grad():
        wanted, exported = plain.values(folder, rows), PlainCritic(out).values(out, rows)
    assert float((after - before).abs().max()) > 0.1
    assert float((after - wanted).abs().max()) < 5e-5  # AdamW divides by gradients that are near 0
    assert float((after - exported).abs().max()) < 1e-5
    again, _ = run_workers(trained_critic, 1, str(out), str(tmp_path / "again"))[0]
    assert float((again - after).abs().max()) < 1e-5
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"][0].endswith("ForTokenClassification") and config["id2label"] == {
        "0": "value"
    }
    assert (out / "preprocessor_config.json").is_file()


def test_a_language_model_becomes_a_critic_with_a_head_of_the_seed(tmp_path):
    made = vision.make_vision_model(tmp_path / "qwen3_vl", "qwen3_vl")
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        run_workers(
            trained_critic, 1, str(made), str(tmp_path / name), f"trainer.seed={seed}", "critic.optim.lr=0"
        )
    one, same, other = (
        load_file(tmp_path / name / "model.safetensors")["score.weight"] for name in ("one", "same", "other")
    )
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert 0.01 < float(one.std()) < 0.04  # initializer_range of the text part
