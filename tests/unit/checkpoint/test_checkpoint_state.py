"""States as JSON plus tensors, the RNG, an index that runs no code, and the export to a model directory."""

import json
import pickle
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from siirl import cli
from siirl.checkpoint import state_tree
from siirl.checkpoint.export import export_adapter, export_hf, save_hf
from siirl.checkpoint.manager import CheckpointManager, SavedModel
from siirl.checkpoint.state_tree import rng_state, set_rng_state
from siirl.engines.train.fsdp.fsdp_engine import FSDPEngine
from siirl.errors import CheckpointError, ConfigError, DataError
from siirl.model_files.directory import weights_digest
from siirl.model_files.stored_tensors import TensorReader, load_tensors, save_tensors

pytestmark = pytest.mark.heavy


class PlainEngine:
    """A module and its AdamW as the checkpoint sees an engine; one process, plain tensors."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        self.version = 0

    def step(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.version += 1

    def state_dict(self):
        return {
            "model": {name: p.detach() for name, p in self.module.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": {"betas": (0.9, 0.999), "total_steps": 7},
            "version": self.version,
        }

    def load_state_dict(self, state):
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]

    def export_weights(self, dtype=None):
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach().to(dtype or parameter.dtype)


def trained(seed: int, steps: int = 2) -> PlainEngine:
    torch.manual_seed(seed)
    engine = PlainEngine(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)))
    for _ in range(steps):
        engine.step()
    return engine


def test_a_state_is_the_same_after_json_and_tensors():
    state = {
        "model": {"a.weight": torch.arange(6).reshape(2, 3), "none": None},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "param_groups": [{"betas": (0.9, 0.999), "lr": 1e-3}],
        },
        "odd": {"$tensor": 1, "nested": [(), [], {}, (1, (2, "x"))]},
        "number": 0.1 + 0.2,
    }
    value, tensors = state_tree.split(state, "s")
    back = state_tree.join(json.loads(json.dumps(value)), tensors)
    assert torch.equal(back["model"].pop("a.weight"), state["model"].pop("a.weight"))
    assert back["optimizer"]["state"][0]["step"].item() == 3.0
    back["optimizer"].pop("state"), state["optimizer"].pop("state")
    assert back == state


@pytest.mark.parametrize("leaf", [{1, 2}, object(), {(1, 2): 3}, np.float32(1)])
def test_a_value_that_json_cannot_hold_is_named(leaf):
    with pytest.raises(CheckpointError, match="model/bad cannot be saved"):
        state_tree.split({"bad": leaf}, "model")


def test_all_random_generators_continue_where_they_were(tmp_path):
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.random()

    models = {"m": SavedModel(trained(0), None)}
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    draw()
    manager = CheckpointManager(tmp_path, 2, None)
    path = manager.save(1, models, {}, rng_state(torch.device("cpu")))
    expected = draw()
    torch.manual_seed(9), np.random.seed(9), random.seed(9)
    set_rng_state(manager.load(path, models).rank_state, torch.device("cpu"))
    assert draw() == expected


class Evil:
    def __reduce__(self):
        return (exec, ("import sys; sys.stdout.write('code ran')",))  # packages put theirs for print


def test_an_index_that_would_run_code_is_refused(tmp_path, capsys):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"builtins\.exec"):
        TensorReader(tmp_path).read_metadata()
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool],
)
def test_tensors_of_every_type_come_back(tmp_path, dtype):
    saved = {"x": (torch.arange(12) % 5).reshape(3, 4).to(dtype), "scalar": torch.tensor(1).to(dtype)}
    save_tensors(saved, tmp_path, None)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load_tensors(loaded, tmp_path, None)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


def test_a_model_of_another_shape_is_refused_with_the_names(tmp_path):
    save_tensors({"w": torch.zeros(2, 3)}, tmp_path, None)
    with pytest.raises(CheckpointError, match=r"w is \(3, 3\), saved as \(2, 3\)"):
        load_tensors({"w": torch.zeros(3, 3)}, tmp_path, None)
    with pytest.raises(CheckpointError, match=r"absent \['v'\]"):
        load_tensors({"v": torch.zeros(1)}, tmp_path, None)


def test_model_optimizer_and_run_state_come_back_exactly(tmp_path):
    engine, other = trained(1), trained(2, steps=1)
    manager = CheckpointManager(tmp_path, 2, None)
    path = manager.save(3, {"actor": SavedModel(engine, None)}, {"loader": {"epoch": 1}}, {})
    restored = manager.load(manager.find_resume("auto", None), {"actor": SavedModel(other, None)})
    assert path.name == "global_step_3" and restored.step == 3 and restored.extra == {"loader": {"epoch": 1}}
    torch.manual_seed(5)
    engine.step()
    torch.manual_seed(5)
    other.step()
    assert other.version == engine.version == 3
    for mine, theirs in zip(other.module.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_contents_choose_what_is_saved_and_restored(tmp_path):
    engine, other = trained(1), trained(2)
    manager = CheckpointManager(tmp_path, 5, None)
    before = other.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    full = manager.save(1, {"actor": SavedModel(engine, None)}, {}, {})
    manager.load(full, {"actor": SavedModel(other, None, load_contents=("model",))})
    assert torch.equal(other.module[0].weight, engine.module[0].weight)
    assert torch.equal(other.optimizer.state_dict()["state"][0]["exp_avg"], before)
    weights_only = manager.save(2, {"actor": SavedModel(engine, None, save_contents=("model",))}, {}, {})
    assert sum(f.stat().st_size for f in weights_only.rglob("*.distcp")) < sum(
        f.stat().st_size for f in full.rglob("*.distcp")
    )
    with pytest.raises(CheckpointError, match="holds no optimizer, scheduler state"):
        manager.load(weights_only, {"actor": SavedModel(other, None)})
    with pytest.raises(CheckpointError, match="no such model"):
        manager.load(full, {"critic": SavedModel(other, None)})


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    return make_tiny_model_dir(tmp_path_factory.mktemp("model"))


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([[6, 7, 8, 9]])).logits


@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 20_000])
def test_saved_hf_weights_load_in_transformers(tmp_path, tiny_model, shard_bytes):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        expected = model(torch.tensor([[6, 7, 8, 9]])).logits
    save_hf(
        PlainEngine(model).export_weights(), str(tiny_model), tmp_path / "hf", rank=0, shard_bytes=shard_bytes
    )
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 1 if shard_bytes > 10**9 else 5
    assert torch.equal(logits(tmp_path / "hf"), expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("1+1").input_ids


def test_a_failed_hf_save_drains_the_iterator_and_keeps_the_old_folder(tmp_path, tiny_model):
    (tmp_path / "hf").mkdir()
    drained = []

    def weights():
        for index in range(3):
            yield f"w{index}", torch.zeros(2)
            drained.append(index)

    with pytest.raises(DataError, match=r"config\.json"):
        save_hf(weights(), str(tmp_path / "hf"), tmp_path / "hf", rank=0)
    assert drained == [0, 1, 2] and (tmp_path / "hf").is_dir()


def test_a_checkpoint_exports_to_a_model_directory_in_its_declared_type(tmp_path, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    engine = PlainEngine(model)
    engine.step()
    older = SavedModel(PlainEngine(AutoModelForCausalLM.from_pretrained(tiny_model)), None, str(tiny_model))
    saved = {"agent_0.actor": SavedModel(engine, None, str(tiny_model)), "agent_0.teacher.older": older}
    checkpoint = CheckpointManager(tmp_path / "c", 1, None).save(1, saved, {}, {})
    for source in (checkpoint, tmp_path / "c"):
        out = export_hf(source, tmp_path / "out")
        with torch.no_grad():
            assert torch.equal(logits(out), model(torch.tensor([[6, 7, 8, 9]])).logits)
    config = json.loads((checkpoint / "agent_0.actor" / "hf" / "config.json").read_text())
    (checkpoint / "agent_0.actor" / "__0_0.distcp").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="corrupted"):
        export_hf(checkpoint, tmp_path / "out")
    assert config["model_type"] == "qwen3"


def test_an_export_of_one_of_several_models_needs_its_name(tmp_path, tiny_model):
    engine = PlainEngine(AutoModelForCausalLM.from_pretrained(tiny_model))
    models = {name: SavedModel(engine, None, str(tiny_model)) for name in ("agent_0.actor", "agent_1.actor")}
    checkpoint = CheckpointManager(tmp_path / "c", 1, None).save(1, models, {}, {})
    with pytest.raises(ConfigError, match=r"several models.*agent_0\.actor, agent_1\.actor"):
        export_hf(checkpoint, tmp_path / "out")
    with pytest.raises(ConfigError, match="no model 'actor'"):
        export_hf(checkpoint, tmp_path / "out", "actor")
    assert (export_hf(checkpoint, tmp_path / "out", "agent_1.actor") / "model.safetensors").exists()


def test_an_export_merges_lora_adapters(tmp_path, tiny_model):
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    inject_adapter_in_model(lora, model, adapter_name="default")
    with torch.no_grad():
        expected = model(torch.tensor([[6, 7, 8, 9]])).logits
    assert get_peft_model is not None
    saved = {"agent_0.actor": SavedModel(PlainEngine(model), None, str(tiny_model), lora_alpha=16)}
    checkpoint = CheckpointManager(tmp_path / "c", 1, None).save(1, saved, {}, {})
    torch.testing.assert_close(
        logits(export_hf(checkpoint, tmp_path / "out")), expected, atol=1e-5, rtol=1e-5
    )
    saved = {"agent_0.actor": SavedModel(PlainEngine(model), None, str(tiny_model))}
    checkpoint = CheckpointManager(tmp_path / "c", 1, None).save(2, saved, {}, {})
    with pytest.raises(CheckpointError, match="no lora_alpha"):
        export_hf(checkpoint, tmp_path / "out2")


class AdapterEngine(PlainEngine):
    """An engine that saves its adapters alone, as the real ones do. extra: what trains besides."""

    extra: ClassVar[dict[str, torch.Tensor]] = {}

    def state_dict(self):
        state, params = super().state_dict(), dict(self.module.named_parameters())
        names = [name.replace(".base_layer.", ".") for name in params if ".lora_" not in name]
        adapters = {name: tensor for name, tensor in state["model"].items() if ".lora_" in name}
        base = {"path": str(self.base), "digest": weights_digest(self.base), "names": names}
        return state | {"model": adapters | self.extra, "base": base}

    def load_state_dict(self, state):
        self.loaded = state


def adapted(path: Path, seed: int) -> AdapterEngine:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(path)
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    inject_adapter_in_model(lora, model, adapter_name="default")
    engine = AdapterEngine(model)
    engine.base = path
    return engine


def saved_adapter(tmp_path: Path, tiny_model: Path) -> tuple[Path, Path, torch.Tensor]:
    """A base of its own, a checkpoint of an adapter on it, and the logits of both."""
    base = shutil.copytree(tiny_model, tmp_path / "base")
    engine = adapted(base, seed=0)
    with torch.no_grad():
        expected = engine.module(torch.tensor([[6, 7, 8, 9]])).logits
    saved = {"agent_0.actor": SavedModel(engine, None, str(base), ("model",), lora_alpha=16)}
    return base, CheckpointManager(tmp_path / "c", 1, None).save(1, saved, {}, {}), expected


def test_an_adapter_alone_is_exported_with_the_base_that_it_was_trained_on(tmp_path, tiny_model):
    base, checkpoint, expected = saved_adapter(tmp_path, tiny_model)
    stored = sum(path.stat().st_size for path in (checkpoint / "agent_0.actor").glob("*.distcp"))
    assert stored < 0.5 * (base / "model.safetensors").stat().st_size
    out = export_hf(checkpoint, tmp_path / "out")
    torch.testing.assert_close(logits(out), expected, atol=1e-5, rtol=1e-5)
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"holds an adapter on the weights of .*base.*--base DIRECTORY"):
        export_hf(checkpoint, tmp_path / "out2")
    assert logits(export_hf(checkpoint, tmp_path / "out2", base=moved)).equal(logits(out))
    with pytest.raises(CheckpointError, match="has others"):
        export_hf(checkpoint, tmp_path / "out3", base=out)


def test_an_adapter_is_exported_alone_as_peft_reads_it_without_its_base(tmp_path, tiny_model, capsys):
    from peft import AutoPeftModelForCausalLM

    base, checkpoint, expected = saved_adapter(tmp_path, tiny_model)
    moved, out = base.rename(tmp_path / "moved"), tmp_path / "adapter"
    assert cli.main(["export", "--adapter", str(checkpoint), str(out)]) == 0
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    moved.rename(base)
    with torch.no_grad():
        found = AutoPeftModelForCausalLM.from_pretrained(out)(torch.tensor([[6, 7, 8, 9]])).logits
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    capsys.readouterr()
    assert cli.main(["export", "--adapter", str(checkpoint), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    other = export_adapter(checkpoint, tmp_path / "other", base=Path("hub/name"))
    assert json.loads((other / "adapter_config.json").read_text())["base_model_name_or_path"] == "hub/name"
    unscaled = {"agent_0.actor": SavedModel(adapted(base, seed=0), None, str(base), ("model",))}
    checkpoint = CheckpointManager(tmp_path / "c", 1, None).save(2, unscaled, {}, {})
    with pytest.raises(CheckpointError, match="no lora_alpha"):
        export_adapter(checkpoint, tmp_path / "out2")


def test_what_is_not_an_adapter_alone_is_not_exported_as_one(tmp_path, tiny_model):
    plain = PlainEngine(AutoModelForCausalLM.from_pretrained(tiny_model))
    critic = adapted(tiny_model, seed=0)
    critic.extra = {"score.weight": torch.ones(1, 3)}
    saved = {
        "agent_0.actor": SavedModel(plain, None, str(tiny_model), ("model",)),
        "agent_0.critic": SavedModel(critic, None, str(tiny_model), ("model",), lora_alpha=16),
    }
    checkpoint = CheckpointManager(tmp_path / "c", 1, None).save(1, saved, {}, {})
    with pytest.raises(ConfigError, match=r"has no LoRA adapter. Leave out --adapter"):
        export_adapter(checkpoint, tmp_path / "out", "agent_0.actor")
    with pytest.raises(ConfigError, match=r"trains model/score.weight besides its adapter"):
        export_adapter(checkpoint, tmp_path / "out", "agent_0.critic")
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_read_from_a_checkpoint_that_holds_its_base_too_and_only_onto_its_own_base(
    tmp_path, tiny_model
):
    old, new = adapted(tiny_model, seed=0), adapted(tiny_model, seed=1)
    whole = SavedModel(PlainEngine(old.module), None, str(tiny_model), ("model",), ("model",), lora_alpha=16)
    manager = CheckpointManager(tmp_path, 1, None)
    checkpoint = manager.save(1, {"agent_0.actor": whole}, {}, {})
    own = SavedModel(new, None, str(tiny_model), ("model",), ("model",), lora_alpha=16)
    manager.load(checkpoint, {"agent_0.actor": own})
    wanted = old.state_dict()["model"]
    assert new.loaded["model"].keys() == wanted.keys() and wanted
    assert all(new.loaded["model"][name].equal(wanted[name]) for name in wanted)
    assert new.loaded["base"] == old.state_dict()["base"]

    here = SimpleNamespace(name="agent_0.actor", _base_weights=new.loaded["base"])
    FSDPEngine._check_base(here, new.loaded)
    FSDPEngine._check_base(here, {"version": 3})
    with pytest.raises(CheckpointError, match=r"agent_0\.actor: its adapter was trained on other weights"):
        FSDPEngine._check_base(here, {"base": new.loaded["base"] | {"digest": "00"}})
