"""Plans with teachers: which models there are, who reads what, what is refused and why."""

import json
import re

import pytest
from plan_cases import compiled, config

from siirl.compiler.compile import TEMPLATES, template_of
from siirl.compiler.memory.phases import memory_lines
from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Run
from siirl.config.batch import batch_of
from siirl.config.checks import check_config
from siirl.config.effects import effect_warnings
from siirl.dag.node_config import with_node_config
from siirl.dag.spec import DagSpec, NodeSpec, dag_spec
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import UserError
from siirl.show.plan_text import report

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
DISTILL, LOSS = f"{ACTOR}.distill", f"{ACTOR}.policy_loss.loss_mode"
PATH = "teacher.model.path=/models/teacher"
BESIDE = (PATH, f"{DISTILL}.enable=true")
GIVEN = (
    *("actor_rollout_ref.rollout.name=dataset", "actor_rollout_ref.rollout.n=1"),
    *("trainer.val_before_train=false", "trainer.test_freq=-1"),
)


def teacher(name: str, **options) -> NodeSpec:
    options = {"dependencies": ("rollout",)} | options
    return NodeSpec(name, "MODEL_INFERENCE", "TEACHER", **options)


def learning(*teachers: NodeSpec, loss: str = "distill", below: tuple[str, ...] | None = None) -> DagSpec:
    """A rollout, a reward, teachers, and a trainer below them."""
    names = tuple(node.node_id for node in teachers) if below is None else below
    nodes = [
        NodeSpec("rollout", "MODEL_INFERENCE", "ROLLOUT"),
        NodeSpec("reward", "COMPUTE", "REWARD", dependencies=("rollout",)),
        *teachers,
        NodeSpec("advantages", "COMPUTE", "ADVANTAGE", dependencies=("reward",)),
    ]
    config = {"actor.policy_loss.loss_mode": loss}
    above = ("advantages", *names)
    return dag_spec(
        "d", [*nodes, NodeSpec("train", "MODEL_TRAIN", "ACTOR", dependencies=above, config=config)]
    )


def runs(plan: Plan, section: str = "instructions") -> list[str]:
    return [ins.node for ins in getattr(plan, section) if isinstance(ins, Run)]


def reads(plan: Plan, node: str) -> set[str]:
    return {key.name for key in plan.run_of(node).reads}


def test_each_teacher_is_a_model_of_its_own_with_ranks_and_a_strategy():
    one = teacher("math", placement="0-1", config={"strategy": "megatron", "takes": ["math"]})
    two = teacher("code", placement="2-3", config={"model.path": "/models/code", "takes": ["code"]})
    plan = compiled(learning(one, two), 4, PATH)
    models = {name: model for name, model in plan.models.items() if model.is_teacher}
    assert models.keys() == {"agent_0.teacher.math", "agent_0.teacher.code"}
    assert [model.backend for model in models.values()] == ["megatron", "fsdp"]
    assert [model.ranks for model in models.values()] == [(0, 1), (2, 3)]
    assert not any(model.trains for model in models.values())
    assert {"math_teacher_weight", "math_teacher_log_prob", "code_teacher_log_prob"} <= reads(plan, "train")
    assert "data_source" in reads(plan, "math")


def test_a_teacher_by_vllm_is_an_engine_of_its_own_with_the_sizes_of_its_node_and_no_weights_to_take():
    sizes = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.tensor_model_parallel_size": 2}
    two, more = (teacher("t", config={"strategy": "vllm"} | more, placement="2-3") for more in (sizes, {}))
    plan = compiled(learning(two), 4, PATH, "trainer.n_gpus_per_node=4")
    model = plan.models["agent_0.scoring_teacher.t"]
    assert (model.backend, model.ranks, model.dims.tp, model.dims.dp) == ("vllm", (2, 3), 2, 1)
    assert model.is_teacher and model.generates and not model.trains
    assert all(link.target != model.name for link in plan.links.values())
    assert plan.nodes["t"].op == "teacher_scores"
    assert {"t_teacher_weight", "t_teacher_log_prob"} <= reads(plan, "train")
    assert compiled(learning(more), 4, PATH).models[model.name].dims.dp == 2
    top = compiled(learning(two), 4, PATH, "trainer.n_gpus_per_node=4", f"{DISTILL}.top_k=8")
    assert {"t_teacher_top_log_prob", "t_teacher_top_ids"} <= reads(top, "train")


def test_a_teacher_behind_a_service_has_no_model_and_takes_rows_on_all_ranks():
    """Nor a path, and keys of what would run here have no effect."""
    plan = compiled(learning(teacher("t", config={"endpoint.url": "http://there/v1/completions"})), 2)
    assert not any(model.is_teacher for model in plan.models.values())
    assert plan.nodes["t"].op == "teacher_service" and plan.run_of("t").ranks == (0, 1)
    assert {"t_teacher_weight", "t_teacher_log_prob"} <= reads(plan, "train")
    keys = (
        f"{LOSS}=distill",
        "teacher.endpoint.url=http://there/v1/completions",
        "teacher.strategy=megatron",
    )
    (warning,) = effect_warnings(config(*keys))
    assert "teacher.strategy=megatron has no effect: teacher.endpoint.url is set" in warning


def test_a_teacher_with_another_tokenizer_reads_messages_and_gives_spans():
    plan = compiled(learning(teacher("t", config={"tokenizer": "own"})), 2, PATH)
    assert "raw_prompt" in reads(plan, "t")
    assert {"t_teacher_weight", "t_teacher_log_prob", "t_teacher_span"} <= reads(plan, "train")
    assert not {"raw_prompt", "t_teacher_span"} & reads(compiled(learning(teacher("t")), 2, PATH), "train")
    for top_k, more in ((8, {"t_teacher_top_ids"}), (-1, set())):
        keys = (PATH, f"{DISTILL}.top_k={top_k}")
        plan = compiled(learning(teacher("t", config={"tokenizer": "own"})), 2, *keys)
        found = {name for name in reads(plan, "train") if name.startswith("t_teacher_")}
        assert found == {"t_teacher_weight", "t_teacher_top_log_prob", "t_teacher_span"} | more


def test_rollouts_with_a_lag_do_not_decode_on_where_a_teacher_by_vllm_needs_their_devices():
    vllm = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_lag=1", PATH)
    for placement, goes_on in (("0", False), ("1", True)):
        dag = learning(teacher("t", config={"strategy": "vllm"}, placement=placement))
        apart = {name: {"placement": "1" if name == "train" else "0"} for name in ("rollout", "train")}
        assert compiled(with_node_config(dag, apart), 2, *vllm).nodes["rollout"].runs_in_background == goes_on


def test_the_estimate_has_what_an_engine_needs_to_score_beside_its_share(tmp_path):
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    shape |= {"num_key_value_heads": 2, "head_dim": 16}  # qwen3's own defaults, 32 and 128, fit no 4 heads
    config_json = {"model_type": "qwen3", "vocab_size": 1000, "tie_word_embeddings": True, **shape}
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    keys = (
        *(f"teacher.model.path={tmp_path}", f"actor_rollout_ref.model.path={tmp_path}"),
        *(f"{DISTILL}.top_k=8", "teacher.strategy=vllm", "data.max_prompt_length=500"),
        *("data.max_response_length=100", f"{ROLLOUT}.max_num_batched_tokens=512"),
    )
    plan = compiled(learning(teacher("t")), 2, *keys)
    found = memory_lines(plan, {name: config(*keys) for name in plan.nodes})["agent_0.scoring_teacher.t"]
    lines = {line.what: line for line in found}
    assert lines["log-probs of a row"].num_bytes == 512 * 1000 * (2 + 4 + 4)
    assert lines["log-probs of a row"].during == ("generate",)
    rows = batch_of(config(*keys)).rows // 2
    assert lines["distributions"].num_bytes == rows * 100 * 8 * 12
    weights = lines["weights while it sleeps"]
    assert weights.host and weights.num_bytes == lines["weights for a restart"].num_bytes > 0
    assert lines["share of the device"].share == 0.5


def test_learning_from_teachers_alone_reads_no_advantage_and_keeps_the_reward_to_watch():
    plan = compiled(learning(teacher("t")), 2, PATH)
    assert set(runs(plan)) == {"rollout", "reward", "t", "train"}
    assert runs(plan, "validation") == ["rollout", "reward"]
    assert not {"advantage", "old_log_prob"} & reads(plan, "train")
    assert "data_source" not in reads(plan, "t")  # it takes all rows


def test_several_optimizer_steps_read_what_the_policy_said_before_them_only_for_sampled_tokens():
    old = NodeSpec("old", "MODEL_TRAIN", "ACTOR", only_forward_compute=True, dependencies=("rollout",))
    dag = learning(teacher("t"), old, below=("t", "old"))
    keys = (PATH, f"{ACTOR}.ppo_mini_batch_size=4")
    assert "old_log_prob" in reads(compiled(dag, 2, *keys), "train")
    whole = compiled(dag, 2, *keys, f"{DISTILL}.top_k=-1")
    assert "old_log_prob" not in reads(whole, "train") and "old" in whole.pruned
    assert {"t_teacher_weight", "t_teacher_top_log_prob"} <= reads(whole, "train")


def test_what_a_trainer_asks_for_holds_for_its_teachers():
    dag = learning(teacher("t"))
    plan = compiled(with_node_config(dag, {"train": {f"{DISTILL}.top_k": 8}}), 2, PATH)
    assert {"t_teacher_top_log_prob", "t_teacher_top_ids"} <= reads(plan, "train")


def test_a_loss_of_rewards_may_have_teachers_beside_it():
    plan = compiled(learning(teacher("t"), loss="vanilla"), 2, *BESIDE, "algorithm.adv_estimator=grpo")
    assert {"advantage", "t_teacher_log_prob"} <= reads(plan, "train")


def test_teachers_that_nobody_learns_from_cost_nothing():
    plan = compiled(learning(teacher("t"), loss="vanilla"), 2, PATH)
    assert "no loss learns from teachers" in plan.pruned["t"] and "agent_0.teacher.t" not in plan.models


def test_the_loss_has_a_template():
    cfg = config(PATH, f"{LOSS}=distill")
    assert template_of(cfg) == "distill.yaml"
    given = config("actor_rollout_ref.rollout.name=dataset", f"{ACTOR}.policy_loss.loss_mode=distill")
    assert template_of(given) == "distill.yaml", "sft.yaml has no teacher"
    plan = compiled(load_dag_file(TEMPLATES / "distill.yaml"), 2, PATH)
    assert set(runs(plan)) == {"rollout", "reward", "teacher", "train"}


def test_keys_of_teachers_without_a_loss_that_learns_are_named():
    (warning,) = effect_warnings(config("teacher.weight=2"))
    assert "teacher.weight=2.0 has no effect" in warning
    assert not effect_warnings(config("teacher.weight=2", f"{LOSS}=distill"))


def test_responses_of_a_dataset_are_learnt_from_distributions():
    dag = learning(teacher("t"))
    nodes = [node for node in dag.nodes if node.node_id not in ("reward", "advantages")]
    nodes[-1] = NodeSpec(**{**vars(nodes[-1]), "dependencies": ("rollout", "t")})
    plan = compiled(dag_spec("d", nodes), 2, PATH, *GIVEN, f"{DISTILL}.top_k=8")
    assert runs(plan) == ["rollout", "t", "train"]
    with pytest.raises(
        UserError, match="loss_mode=distill, which is for responses that the policy has sampled"
    ):
        compiled(dag_spec("d", nodes), 2, PATH, *GIVEN)


def team(*teachers: NodeSpec, loss: str = "vanilla", trained: bool = True) -> DagSpec:
    """`learning`, and a second agent with a model of its own, in training or not."""
    config = {"model.path": "/models/other"}
    other = [
        NodeSpec("rollout_1", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, config=config),
        NodeSpec("reward_1", "COMPUTE", "REWARD", agent_group=1, dependencies=("rollout_1",)),
        NodeSpec("advantage_1", "COMPUTE", "ADVANTAGE", agent_group=1, dependencies=("reward_1",)),
        NodeSpec("train_1", "MODEL_TRAIN", "ACTOR", agent_group=1, dependencies=("advantage_1",)),
    ]
    return dag_spec("team", [*learning(*teachers, loss=loss).nodes, *other[: 4 if trained else 0]])


def test_policies_in_training_are_teachers_as_they_were_before_the_step():
    own = teacher("own", config={"policy": 0, "update_rate": 0.1})
    others = teacher("others", config={"policy": 1, "sync_steps": 4}, placement="1")
    dtype = f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=float32"
    dag = with_node_config(team(own, others), {"train": {f"{DISTILL}.enable": True}})
    plan = compiled(dag, 2, dtype)
    links = {link.target: link for link in plan.links.values() if link.every_steps}
    assert [(x.source, x.every_steps, x.share, x.kind) for x in links.values()] == [
        ("agent_0.actor", 1, 0.1, "local"),
        ("agent_1.actor", 4, 1.0, "local"),
    ]
    first = [ins.link for ins in plan.instructions[:2]]
    assert first == [link.name for link in links.values()], "before anything of the step trains them"
    assert not any(getattr(ins, "link", "") in first for ins in plan.validation)
    overrides = plan.nodes["others"].overrides
    assert overrides["teacher.model.path"] == "/models/other"
    assert overrides["teacher.fsdp_config.mixed_precision.param_dtype"] == "float32"
    said = " ".join(report(plan, {name: config() for name in plan.nodes}).split())
    assert "agent_0.actor -> agent_0.teacher.own, each step, a share of 0.1" in said
    assert "agent_1.actor -> agent_0.teacher.others, every 4 steps" in said


def test_keys_of_micro_batches_have_no_effect_on_a_teacher_by_vllm():
    keys = (f"{LOSS}=distill", "teacher.log_prob_micro_batch_size_per_gpu=4")
    assert not effect_warnings(config(*keys))
    (warning,) = effect_warnings(config(*keys, "teacher.strategy=vllm"))
    assert "teacher.log_prob_micro_batch_size_per_gpu=4 has no effect: teacher.strategy is vllm" in warning


def test_keys_of_older_weights_have_no_effect_on_frozen_teachers():
    (warning,) = effect_warnings(config("teacher.sync_steps=2", f"{LOSS}=distill"))
    assert "teacher.sync_steps=2 has no effect" in warning and "teachers are frozen" in warning
    assert not effect_warnings(config("teacher.sync_steps=2", "teacher.policy=0", f"{LOSS}=distill"))


REFUSED = {
    "nobody trains the policy": (
        lambda: team(teacher("t", config={"policy": 1}), trained=False),
        (f"{DISTILL}.enable=true",),
        "node 't': teacher.policy=1: no node trains the policy of agent 1",
    ),
    "a policy with a path": (
        lambda: team(teacher("t", config={"policy": 1})),
        (PATH, f"{DISTILL}.enable=true"),
        "teacher.policy=1 with teacher.model.path=/models/teacher: it begins as the model of agent 1, "
        "/models/other",
    ),
    "itself": (
        lambda: learning(teacher("t", config={"policy": 0}), loss="vanilla"),
        (f"{DISTILL}.enable=true",),
        "it is the policy that learns from it, as it was when the step began",
    ),
    "its own older weights and nothing else": (
        lambda: learning(teacher("t", config={"policy": 0, "sync_steps": 5})),
        (),
        "node 'train' learns from its own older weights alone \\(t\\)",
    ),
    "a moving average in bf16": (
        lambda: learning(teacher("t", config={"policy": 0, "update_rate": 0.1}), loss="vanilla"),
        (f"{DISTILL}.enable=true", "teacher.fsdp_config.model_dtype=bfloat16"),
        "not supported yet: .*update_rate=0.1 and teacher.fsdp_config.model_dtype=bfloat16: .* stand still",
    ),
    "vLLM at another temperature": (
        lambda: learning(teacher("t", config={"strategy": "vllm"})),
        (PATH, f"{ROLLOUT}.temperature=0.7"),
        "not supported yet: node 't': teacher.strategy=vllm with .*temperature=0.7: .* at temperature 1. Set",
    ),
    "the whole vocabulary by vLLM": (
        lambda: learning(teacher("t", config={"strategy": "vllm"})),
        (PATH, f"{DISTILL}.top_k=-1"),
        "not supported yet: .*teacher.strategy=vllm with actor.distill.top_k=-1: .* Set distill.top_k=64",
    ),
    "a service without an address": (
        lambda: learning(teacher("t", config={"endpoint.url": "localhost:8000"})),
        (),
        "node 't': teacher.endpoint.url=localhost:8000: it must be the http.s. address of a service",
    ),
    "a service at another temperature": (
        lambda: learning(teacher("t", config={"endpoint.url": "http://localhost:8000/v1/completions"})),
        (f"{ROLLOUT}.temperature=0.7",),
        "not supported yet: node 't': teacher.endpoint.url=http://localhost:8000/v1/completions with .*=0.7",
    ),
    "the whole vocabulary by a service": (
        lambda: learning(teacher("t", config={"endpoint.url": "http://localhost:8000/v1/completions"})),
        (f"{DISTILL}.top_k=-1",),
        "not supported yet: node 't': teacher.endpoint.url=.* with actor.distill.top_k=-1",
    ),
    "a service that is the policy": (
        lambda: learning(teacher("t", config={"policy": 0, "endpoint.url": "http://localhost:8000/v1"})),
        (f"{DISTILL}.enable=true", f"{LOSS}=vanilla"),
        "not supported yet: node 't': teacher.endpoint.url=.* with teacher.policy=0",
    ),
    "the whole vocabulary of another tokenizer by a service": (
        lambda: learning(
            teacher("t", config={"tokenizer": "own", "endpoint.url": "http://localhost:8000/v1/completions"})
        ),
        (PATH, f"{DISTILL}.top_k=-1"),
        "not supported yet: node 't': teacher.endpoint.url=.* with actor.distill.top_k=-1",
    ),
    "another tokenizer in an engine here": (
        lambda: learning(teacher("t", config={"tokenizer": "own", "strategy": "vllm"})),
        (PATH,),
        "not supported yet: node 't': teacher.tokenizer=own with teacher.strategy=vllm: .*strategy=fsdp",
    ),
    "a service with another tokenizer that is not here": (
        lambda: learning(teacher("t", config={"tokenizer": "own", "endpoint.url": "http://there/v1"})),
        (),
        "teacher.tokenizer=own with teacher.endpoint.url=.*: its rows are tokenised here. Set",
    ),
    "a policy with another tokenizer than itself": (
        lambda: learning(teacher("t", config={"tokenizer": "own", "policy": 0, "sync_steps": 5})),
        (f"{DISTILL}.enable=true", f"{LOSS}=vanilla"),
        "node 't': teacher.tokenizer=own with teacher.policy=0: a policy has the policy's tokens",
    ),
    "another tokenizer in a mixture": (
        lambda: learning(teacher("a", config={"tokenizer": "own"}), teacher("b")),
        (PATH,),
        "node 'a' and node 'b' take the same rows with teacher.tokenizer=own: .* Set teacher.takes",
    ),
    "another tokenizer, and weights of tokens": (
        lambda: learning(teacher("t", config={"tokenizer": "own"})),
        (PATH, f"{ACTOR}.tis_imp_ratio_cap=2"),
        "not supported yet: node 't': teacher.tokenizer=own with actor.rollout_correction.weight: .* spans",
    ),
    "another tokenizer in a conversation": (
        lambda: dag_spec(
            "talk",
            [
                *learning(teacher("t", config={"tokenizer": "own"})).nodes,
                NodeSpec("answer", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=("rollout",)),
            ],
        ),
        (PATH,),
        "not supported yet: node 't': teacher.tokenizer=own in an interaction: rows of several turns",
    ),
    "older weights in vLLM": (
        lambda: learning(teacher("t", config={"policy": 0, "strategy": "vllm", "sync_steps": 5})),
        (f"{DISTILL}.enable=true", f"{LOSS}=vanilla"),
        "not supported yet: .*teacher.strategy=vllm with teacher.policy=0: older weights",
    ),
    "an adapter that nobody trained": (
        lambda: learning(teacher("t", config={"strategy": "vllm", "model.lora_rank": 8})),
        (PATH,),
        "teacher.strategy=vllm with teacher.model.lora_rank=8: a teacher is frozen",
    ),
    "vLLM without a model": (
        lambda: learning(teacher("t", config={"strategy": "vllm"})),
        (),
        "node 't': teacher.model.path is not set",
    ),
    "more ranks than a machine has": (
        lambda: learning(teacher("t", config={f"{ROLLOUT}.tensor_model_parallel_size": 2})),
        (PATH, "teacher.strategy=vllm", "trainer.n_gpus_per_node=1"),
        "node 't': .*tensor_model_parallel_size=2 is more than trainer.n_gpus_per_node=1",
    ),
    "nobody to learn from": (
        lambda: learning(),
        (),
        "node 'train' has loss_mode=distill, and no teacher above it. Add a node with .* node_role TEACHER",
    ),
    "a teacher beside the trainer": (
        lambda: learning(teacher("t"), below=()),
        (PATH,),
        "no teacher above it. Add 't' to its dependencies",
    ),
    "a teacher without a model": (
        lambda: learning(teacher("t")),
        (),
        "node 't': teacher.model.path is not set",
    ),
    "two that take the same rows": (
        lambda: learning(teacher("a", config={"takes": ["x", "y"]}), teacher("b", config={"takes": ["y"]})),
        (PATH, f"{DISTILL}.top_k=4"),
        "node 'a' and node 'b' take the same rows with distill.top_k=4: .* Set teacher.takes",
    ),
    "one that takes all rows beside another": (
        lambda: learning(teacher("a"), teacher("b", config={"takes": ["y"]})),
        (PATH, f"{DISTILL}.top_k=4"),
        "take the same rows",
    ),
    "two fields": (
        lambda: learning(
            teacher("a", config={"takes": ["x"]}),
            teacher("b", config={"takes": ["y"], "by": "extra_info.topic"}),
        ),
        (PATH,),
        "chosen by different fields: a by data_source, b by extra_info.topic",
    ),
    "another field than rows have": (
        lambda: learning(teacher("a", config={"takes": ["x"], "by": "topic"})),
        (PATH,),
        "teacher.by=topic: expected data_source, or extra_info.NAME",
    ),
    "a teacher that says less than the loss reads": (
        lambda: learning(teacher("t", config={"top_k": 0})),
        (PATH, f"{DISTILL}.top_k=4"),
        "teacher.top_k=0 and node 'train' has actor.distill.top_k=4",
    ),
    "a divergence of sampled tokens": (
        lambda: learning(teacher("t")),
        (PATH, f"{LOSS}=distill", f"{DISTILL}.divergence=jsd"),
        r"distill\.divergence=jsd with .*top_k=0",
    ),
    "sampled tokens beside given ones": (
        lambda: learning(teacher("t"), loss="sft"),
        (*BESIDE, f"{LOSS}=sft", "actor_rollout_ref.rollout.name=dataset", "actor_rollout_ref.rollout.n=1"),
        "it is a divergence at tokens that the policy sampled",
    ),
    "pairs": (
        lambda: learning(teacher("t"), loss="dpo"),
        (*BESIDE, f"{LOSS}=dpo", "actor_rollout_ref.rollout.n=2"),
        "distill.enable=true with .*loss_mode=dpo",
    ),
    "masks by an advantage that there is not": (
        lambda: learning(teacher("t")),
        (PATH, f"{LOSS}=distill", f"{ACTOR}.opsm_delta=0.1"),
        "it masks rows by their advantage",
    ),
    "a second reference": (
        lambda: dag_spec(
            "d",
            [
                *learning(teacher("t")).nodes[:-1],
                *(NodeSpec(x, "MODEL_TRAIN", "REFERENCE", dependencies=("rollout",)) for x in ("r", "s")),
                NodeSpec("train", "MODEL_TRAIN", "ACTOR", dependencies=("advantages", "r", "s")),
            ],
        ),
        (f"{ACTOR}.use_kl_loss=true",),
        "kept close to one reference: remove one. Models that it learns from are nodes of node_role: TEACHER",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason(what):
    dag, overrides, reason = REFUSED[what]
    with pytest.raises(UserError) as error:
        check_config(config(*overrides, "data.train_files=[a]", "data.val_files=[a]"))
        compiled(dag(), 2, *overrides)
    assert re.search(reason, str(error.value)), error.value
