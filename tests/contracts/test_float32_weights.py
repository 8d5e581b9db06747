"""Weights that a family computes with in float32 are not rounded where the others are."""

import json
import re
from pathlib import Path

import causal_lms
import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from safetensors.torch import load_file, save_file
from some_cases import some
from train_engine_cases import Scenario

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.models.families import family_of, known_types, types_with
from siirl.models.trained import own_type
from siirl.parallel.dims import ParallelDims

KINDS = types_with(lambda row: row.in_float32)
MASTER = "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16"
COMPUTE = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16"
ADAPTERS = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_proj,v_proj]")
ROUNDED = (
    Scenario("alone", 1, overrides=(MASTER,)),
    Scenario("alone, in bfloat16", 1, overrides=(MASTER, COMPUTE)),
    Scenario("other rows", 2, split="uneven", overrides=(MASTER,), large=True),
    Scenario("adapters", 1, overrides=(MASTER, *ADAPTERS)),
    Scenario("three ranks, of which one has none", 3, overrides=(MASTER, COMPUTE)),
    Scenario("copies", 4, overrides=(MASTER,), fsdp_size=2),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Kind -> its files in bfloat16, but for what is in float32."""
    found = {}
    for kind in KINDS:
        folder = found[kind] = tmp_path_factory.mktemp(kind)
        causal_lms.write_model(folder, causal_lms.tiny_config(kind))
        config, ends = json.loads((folder / "config.json").read_text()), family_of(kind).in_float32
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
        stored = load_file(folder / "model.safetensors")
        rounded = {name: x if name.endswith(ends) else x.bfloat16() for name, x in stored.items()}
        save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    return found


def told_otherwise(rank: int, world: int, kinds: list[str]) -> dict[str, set[str]]:
    """Kind -> weights, and buffers, that transformers reads in float32 and the table does not, or the other
    way round.

    Also the decays of layers with states, which transformers rounds: a step of them, exp(-exp(A_log) dt), is
    taken once for each token, and all who train or sample such models hold them in float32.
    """
    from transformers import AutoModelForCausalLM

    found = {}
    for kind in kinds:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(causal_lms.tiny_config(kind))
        parts = (*(type(model)._keep_in_fp32_modules_strict or ()), "A_log")
        kept = re.compile(rf"(^|\.)({'|'.join(map(re.escape, parts))})(\.|$)")
        weights, stored = dict(model.named_parameters()), model.state_dict()
        expected = {name for name in stored if kept.search(name)}
        trained = {name for name in weights if name.endswith(family_of(kind).in_float32)}
        written = {name for name in stored if name.endswith(own_type(kind))}
        if odd := (expected & weights.keys()) ^ trained | (expected - written):
            found[kind] = odd
    return found


def test_the_table_has_all_that_transformers_reads_in_float32_and_all_decays():
    kinds = [kind for kind in known_types("fsdp") if not family_of(kind).sees_images]
    assert run_workers(told_otherwise, 1, kinds)[0] == {}


def wrong(rank: int, world: int, scenarios: list[Scenario], folder: Path, kind: str) -> list[str]:
    return [f"{one.name}: {problem}" for one in scenarios if (problem := is_wrong(one, folder, kind))]


def is_wrong(scenario: Scenario, folder: Path, kind: str) -> str:
    from transformers import AutoModelForCausalLM

    ends, stored = family_of(kind).in_float32, load_file(folder / "model.safetensors")
    engine, groups = cases.build_engine(scenario, folder)
    exported = {name: tensor.clone() for name, tensor in engine.export_weights()}
    own = [name for name in stored if name.endswith(ends)]
    assert own and not any(torch.equal(stored[name], stored[name].bfloat16().float()) for name in own)
    alike = (exported[name].dtype == x.dtype and torch.equal(exported[name], x) for name, x in stored.items())
    if not all(alike):
        return "exported otherwise"
    if {name: tensor.dtype for name, tensor in exported.items()} != {
        name: dtype for name, (_, dtype) in engine.weight_specs().items()
    }:
        return "specs say other types"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows, mask_BT = cases.sample_rows(0), cases.sample_rows(0)["response_mask"]
    log_prob_BT, entropy_BT = cases.reference_outputs(model, rows)
    found = engine.compute(rows, ("log_prob",), cases.TEMPERATURE)["log_prob"]
    exact = COMPUTE not in scenario.overrides
    if not float((found - log_prob_BT.detach()).abs().max()) < (1e-5 if exact else 0.5):
        return "other log-probs"
    loss_BT = -rows["advantage"] * log_prob_BT - cases.ENTROPY_COEFF * entropy_BT
    ((loss_BT * mask_BT).sum() / mask_BT.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), cases.CLIP)
    theirs = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    seen = seen_in_passes(engine, ends)
    cases.train_steps(engine, scenario, range(1))
    masters = {name: x for name, x in exported.items() if name in own}
    if not seen or not all(
        x.dtype == torch.float32 and torch.equal(x, masters.get(name, x)) for name, x in seen
    ):
        return "passes see others"
    if any("lora" in key for key in scenario.overrides):
        cases.release(groups)
        return ""
    gradients = cases.first_step_gradients(engine)
    for name in gradients.keys() & own:
        gap = float((gradients[name] - theirs[name]).norm() / theirs[name].norm())
        if gradients[name].dtype != torch.float32 or not gap < (2e-3 if exact else 0.2):
            return f"the gradient of {name} is off by {gap}"
    moved = dict(engine.export_weights())
    steps = {name: float((moved[name] - stored[name]).abs().max()) for name in own}
    if not all(0 < step < 2 * cases.LR if name in gradients else step == 0 for name, step in steps.items()):
        return "a step is another"
    cases.release(groups)
    return ""


def seen_in_passes(engine, ends: tuple[str, ...]) -> list[tuple[str, torch.Tensor]]:
    """What layers compute with, as passes come: filled by them."""
    seen = []

    def see(module, args, name):
        seen.append((name, getattr(module, name.rpartition(".")[2]).detach().clone()))

    for name, _ in list(engine._model.hf.named_parameters()):
        if name.endswith(ends):
            module = engine._model.hf.get_submodule(name.rpartition(".")[0])
            module.register_forward_pre_hook(lambda module, args, name=name: see(module, args, name))
    return seen


@pytest.mark.parametrize("kind", some(KINDS, "qwen3_next", "ernie4_5_moe"))
def test_weights_in_float32_are_read_computed_with_trained_and_exported_unrounded(folders, kind):
    assert run_workers(wrong, 1, [one for one in ROUNDED if one.world == 1], folders[kind], kind)[0] == []


@pytest.mark.parametrize("world", some([2, 3, 4], 3))
def test_they_are_on_several_ranks_with_other_rows_each(folders, world):
    kind, some = KINDS[-1], [one for one in ROUNDED if one.world == world]
    assert run_workers(wrong, world, some, folders[kind], kind) == [[]] * world


def test_rollouts_have_them_unrounded(folders):
    from siirl.engines.rollout.hf.hf_rollout import HFRollout

    kind = KINDS[0]
    plan = ModelPlan("agent_0.rollout", 0, "rollout", "hf", "lm", False, (0,), ParallelDims(1), "rollout", ())
    keys = [f"actor_rollout_ref.model.path={folders[kind]}", "actor_rollout_ref.rollout.name=hf"]
    engine = HFRollout(plan, load_config([*keys, "actor_rollout_ref.rollout.dtype=bfloat16"]), None, "cpu")
    stored = load_file(folders[kind] / "model.safetensors")
    engine.load_weights(stored.items(), version=0)
    held = engine._model.state_dict()
    assert {name: x.dtype for name, x in stored.items() if name in held} == {
        name: x.dtype for name, x in held.items() if name in stored
    }
    assert all(torch.equal(held[name], stored[name]) for name in held if name in stored)
