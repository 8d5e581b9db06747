"""rollout.replace_weights: where weights are written in place, by default and on demand, and where not."""

import json

import pytest
from plan_cases import config

from siirl.compiler.backends.vllm import writes_in_place
from siirl.compiler.compile import TEMPLATES, compile_plan, load_dag
from siirl.compiler.plan import ModelPlan
from siirl.config import effect_warnings
from siirl.config.checks import check_config
from siirl.config.roles import judge_config, scoring_config
from siirl.dag.spec import NodeSpec, dag_spec
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import NotSupportedError
from siirl.models.families import types_with
from siirl.parallel.dims import ParallelDims

ROLLOUT = "actor_rollout_ref.rollout"
QWEN3 = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
IN_PLACE = f"{ROLLOUT}.replace_weights=in_place"


def compiled(folder, *keys, kind="qwen3"):
    (folder / "config.json").write_text(json.dumps(QWEN3 | {"model_type": kind}))
    base = (f"actor_rollout_ref.model.path={folder}", f"{ROLLOUT}.name=vllm", "trainer.device=cuda")
    cfg = config(*base, *keys)
    check_config(cfg)
    plan, _ = compile_plan(load_dag(cfg), cfg, 2)
    return cfg, plan


def checked(folder, *keys, kind="qwen3"):
    return compiled(folder, *keys, kind=kind)[0]


@pytest.mark.parametrize(
    ("keys", "kind", "in_place"),
    [
        *(((), kind, True) for kind in types_with(lambda row: row.vllm.in_place)),
        (("trainer.device=cpu",), "qwen3", True),
        ((f"{ROLLOUT}.replace_weights=by_loaders",), "qwen3", False),
        ((), "phi3", False),
        (("trainer.rollout_only=true",), "qwen3", False),
        (("actor_rollout_ref.model.lora_rank=8",), "qwen3", True),
        (("actor_rollout_ref.model.lora_rank=8", f"{ROLLOUT}.merge_lora=false"), "qwen3", False),
        ((f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.max_log_prob_diff=0.1"), "qwen3", False),
        ((f"{ROLLOUT}.engine_kwargs.vllm={{quantization: fp8}}",), "qwen3", False),
    ],
    ids=str,
)
def test_by_default_weights_are_written_in_place_where_that_was_seen(keys, kind, in_place, tmp_path):
    cfg, plan = compiled(tmp_path, *keys, kind=kind)
    (model,) = (model for model in plan.models.values() if model.is_rollout)
    assert writes_in_place(model, cfg) is in_place


def test_a_model_whose_type_cannot_be_read_takes_weights_by_loaders():
    cfg = config(f"{ROLLOUT}.name=vllm", "trainer.device=cuda", "actor_rollout_ref.model.path=some/model")
    model = ModelPlan("a.rollout", 0, "rollout", "vllm", "lm", False, (0,), ParallelDims(1), "rollout", ())
    assert not writes_in_place(model, cfg)


@pytest.mark.parametrize("way", ["in_place", "in_place_checked"])
@pytest.mark.parametrize(
    "other",
    [
        f"{ROLLOUT}.max_lag=1",
        "actor_rollout_ref.model.lora_rank=8",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ],
)
def test_weights_in_place_go_with_vllm(way, other, tmp_path):
    cfg = checked(tmp_path, f"{ROLLOUT}.replace_weights={way}", other)
    assert not [line for line in effect_warnings(cfg) if "replace_weights" in line]


def test_engines_on_ranks_without_a_trainer_take_what_is_sent_to_them_in_place(tmp_path):
    cfg, dag = checked(tmp_path, IN_PLACE), load_dag_file(TEMPLATES / "grpo.yaml")
    places = {"ROLLOUT": "1", "ACTOR": "0", "REFERENCE": "0"}
    nodes = [NodeSpec(**{**vars(node), "placement": places.get(node.node_role)}) for node in dag.nodes]
    plan, _ = compile_plan(dag_spec(dag.dag_id, nodes, dag.description), cfg, 2)
    assert [link.kind for link in plan.links.values()] == ["broadcast"]


@pytest.mark.parametrize(
    ("keys", "kind", "words"),
    [
        ((f"{ROLLOUT}.name=sglang",), "qwen3", "with rollout.name=sglang: it takes weights in its own way"),
        ((f"{ROLLOUT}.name=hf",), "qwen3", "with rollout.name=hf: it takes weights in its own way"),
        (
            (f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.max_log_prob_diff=0.1"),
            "qwen3",
            "with quantized weights: each sync rounds them anew",
        ),
        ((f"{ROLLOUT}.engine_kwargs.vllm={{quantization: fp8}}",), "qwen3", "with quantized weights"),
        (("trainer.rollout_only=true",), "qwen3", "with trainer.rollout_only=true: weights come once"),
        ((), "phi3", "for a phi3: it was held against vLLM's loaders for gemma3_text, llama, qwen2"),
    ],
)
def test_where_weights_cannot_be_written_in_place_the_check_says_so(keys, kind, words, tmp_path):
    with pytest.raises(NotSupportedError, match=words) as raised:
        checked(tmp_path, IN_PLACE, *keys, kind=kind)
    assert f"Set {ROLLOUT}.replace_weights=by_loaders." in str(raised.value)


def test_a_judge_and_a_teacher_take_weights_as_ever(tmp_path):
    cfg = checked(tmp_path, IN_PLACE)
    for made in (judge_config(cfg), scoring_config(cfg)):
        assert made.actor_rollout_ref.rollout.replace_weights == "by_loaders"
