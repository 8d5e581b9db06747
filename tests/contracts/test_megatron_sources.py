"""Weights of Megatron models by every way in: Hugging Face files, mbridge, converted and run checkpoints."""

import tempfile
from pathlib import Path

import causal_lms
import pytest
import torch
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from safetensors.torch import load_file
from train_engine_cases import Scenario

MEGATRON = "actor_rollout_ref.actor.megatron"
FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe", "mixtral")
TIED = ("qwen3", "llama")
BY_MBRIDGE = (f"{MEGATRON}.use_mbridge=True",)
SEQUENCE_PARALLEL = (f"{MEGATRON}.sequence_parallel=True",)


def stored_at(folder: str) -> tuple[str, ...]:
    return (f"{MEGATRON}.use_dist_checkpointing=True", f"{MEGATRON}.dist_checkpointing_path={folder}")


@pytest.fixture(scope="module")
def models() -> dict[str, str]:
    """A tiny model of each family; qwen3's words do not divide over two ranks. TIED ones have no head."""
    root = Path(tempfile.mkdtemp(prefix="siirl-megatron-sources-"))
    return {
        family: str(
            make_tiny_model_dir(
                root / family, family, tie=family in TIED, vocab=67 if family == "qwen3" else 64
            )
        )
        for family in FAMILIES
    }


def wrong_weights(path: str, world: int, overrides: tuple[str, ...], **sizes: int) -> list[str]:
    """Names of the weights that an engine, built so, exports otherwise than they are in the files."""
    scenario = Scenario("read", world, overrides=overrides, strategy="megatron", sizes=tuple(sizes.items()))
    engine, _ = cases.build_engine(scenario, path)
    source = load_file(Path(path) / "model.safetensors")
    found = dict(engine.export_weights())
    assert found.keys() == source.keys()
    return [name for name in source if not torch.equal(found[name], source[name])]


def read_families(
    rank: int, world: int, models: dict[str, str], folder: str, by_mbridge: bool
) -> dict[str, list[str]]:
    """Each model from a converted checkpoint, or by mbridge, in two layouts."""
    from siirl.checkpoint.convert import to_distributed

    wrong = {}
    for family, path in models.items():
        stored = Path(folder) / family
        if rank == 0 and not by_mbridge:
            to_distributed(Path(path), stored, chunk_bytes=4096)
        torch.distributed.barrier()
        source = BY_MBRIDGE if by_mbridge else stored_at(str(stored))
        tensor = {"tp": 2, "ep": 2} if family in ("qwen3_moe", "mixtral") else {"tp": 2}
        wrong[f"{family}, {tensor}"] = wrong_weights(path, world, source + SEQUENCE_PARALLEL, **tensor)
        wrong[f"{family}, pp2"] = wrong_weights(path, world, source, pp=2)
    return wrong


@pytest.mark.parametrize(
    ("families", "by_mbridge"),
    [
        (("qwen3", "mixtral"), False),
        (("llama",), True),
        pytest.param(("qwen2", "llama", "qwen3_moe"), False, marks=pytest.mark.slow),
        pytest.param(FAMILIES, True, marks=pytest.mark.slow),
    ],
    ids=["converted", "a tied one by mbridge", "converted, the other families", "by mbridge"],
)
def test_every_source_gives_the_weights_of_the_files(models, tmp_path, families, by_mbridge):
    chosen = {family: models[family] for family in families}
    for wrong in run_workers(read_families, 2, chosen, str(tmp_path), by_mbridge, deadline_s=100):
        assert len(wrong) == 2 * len(families)
        assert not {case: names for case, names in wrong.items() if names}


def read_checkpoint_of_fsdp(rank: int, world: int, path: str, folder: str) -> float:
    """Train under FSDP, save as a run does, read its folder under tensor parallelism."""
    from siirl.checkpoint.manager import CheckpointManager, SavedModel

    engine, groups = cases.build_engine(Scenario("fsdp", world), path)
    cases.train_steps(engine, Scenario("fsdp", world), range(1))
    saved = SavedModel(engine, groups.get(tuple(range(world))), path)
    manager = CheckpointManager(Path(folder), 1, groups.world)
    checkpoint = manager.save(1, {"agent_0.actor": saved}, {}, {})
    trained = {name: weight.clone() for name, weight in engine.export_weights()}

    scenario = Scenario(
        "tp", world, overrides=stored_at(str(checkpoint / "agent_0.actor")), strategy="megatron",
        sizes=(("tp", 2),),
    )  # fmt: skip
    other, _ = cases.build_engine(scenario, path)
    return max(float((weight - trained[name]).abs().max()) for name, weight in other.export_weights())


def test_the_weights_of_a_run_under_fsdp_start_one_under_megatron(models, tmp_path):
    assert run_workers(read_checkpoint_of_fsdp, 2, models["qwen3"], str(tmp_path)) == [0.0, 0.0]


def read_biases(rank: int, world: int, path: str, folder: str) -> list[str]:
    from siirl.checkpoint.convert import to_distributed

    if rank == 0:
        to_distributed(Path(path), Path(folder) / "stored")
    torch.distributed.barrier()
    return wrong_weights(path, world, stored_at(f"{folder}/stored"), pp=2)


@pytest.mark.slow
def test_a_converted_checkpoint_has_the_biases_of_routers(tmp_path):
    path = causal_lms.write_model(tmp_path / "model", causal_lms.tiny_config("glm4_moe"))
    assert run_workers(read_biases, 2, str(path), str(tmp_path)) == [[], []]


def read_another_model(rank: int, world: int, path: str, folder: str) -> str:
    from siirl.checkpoint.convert import to_distributed

    if rank == 0:
        to_distributed(Path(path), Path(folder) / "stored")
    torch.distributed.barrier()
    wider = "+actor_rollout_ref.model.override_config.intermediate_size=96"
    try:
        wrong_weights(path, world, (*stored_at(f"{folder}/stored"), wider), tp=2)
    except ValueError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(models, tmp_path):
    for message in run_workers(read_another_model, 2, models["llama"], str(tmp_path)):
        assert "dist_checkpointing_path" in message and "of another shape" in message
