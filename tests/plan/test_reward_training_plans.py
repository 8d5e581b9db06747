"""Plans that train a reward model: whose it is, who scores by it and when, and what is refused."""

import re

import pytest
from plan_cases import compiled, config

from siirl.compiler.compile import TEMPLATES, template_of
from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Run
from siirl.config.effects import effect_warnings
from siirl.dag.node_config import with_node_config
from siirl.dag.spec import DagSpec, NodeSpec, dag_spec
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import UserError
from siirl.findings import Findings
from siirl.launch.survey import survey

MODEL = ("reward_model.enable=true", "reward_model.model.path=/models/rm")
GIVEN = (
    *("actor_rollout_ref.rollout.name=dataset", "actor_rollout_ref.rollout.n=2", *MODEL),
    *("data.response_keys=[chosen,rejected]", "trainer.val_before_train=false", "trainer.test_freq=-1"),
)
BESIDE = TEMPLATES / "reward_training_grpo.yaml"
TRAIN = NodeSpec("learn", "MODEL_TRAIN", "REWARD", dependencies=("reward",))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("reward_model.ppo_mini_batch_size=4",), ""),
        (
            ("reward_model.ppo_mini_batch_size=3",),
            "'reward_training': .* = 3 prompts .* a divisor of 8",
        ),
        (("reward_model.ppo_mini_batch_size=4", f"dag.workflow_path={BESIDE}"), "actor.*=256 is larger than"),
    ],
)
def test_mini_batches_of_a_policy_that_nobody_trains_are_not_judged(keys, words):
    actor = "actor_rollout_ref.actor.ppo_mini_batch_size=256"
    survey(config(*GIVEN, "data.train_batch_size=8", actor, *keys), found := Findings())
    problems = "\n".join(map(str, found.problems))
    assert re.search(words, problems) if words else not problems


def alone() -> DagSpec:
    return load_dag_file(TEMPLATES / "reward_training.yaml")


def beside(**nodes: dict) -> DagSpec:
    """A policy beside it, with keys of nodes."""
    return with_node_config(load_dag_file(TEMPLATES / "reward_training_grpo.yaml"), nodes)


def sampled(role: str = "COMPUTE") -> DagSpec:
    """A policy that is trained by a reward, and a reward model that learns that one from its samples."""
    grpo = beside()
    nodes = [grpo.node("rollout"), NodeSpec("reward", role, "REWARD", dependencies=("rollout",)), TRAIN]
    advantages = NodeSpec("advantages", "COMPUTE", "ADVANTAGE", dependencies=("reward",))
    return dag_spec("sampled", [*nodes, advantages, grpo.node("train")])


def runs(plan: Plan, section: str = "instructions") -> list[str]:
    return [ins.node for ins in getattr(plan, section) if isinstance(ins, Run)]


def test_a_reward_model_is_trained_alone():
    plan = compiled(alone(), 2, *GIVEN)
    assert template_of(config(*GIVEN)) == "reward_training.yaml"
    assert runs(plan) == ["pairs", "reward_training"] and not plan.links and not plan.validation
    (model,) = plan.models.values()
    assert (model.name, model.head, model.trains) == ("agent_0.reward", "trained_score", True)
    assert plan.layouts[plan.run_of("reward_training").source].split == "group"


def test_what_scores_by_a_model_in_training_has_no_model_of_its_own():
    plan = compiled(beside(), 2, *MODEL)
    assert plan.models.keys() == {"agent_1.reward", "agent_0.rollout", "agent_0.actor"}
    model = plan.models["agent_1.reward"]
    assert model.nodes == ("reward_training", "reward") and model.node == "reward_training" and model.trains
    order = runs(plan)
    assert order.index("reward_training") < order.index("reward")
    assert runs(plan, "validation") == ["rollout", "reward"]


def test_a_frozen_reward_model_keeps_its_head_and_its_constant():
    plan = compiled(beside(reward={"reward_model.share_instance": None}), 2, *MODEL)
    assert plan.models["agent_0.reward"].head == "score" and not plan.models["agent_0.reward"].trains


def test_pairs_that_are_sampled_and_scored_teach_it_too():
    plan = compiled(sampled(), 2, *MODEL, "actor_rollout_ref.rollout.n=2")
    assert plan.nodes["learn"].op == "reward_train" and "train" in runs(plan)


NAMED = {"reward_model.model.path": "/models/other"}
REFUSED = {
    "another number of responses": (sampled, (), "learns from two responses of a prompt. Set .*n=2"),
    "its own scores": (
        lambda: sampled("MODEL_INFERENCE"),
        ("actor_rollout_ref.rollout.n=2",),
        "it would learn what it says already",
    ),
    "a model that nobody trains": (
        lambda: beside(reward={"reward_model.share_instance": 3}),
        (),
        r"share_instance = 3: agent 3 trains no reward model\. Agents that do: 1",
    ),
    "the model of another agent": (
        lambda: beside(reward_training={"reward_model.share_instance": 0}),
        (),
        "trains a reward model, which is that of its own agent",
    ),
    "other tokens than those that it learns": (
        lambda: beside(reward_training={"reward_model.max_length": 99}),
        (),
        "reward_model.max_length is not the same at both",
    ),
    "a judge": (alone, (*GIVEN, "reward_model.judge.url=http://localhost:1"), "has no score head"),
    "no reward model": (
        alone,
        (*GIVEN, "reward_model.enable=false"),
        "trains a reward model, but reward_model.enable is False",
    ),
    "mini-batches that are not whole": (
        alone,
        (*GIVEN, "reward_model.ppo_mini_batch_size=3"),
        "ppo_mini_batch_size = 3 prompts does not divide data.train_batch_size = 8",
    ),
    "a rollout that nobody gives weights": (
        lambda: dag_spec("d", [x for x in sampled().nodes if x.node_id in ("rollout", "reward", "learn")]),
        ("actor_rollout_ref.rollout.n=2",),
        "has a rollout but no training",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason(what):
    dag, overrides, reason = REFUSED[what]
    with pytest.raises(UserError) as error:
        compiled(dag(), 2, *MODEL, *overrides)
    assert re.search(reason, str(error.value)), error.value


def test_keys_of_its_training_say_so_where_nothing_trains_it():
    found = effect_warnings(config(*MODEL, "reward_model.optim.lr=0.5"))
    assert any("reward_model.optim.lr=0.5 has no effect: no node trains the reward model" in x for x in found)
    assert not any(
        "reward_model.optim" in x for x in effect_warnings(config(*GIVEN, "reward_model.optim.lr=0.5"))
    )
