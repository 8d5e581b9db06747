"""Dynamic sampling and PF-PPO where agents talk: which interactions may be played in rounds."""

from dataclasses import replace

import pytest
from plan_cases import compiled, run_symbolically, template_plan

from siirl.compiler.compile import TEMPLATES
from siirl.compiler.plan_instructions import Collect, Repeat
from siirl.dag.spec import DagBuilder, DagSpec, dag_spec, node_spec
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import ConfigError, DagError, NotSupportedError

SAMPLING, PF_PPO = "algorithm.filter_groups.enable=true", "algorithm.use_pf_ppo=true"
OFF = {"algorithm.filter_groups.enable": False}


def dag_of(
    trained: tuple[int, ...],
    sampling: tuple[int, ...],
    silent: dict | None = None,
    environment: str | None = None,
    reads: list[str] | None = None,
) -> DagSpec:
    """Agents 0 and 1 talk (or agent 0 acts alone in an environment), those in `trained` have rows.

    sampling: the agents whose rows a POSTPROCESS_SAMPLING node takes; nodes of other trained agents have
    sampling off where some agent samples. silent: the configuration of agent 1's rollout. reads: what the
    advantage node of agent 0 reads besides.
    """
    dag = DagBuilder("sampling")
    dag.node("rollout_0", "MODEL_INFERENCE", "ROLLOUT")
    if environment:
        options = {"config": {"env_path": environment}, "loop": {"max_turns": 3}}
        last = dag.node("world", "ENV_INTERACT", dependencies=["rollout_0"], **options)
    else:
        config = silent if 1 not in trained else OFF if sampling == (0,) else None
        common = {"agent_group": 1, "dependencies": ["rollout_0"], "config": config}
        last = dag.node("rollout_1", "MODEL_INFERENCE", "ROLLOUT", loop={"max_turns": 2}, **common)
    rewards = {
        agent: dag.node(f"reward_{agent}", "COMPUTE", "REWARD", agent_group=agent, dependencies=[last])
        for agent in trained
    }
    for agent, reward in rewards.items():
        above, config = [reward], OFF if sampling and agent not in sampling else None
        common = {"agent_group": agent, "config": config}
        if agent in sampling:
            above = [f"sample_{agent}"]
            dag.node(*above, "COMPUTE", "POSTPROCESS_SAMPLING", dependencies=[reward], **common)
        above += [other for other in rewards.values() if reads and agent == 0 and other != reward]
        more = {"reads": reads} if agent == 0 else {}
        dag.node(f"advantage_{agent}", "COMPUTE", "ADVANTAGE", dependencies=above, **common, **more)
        dag.node(f"train_{agent}", "MODEL_TRAIN", "ACTOR", dependencies=[f"advantage_{agent}"], **common)
    return dag.build()


@pytest.fixture(scope="module")
def game(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("game") / "game.py"
    path.write_text(
        "class Game:\n"
        "    def reset(self, task, seed):\n        return ''\n\n"
        "    def step(self, actions):\n        return '', 0.0, True\n"
    )
    return f"{path}:Game"


PLAYED_IN_ROUNDS = {
    "an environment": {"trained": (0,), "environment": "game"},
    "a second speaker with the same policy": {
        "trained": (0,), "silent": {"rollout.agent.share_instance": 0},
    },
    "a frozen second agent": {"trained": (0,)},
    "a frozen first agent": {"trained": (1,)},
}  # fmt: skip


@pytest.mark.parametrize("name", PLAYED_IN_ROUNDS)
def test_an_interaction_whose_rows_are_those_of_one_agent_is_played_in_rounds(name, game):
    options = PLAYED_IN_ROUNDS[name] | (
        {"environment": game} if "environment" in PLAYED_IN_ROUNDS[name] else {}
    )
    plan = compiled(dag_of(sampling=options["trained"], **options), 2, SAMPLING)
    run_symbolically(plan)
    assert [type(ins) for ins in plan.instructions].count(Repeat) == 1
    collected = next(ins.reads for ins in plan.instructions if isinstance(ins, Collect))
    assert {"row_id", "group_id", "episode_id", "turn_id", "env_reward"} <= {key.name for key in collected}
    compiled(dag_of(sampling=options["trained"], **options), 2, PF_PPO)


@pytest.mark.parametrize("sampling", [(), (0,), (1,), (0, 1)])
def test_dynamic_sampling_of_several_trained_agents_that_talk_is_refused(sampling):
    with pytest.raises(NotSupportedError, match=r"agents 0 and 1 of its interaction are trained"):
        compiled(dag_of((0, 1), sampling), 2, SAMPLING)


def test_a_sampling_node_is_still_asked_for_where_rows_are_trained_on():
    with pytest.raises(DagError, match=r"no node filters the groups of node 'rollout_0'"):
        compiled(dag_of((0,), ()), 2, SAMPLING)
    with pytest.raises(DagError, match=r"no node resamples the rows of node 'rollout_0'"):
        compiled(dag_of((0,), ()), 2, PF_PPO)


def test_what_others_got_is_joined_before_pf_ppo_draws_episodes():
    keys = (PF_PPO, "algorithm.credit.team=0.5")
    compiled(dag_of((0, 1), (0, 1)), 2, PF_PPO)
    with pytest.raises(
        DagError, match=r"'advantage_0' reads agent_1\.score by episode, below node 'sample_0'"
    ):
        compiled(dag_of((0, 1), (0, 1), reads=["agent_1.score"]), 2, *keys)


BY_MODEL = ("reward_model.enable=true", "reward_model.model.path=/models/rm")
PARTS = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_rewards={score: 1, digits: 0.5}")


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ((SAMPLING, "algorithm.filter_groups.metric=digits"), "algorithm.filter_groups.metric"),
        (PARTS, "algorithm.gdpo_rewards"),
    ],
)
def test_numbers_that_the_score_of_a_model_does_not_come_with_are_refused(keys, key):
    """They were missed in the first step, after all models had been built and rows sampled."""
    graph = sampled_by("grpo_reward_model.yaml") if SAMPLING in keys else None
    with pytest.raises(ConfigError, match=rf"{key} names 'digits', but node 'reward_model' gives the score"):
        compiled(graph, 1, *keys, *BY_MODEL) if graph else template_plan(1, *keys, *BY_MODEL)


def test_numbers_that_may_come_of_a_function_or_that_every_score_has_are_accepted():
    template_plan(1, *PARTS)
    for metric in ("acc", "score"):
        name = f"algorithm.filter_groups.metric={metric}"
        compiled(sampled_by("grpo_reward_model.yaml"), 1, SAMPLING, name, *BY_MODEL)


def sampled_by(template: str) -> DagSpec:
    """A template with dynamic sampling between its reward and its advantages."""
    dag = load_dag_file(TEMPLATES / template)
    common = {"node_type": "COMPUTE", "node_role": "POSTPROCESS_SAMPLING", "dependencies": ["reward_model"]}
    below = [
        replace(node, dependencies=("sampling", *node.dependencies))
        if node.node_id in ("calculate_advantages", "actor_old_log_prob", "reference_log_prob")
        else node
        for node in dag.nodes
    ]
    return dag_spec("sampled", [*below, node_spec({"node_id": "sampling", **common})])
