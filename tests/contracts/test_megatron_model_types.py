"""Every type of model that Megatron trains, in layouts of up to four ranks, against plain Hugging Face."""

import functools
import shutil
import tempfile
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import causal_lms
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import train_engine_cases as cases
import value_head_cases as heads
from dist_harness import run_workers
from expert_cases import (
    assert_equal_training,
    largest_gap,
    names_on_disk,
    on_disk,
    reference_on_disk,
    unequal_replicas,
)
from proven_models import TRAINING, record
from recorded_cases import case_of, distance, record_gaps, record_outcome
from safetensors.torch import load_file
from torch import Tensor
from train_engine_cases import Scenario

from siirl.models.families import family_of, known_types, types_with
from siirl.models.sizes import EXPERTS
from siirl.models.trained import OWN_TYPE
from siirl.parallel.process_groups import ProcessGroupManager

LATENT = types_with(lambda row: row.latent)
NORMED_WHOLE = types_with(lambda row: row.qk_norm == "whole")
SINKS = types_with(lambda row: row.sinks)

MODEL = "actor_rollout_ref.model"
MEGATRON = "actor_rollout_ref.actor.megatron"
SEQUENCE_PARALLEL = f"{MEGATRON}.sequence_parallel=True"
LORA = (f"{MODEL}.lora_rank={cases.LORA_RANK}", f"{MODEL}.lora_alpha={cases.LORA_ALPHA}")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9},
    "original_max_position_embeddings": 32,
}
OTHERWISE = {
    **{"deepseek_v2_lite": "deepseek_v2", "moonlight": "deepseek_v3"},
    **{"granite_plain": "granite", "gpt_oss_plain": "gpt_oss"},
}
"""Models with other parts of a type, by names of our own."""
TEXTS = [kind for kind in known_types("megatron") if not family_of(kind).sees_images]
"""Those that see images are in test_megatron_vision.py."""
KINDS = (*TEXTS, *OTHERWISE)
VARIANTS: dict[str, dict[str, Any]] = {
    **{kind: {"sliding_window": 5} for kind in ("ministral", "mistral", "mixtral")},
    "phi3": {
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "cwm": {"sliding_window": 5, "max_position_embeddings": 16384},
    "gemma3_text": {
        **{"sliding_window": 5, "query_pre_attn_scalar": 12, "tie_word_embeddings": True},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "llama": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen2_moe": {
        **{"shared_expert_intermediate_size": 24, "mlp_only_layers": [2], "use_sliding_window": True},
        **{"sliding_window": 5, "max_window_layers": 1},
    },
    "deepseek_v2": {
        **{"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "num_experts": 8, "n_routed_experts": 8},
        **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0, "rope_parameters": YARN},
    },
    "deepseek_v2_lite": {"topk_method": "greedy", "first_k_dense_replace": 1, "q_lora_rank": 16},
    "deepseek_v3": {
        **{"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "num_local_experts": 8, "n_routed_experts": 8},
        **{"n_group": 4, "topk_group": 2, "q_lora_rank": 16, "rope_parameters": YARN},
    },
    "moonlight": {
        **{"rms_norm_eps": 1e-5, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1},
        **{"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 2},
    },
    "glm4_moe": {
        **{"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2, "n_shared_experts": 2},
        **{
            "num_local_experts": 8,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    },
    "granite": {"residual_multiplier": 0.22, "tie_word_embeddings": True, "pad_token_id": None},
    "granite_plain": {
        **{"logits_scaling": 1.0, "attention_multiplier": 1.0},
        **{"embedding_multiplier": 1.0, "residual_multiplier": 1.0},
    },
    "gpt_oss_plain": {"attention_bias": False, "layer_types": ["full_attention"] * 4},
    "gpt_oss": {"sliding_window": 5, "swiglu_limit": 0.7, "swiglu_alpha": 1.3},
    "olmo": {"pad_token_id": None},
    "olmo2": {"num_key_value_heads": 4, "pad_token_id": None},
    "olmo3": {
        **{"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": YARN,
        },
    },
    "qwen3_moe": {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5},
}
"""What sets a type apart, in some layers where it may be; of llama what transformers does not read."""


def has_experts(kind: str) -> bool:
    config = model_config(kind)
    return any(getattr(config, name, None) for name in EXPERTS)


def model_config(kind: str, **changes: Any) -> Any:
    return causal_lms.tiny_config(
        OTHERWISE.get(kind, kind),
        **{"num_hidden_layers": 4, "tie_word_embeddings": False} | VARIANTS.get(kind, {}) | changes,
    )


def layout(world: int, *overrides: str, **sizes: int) -> Scenario:
    used = {axis: size for axis, size in sizes.items() if size > 1}
    words = [f"{axis}{size}" for axis, size in used.items()] + ["sequence parallel"] * bool(overrides)
    name = " ".join(words) or "alone"
    return Scenario(name, world, "", overrides=overrides, strategy="megatron", sizes=tuple(used.items()))


def layouts(world: int, experts: bool, within_heads: bool = True, shares_rows: bool = True) -> list[Scenario]:
    """Every choice of sizes 1 and 2 that takes all ranks; with tensor parallelism the sequence is cut, too,
    in every second one, and always where there are experts.

    within_heads: ranks may share a key-value head; shares_rows: they may share rows.
    """
    found: list[Scenario] = []
    for tp, pp, cp, ep, etp, vpp in product((1, 2), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2)):
        experts_fit = world % (ep * etp * pp) == 0 if experts else ep == etp == 1
        if cp > 1 and not shares_rows:
            continue
        if tp * pp * cp != world or not experts_fit or vpp > pp:
            continue
        cut = tp > 1 and (experts or len(found) % 2 == 0)
        options = (SEQUENCE_PARALLEL,) if cut else ()
        found.append(layout(world, *options, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, vpp=vpp))
    return found + [layout(world, tp=world)] * (world == 4 and not experts and within_heads)


@dataclass
class Reference:
    """What plain Hugging Face computes of a model, a row at a time, and its gradient, clipped."""

    folder: Path
    weights: dict[str, Tensor]
    outputs: dict[str, Tensor]
    norm: float
    grads: dict[str, Tensor]


@functools.cache
def reference(kind: str) -> Reference:
    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.mkdtemp(prefix="siirl-model-types-"))
    causal_lms.write_model(folder, model_config(kind))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = cases.sample_rows(0)
    log_prob_BT, entropy_BT = cases.reference_outputs(model, rows)
    mask_BT = rows["response_mask"]
    loss_BT = -rows["advantage"] * log_prob_BT - cases.ENTROPY_COEFF * entropy_BT
    ((loss_BT * mask_BT).sum() / mask_BT.sum()).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), cases.CLIP))
    outputs = {"log_prob": log_prob_BT.detach(), "entropy": entropy_BT.detach()}
    grads = on_disk(model, {name: param.grad for name, param in model.named_parameters()})
    grads = {name: grad for name, grad in grads.items() if not name.endswith(OWN_TYPE)}
    return Reference(folder, load_file(folder / "model.safetensors"), outputs, norm, grads)


def results(rank: int, world: int, kind: str, expected: Reference) -> dict[str, str]:
    """Layout -> what is wrong."""
    found: dict[str, str] = {}
    saved: Path | None = None
    within_heads = kind not in NORMED_WHOLE or model_config(kind).num_key_value_heads >= world
    for scenario in layouts(world, has_experts(kind), within_heads, OTHERWISE.get(kind, kind) not in SINKS):
        gaps: dict[str, float] = {}
        problem, saved = wrong(scenario, expected, saved, gaps)
        case = case_of(OTHERWISE.get(kind, kind), scenario, f"as {kind}" if kind in OTHERWISE else TRAINING)
        record_gaps(case, {} if problem else gaps)
        if problem:
            found[scenario.name] = problem
    return found


def wrong(
    scenario: Scenario, expected: Reference, saved: Path | None, gaps: dict[str, float]
) -> tuple[str, Path | None]:
    """What is wrong in a layout, and where its state lies, from which the next one goes on.

    saved: that of the layout before, after the same step. gaps: what is found of distances goes there.
    """
    engine, groups = cases.build_engine(scenario, expected.folder)
    try:
        exported = {name: weight.clone() for name, weight in engine.export_weights()}
        if list(exported) != list(engine.weight_specs()):
            return "weights come in another order than their shapes", None
        if exported.keys() != expected.weights.keys():
            return f"other weights: {sorted(exported.keys() ^ expected.weights.keys())[:4]}", None
        if unequal := [x for x, weight in expected.weights.items() if not torch.equal(exported[x], weight)]:
            return f"exported otherwise: {unequal[:4]}", None
        found = engine.compute(cases.sample_rows(0), ("log_prob", "entropy"), cases.TEMPERATURE)
        for name, expected_BT in expected.outputs.items():
            gaps[name] = float((found[name] - expected_BT).abs().max())
            if not gaps[name] < 1e-5:
                return f"{name} is off by {gaps[name]}", None
        (metrics,) = cases.train_steps(engine, scenario, range(1))
        if metrics.values()["grad_norm"] != pytest.approx(expected.norm, rel=1e-5):
            return f"grad_norm is {metrics.values()['grad_norm']} instead of {expected.norm}", None
        grads = cases.first_step_gradients(engine)
        if grads.keys() != expected.grads.keys():
            return f"other gradients: {sorted(grads.keys() ^ expected.grads.keys())[:4]}", None
        gap, name = largest_gap(grads, expected.grads)
        if not gap < 1e-6:
            return f"the gradient of {name} is off by {gap}", None
        gaps["gradient"] = distance(grads, expected.grads)
        if dist.get_world_size() > engine._dims.pp and (unequal := unequal_replicas(engine)):
            return f"copies differ: {unequal[:4]}", None
        return resumed(engine, saved)
    finally:
        cases.release(groups)


def resumed(engine: Any, saved: Path | None) -> tuple[str, Path]:
    """The engine's state saved, and that of another layout in its place: the same weights after one step."""
    trained = {name: weight.clone() for name, weight in engine.export_weights()}
    made = [tempfile.mkdtemp(prefix="siirl-model-types-")]
    dist.broadcast_object_list(made)
    dcp.save(engine.state_dict(), checkpoint_id=made[0])
    if saved is None:
        return "", Path(made[0])
    cases.train_steps(engine, layout(1), range(1, 2))
    state = engine.state_dict()
    dcp.load(state, checkpoint_id=saved)
    engine.load_state_dict(state)
    gaps = {name: float((weight - trained[name]).abs().max()) for name, weight in engine.export_weights()}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(saved)
    worst = max(gaps, key=lambda name: gaps[name])
    problem = "" if gaps[worst] < 0.01 * cases.LR else f"resumed, {worst} is off by {gaps[worst]}"
    return problem, Path(made[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_equals_plain_hf_in_every_layout(kind, world):
    assert run_workers(results, world, kind, reference(kind), deadline_s=800) == [{}] * world


def of_all_kinds(kind: str, *overrides: str) -> Scenario:
    sizes = {"tp": 2, "pp": 2} | ({"ep": 2} if has_experts(kind) else {})
    return Scenario(kind, 4, "", overrides=overrides, strategy="megatron", sizes=tuple(sizes.items()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in TEXTS if kind not in LATENT])
def test_adapters_of_every_type_equal_peft(kind):
    path = str(reference(kind).folder)
    targets = list(ATTENTION) if has_experts(kind) else "all-linear"
    chosen = (f"{MODEL}.target_modules=[{','.join(ATTENTION)}]",) if has_experts(kind) else ()
    scenario = of_all_kinds(kind, SEQUENCE_PARALLEL, *LORA, *chosen)
    ours = run_workers(cases.run_scenarios, 4, [scenario], {"": path}, deadline_s=300)[0][kind]
    theirs = reference_on_disk(path, kind, targets)
    assert_equal_training(ours, theirs)
    record_outcome(case_of(kind, scenario, "adapters"), ours, theirs)


def with_options(name: str, world: int, *options: str, **sizes: int) -> Scenario:
    return Scenario(name, world, "", overrides=options, strategy="megatron", sizes=tuple(sizes.items()))


def again(part: str) -> tuple[str, ...]:
    """Options by which a part of each layer is computed again in the backward pass."""
    options = f"+{MEGATRON}.override_transformer_config.recompute_"
    return f"{options}granularity=selective", f"{options}modules=[{part}]"


LATE = tuple(
    f"+{MEGATRON}.override_ddp_config.overlap_{what}=True" for what in ("grad_reduce", "param_gather")
)
BESIDE = {
    "attention again": with_options("attention again", 2, SEQUENCE_PARALLEL, *again("core_attn"), tp=2),
    "MLPs again": with_options("MLPs again", 2, SEQUENCE_PARALLEL, *again("mlp"), tp=2),
    "experts again": with_options("experts again", 2, *again("moe"), ep=2),
    "gathered late": with_options("gathered late", 2, *LATE),
    "allgather": with_options(
        "allgather", 2, f"+{MEGATRON}.override_transformer_config.moe_token_dispatcher_type=allgather", ep=2
    ),
    "heads repeated": with_options("heads repeated", 4, SEQUENCE_PARALLEL, tp=4),
}
"""Options that parts of our own have to keep."""
OWN_PARTS = {
    "granite": ("attention again", "MLPs again"),
    "granitemoe": ("experts again", "gathered late", "allgather", "heads repeated"),
    "olmo2": ("attention again", "MLPs again", "gathered late"),
    "gpt_oss": ("attention again", "experts again", "gathered late", "allgather", "heads repeated"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN_PARTS)
def test_parts_of_our_own_train_the_same_with_options(kind):
    path = str(reference(kind).folder)
    theirs = reference_on_disk(path, kind)
    chosen = [BESIDE[name] for name in OWN_PARTS[kind]]
    for world in {scenario.world for scenario in chosen}:
        some = [scenario for scenario in chosen if scenario.world == world]
        found = run_workers(cases.run_scenarios, world, some, {"": path}, deadline_s=300)[0]
        for scenario in some:
            assert_equal_training(found[scenario.name], theirs)


def train_critic(rank: int, world: int, path: str, scenario: Scenario) -> heads.CriticOutcome:
    ranks = tuple(range(world))
    groups = ProcessGroupManager(cases.dims_of(scenario, ranks)[1], "gloo", 60)
    run = heads.CriticRun(*heads.make_critic(scenario, path, groups, ranks), scenario.split)
    for step in range(heads.STEPS):
        run.step(step)
    return run.outcome()


@pytest.mark.slow
@pytest.mark.parametrize("kind", known_types("megatron", "value"))
def test_values_of_every_type_equal_plain_hf(kind):
    path = str(reference(kind).folder)
    theirs = heads.plain_training(path)
    named = {name: names_on_disk(getattr(theirs, name), kind) for name in ("grads", "weights")}
    scenario = of_all_kinds(kind, "critic.megatron.sequence_parallel=True")
    ours = run_workers(train_critic, 4, path, scenario, deadline_s=300)[0]
    heads.assert_equal(ours, theirs := replace(theirs, **named))
    gap = float((ours.before - theirs.before).abs().max())
    record(case_of(kind, scenario, "values"), gap, distance(ours.grads, theirs.grads))
