"""The Megatron engine on CUDA: variable-length kernels, NCCL, memory given back, the numbers of plain HF."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train_engine_cases as cases
import value_head_cases as heads
from dist_harness import run_workers
from expert_cases import reference_on_disk, unequal_replicas
from fixtures_tiny import make_tiny_model_dir
from recorded_cases import case_of, on_cuda, record_outcome
from train_engine_cases import Scenario

from siirl.parallel.process_groups import ProcessGroupManager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKEND = "cpu:gloo,cuda:nccl"
MEGATRON = "actor_rollout_ref.actor.megatron"
BF16 = f"{MEGATRON}.param_dtype=bfloat16"
PLAIN_OPTIMIZER = f"{MEGATRON}.use_distributed_optimizer=False"
SEQUENCE_PARALLEL = f"{MEGATRON}.sequence_parallel=True"
SHAPE = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "init_std": 0.1}
PARTS = ("params", "grads", "optimizer")


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("gpu")
    return {
        "qwen3_untied": str(make_tiny_model_dir(root / "qwen3", tie=False, **SHAPE)),
        "mixtral": str(make_tiny_model_dir(root / "mixtral", "mixtral", tie=False, **SHAPE)),
        "qwen3_moe": str(make_tiny_model_dir(root / "qwen3_moe", "qwen3_moe", tie=False, **SHAPE)),
    }


def layout(world: int, *overrides: str, model: str = "qwen3_untied", **sizes: int) -> Scenario:
    name = " ".join([model, *(f"{axis}{size}" for axis, size in sizes.items()), *overrides])
    return Scenario(name, world, model, overrides=overrides, strategy="megatron", sizes=tuple(sizes.items()))


def require(scenario: Scenario) -> None:
    if torch.cuda.device_count() < scenario.world:
        pytest.skip(f"needs {scenario.world} CUDA devices")


def train_on_cuda(rank: int, world: int, scenario: Scenario, path: str) -> cases.Outcome:
    return cases.run_scenario(replace(scenario, device=f"cuda:{rank}"), path)


def outcome_of(scenario: Scenario, model_dirs: dict[str, str]) -> cases.Outcome:
    path = model_dirs[scenario.model]
    return run_workers(train_on_cuda, scenario.world, scenario, path, deadline_s=180, backend=BACKEND)[0]


def assert_near(ours: cases.Outcome, theirs: cases.Outcome, log_prob: float, norm: float) -> None:
    assert (ours.log_prob - theirs.log_prob).abs().max() < log_prob
    assert (ours.entropy - theirs.entropy).abs().max() < log_prob
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=norm)
    assert ours.losses == pytest.approx(theirs.losses, abs=log_prob)


FP32 = [
    layout(1),
    layout(1, PLAIN_OPTIMIZER),
    layout(2, tp=2),
    layout(2, SEQUENCE_PARALLEL, tp=2),
    layout(2, pp=2),
    layout(2, cp=2),
    layout(2),
    layout(4, SEQUENCE_PARALLEL, tp=2, pp=2),
]


@pytest.mark.parametrize("scenario", FP32, ids=lambda scenario: scenario.name)
def test_fp32_on_cuda_equals_plain_hf_on_cpu(model_dirs, scenario):
    require(scenario)
    ours = outcome_of(scenario, model_dirs)
    theirs = cases.run_reference(Path(model_dirs[scenario.model]))
    assert_near(ours, theirs, 1e-4, 1e-3)
    assert ours.grads.keys() == theirs.grads.keys()
    for name, grad in theirs.grads.items():
        assert (ours.grads[name] - grad).abs().max() < 1e-5, name
    for name, weight in theirs.weights.items():
        assert (ours.weights[name] - weight).abs().mean() < 0.01 * cases.LR, name
    record_outcome(case_of("qwen3", on_cuda(scenario)), ours, theirs)


HALF = [
    layout(1, BF16),
    layout(1, BF16, PLAIN_OPTIMIZER),
    layout(2, BF16, SEQUENCE_PARALLEL, tp=2),
    layout(2, BF16, pp=2),
    layout(2, BF16, cp=2),
    layout(2, BF16),
    layout(2, BF16, pp=2, vpp=2),
]


@pytest.mark.parametrize("scenario", HALF, ids=lambda scenario: scenario.name)
def test_bf16_with_variable_length_kernels_stays_near_fp32(model_dirs, scenario):
    require(scenario)
    ours, theirs = outcome_of(scenario, model_dirs), cases.run_reference(Path(model_dirs[scenario.model]))
    assert_near(ours, theirs, 0.2, 0.05)
    record_outcome(case_of("qwen3", on_cuda(scenario), dtype="bfloat16"), ours, theirs)


EXPERTS = [
    layout(1, model="mixtral"),
    layout(2, model="mixtral", ep=2),
    layout(2, SEQUENCE_PARALLEL, model="mixtral", tp=2),
    layout(2, SEQUENCE_PARALLEL, PLAIN_OPTIMIZER, model="qwen3_moe", tp=2),
    layout(2, SEQUENCE_PARALLEL, model="qwen3_moe", tp=2, etp=2),
    layout(2, model="mixtral", etp=2),
    layout(4, SEQUENCE_PARALLEL, model="qwen3_moe", tp=2),
    layout(4, SEQUENCE_PARALLEL, model="mixtral", tp=2, ep=2, etp=2),
]


def train_experts(rank: int, world: int, scenario: Scenario, path: str) -> tuple[cases.Outcome, list[str]]:
    """The outcome, and what ranks hold unequal copies of."""
    scenario = replace(scenario, device=f"cuda:{rank}")
    engine, _ = cases.build_engine(scenario, path)
    return cases.train(engine, scenario), unequal_replicas(engine)


@pytest.mark.parametrize("scenario", EXPERTS, ids=lambda case: case.name)
def test_experts_on_cuda_equal_plain_hf_on_cpu_and_their_copies_each_other(model_dirs, scenario):
    require(scenario)
    path = model_dirs[scenario.model]
    ours, unequal = run_workers(
        train_experts, scenario.world, scenario, path, deadline_s=180, backend=BACKEND
    )[0]
    theirs = reference_on_disk(path, scenario.model)
    assert unequal == []
    assert_near(ours, theirs, 1e-4, 1e-3)
    assert ours.grads.keys() == theirs.grads.keys()
    for name, grad in theirs.grads.items():
        assert (ours.grads[name] - grad).abs().max() < 1e-5, name
    for name, weight in theirs.weights.items():
        assert (ours.weights[name] - weight).abs().mean() < 0.01 * cases.LR, name
    record_outcome(case_of(scenario.model, on_cuda(scenario)), ours, theirs)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_experts_in_bf16_stay_near_fp32(model_dirs, world, grouped):
    option = f"+{MEGATRON}.override_transformer_config.moe_grouped_gemm={grouped}"
    scenario = layout(world, BF16, option, model="mixtral", ep=world)
    require(scenario)
    ours, theirs = outcome_of(scenario, model_dirs), reference_on_disk(model_dirs["mixtral"], "mixtral")
    gap = (ours.log_prob - theirs.log_prob).abs()  # a token may go to another expert
    assert gap.mean() < 0.05
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=0.1)
    record_outcome(case_of("mixtral", on_cuda(scenario), dtype="bfloat16"), ours, theirs)


def train_critic(rank: int, world: int, path: str, scenario: Scenario) -> heads.CriticOutcome:
    ranks = tuple(range(world))
    groups = ProcessGroupManager(cases.dims_of(scenario, ranks)[1], BACKEND, 60)
    scenario = replace(scenario, device=f"cuda:{rank}")
    run = heads.CriticRun(*heads.make_critic(scenario, path, groups, ranks), scenario.split)
    for step in range(heads.STEPS):
        run.step(step)
    return run.outcome()


@pytest.mark.parametrize("scenario", [layout(1), layout(2, tp=2)], ids=lambda scenario: scenario.name)
def test_a_critic_on_cuda_equals_plain_hf_on_cpu(model_dirs, scenario):
    require(scenario)
    path = model_dirs["qwen3_untied"]
    ours = run_workers(train_critic, scenario.world, path, scenario, deadline_s=180, backend=BACKEND)[0]
    theirs = heads.plain_training(path)
    assert (ours.before - theirs.before).abs().max() < 1e-4
    assert (ours.after - theirs.after).abs().max() < 1e-3
    for name, grad in theirs.grads.items():
        assert (ours.grads[name] - grad).abs().max() < 1e-5, name


def state_of(engine) -> dict[str, torch.Tensor]:
    """Copies of this rank's pieces of weights and optimizer state."""
    state = engine.state_dict()
    return {
        f"{part}.{name}.{number}": piece.local.clone()
        for part in ("model", "optimizer")
        for name, tensor in state[part].items()
        for number, piece in enumerate(tensor.pieces)
    }


def offload_between_steps(rank: int, world: int, path: str, scenario: Scenario, used: bool) -> dict:
    """Weights after NUM_STEPS; if used, each part was away for a while after each step."""
    scenario = replace(scenario, device=f"cuda:{rank}")
    engine, _ = cases.build_engine(scenario, path)
    num_weights = sum(weight.numel() for _, weight in engine.export_weights())
    bytes_each = {"params": 2, "grads": 4, "optimizer": 12}  # bf16; fp32; fp32 main weights and two moments
    for step in range(cases.NUM_STEPS):
        cases.train_steps(engine, scenario, range(step, step + 1))
        for part in PARTS if used else ():
            kept = state_of(engine)
            before = torch.cuda.memory_allocated()
            engine.offload(**{name: name == part for name in PARTS})
            engine.offload(**{name: name == part for name in PARTS})
            assert before - torch.cuda.memory_allocated() >= bytes_each[part] * num_weights, part
            with pytest.raises(AssertionError, match="call onload first"):
                cases.train_steps(engine, scenario, range(1))
            engine.onload(**{name: name == part for name in PARTS})
            assert torch.cuda.memory_allocated() <= before + 1_000_000, part
            for name, tensor in state_of(engine).items():
                assert torch.equal(tensor, kept[name]), (part, name)
    if used:
        before = torch.cuda.memory_allocated()
        engine.offload(**dict.fromkeys(PARTS, True))
        assert before - torch.cuda.memory_allocated() >= 18 * num_weights
        engine.onload(**dict.fromkeys(PARTS, True))
    return {name: weight.to("cpu", copy=True) for name, weight in engine.export_weights()}


def optimizer_bytes(rank: int, world: int, path: str, scenario: Scenario) -> tuple[int, cases.Outcome]:
    """Device memory of a trained engine, and its outcome."""
    outcome = cases.run_scenario(replace(scenario, device=f"cuda:{rank}"), path)
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine, _ = cases.build_engine(replace(scenario, device=f"cuda:{rank}"), path)
    cases.train_steps(engine, scenario, range(2))
    return torch.cuda.memory_allocated() - before, outcome


def assert_weights_near(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    """As far apart as the attention kernel's backward makes them, which adds up in any order: a twentieth of
    a step in the mean, or one of a norm's few weights on the other side of what bfloat16 rounds."""
    rounding = float(theirs.abs().max()) * 2**-8 / theirs.numel()
    assert (ours.float() - theirs.float()).abs().mean() < max(0.05 * cases.LR, 2 * rounding), name


@pytest.mark.parametrize("overlap", [False, True])
def test_half_of_the_optimizer_on_the_host_trains_the_same_in_less_memory(model_dirs, overlap):
    options = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": overlap,
    }
    host = [
        f"+actor_rollout_ref.actor.optim.override_optimizer_config.{name}={value}"
        for name, value in options.items()
    ]
    path = model_dirs["qwen3_untied"]
    (usual_bytes, usual), (host_bytes, ours) = (
        run_workers(optimizer_bytes, 1, path, layout(1, BF16, *more), deadline_s=180, backend=BACKEND)[0]
        for more in ((), host)
    )
    num_weights = sum(weight.numel() for weight in usual.weights.values())
    assert usual_bytes - host_bytes >= 0.45 * 12 * num_weights
    assert ours.grad_norms == pytest.approx(usual.grad_norms, rel=0.01)
    for name, weight in usual.weights.items():
        assert_weights_near(ours.weights[name], weight, name)


@pytest.mark.parametrize("optimizer", [(), (PLAIN_OPTIMIZER,)], ids=["distributed", "plain"])
def test_offload_gives_memory_back_restores_every_bit_and_does_not_disturb(model_dirs, optimizer):
    scenario, path = layout(1, BF16, *optimizer), model_dirs["qwen3_untied"]
    with_it, without = (
        run_workers(offload_between_steps, 1, path, scenario, used, deadline_s=180, backend=BACKEND)[0]
        for used in (True, False)
    )
    for name, weight in without.items():
        assert_weights_near(with_it[name], weight, name)
