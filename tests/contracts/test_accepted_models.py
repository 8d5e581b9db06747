"""Every type of model that `siirl check` accepts is built, small and random, and computes what HF does."""

import tempfile
from pathlib import Path

import causal_lms
import pytest
import torch
import torch.distributed as dist
import train_engine_cases as cases
from accepted_cases import EXACT, results
from dist_harness import run_workers
from some_cases import in_parts, some
from train_engine_cases import Scenario

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.config.common import STRATEGIES
from siirl.errors import NotSupportedError
from siirl.models.families import known_types, types_with
from siirl.models.sizes import EXPERTS
from siirl.parallel.dims import ParallelDims

LATENT = types_with(lambda row: row.latent)
OF_ANY_HEAD = types_with(lambda row: row.any_head and not row.sees_images)
"""Those that see: test_vision_heads.py."""
SCANNED = types_with(lambda row: row.mamba2)
"""Of whose rows ranks share no tokens: checks refuse it."""
VISION_MODELS = types_with(lambda row: row.sees_images)

SOME = {
    "fsdp": (
        "mistral",
        "opt",
        "gemma3_text",
        "exaone4",
        "olmoe",
        "gpt_oss",
        "qwen3_next",
        "granitemoehybrid",
    ),
    "megatron": ("mixtral", "mistral", "glm4", "qwen2_moe", "granitemoe", "olmo3", "gpt_oss"),
}
"""What `make test` builds: models that differ in attention, windows, dropout, norms, experts and states."""
FEW_VALUES = ["mixtral", "llama", "deepseek_v2"]
"""Of which `make test` also builds those whose files leave values out."""
SHARED = Scenario("two ranks share rows", 2, sizes=(("cp", 2),))
DEALT = Scenario("two ranks have some of the experts each", 2, sizes=(("ep", 2),))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_some_models_that_are_accepted_compute_what_transformers_does(strategy):
    alone = Scenario("", 1, strategy=strategy)
    assert run_workers(results, 1, list(SOME[strategy]), alone, deadline_s=200)[0] == {}


@pytest.mark.parametrize("values", some(["null", "absent"], "absent"))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_some_models_whose_files_leave_out_what_they_may_compute_what_transformers_does(strategy, values):
    alone = Scenario("", 1, strategy=strategy)
    assert run_workers(results, 1, FEW_VALUES, alone, EXACT, values, deadline_s=200)[0] == {}


def has_experts(kind: str) -> bool:
    config = causal_lms.tiny_config(kind).to_dict()
    return any(config.get(name) not in (None, 0, 1) for name in EXPERTS)


PLAIN = {
    strategy: [kind for kind in known_types(strategy) if kind not in VISION_MODELS] for strategy in STRATEGIES
}
"""Those that see images are in test_vision_engine.py."""
EVERY = [part for strategy, kinds in PLAIN.items() for part in in_parts(kinds, strategy)]
MIXTURES = [kind for kind in PLAIN["fsdp"] if has_experts(kind)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("values", ["null", "absent"])
@pytest.mark.parametrize(("strategy", "kinds"), EVERY)
def test_every_model_whose_file_leaves_out_what_it_may_computes_what_transformers_does(
    strategy, kinds, values
):
    alone = Scenario("", 1, strategy=strategy)
    assert run_workers(results, 1, kinds, alone, EXACT, values, deadline_s=350)[0] == {}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("strategy", "kinds"), EVERY)
def test_every_model_that_is_accepted_computes_what_transformers_does(strategy, kinds):
    alone = Scenario("", 1, strategy=strategy)
    assert run_workers(results, 1, kinds, alone, deadline_s=350)[0] == {}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kinds", in_parts([kind for kind in PLAIN["fsdp"] if kind not in SCANNED]))
def test_ranks_that_share_rows_compute_what_transformers_does_with_every_model(kinds):
    assert run_workers(results, 2, kinds, SHARED, deadline_s=350) == [{}, {}]


def test_there_are_many_mixtures():
    assert len(MIXTURES) > 10 and "granitemoe" in MIXTURES


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kinds", in_parts(MIXTURES))
def test_ranks_that_have_some_of_the_experts_compute_what_transformers_does_with_every_mixture(kinds):
    assert run_workers(results, 2, kinds, DEALT, deadline_s=350) == [{}, {}]


ROUTED_OTHERWISE = ("glm4_moe", "deepseek_v2", "deepseek_v3")
"""Models whose routers choose by groups or a bias, and whose keys and values may be compressed."""


def export_is_wrong(rank: int, world: int, kind: str, folder: str) -> str:
    """What an engine exports that its files do not have, and how the HF engine samples with it."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from siirl.data.completions import SamplingParams
    from siirl.engines.rollout.hf.hf_rollout import HFRollout

    engine, _ = cases.build_engine(Scenario("", world), folder)
    exported = {name: tensor.clone() for name, tensor in engine.export_weights()}
    stored = load_file(Path(folder) / "model.safetensors")
    if exported.keys() != stored.keys() or exported.keys() != engine.weight_specs().keys():
        return f"other names: {sorted(exported.keys() ^ stored.keys())}"
    if not all(torch.equal(exported[name], tensor) for name, tensor in stored.items()):
        return "other values"
    halves = {name: tensor.dtype for name, tensor in engine.export_weights(torch.bfloat16)}
    whole = [name for name, dtype in halves.items() if dtype == torch.float32]
    if any("e_score_correction_bias" not in name for name in whole) or (
        bool(whole) == (kind == "deepseek_v2")
    ):
        return f"in fp32: {whole}"
    plan = ModelPlan("agent_0.rollout", 0, "rollout", "hf", "lm", False, (0,), ParallelDims(1), "rollout", ())
    keys = [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.dtype=float32"]
    rollout = HFRollout(plan, load_config(["actor_rollout_ref.rollout.name=hf", *keys]), None, "cpu")
    rollout.load_weights(exported.items(), version=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]
    for prompt, samples in zip(
        prompts, rollout.generate(prompts, SamplingParams(max_tokens=9, n=2), range(3)), strict=True
    ):
        for sample in samples:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *sample.token_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            if (torch.tensor(sample.log_probs) - expected).abs().max() > 1e-5:
                return f"sampled log-probs {sample.log_probs} instead of {expected.tolist()}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUTED_OTHERWISE)
def test_biases_of_routers_leave_the_engine_as_they_came_and_are_sampled_with(tmp_path, kind):
    causal_lms.write_model(tmp_path, causal_lms.tiny_config(kind))
    assert run_workers(export_is_wrong, 2, kind, str(tmp_path), deadline_s=200) == ["", ""]


def checkpoint_is_wrong(rank: int, world: int, kind: str, folder: str, strategy: str, lora: bool) -> str:
    """What of an engine's state `siirl export` writes, or it loads, otherwise than the files have it."""
    import json

    from safetensors.torch import load_file

    from siirl.checkpoint import state_tree
    from siirl.checkpoint.export import copy_hf_files, export_folder
    from siirl.model_files.stored_tensors import load_tensors, save_tensors

    model = "actor_rollout_ref.model"
    adapters = (f"{model}.lora_rank=4", f"{model}.target_modules=[q_proj,o_proj]") if lora else ()
    engine, _ = cases.build_engine(Scenario("", world, overrides=adapters, strategy=strategy), folder)
    state = engine.state_dict()
    values, tensors = state_tree.split(state["model"], "model")
    made = [tempfile.mkdtemp(prefix="siirl-model-type-")]
    dist.broadcast_object_list(made)
    saved, out = Path(made[0]), Path(made[0]) / "out"
    save_tensors(tensors, saved, dist.group.WORLD)
    if rank == 0:
        about = {"model": values} | {name: state[name] for name in ("base",) if name in state}
        (saved / "state.json").write_text(json.dumps({"lora_alpha": 8, "state": about}))
        copy_hf_files(folder, saved / "hf")
        config = json.loads((saved / "hf" / "config.json").read_text())
        (saved / "hf" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
        export_folder(saved, out)
    dist.barrier()
    stored, exported = load_file(Path(folder) / "model.safetensors"), load_file(out / "model.safetensors")
    if stored.keys() != exported.keys():
        return f"other names: {sorted(stored.keys() ^ exported.keys())}"
    kept = [name for name in stored if name.endswith("e_score_correction_bias")]
    if bool(kept) == (kind == "deepseek_v2"):
        return f"biases: {kept}"
    for name, tensor in stored.items():
        expected = tensor if name in kept else tensor.bfloat16()
        if exported[name].dtype != expected.dtype or not torch.equal(exported[name], expected):
            return f"{name} is exported otherwise"
    if lora:
        return ""
    biases = {name: tensors[f"model/{name}"] for name in kept}
    for bias in biases.values():
        bias.pieces[0].local.zero_()
    load_tensors(tensors, saved, dist.group.WORLD)
    engine.load_state_dict(state)
    found = dict(engine.export_weights())
    return "".join(name for name in kept if not torch.equal(found[name], stored[name]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ROUTED_OTHERWISE)
def test_checkpoints_and_what_is_exported_of_them_have_the_biases_of_routers(tmp_path, kind, strategy):
    if kind not in known_types(strategy):
        assert strategy != "fsdp"
        return
    causal_lms.write_model(tmp_path, causal_lms.tiny_config(kind))
    found = run_workers(checkpoint_is_wrong, 2, kind, str(tmp_path), strategy, False, deadline_s=200)
    assert found == ["", ""]
    if kind not in LATENT:
        found = run_workers(checkpoint_is_wrong, 2, kind, str(tmp_path), strategy, True, deadline_s=200)
        assert found == ["", ""]


def values_are_wrong(rank: int, world: int, kinds: list[str]) -> dict[str, str]:
    """Model type -> why it cannot have a value head."""
    from transformers import AutoConfig

    from siirl.engines.train.hf_model import build_skeleton

    problems = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            causal_lms.tiny_config(kind).save_pretrained(folder)
            try:
                build_skeleton(AutoConfig.from_pretrained(folder), torch.float32, False, "value")
            except (NotSupportedError, ValueError) as error:
                problems[kind] = str(error)
    return problems


@pytest.mark.slow
def test_every_model_that_is_accepted_with_a_value_head_has_one():
    assert run_workers(values_are_wrong, 1, list(OF_ANY_HEAD), deadline_s=200)[0] == {}
