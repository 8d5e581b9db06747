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
    return str(make_tiny_model_dir(root, tie=True, hidden=64, init_std=0.15))


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
            assert not same or torch.equal(found[name], trained[name]), name
            gap = float((found[name] - trained[name]).abs().max())
            assert gap < 0.01 * cases.LR, (scenario.name, name)


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
        layout(2, (f"{MEGATRON}.param_dtype=bfloat16", *PLAIN), tp=2),
        pytest.param(layout(2, (f"{MEGATRON}.param_dtype=bfloat16",)), marks=pytest.mark.slow),
        pytest.param(layout(2, PLAIN, tp=2), marks=pytest.mark.slow),
        pytest.param(layout(2, pp=2), marks=pytest.mark.slow),
    ],
    ids=lambda scenario: scenario.name,
)
def test_each_part_leaves_alone_and_the_training_is_the_same_bit_for_bit(model_dir, scenario):
    assert run_workers(train_with_parts_away, 2, model_dir, scenario) == [[], []]


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
