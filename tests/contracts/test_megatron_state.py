"""Training state of Megatron models: resumed exactly, on other parallel sizes, and by the other strategy."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

MEGATRON = "actor_rollout_ref.actor.megatron"
PLAIN = (f"{MEGATRON}.use_distributed_optimizer=False",)


def layout(world: int, overrides=(), strategy: str = "megatron", **sizes: int) -> Scenario:
    name = f"{strategy} {sizes}"
    return Scenario(name, world, overrides=overrides, strategy=strategy, sizes=tuple(sizes.items()))


@pytest.fixture(scope="module")
def model_dir() -> str:
    root = Path(tempfile.mkdtemp(prefix="siirl-megatron-state-"))
    return str(make_tiny_model_dir(root, tie=True, hidden=64, vocab=258, init_std=0.15))


HOST = (
    "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True",
    "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=0.5",
    "+actor_rollout_ref.actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True",
)
NARROW = (
    "+actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True",
    "+actor_rollout_ref.actor.optim.override_optimizer_config.exp_avg_dtype=bf16",
    "+actor_rollout_ref.actor.optim.override_optimizer_config.exp_avg_sq_dtype=bf16",
)
BF16 = (f"{MEGATRON}.param_dtype=bfloat16",)


def save_after_two_steps(rank: int, world: int, path: str, folder: str, scenario: Scenario) -> dict:
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(2))
    dcp.save(engine.state_dict(), checkpoint_id=folder)
    cases.train_steps(engine, scenario, range(2, 3))
    return {name: weight.clone() for name, weight in engine.export_weights()}


def resume_last_step(rank: int, world: int, path: str, folder: str, scenario: Scenario) -> dict:
    engine, _ = cases.build_engine(scenario, path)
    cases.train_steps(engine, scenario, range(1))  # whatever is there must be overwritten
    state = engine.state_dict()
    dcp.load(state, checkpoint_id=folder)
    engine.load_state_dict(state)
    assert engine.version == 2
    cases.train_steps(engine, scenario, range(2, 3))
    return {name: weight.clone() for name, weight in engine.export_weights()}


FEW = [(layout(2, tp=2), [layout(2, tp=2), layout(2, strategy="fsdp")])]
SLOW = [
    (layout(4, tp=2), [layout(4, tp=2), layout(2, pp=2), layout(1), layout(4, PLAIN, tp=2, pp=2)]),
    (layout(2, PLAIN, pp=2), [layout(2, PLAIN, pp=2), layout(4), layout(2, pp=2, vpp=1)]),
    (layout(2, strategy="fsdp"), [layout(2), layout(4, tp=2, pp=2), layout(4, tp=4)]),
    (layout(2, HOST), [layout(2, HOST), layout(2, tp=2), layout(2, strategy="fsdp")]),
    (layout(2, (*NARROW, *HOST, *BF16)), [layout(2, (*NARROW, *HOST, *BF16)), layout(1, (*NARROW, *BF16))]),
    (layout(4, pp=2), [layout(4, pp=2), layout(2, strategy="fsdp"), layout(4, cp=2)]),
    (layout(4, cp=2, tp=2), [layout(4, cp=2, tp=2), layout(2, pp=2, vpp=1)]),
]


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda value: value.name if isinstance(value, Scenario) else "",
)
def test_a_checkpoint_continues_exactly_and_on_other_layouts(model_dir, tmp_path, saved, resumed):
    folder = str(tmp_path)
    trained = run_workers(save_after_two_steps, saved.world, model_dir, folder, saved)[0]
    for scenario in resumed:
        found = run_workers(resume_last_step, scenario.world, model_dir, folder, scenario)[0]
        assert found.keys() == trained.keys()
        for name in trained:
            same = scenario == saved
            narrow = NARROW[0] in saved.overrides
            assert not same or torch.equal(found[name], trained[name]), name
            gap = float((found[name] - trained[name]).abs().max())
            assert narrow or gap < 0.01 * cases.LR, (scenario.name, name)


def train_with(rank: int, world: int, path: str, scenarios: list[Scenario]) -> list[dict]:
    """For each scenario: exported weights after NUM_STEPS, and the optimizer's state of this rank."""
    found = []
    for scenario in scenarios:
        engine, _ = cases.build_engine(scenario, path)
        cases.train_steps(engine, scenario, range(cases.NUM_STEPS))
        places = [part.optimizer for part in engine._optimizer.chained_optimizers]
        on_device = [p.untyped_storage().nbytes() > 0 for place in places for p in place.state]
        shares = [len(getattr(place, "_copies", ())) / max(1, len(place.state)) for place in places]
        types = {str(tensor.dtype) for tensor in engine.state_dict()["optimizer"].values()}
        weights = {name: weight.clone() for name, weight in engine.export_weights(torch.float32)}
        found.append(
            {
                "weights": weights,
                "share": max(shares),
                "types": types,
                "here": sum(on_device) / len(on_device),
            }
        )
    return found


@pytest.mark.parametrize(
    "kind",
    [BF16, pytest.param((), marks=pytest.mark.slow), pytest.param(PLAIN, marks=pytest.mark.slow)],
    ids=["bf16", "distributed", "plain"],
)
def test_moments_on_the_host_change_nothing_and_narrow_ones_little(model_dir, kind):
    kinds = [layout(2, (*kind, *more), tp=2) for more in ((), HOST, NARROW, (*NARROW, *HOST))]
    usual, host, narrow, both = run_workers(train_with, 2, model_dir, kinds)[0]
    assert usual["share"] == 0 and 0 < host["share"] < 1 and 0 < both["share"] < 1
    assert usual["here"] == 1 and (host["here"] < 1) == (kind == BF16)
    assert usual["types"] == host["types"] == {"torch.float32"}
    assert narrow["types"] == both["types"] == {"torch.bfloat16"}
    for name, weight in usual["weights"].items():
        assert torch.equal(host["weights"][name], weight), name
        assert torch.equal(both["weights"][name], narrow["weights"][name]), name
        gap = (narrow["weights"][name] - weight).abs()
        assert gap.mean() < 0.1 * cases.LR, name
    assert any(not torch.equal(narrow["weights"][name], usual["weights"][name]) for name in usual["weights"])


def train_with_parts_away(rank: int, world: int, path: str, scenario: Scenario) -> list[str]:
    """Names of weights that differ after training with each part away, alone, between the steps."""
    kept, _ = cases.build_engine(scenario, path)
    moved, _ = cases.build_engine(scenario, path)
    main = 12 if "bfloat16" in str(scenario.overrides) else 8
    for step in range(cases.NUM_STEPS):
        cases.train_steps(kept, scenario, range(step, step + 1))
        cases.train_steps(moved, scenario, range(step, step + 1))
        num = sum(param.numel() for param, _ in moved._params)
        owned = num // moved.dp_size if moved.dp_size > 1 else num
        weights = 2 if main == 12 else 4
        for part, num_bytes in {"params": weights * num, "grads": 4 * num, "optimizer": main * owned}.items():
            copies = moved._host[part]
            copies.take(moved._local_tensors(part))  # on CPU offload() has nothing to do
            held = sum(host.nbytes() for _, host in copies._copies)
            assert held == pytest.approx(num_bytes, rel=0.05), part  # buffers are padded
            with pytest.raises(AssertionError, match=f"{part} are offloaded"):
                cases.train_steps(moved, scenario, range(1))
            moved.onload(**{name: name == part for name in ("params", "grads", "optimizer")})
    theirs = dict(moved.export_weights())
    return [name for name, weight in kept.export_weights() if not torch.equal(weight, theirs[name])]


@pytest.mark.parametrize(
    "scenario",
    [
        layout(2, (*BF16, *PLAIN), tp=2),
        pytest.param(layout(2, BF16), marks=pytest.mark.slow),
        pytest.param(layout(2, PLAIN, tp=2), marks=pytest.mark.slow),
        pytest.param(layout(2, pp=2), marks=pytest.mark.slow),
    ],
    ids=lambda scenario: scenario.name,
)
def test_each_part_leaves_alone_and_the_training_is_the_same_bit_for_bit(model_dir, scenario):
    assert run_workers(train_with_parts_away, 2, model_dir, scenario) == [[], []]


MOE = {"layers": 2, "tie": False, "hidden": 64, "init_std": 0.15}
SPLIT = (f"{MEGATRON}.sequence_parallel=True",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (layout(4, SPLIT, tp=2, ep=2), [layout(1), layout(2, pp=2), layout(2, SPLIT, tp=2, etp=2)]),
        (
            layout(4, SPLIT, tp=2),
            [layout(2, ep=2), layout(4, ep=2, etp=2), layout(2, (*SPLIT, *PLAIN), tp=2)],
        ),
    ],
    ids=["tp2, ep2", "tp2"],
)
def test_experts_continue_exactly_and_on_other_layouts(tmp_path, saved, resumed):
    """The optimizer state of experts is sharded apart from the dense weights'."""
    model = str(make_tiny_model_dir(tmp_path / "model", "mixtral", **MOE))
    folder = str(tmp_path / "state")
    trained = run_workers(save_after_two_steps, 4, model, folder, saved)[0]
    for scenario in [saved, *resumed]:
        found = run_workers(resume_last_step, scenario.world, model, folder, scenario)[0]
        assert found.keys() == trained.keys()
        for name in trained:
            assert scenario != saved or torch.equal(found[name], trained[name]), name
            gap = float((found[name] - trained[name]).abs().max())
            assert gap < 0.01 * cases.LR, (scenario.name, name)


def export_again(rank: int, world: int, path: str, scenario: Scenario) -> dict[str, torch.Tensor]:
    engine, _ = cases.build_engine(scenario, path)
    specs = engine.weight_specs()
    weights = {name: weight.clone() for name, weight in engine.export_weights()}
    assert list(specs) == list(weights)
    assert specs == {name: (tuple(w.shape), w.dtype) for name, w in weights.items()}
    halves = {name: weight.dtype for name, weight in engine.export_weights(torch.bfloat16)}
    assert set(halves.values()) == {torch.bfloat16}
    return weights


@pytest.mark.parametrize(
    "scenario",
    [
        layout(2, tp=2),
        pytest.param(layout(4, tp=4), marks=pytest.mark.slow),
        pytest.param(layout(4, tp=2, pp=2), marks=pytest.mark.slow),
        pytest.param(layout(2, pp=2, vpp=1), marks=pytest.mark.slow),
    ],
    ids=lambda scenario: scenario.name,
)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_weights_come_out_bit_for_bit_as_they_went_in(tmp_path, scenario, tie):
    from safetensors.torch import load_file

    path = make_tiny_model_dir(tmp_path, tie=tie, vocab=66, init_std=0.15)
    source = load_file(path / "model.safetensors")
    for found in run_workers(export_again, scenario.world, str(path), replace(scenario)):
        assert found.keys() == source.keys()
        for name in source:
            assert torch.equal(found[name], source[name]), name


@pytest.mark.parametrize(
    "scenario",
    [layout(2, tp=2), pytest.param(layout(2, pp=2), marks=pytest.mark.slow)],
    ids=lambda scenario: scenario.name,
)
def test_a_frozen_model_takes_a_share_of_other_weights(tmp_path, scenario):
    sizes = {"tie": True, "vocab": 66, "init_std": 0.15}
    paths = [str(make_tiny_model_dir(tmp_path / str(seed), seed=seed, **sizes)) for seed in (1, 2)]
    run_workers(cases.follow, 2, scenario, *paths)
