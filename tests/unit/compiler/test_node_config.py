"""dag.node_config: the command line sets keys of nodes of any workflow."""

import pytest
from plan_cases import add_agent, config

from siirl.compiler.compile import TEMPLATES, compile_plan, load_dag
from siirl.compiler.resolved_node import resolve_nodes
from siirl.config import load_config
from siirl.config.aliases import POLICY
from siirl.config.resolve import FOLLOWS, REFERENCE, get
from siirl.config.root import all_keys
from siirl.config.values import plain
from siirl.dag.node_config import with_node_config
from siirl.dag.spec import DagBuilder
from siirl.errors import DagError
from siirl.findings import Findings

TEMPLATE = f"dag.workflow_path={TEMPLATES / 'reasoner_actor.yaml'}"


def nodes(*overrides):
    cfg = load_config([TEMPLATE, *overrides])
    dag = load_dag(cfg)
    found = Findings()
    resolved = resolve_nodes(dag, cfg, found)
    found.close()
    return dag, resolved


def test_keys_of_nodes_are_set_on_the_command_line_as_in_the_file():
    dag, resolved = nodes(
        "dag.node_config.actor.model.path=/m",
        "dag.node_config.actor.rollout.agent.pre_process_kwargs.others=False",
        "dag.node_config.advantage_reasoner.credit.team=0.5",
        "dag.node_config.world={env_path: 'games.py:Doors', env_kwargs: {actor: 0}}",
        "dag.node_config.world.deadline_s=5",
    )
    assert dag.node("world").config == {
        "env_path": "games.py:Doors",
        "env_kwargs": {"actor": 0},
        "deadline_s": 5,
    }
    assert resolved["train_actor"].cfg.actor_rollout_ref.model.path == "/m"  # of the rollout: of the agent
    assert resolved["actor"].cfg.actor_rollout_ref.rollout.agent.pre_process_kwargs == {"others": False}
    assert resolved["reasoner"].cfg.actor_rollout_ref.model.path != "/m"
    credit = resolved["advantage_reasoner"].cfg.algorithm.credit
    assert (credit.team, credit.own) == (0.5, 0.0)  # over the file's, beside the file's


def test_the_ranks_of_a_node_are_set_on_the_command_line_and_an_option_of_that_name_stays_one():
    dag, resolved = nodes(
        "dag.node_config.actor.placement=0-1",
        "dag.node_config.actor.model.path=/m",
        "dag.node_config.world.placement=corner",
    )
    assert dag.node("actor").placement == "0-1" and dag.node("reasoner").placement is None
    assert "placement" not in dag.node("actor").config
    assert resolved["actor"].cfg.actor_rollout_ref.model.path == "/m"
    assert dag.node("world").config["placement"] == "corner" and dag.node("world").placement is None


def test_the_template_is_as_it_is_in_the_file_without():
    assert nodes()[0].node("advantage_reasoner").config == {"credit.own": 0.0, "credit.team": 1.0}


@pytest.mark.parametrize(
    "override, words",
    [
        ("dag.node_config.word.env_path=x", ["'word'", "Did you mean 'world'?"]),
        ("dag.node_config.world=x", ["dag.node_config.world = 'x'", "KEY=VALUE"]),
        ("dag.node_config.actor.modle.path=x", ["node 'actor'", "modle"]),
    ],
)
def test_nodes_and_keys_that_do_not_exist_are_refused(override, words):
    with pytest.raises(Exception) as caught:
        nodes(override)
    assert all(word in str(caught.value) for word in words), caught.value
    assert isinstance(caught.value, DagError | ValueError)


FOLLOWERS = {"REFERENCE": f"{POLICY}.ref.", "CRITIC": "critic."}
FOLLOWED = [
    (role, name, source)
    for role, prefix in FOLLOWERS.items()
    for name, template in FOLLOWS.items()
    for source in REFERENCE.findall(template)
    if name.startswith(prefix) and source.startswith(f"{POLICY}.actor.")
]
"""(role, key of it, the actor's key that it follows), of all."""


@pytest.mark.parametrize(("role", "follower", "source"), FOLLOWED)
def test_what_an_actors_node_sets_holds_for_the_keys_of_its_agent_that_follow_it(role, follower, source):
    cfg = config(f"{POLICY}.actor.strategy=megatron") if ".megatron." in source else config()
    run = get(cfg, follower)
    choices = [choice for choice in all_keys()[source].rule.choices or () if choice != run]
    value = choices[0] if choices else {bool: not run, int: 2, dict: {"a": 1}}.get(type(run), 2)
    if source.endswith("path"):
        value = "/m"
    dag = DagBuilder("three")
    for agent in range(3):
        ids = add_agent(dag, agent)
        more = {"agent_group": agent, "dependencies": [ids["rollout"]]}
        own = {follower: run} if agent == 2 and run is not None else {}
        dag.node(f"forward_{agent}", "MODEL_TRAIN", role, only_forward_compute=True, config=own, **more)
        dag.node(f"actor_{agent}", "MODEL_TRAIN", "ACTOR", config={source: value} if agent else {}, **more)
    found = Findings()
    resolved = resolve_nodes(dag.build(), cfg, found)
    found.close()
    forward = [resolved[f"forward_{agent}"].cfg for agent in range(3)]
    assert [get(cfg, follower) for cfg in forward] == [run, value, value if run is None else run]


def test_any_key_at_one_of_the_nodes_of_a_model_is_compared_with_the_others():
    """Older names, keys that do nothing and things in maps, too."""
    half = "actor_rollout_ref.actor.ppo_mini_batch_size=4"  # of a batch: the old log-probs have a node
    cfg = config(half, "actor_rollout_ref.rollout.engine_kwargs.vllm.a=1")
    dag, groups = load_dag(cfg), ("actor_rollout_ref.", "critic.")
    same = {name: plain(get(cfg, name)) for name in all_keys() if name.startswith(groups)}
    assert {"actor_rollout_ref.model.fsdp_config.fsdp_size", "actor_rollout_ref.hybrid_engine"} <= same.keys()
    same = {name: value for name, value in same.items() if not name.endswith("hf_hub_token")}
    same["actor_rollout_ref.rollout.engine_kwargs.vllm.a"] = 1
    assert "actor_train" in compile_plan(with_node_config(dag, {"actor_train": same}), cfg, 2)[0].nodes
    for name, value in (
        ("actor_rollout_ref.model.fsdp_config.param_offload", True),
        ("actor_rollout_ref.model.megatron.param_dtype", "float32"),
        ("actor_rollout_ref.hybrid_engine", False),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.a", 2),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.b.c", 2),
    ):
        other = with_node_config(dag, {"actor_old_log_prob": {name: value}})
        with pytest.raises(DagError, match=f"sets {name}={value}.* is built from"):
            compile_plan(other, cfg, 2)
