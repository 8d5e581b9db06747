"""What `siirl check` says of ranks that share each row's tokens: accepted is what runs, else with the fix."""

import json
import re
from pathlib import Path

import pytest
from plan_cases import config

from siirl.compiler.compile import TEMPLATES, compile_plan, load_dag
from siirl.compiler.plan import Plan
from siirl.config import check_config
from siirl.config.effects import effect_warnings
from siirl.dag.spec import DagSpec
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import UserError

ACTOR, REF, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "model"))
SIZE = "ulysses_sequence_parallel_size"
SHAPE = {
    **{"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2},
    **{"intermediate_size": 128, "moe_intermediate_size": 32, "vocab_size": 100, "num_experts_per_tok": 2},
}
KL = f"{ACTOR}.use_kl_loss=true"
GAE = "algorithm.adv_estimator=gae"
DISTILL = f"{ACTOR}.policy_loss.loss_mode=distill"


def of_six_heads(folder: Path, kind: str = "qwen3", **more: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind} | SHAPE | more))
    return folder


def compiled(folder: Path, world: int, *keys: str, dag: DagSpec | None = None) -> Plan:
    """The plan of a run whose configuration is checked, as a run's is."""
    rows = ("data.train_batch_size=24", f"{ACTOR}.ppo_mini_batch_size=24", "critic.ppo_mini_batch_size=24")
    cfg = config(f"{MODEL}.path={folder}", *rows, *keys)
    check_config(cfg)
    return compile_plan(dag or load_dag(cfg), cfg, world)[0]


REFUSED = {
    "heads": ((6, f"{ACTOR}.{SIZE}=4"), 8, "=4 does not divide the model's 6 attention heads: .*whole heads"),
    "ranks": ((6, f"{ACTOR}.{SIZE}=3"), 4, "=3 does not divide its 4 ranks: .*share its model's weights"),
    "more than ranks": ((6, f"{ACTOR}.{SIZE}=2"), 1, "=2 does not divide its 1 ranks: "),
    "shards": (
        (6, f"{ACTOR}.{SIZE}=6", f"{ACTOR}.fsdp_config.fsdp_size=4"),
        12,
        r"=6 does not divide actor_rollout_ref\.actor\.fsdp_config\.fsdp_size=4: ",
    ),
    "the reference alone": ((6, KL, f"{REF}.{SIZE}=3"), 2, "node 'reference_log_prob': .*ref.*=3 does not"),
    "the critic alone": ((6, GAE, f"critic.{SIZE}=4"), 4, r"critic\..*=4 does not divide the model's 6 att"),
    "another name of heads": ((4, f"{ACTOR}.{SIZE}=3"), 3, "=3 does not divide the model's 4 attention h"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(tmp_path, case):
    (heads, *keys), world, said = REFUSED[case]
    kind = {"num_attention_heads": None, "n_head": heads} if heads == 4 else {"num_attention_heads": heads}
    folder = of_six_heads(tmp_path, "gpt2" if heads == 4 else "qwen3", **kind)
    with pytest.raises(UserError, match=said) as caught:
        compiled(folder, world, *keys)
    key = next(key.partition("=")[0] for key in keys if SIZE in key)
    fix = re.search(r"Set (?:it|(\S+)) to ([\d or]+)\.$", str(caught.value))
    assert fix and f"{key}=" in str(caught.value) and fix[1] in (None, key), caught.value
    for size in fix[2].split(" or "):
        compiled(folder, world, *keys, f"{key}={size}")


def test_a_size_below_one_and_a_budget_that_no_row_fits_are_refused(tmp_path):
    with pytest.raises(UserError, match=rf"{SIZE}=0"):
        compiled(of_six_heads(tmp_path), 2, f"{ACTOR}.{SIZE}=0")
    keys = (f"{ACTOR}.{SIZE}=2", f"{ACTOR}.use_dynamic_bsz=true", "data.max_prompt_length=600")
    keys += ("data.max_response_length=401",)
    with pytest.raises(
        UserError, match=r"=500 on each of the 2 ranks that share it is less .*= 1001 tokens: .*=501 or more"
    ):
        compiled(tmp_path, 2, *keys, f"{ACTOR}.ppo_max_token_len_per_gpu=500")
    compiled(tmp_path, 2, *keys, f"{ACTOR}.ppo_max_token_len_per_gpu=501")


def test_a_vision_model_is_refused(tmp_path):
    vision = {"vision_config": {"depth": 2, "spatial_merge_size": 2}, "text_config": {"hidden_size": 96}}
    folder = of_six_heads(tmp_path, "qwen3_vl", **vision)
    compiled(folder, 2, "data.dataset_type=vlm")
    with pytest.raises(UserError, match=rf"{SIZE}=2 for a qwen3_vl, a vision model\. Set it to 1\."):
        compiled(folder, 2, "data.dataset_type=vlm", f"{ACTOR}.{SIZE}=2")


ACCEPTED = {
    "KV heads that do not divide": (3, f"{ACTOR}.{SIZE}=3"),
    "one KV head": (2, f"{ACTOR}.{SIZE}=2", f"{MODEL}.override_config={{num_key_value_heads: 1}}"),
    "copies": (8, f"{ACTOR}.{SIZE}=2", f"{ACTOR}.fsdp_config.fsdp_size=4"),
    "more shards than ranks": (4, f"{ACTOR}.{SIZE}=2", f"{ACTOR}.fsdp_config.fsdp_size=16"),
    "a reference of its own": (6, KL, f"{ACTOR}.{SIZE}=3", f"{REF}.{SIZE}=2"),
    "lora": (2, f"{ACTOR}.{SIZE}=2", f"{MODEL}.lora_rank=4"),
    "no recomputation": (2, f"{ACTOR}.{SIZE}=2", f"{MODEL}.enable_gradient_checkpointing=false"),
    "a lag": (2, f"{ACTOR}.{SIZE}=2", "actor_rollout_ref.rollout.max_lag=1"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_goes_with_shared_rows_is_accepted(tmp_path, case):
    world, *keys = ACCEPTED[case]
    assert compiled(of_six_heads(tmp_path), world, *keys).models["agent_0.actor"].dims.cp > 1


@pytest.mark.parametrize(
    "key", [f"{ACTOR}.router_replay.mode=R2", f"{ACTOR}.fsdp_config.moe_aux_loss_coeff=0.1"]
)
def test_experts_are_replayed_and_balanced_where_ranks_share_rows(tmp_path, key):
    compiled(of_six_heads(tmp_path, "qwen3_moe", num_experts=4), 2, f"{ACTOR}.{SIZE}=2", key)


def test_every_role_has_ranks_of_its_own_and_the_reference_follows_the_actor(tmp_path):
    folder = of_six_heads(tmp_path)
    plan = compiled(
        folder, 6, GAE, "algorithm.use_kl_in_reward=true", f"{ACTOR}.{SIZE}=2", f"critic.{SIZE}=3"
    )
    sizes = {name: (model.dims.cp, model.dims.dp) for name, model in plan.models.items()}
    assert sizes == {
        **{"agent_0.actor": (2, 3), "agent_0.ref": (2, 3), "agent_0.critic": (3, 2)},
        "agent_0.rollout": (1, 6),
    }
    reward = ("reward_model.enable=true", f"reward_model.model.path={folder}", f"reward_model.{SIZE}=2")
    dag = load_dag_file(TEMPLATES / "grpo_reward_model.yaml")
    assert compiled(folder, 6, *reward, dag=dag).models["agent_0.reward"].dims.cp == 2
    taught = compiled(folder, 6, DISTILL, f"teacher.model.path={folder}", f"teacher.{SIZE}=3")
    teachers = [model for model in taught.models.values() if model.role == "teacher"]
    assert teachers and {model.dims.cp for model in teachers} == {3}


def test_under_megatron_the_key_is_said_to_do_nothing(tmp_path):
    keys = (f"{ACTOR}.strategy=megatron", f"{ACTOR}.{SIZE}=2")
    (said,) = [line for line in effect_warnings(config(*keys)) if f"actor.{SIZE}=2" in line]
    assert said.endswith("has no effect: actor_rollout_ref.actor.strategy is megatron."), said
    budget = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=600")
    with pytest.raises(UserError, match=r"=600 is less than the longest row"):
        compiled(tmp_path, 2, *keys, *budget, "data.max_prompt_length=600", "data.max_response_length=401")
    of_four = of_six_heads(tmp_path, num_attention_heads=4)
    assert compiled(of_four, 2, *keys).models["agent_0.actor"].dims.cp == 1
