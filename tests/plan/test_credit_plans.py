"""What nodes of an interaction read of each other in the plan, and which reads are refused."""

from dataclasses import replace

import pytest
from plan_cases import add_agent, compiled, config, run_symbolically

from siirl.compiler.interactions.credit_reads import policy_trains
from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Run
from siirl.dag.spec import DagBuilder, DagSpec
from siirl.errors import DagError, PlacementError

CREDIT = "algorithm.credit"
MARFT = ("algorithm.adv_estimator=gae_marft", f"{CREDIT}.team=1.0")


def two_agents(
    verifier_reward: bool = True,
    solver_reads: list[str] | None = None,
    verifier_reads: list[str] | None = None,
    critics: bool = False,
    placement: str | None = None,
    shared_critic: int | None = None,
    late_values: bool = False,
) -> DagSpec:
    """A solver and a verifier that talk, both trained. shared_critic: agent 1 has that agent's critic, whose
    update need not wait for the values of agent 1 where these are late."""

    def critic_of(agent: int) -> dict[str, int]:
        return {} if shared_critic is None or agent == 0 else {"share_instance": shared_critic}

    dag = DagBuilder("two_agents")
    dag.node("rollout_0", "MODEL_INFERENCE", "ROLLOUT")
    dag.node("rollout_1", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=["rollout_0"])
    dag.node("reward_0", "COMPUTE", "REWARD", dependencies=["rollout_1"])
    above = ["reward_0"]
    if verifier_reward:
        dag.node("reward_1", "COMPUTE", "REWARD", agent_group=1, dependencies=["rollout_1"])
        above.append("reward_1")
    if critics:
        for agent in (0, 1):
            common = {"agent_group": agent, "dependencies": ["rollout_1"], "config": critic_of(agent)}
            dag.node(f"values_{agent}", "MODEL_TRAIN", "CRITIC", only_forward_compute=True, **common)
            above.append(f"values_{agent}")
    for agent, reads in enumerate((solver_reads, verifier_reads)):
        order = sorted(above, key=lambda name: not name.endswith(str(agent)))
        if late_values and agent == 0:
            order.remove("values_1")
        common = {"agent_group": agent, "dependencies": order}
        dag.node(f"advantage_{agent}", "COMPUTE", "ADVANTAGE", reads=reads, placement=placement, **common)
        common["dependencies"] = [f"advantage_{agent}"]
        dag.node(f"train_{agent}", "MODEL_TRAIN", "ACTOR", **common)
        if critics:
            dag.node(f"critic_{agent}", "MODEL_TRAIN", "CRITIC", config=critic_of(agent), **common)
    return dag.build()


def test_the_policy_of_two_speakers_has_a_team_without_reads():
    dag = DagBuilder("shared")
    first = add_agent(dag, 0)["rollout"]
    share = {"rollout.agent.share_instance": 0}
    dag.node("second", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=[first], config=share)
    assert compiled(dag.build(), 1, f"{CREDIT}.team=0.5").nodes["advantage_0"]


def test_rewards_one_by_one_are_refused_where_agents_talk():
    keys = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_rewards={score: 1}")
    with pytest.raises(DagError, match=r"adv_estimator=gdpo compares the rewards .* Set algorithm.adv_estim"):
        compiled(two_agents(), 1, *keys)


def joins(plan: Plan, node: str) -> list[str]:
    run = next(ins for ins in plan.instructions if isinstance(ins, Run) and ins.node == node)
    assert all(plan.layouts[layout].ranks == plan.layouts[run.source].ranks for _, layout in run.joins)
    assert all(plan.layouts[layout].shards == plan.layouts[run.source].shards for _, layout in run.joins)
    run_symbolically(plan)
    assert Plan.from_json(plan.to_json()) == plan
    return sorted(str(key) for key, _ in run.joins)


def test_an_advantage_node_reads_what_the_others_got_by_episode():
    plan = compiled(two_agents(solver_reads=["agent_1.score"]), 2, f"{CREDIT}.team=0.5")
    assert joins(plan, "advantage_0") == ["agent_1.episode_id", "agent_1.score", "agent_1.speaker"]
    assert joins(plan, "advantage_1") == []
    reads = {key.name for key in plan.run_of("advantage_0").reads}
    assert {"score", "episode_id", "speaker", "turn_id", "env_reward"} <= reads
    assert "episode_id" in {key.name for key in plan.run_of("train_0").reads}


def test_an_agent_without_a_reward_node_gets_the_scores_of_the_others():
    plan = compiled(two_agents(verifier_reward=False), 2)
    assert joins(plan, "advantage_1") == ["agent_0.episode_id", "agent_0.score", "agent_0.speaker"]
    assert "score" not in {key.name for key in plan.run_of("advantage_1").reads}
    with pytest.raises(DagError, match=r"agent 1 has no reward node, and algorithm\.share_reward_in_agent"):
        compiled(two_agents(verifier_reward=False), 2, "algorithm.share_reward_in_agent=false")


def test_gae_marft_reads_the_values_of_the_other_critic():
    plan = compiled(
        two_agents(
            critics=True, solver_reads=["agent_1.value", "agent_1.score"], verifier_reads=["agent_0.value"]
        ),
        2,
        *MARFT,
    )
    value = ["env_reward", "episode_id", "response_length", "speaker", "turn_id", "value"]
    assert joins(plan, "advantage_1") == [f"agent_0.{name}" for name in value]
    assert joins(plan, "advantage_0") == sorted(f"agent_1.{name}" for name in [*value, "score"])


def test_two_agents_share_a_critic():
    plan = compiled(two_agents(critics=True, shared_critic=0), 2, "algorithm.adv_estimator=gae")
    assert [name for name in plan.models if "critic" in name] == ["agent_0.critic"]
    assert set(plan.models["agent_0.critic"].nodes) == {"values_0", "values_1", "critic_0", "critic_1"}
    assert {key.agent for key in plan.run_of("values_1").reads} == {1}
    run_symbolically(plan)


REFUSED = {
    "a critic of an agent that has none": (
        {"critics": True, "shared_critic": 2}, ("algorithm.adv_estimator=gae",),
        r"share_instance = 2: agent 2 trains no critic of its own\. Agents that do: 0",
    ),
    "a critic shared with itself": (
        {"critics": True, "shared_critic": 1}, ("algorithm.adv_estimator=gae",),
        r"share_instance = 1: agent 1 trains no critic of its own\. Agents that do: 0",
    ),
    "values of a shared critic while it learns": (
        {"critics": True, "shared_critic": 0, "late_values": True}, ("algorithm.adv_estimator=gae",),
        r"'critic_0' and node 'values_1' share the critic of agent 0, and nothing says which comes first",
    ),
    "a field that is no score": (
        {"solver_reads": ["agent_1.reward"]}, (), r"reads scores and values of other agents",
    ),
    "a field of its own": ({"solver_reads": ["score"]}, (), r"Write agent_N\.score or agent_N\.value"),
    "others' scores where agents share none": (
        {"solver_reads": ["agent_1.score"]}, ("algorithm.share_reward_in_agent=false",),
        r"'advantage_0' reads agent_1\.score, but algorithm\.share_reward_in_agent is False",
    ),
    "others' scores that count nothing": (
        {"solver_reads": ["agent_1.score"]}, (f"{CREDIT}.team=0",), r"algorithm\.credit\.team.* is 0",
    ),
    "a key that there is not": (
        {}, (f"{CREDIT}.group_by=[task,trun]",), r"group_by has 'trun'.*Did you mean 'turn'",
    ),
    "groups over several shards": (
        {}, (f"{CREDIT}.group_by=[agent]",), r"has no task: its groups span 2 shards of rows\. Add task",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_the_node_and_the_fix(name):
    options, overrides, message = REFUSED[name]
    with pytest.raises(DagError, match=message):
        compiled(two_agents(**options), 2, *overrides)


def test_groups_of_all_tasks_are_formed_on_one_rank():
    keys = (f"{CREDIT}.group_by=[agent]", f"{CREDIT}.team=1")
    plan = compiled(two_agents(placement="0", solver_reads=["agent_1.score"]), 2, *keys)
    assert joins(plan, "advantage_0") == ["agent_1.episode_id", "agent_1.score", "agent_1.speaker"]


def test_rows_of_others_are_read_where_the_interaction_left_them():
    dag = two_agents(placement="1-2", solver_reads=["agent_1.score"])
    with pytest.raises(
        PlacementError, match=r"'advantage_0' on ranks 1-2 reads fields of agent 1, whose rows"
    ):
        compiled(dag, 4, f"{CREDIT}.team=1")


def test_credit_without_an_interaction_is_refused():
    dag = DagBuilder("one")
    dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    dag.node("reward", "COMPUTE", "REWARD", dependencies=["rollout"])
    dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=["reward"])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=["advantage"])
    with pytest.raises(DagError, match=r"algorithm\.credit\.team is set, but the DAG has no interaction"):
        compiled(dag.build(), 2, f"{CREDIT}.team=1.0")


def test_scores_of_agents_that_do_not_talk_are_not_joined():
    dag = DagBuilder("strangers")
    rewards = [add_agent(dag, agent)["reward"] for agent in (0, 1)]
    dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=rewards, reads=["agent_1.score"])
    with pytest.raises(DagError, match=r"'advantage' reads agent_1\.score, but agents 0 and 1 make rows"):
        compiled(dag.build(), 2)


def test_agents_of_different_cycles_are_refused():
    spec = two_agents()
    key = "rollout.agent.train_cycle"
    nodes = [
        replace(node, config={key: 1 + node.agent_group}) if node.node_role == "ROLLOUT" else node
        for node in spec.nodes
    ]
    with pytest.raises(DagError, match=r"train_cycle differs.*'train_0': 1, 'train_1': 2"):
        compiled(replace(spec, nodes=tuple(nodes)), 2)


def test_agents_take_turns_of_some_steps_after_the_critics_warm_up():
    keys = ("actor_rollout_ref.rollout.agent.train_cycle=2", "trainer.critic_warmup=1")
    plan, cfg = compiled(two_agents(), 2, *keys), config(*keys)
    turns = [plan.nodes[f"train_{agent}"].options for agent in (0, 1)]
    trained = [[step for step in range(1, 11) if policy_trains(cfg, step, turn)] for turn in turns]
    assert trained == [[2, 3, 6, 7, 10], [4, 5, 8, 9]]
    assert compiled(two_agents(), 2).nodes["train_0"].options == {}
