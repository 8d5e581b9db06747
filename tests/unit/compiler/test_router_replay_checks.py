"""What `siirl check` says of router replay: accepted is what runs, all else is refused with the fix."""

import json
from pathlib import Path

import pytest
from plan_cases import config

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.memory.phases import memory_lines
from siirl.compiler.plan_instructions import Run
from siirl.config import check_config
from siirl.config.batch import batch_of
from siirl.errors import UserError
from siirl.models.sizes import RouterChoices, router_choices
from siirl.types import EXPERT_FIELDS, FieldKey

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
R2, R3 = (f"{ACTOR}.router_replay.mode={mode}" for mode in ("R2", "R3"))
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3}
SHAPE = {
    **{"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100},
    "moe_intermediate_size": 32,
}


def compiled(tmp_path: Path, kind: str, *keys: str):
    """The plan of a run whose configuration is checked, as a run's is."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | EXPERTS | SHAPE))
    cfg = config(f"actor_rollout_ref.model.path={tmp_path}", f"{ROLLOUT}.name=hf", *keys)
    check_config(cfg)
    return compile_plan(load_dag(cfg), cfg, 2)[0]


def fields_of(plan) -> tuple[set[str], set[str]]:
    """The nodes that read the experts of tokens, and those that write them."""
    fields = {FieldKey(0, name) for name in EXPERT_FIELDS}
    runs = [ins for ins in plan.instructions if isinstance(ins, Run)]
    return {run.node for run in runs if fields <= {*run.reads}}, {
        run.node for run in runs if fields <= {*run.writes}
    }


def test_the_experts_of_the_rollout_reach_the_policy_and_no_other_model(tmp_path):
    several = (f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.use_kl_loss=True")
    for strategy in ("fsdp", "megatron"):
        plan = compiled(tmp_path, "qwen3_moe", R3, *several, f"{ACTOR}.strategy={strategy}")
        assert fields_of(plan) == ({"actor_old_log_prob", "actor_train"}, {"rollout_actor"})
    assert fields_of(compiled(tmp_path, "qwen3_moe", *several)) == (set(), set())


def test_the_pass_before_the_update_computes_all_rows_where_it_chooses_their_experts(tmp_path):
    plan = compiled(tmp_path, "qwen3_moe", R2)
    assert fields_of(plan) == ({"actor_train"}, {"actor_old_log_prob"})
    assert plan.nodes["actor_old_log_prob"].op == "old_log_prob"
    several = compiled(tmp_path, "qwen3_moe", R3, f"{ACTOR}.ppo_mini_batch_size=4")
    assert several.nodes["actor_old_log_prob"].op == "later_old_log_prob"


def test_the_estimate_has_the_experts_of_all_rows_of_a_rank(tmp_path):
    keys = (R3, f"actor_rollout_ref.model.path={tmp_path}", f"{ROLLOUT}.name=hf")
    plan = compiled(tmp_path, "qwen3_moe", R3)
    configs = {name: config(*keys, "data.max_prompt_length=500") for name in plan.nodes}
    lines = {line.what: line for line in memory_lines(plan, configs)["agent_0.actor"]}
    tokens = 500 + configs["actor_train"].data.max_response_length
    assert lines["chosen experts"].host and lines["chosen experts"].num_bytes == (
        batch_of(configs["actor_train"]).rows // 2 * tokens * 3 * 2
    )


MEGATRON = f"{ACTOR}.strategy=megatron"
OPTIONS = f"{ACTOR}.megatron.override_transformer_config"
RECORDED = (
    *(f"{ROLLOUT}.name=replay", f"{ROLLOUT}.replay_dir=/recorded"),
    *("trainer.val_before_train=false", "trainer.test_freq=-1"),
)
REFUSED = {
    "a loss of megatron's": (
        "qwen3_moe",
        (R3, MEGATRON, f"{OPTIONS}={{moe_aux_loss_coeff: 0.1}}"),
        "moe_aux_loss_coeff=0.1: the loss balances",
    ),
    "experts computed again": (
        "qwen3_moe",
        (R3, MEGATRON, f"{OPTIONS}={{moe_layer_recompute: true}}"),
        "which do not know of which micro-batch they are. Remove the option",
    ),
    "vllm on a CPU": (
        "qwen3_moe",
        (R3, f"{ROLLOUT}.name=vllm", "trainer.device=cpu"),
        "vLLM says .* on GPUs only.*rollout.name=hf",
    ),
    "vllm on two ranks": (
        "qwen3_moe",
        (R3, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2"),
        "tensor_model_parallel_size=2.* were not seen to say experts.*rollout.name=hf",
    ),
    "dense": ("qwen3", (R3, "actor_rollout_ref.model.override_config={num_experts: 0}"), "qwen3 without exp"),
    "another router": ("deepseek_v2", (R2,), "a deepseek_v2, whose router was not seen"),
    "replayed rollouts": ("qwen3_moe", (R3, *RECORDED), "rollout.name=replay: it does not say"),
    "no pass": (
        "qwen3_moe",
        (R2, f"{ACTOR}.recompute_old_log_prob=false"),
        "the pass of old log-probs is wha",
    ),
    "the routers' loss": (
        "qwen3_moe",
        (R2, f"{ACTOR}.fsdp_config.moe_aux_loss_coeff=0.1"),
        "balances what the router would choose now",
    ),
}


def test_vllm_on_gpus_says_the_experts_of_its_rows(tmp_path):
    plan = compiled(tmp_path, "qwen3_moe", R3, f"{ROLLOUT}.name=vllm", "trainer.device=cuda")
    assert fields_of(plan)[1] == {"rollout_actor"}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_replayed_is_refused_with_the_fix(tmp_path, case):
    kind, keys, said = REFUSED[case]
    with pytest.raises(UserError, match=said):
        compiled(tmp_path, kind, *keys)


def test_the_experts_of_a_token_are_counted_as_config_json_has_them():
    sparse = {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6}
    assert router_choices(EXPERTS | sparse) == RouterChoices(2, 2, 4)
    assert router_choices(EXPERTS | {"first_k_dense_replace": 1}) == RouterChoices(2, 2, 4)
    assert router_choices(EXPERTS | {"num_experts": None}) is None
    assert RouterChoices(48, 8, 128).token_bytes == 384
    assert RouterChoices(48, 8, 256).token_bytes == 768
