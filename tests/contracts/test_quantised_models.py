"""A model of quantised files is trained, sampled and exported as the plain numbers that these stand for."""

import json
import tempfile
from pathlib import Path

import causal_lms
import pytest
import torch
import torch.distributed as dist
import train_engine_cases as cases
from dist_harness import run_workers
from quantised_files import in_fp8, in_mxfp4, rounded
from safetensors.torch import load_file, save_file
from some_cases import in_parts
from train_engine_cases import Scenario

from siirl.checkpoint.export import save_hf
from siirl.models.families import known_types, types_with
from siirl.models.trained import why_not

BLOCK = (12, 20)
FORMS = {
    "fp8": lambda folder: in_fp8(folder, BLOCK),
    "fp8 of matrices": lambda folder: in_fp8(folder, None),
    "mxfp4": in_mxfp4,
}
SOME = {
    "fsdp": (
        *(("qwen3", "fp8"), ("ministral3", "fp8 of matrices"), ("qwen3_next", "fp8"), ("gpt_oss", "mxfp4")),
        *(("deepseek_v3", "fp8"), ("minimax_m2", "fp8")),
    ),
    "megatron": (("qwen3_moe", "fp8"), ("deepseek_v3", "fp8"), ("gpt_oss", "mxfp4")),
}
LAYOUTS = [
    *(Scenario("", 1, strategy=strategy) for strategy in SOME),
    Scenario("two ranks have shards", 2),
    Scenario("two ranks have some of the experts each", 2, sizes=(("ep", 2),)),
    Scenario("two ranks have halves", 2, strategy="megatron", sizes=(("tp", 2),)),
]
QUICK_AND_SLOW = [
    case
    if (case.strategy == "fsdp" and case.world == 1) or case.sizes == (("tp", 2),)
    else pytest.param(case, marks=pytest.mark.slow)
    for case in LAYOUTS
]


def wrong(rank: int, world: int, models: list[tuple[str, str]], scenario: Scenario) -> dict[str, str]:
    return {kind: problem for kind, form in models if (problem := _wrong(kind, form, scenario))}


def _wrong(kind: str, form: str, scenario: Scenario) -> str:
    made = [tempfile.mkdtemp(prefix="siirl-quantised-")]
    dist.broadcast_object_list(made)
    folder = Path(made[0])
    if dist.get_rank() == 0:
        small = causal_lms.tiny_config(kind, **({"hidden_size": 64} if kind == "gpt_oss" else {}))
        causal_lms.write_model(folder, small)
        torch.save(rounded(FORMS[form](folder)), folder / "wanted.pt")
    dist.barrier()
    if problem := why_not(json.loads((folder / "config.json").read_text()), scenario.strategy):
        return problem
    wanted = torch.load(folder / "wanted.pt")
    engine, _ = cases.build_engine(scenario, folder)
    out = folder / "out"
    save_hf(engine.export_weights(), str(folder), out, dist.get_rank(), engine.hf_config_changes())
    dist.barrier()
    exported = load_file(out / "model.safetensors")
    if exported.keys() != wanted.keys():
        return f"other tensors: {sorted(exported.keys() ^ wanted.keys())[:4]}"
    if unequal := [name for name, x in wanted.items() if not torch.equal(exported[name], x.float())]:
        return f"other numbers: {unequal[:4]}"
    said = json.loads((out / "config.json").read_text())
    if "quantization_config" in said or said["dtype"] != "float32":
        return f"the export says {said}"
    found = engine.compute(cases.sample_rows(0), ("log_prob",), cases.TEMPERATURE)["log_prob"]
    return "" if found.isfinite().all() else "log-probs that are no numbers"


@pytest.mark.parametrize("scenario", QUICK_AND_SLOW, ids=lambda case: f"{case.strategy} {case.name}")
def test_what_is_released_in_fp8_or_mxfp4_is_trained_as_plain_numbers(scenario):
    models = [x for x in SOME[scenario.strategy] if scenario.world == 1 or x[0] in ("deepseek_v3", "gpt_oss")]
    assert run_workers(wrong, scenario.world, models, scenario, deadline_s=200) == [{}] * scenario.world


SEEING = types_with(lambda row: row.sees_images)
EVERY = [
    part
    for strategy in SOME
    for part in in_parts([kind for kind in known_types(strategy) if kind not in SEEING], strategy)
]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("strategy", "kinds"), EVERY)
def test_every_model_that_is_accepted_may_be_released_in_fp8(strategy, kinds):
    models = [(kind, "fp8") for kind in kinds]
    assert run_workers(wrong, 1, models, Scenario("", 1, strategy=strategy), deadline_s=350) == [{}]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_vllm_is_built_for_plain_numbers_and_reads_those_of_quantised_files(tmp_path):
    from test_vllm_types import NEAR, SIZES, start
    from vllm_cases import PROMPTS, gaps

    from siirl.data.completions import SamplingParams
    from siirl.engines.weights.target import stored_weights

    sizes = {name: SIZES[name] for name in ("hidden_size", "head_dim", "intermediate_size")}
    small = causal_lms.tiny_config("qwen3", **sizes)
    plain, quantised = (causal_lms.write_model(tmp_path / name, small) for name in ("plain", "fp8"))
    save_file(rounded(in_fp8(quantised, (48, 80))), plain / "model.safetensors", {"format": "pt"})
    engine = start(quantised)
    try:
        engine.load_weights(stored_weights(quantised, engine.weight_specs()), 0)
        answers = engine.generate(PROMPTS, SamplingParams(max_tokens=9, n=2, ignore_eos=True), range(3))
        assert float(gaps(plain, answers, 1.0, torch.float32).max()) < NEAR
    finally:
        engine.close()
