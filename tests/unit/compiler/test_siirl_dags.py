"""DAG files as siiRL has them: nodes that only move rows, and agent_options that are configuration here."""

import random
from dataclasses import replace

import pytest

from siirl.cli import main
from siirl.compiler.compile import TEMPLATES, compile_plan
from siirl.config import load_config, with_overrides
from siirl.dag.node_kinds import NODE_ROLES, NODE_TYPES
from siirl.dag.spec import DagSpec, dag_spec, node_spec
from siirl.dag.yaml_file import load_dag_file, parse_dag
from siirl.errors import DagError

SETTINGS = (
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.n=4",
)
CFG = load_config([*SETTINGS, "algorithm.adv_estimator=grpo"])
TALK = load_config(
    [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
    ]
)
TEMPLATE_CFGS = {"grpo.yaml": CFG, "ppo.yaml": load_config(SETTINGS)}
IDLE = [(name, "DEFAULT") for name, kind in NODE_TYPES.items() if kind.idle]
IDLE += [("COMPUTE", name) for name, role in NODE_ROLES.items() if role.idle]
ENVIRONMENT = """
class Game:
    async def reset(self, task, seed):
        return "begin"

    async def step(self, actions):
        return "go on", 0.0, False
"""


def with_idle_nodes(dag: DagSpec, draw: random.Random) -> DagSpec:
    """The DAG with nodes that compute nothing, chained and shared, between random nodes and their parents."""
    nodes, added = list(dag.nodes), []
    for number in range(draw.randint(1, 6)):
        kind, role = draw.choice(IDLE)
        at = draw.randrange(len(nodes))
        entry = {"node_id": f"idle_{number}", "node_type": kind, "node_role": role}
        idle = node_spec(entry | {"dependencies": list(nodes[at].dependencies)})
        added.append(idle)
        nodes[at] = replace(nodes[at], dependencies=(idle.node_id,))
    order = [*added, *nodes] if draw.random() < 0.5 else [*nodes, *added]
    return dag_spec(dag.dag_id, order, dag.description)


@pytest.mark.parametrize("seed", range(20))
def test_a_dag_with_nodes_that_only_move_rows_has_the_plan_of_one_without(seed):
    draw = random.Random(seed)
    template, cfg = draw.choice(sorted(TEMPLATE_CFGS.items(), key=lambda item: item[0]))
    dag, ranks = load_dag_file(TEMPLATES / template), draw.choice((1, 2, 4))
    plain, _ = compile_plan(dag, cfg, ranks)
    mixed, _ = compile_plan(with_idle_nodes(dag, draw), cfg, ranks)
    skipped = mixed.pruned.keys() - plain.pruned.keys()
    assert skipped and all(name.startswith("idle_") for name in skipped)
    assert replace(mixed, pruned=plain.pruned) == plain


def test_the_note_says_why_a_rebalance_node_is_skipped(tmp_path, capsys):
    text = (TEMPLATES / "grpo.yaml").read_text()
    text = text.replace("dependencies: [rollout_actor]", "dependencies: [even]", 1)
    even = "{node_id: even, node_type: COMPUTE, node_role: DATA_REBALANCE, dependencies: [rollout_actor]}"
    file = tmp_path / "dag.yaml"
    file.write_text(f"{text}\n  - {even}\n")
    settings = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
    assert main(["check", "--elsewhere", *settings, f"dag.workflow_path={file}"]) == 0
    assert "skipped: even: rows are sharded evenly" in capsys.readouterr().out


DAPO = """
dag_id: dapo
nodes:
  - {node_id: rollout, node_type: MODEL_INFERENCE, node_role: ROLLOUT}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [rollout]}
  - {node_id: adv, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [reward]}
  - {node_id: mark, node_type: COMPUTE, executable_ref: MODULE.dapo.dynamic_sampling,
      dependencies: [adv]}
  - {node_id: sample, node_type: COMPUTE, node_role: POSTPROCESS_SAMPLING, dependencies: [mark]}
  - {node_id: old, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [sample], only_forward_compute: on}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [old]}
"""


@pytest.mark.parametrize("module", ["siirl.algorithm", "siirl.user_interface.filter_interface"])
def test_siirls_dapo_samples_by_one_node(module):
    cfg = with_overrides(
        CFG, {"algorithm.filter_groups.enable": True, "actor_rollout_ref.actor.use_kl_loss": False}
    )
    plan, _ = compile_plan(parse_dag(DAPO.replace("MODULE", module)), cfg, 2)
    assert list(plan.pruned) == ["mark", "old"]  # a batch is one mini-batch: nobody reads old log-probs
    assert plan.nodes["sample"].op == "dynamic_sampling"
    with pytest.raises(DagError, match="'mark'"):
        compile_plan(parse_dag(DAPO.replace("MODULE", "mine")), cfg, 2)


def conversation(tmp_path, first: str, second: str) -> DagSpec:
    """Two agents that speak in turn, with these agent_options."""
    (tmp_path / "game.py").write_text(ENVIRONMENT)
    parts = []
    for agent, options, above in ((0, first, ""), (1, second, "rollout_0")):
        parts.append(
            f"""
  - node_id: rollout_{agent}
    node_type: MODEL_INFERENCE
    node_role: ROLLOUT
    agent_group: {agent}
    dependencies: [{above}]
    agent_options: {options}"""
        )
    for agent in (0, 1):
        parts.append(
            f"""
  - {{node_id: reward_{agent}, node_type: COMPUTE, node_role: REWARD, agent_group: {agent},
      dependencies: [rollout_1]}}
  - {{node_id: advantage_{agent}, node_type: COMPUTE, node_role: ADVANTAGE, agent_group: {agent},
      dependencies: [reward_{agent}]}}
  - {{node_id: train_{agent}, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: {agent},
      dependencies: [advantage_{agent}], agent_options: {{train_cycle: 15}}}}"""
        )
    game = f"{tmp_path}/game.py:Game"
    return parse_dag("dag_id: talk\nnodes:" + "".join(parts).replace("GAME", game))


def test_agent_options_of_siirl_are_configuration(tmp_path):
    dag = conversation(tmp_path, "{obs_with_env: true}", "{obs_with_env: true, env_path: [GAME]}")
    plan, configs = compile_plan(dag, TALK, 2)
    stages = plan.interactions["rollout_0"].stages
    assert [stage.node for stage in stages] == ["rollout_0", "rollout_1", "rollout_1_env"]
    assert stages[2].obs_with_env is True
    assert configs["train_0"].actor_rollout_ref.rollout.agent.train_cycle == 15


@pytest.mark.parametrize(
    ("first", "second", "fragments"),
    [
        ("{obs_with_env: true}", "{}", ["rollout_0", "there is no environment"]),
        (
            "{obs_with_env: true}",
            "{rewards_with_env: true, env_path: [GAME]}",
            ["rollout_0", "'rollout_1'", "leaves it false"],
        ),
        ("{obs_with_envs: true}", "{}", ["unknown key 'obs_with_envs'"]),
    ],
)
def test_agent_options_that_nothing_answers_are_refused(tmp_path, first, second, fragments):
    with pytest.raises(DagError) as caught:
        compile_plan(conversation(tmp_path, first, second), TALK, 2)
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value


def test_agent_options_that_contradict_the_config_are_refused():
    entry = {"node_id": "a", "node_type": "MODEL_TRAIN", "node_role": "CRITIC"}
    with pytest.raises(
        DagError, match=r"agent_options.share_instance = 0 contradicts .*'share_instance' = 1"
    ):
        node_spec(entry | {"agent_options": {"share_instance": 0}, "config": {"share_instance": 1}})
    merged = node_spec(entry | {"agent_options": {"share_instance": 0}, "config": {"share_instance": 0}})
    assert merged.config == {"critic.share_instance": 0} and merged.agent_options is None
