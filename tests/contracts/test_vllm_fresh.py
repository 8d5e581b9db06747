"""Weights that came into a running vLLM engine lie in it as those that a vLLM reads of the exported files.

Of models whose loaders take some past what brings weights into an engine that runs, or make others of them.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_harness import run_workers
from later import needed
from safetensors.torch import load_file, save_file
from test_vllm_types import made

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.engines.engine_registry import make_rollout_engine
from siirl.engines.rollout.vllm.arguments import CPU_LATENT, STATES
from siirl.models.families import OTHER_NAMES, family_of
from siirl.models.trained import own_type
from siirl.parallel.dims import ParallelDims
from siirl.parallel.process_groups import ProcessGroupManager

needed("vllm")
from fresh_vllm import digest  # noqa: E402

SUPPORT = Path(__file__).parents[1] / "support"
KINDS = ("deepseek_v2", "deepseek_v3", "gpt_oss", "kimi_k2", "qwen3_next", "granitemoehybrid")


def written(folder: Path, kind: str, seed: int) -> Path:
    """Files as an export in bfloat16 writes them, but those of routers' biases; random weights."""
    known = OTHER_NAMES.get(kind, kind)
    assert made(folder, known, seed) is not None
    stored = load_file(folder / "model.safetensors")
    plain = {
        name: tensor if name.endswith(own_type(known)) else tensor.bfloat16()
        for name, tensor in stored.items()
    }
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    own = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}} if kind != known else {}
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": kind, "dtype": "bfloat16"} | own))
    return folder


def updated(rank: int, world_size: int, folders: list[Path], names: list[str]) -> dict[str, Any]:
    """What an engine that took one set of weights after the other has of each parameter in the end."""
    rollout = "actor_rollout_ref.rollout"
    cfg = load_config(
        [
            *(f"{rollout}.name=vllm", f"{rollout}.dtype=bfloat16", f"{rollout}.max_model_len=64"),
            *(f"{rollout}.tensor_model_parallel_size={world_size}", f"trainer.n_gpus_per_node={world_size}"),
            f"actor_rollout_ref.model.path={folders[0]}",
            f"trainer.output_dir={folders[0]}/outputs",
        ]
    )
    ranks = tuple(range(world_size))
    groups = ProcessGroupManager([ranks], "gloo", 200) if world_size > 1 else None
    dims = ParallelDims(world_size, tp=world_size)
    plan = ModelPlan("agent_0.rollout", 0, "rollout", "vllm", "lm", False, ranks, dims, "r", ())
    engine = make_rollout_engine(plan, cfg, groups, torch.device("cpu"))
    try:
        for version, folder in enumerate(folders):
            engine.load_weights(load_file(folder / "model.safetensors").items(), version)
        if rank:
            return {}
        return {name: [digest(share) for share in engine.read_tensor(name)] for name in names}
    finally:
        engine.close()


def fresh(folder: Path, kind: str, ranks: int) -> list[dict[str, str]]:
    """What each rank of a vLLM that reads the files has of each parameter."""
    values, latent = family_of(kind).vllm.values, family_of(kind).latent
    arguments = {"hf_overrides": dict(values), "dtype": "bfloat16", **(CPU_LATENT if latent else {})}
    arguments |= STATES if family_of(kind).has_states else {}
    words = (str(ranks), str(folder / "store"), json.dumps(arguments))
    started = [
        subprocess.Popen(
            [sys.executable, SUPPORT / "fresh_vllm.py", folder, str(rank), *words], stdout=subprocess.PIPE
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=500)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks
    for left in Path("/dev/shm").glob(f"{words[1].replace('/', '_')}-*"):  # vLLM's, of ranks on a CPU
        left.unlink()
    return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_updated_engine_has_the_parameters_of_a_fresh_one(kind, ranks, tmp_path):
    if kind == "kimi_k2" and ranks > 1:
        pytest.skip("a deepseek_v3 by another name")
    first, second = (written(tmp_path / name, kind, seed) for seed, name in enumerate("ab"))
    known = fresh(second, kind, ranks)
    assert len(known[0]) > 20
    found, *_ = run_workers(updated, ranks, [first, second], list(known[0]), deadline_s=400)
    assert {name for name in found if found[name] != [share[name] for share in known]} == set()
