"""Plans with teachers: which models there are, who reads what, what is refused and why."""

import re

import pytest
from plan_cases import compiled, config

from siirl.compiler.compile import TEMPLATES, template_of
from siirl.compiler.plan import Plan, Run
from siirl.config.checks import check_config
from siirl.config.effects import effect_warnings
from siirl.dag.node_config import with_node_config
from siirl.dag.spec import DagSpec, NodeSpec, dag_spec
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import UserError
from siirl.show.plan_text import report

ACTOR = "actor_rollout_ref.actor"
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
