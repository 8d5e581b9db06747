"""Agents that a service speaks for: they have a stage in the interaction, but no weights and no rows."""

import pytest
from plan_cases import compiled

from siirl.dag.spec import DagBuilder
from siirl.errors import ConfigError, DagError

SERVICE = {
    "rollout.name": "openai",
    "rollout.agent.endpoint.url": "http://localhost:8000/v1/chat/completions",
}


def plan_with(config, verifier_trains=False, service_first=False):
    dag = DagBuilder("external")
    solver = dag.node("solver", "MODEL_INFERENCE", "ROLLOUT", config=config if service_first else {})
    verifier = dag.node(
        "verifier",
        "MODEL_INFERENCE",
        "ROLLOUT",
        agent_group=1,
        dependencies=[solver],
        config={} if service_first else config,
    )
    for agent in (0, 1) if verifier_trains else (0,):
        names = {"agent_group": agent}
        reward = dag.node(f"reward_{agent}", "COMPUTE", "REWARD", dependencies=[verifier], **names)
        advantage = dag.node(f"adv_{agent}", "COMPUTE", "ADVANTAGE", dependencies=[reward], **names)
        dag.node(f"train_{agent}", "MODEL_TRAIN", "ACTOR", dependencies=[advantage], **names)
    return compiled(dag.build(), 2)


def test_a_service_needs_no_weights_and_gives_no_rows():
    plan = plan_with(SERVICE)
    assert plan.models["agent_1.rollout"].backend == "openai"
    assert set(plan.models) == {"agent_0.rollout", "agent_0.actor", "agent_1.rollout"}
    assert [link.target for link in plan.links.values()] == ["agent_0.rollout"]
    (interaction,) = plan.interactions.values()
    assert [(stage.node, stage.rows) for stage in interaction.stages] == [
        ("solver", True),
        ("verifier", False),
    ]


@pytest.mark.parametrize(
    ("config", "options", "error", "words"),
    [
        ({"rollout.name": "openai"}, {}, ConfigError, "endpoint.url=None"),
        (SERVICE | {"rollout.agent.endpoint.url": "localhost"}, {}, ConfigError, "'localhost'"),
        (SERVICE, {"verifier_trains": True}, DagError, "cannot be trained"),
        (SERVICE, {"service_first": True}, DagError, "not first"),
    ],
)
def test_what_a_service_cannot_be_is_refused(config, options, error, words):
    with pytest.raises(error, match=words):
        plan_with(config, **options)
