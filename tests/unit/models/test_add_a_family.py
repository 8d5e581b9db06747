"""A model family is one row: with nothing else, check, memory estimate, plan, engines and pages know it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import models_page
import proven_models
import pytest
from plan_cases import config

import siirl
from siirl.cli import main
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.memory.estimate import read_shape
from siirl.errors import NotSupportedError
from siirl.models.families import FAMILIES
from siirl.models.trained import why_not

ACTOR, NEW = "actor_rollout_ref.actor", "qwen_of_tomorrow"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
FILE = SIZES | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
DENSE = {"model_type": NEW} | FILE
MIXTURE = DENSE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write(folder, raw: dict) -> str:
    (folder / "config.json").write_text(json.dumps(raw))
    return f"actor_rollout_ref.model.path={folder}"


@pytest.mark.parametrize(("like", "raw"), [("qwen3", DENSE), ("qwen3_moe", MIXTURE)])
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_a_row_alone_makes_a_family_known_to_check_estimate_and_plan(
    tmp_path, monkeypatch, capsys, like, raw, strategy
):
    path = write(tmp_path, raw)
    words = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", f"{ACTOR}.strategy={strategy}")
    command = ["check", "--elsewhere", *words, path]
    assert main(command) == 2
    assert f"{NEW} is no model type whose results under {strategy} were compared" in capsys.readouterr().err
    monkeypatch.setitem(FAMILIES, NEW, FAMILIES[like])
    assert main(command) == 0
    assert NEW not in capsys.readouterr().err
    cfg = config(path, f"{ACTOR}.strategy={strategy}")
    plan, _ = compile_plan(load_dag(cfg), cfg, 2)
    assert plan.models["agent_0.actor"].backend == strategy
    shape = read_shape(cfg, "actor")
    write(tmp_path, raw | {"model_type": like})
    assert replace(shape, family=like) == read_shape(cfg, "actor")
    write(tmp_path, raw)
    assert main(["plan", "trainer.n_gpus_per_node=2", *command[2:]]) == 0
    assert "agent_0.actor" in capsys.readouterr().out


def test_what_a_row_says_is_what_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path, DENSE)
    row = FAMILIES["qwen3"]
    asked = {
        f"{ACTOR}.fsdp_config.float8=True": (replace(row, float8=False), f"float8=True for a {NEW}"),
        "actor_rollout_ref.model.compile_layers=True": (
            replace(row, compiled=False),
            f"compile_layers=True for a {NEW}",
        ),
        "actor_rollout_ref.model.lora_rank=4": (replace(row, turned=True), f"LoRA adapters of a {NEW}"),
        "actor_rollout_ref.rollout.name=vllm": (
            replace(row, vllm=replace(row.vllm, why_not="it is of tomorrow")),
            f"a {NEW} in vLLM: it is of tomorrow. Set actor_rollout_ref.rollout.name=hf",
        ),
        "data.dataset_type=llm": (replace(row, sees_images=True), f"a {NEW} with data.dataset_type=llm"),
    }
    for key, (other, words) in asked.items():
        cfg = config(path, key, "trainer.device=cuda")
        monkeypatch.setitem(FAMILIES, NEW, row)
        compile_plan(load_dag(cfg), cfg, 1)
        monkeypatch.setitem(FAMILIES, NEW, other)
        with pytest.raises(NotSupportedError, match=words):
            compile_plan(load_dag(cfg), cfg, 1)


def test_megatron_builds_what_a_row_says(monkeypatch):
    pytest.importorskip("megatron.core")
    from transformers import Qwen3Config

    from siirl.engines.train.megatron.weights import entries

    like = [(entry.name, entry.blocks) for entry in entries(Qwen3Config(**FILE))]
    new = type("NewConfig", (Qwen3Config,), {"model_type": NEW})(**FILE)
    assert NEW in why_not(new.to_dict(), "megatron")
    monkeypatch.setitem(FAMILIES, NEW, FAMILIES["qwen3"])
    assert [(entry.name, entry.blocks) for entry in entries(new)] == like
    monkeypatch.setitem(FAMILIES, NEW, replace(FAMILIES["qwen3"], qk_norm=""))
    assert {name for name, _ in like} - {entry.name for entry in entries(new)} == {
        f"decoder.layers.{layer}.self_attention.{x}_layernorm.weight" for layer in range(2) for x in "qk"
    }


def test_the_page_of_models_lists_a_new_row(monkeypatch):
    monkeypatch.setitem(FAMILIES, NEW, FAMILIES["qwen3"])
    pages = models_page.written(proven_models.load(proven_models.FILE))
    row = f"| {NEW} | any role | any role | hf, vllm, sglang | all | yes | - |"
    assert row in pages[models_page.PAGE]
    for strategy in ("fsdp", "megatron"):
        assert f"| {NEW} | {strategy} | not run |" in pages[models_page.EVIDENCE]


def test_no_other_file_compares_names_of_types():
    """Of names in quotes; templates and formats of tool calls have theirs, tiny models their sizes."""
    root = Path(siirl.__file__).parent
    names = re.compile(rf"[\"']({'|'.join(FAMILIES)})[\"']")
    elsewhere = {"models/families.py", "config/rollout.py", "testing/tiny_models.py"}
    found = {
        str(file.relative_to(root)): names.findall(file.read_text(encoding="utf-8"))
        for file in root.rglob("*.py")
        if not str(file.relative_to(root)).startswith("dialect/")
    }
    assert {file for file, told in found.items() if told} - elsewhere == set()
