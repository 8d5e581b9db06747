"""The drawing: everything of the plan is in it, and the same plan gives the same file."""

import re

from plan_cases import add_agent, compiled, custom, template_plan

from siirl.dag.spec import DagBuilder
from siirl.show.plan_picture import AGENT_COLORS, draw
from siirl.show.plan_text import conversations, node_ranks


def test_the_same_plan_gives_the_same_svg_with_all_nodes_ranks_and_reasons(tmp_path):
    plan = template_plan(4, "trainer.balance_batch=true")
    for name in ("a.svg", "b.svg"):
        draw(plan, tmp_path / name, {})
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    for expected in (*plan.nodes, *plan.pruned, "ranks 0-3", "reshard", "weights, if newer (local)"):
        assert expected in text, expected


def test_arrows_that_skip_columns_and_lanes_are_drawn_around_boxes(tmp_path):
    dag = DagBuilder("wide")
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT", placement="2-3")
    reward = dag.node("reward", "COMPUTE", "REWARD", dependencies=[rollout])
    middle = custom(dag, "middle", [reward], ["score"], ["x"], placement="1")
    last = custom(dag, "last", [middle], ["x"], ["y"], placement="1")
    short = custom(dag, "short", [reward], ["score"], ["z"])
    custom(dag, "join", [short, last], ["y", "z"], [])
    advantage = dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=[reward])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage], placement="0-1")
    plan = compiled(dag.build(), 4)
    draw(plan, tmp_path / "wide.svg", {})
    text = (tmp_path / "wide.svg").read_text()
    for expected in (*plan.nodes, "rank 1", "ranks 0-1", "ranks 2-3", "weights, if newer (broadcast)"):
        assert expected in text, expected


def test_nodes_have_the_colour_of_their_agent_which_a_legend_names(tmp_path):
    dag = DagBuilder("pair")
    for agent in (0, 1):
        add_agent(dag, agent, placement=str(agent))
    for name, plan in {"pair": compiled(dag.build(), 2), "single": template_plan(2)}.items():
        draw(plan, tmp_path / f"{name}.svg", {})
    pair, single = ((tmp_path / f"{name}.svg").read_text() for name in ("pair", "single"))
    assert "agent 0: rollout_0" in pair and "agent 1: rollout_1" in pair and "agent 0: " not in single
    first, second = AGENT_COLORS[:2]
    assert pair.count(first) == pair.count(second) > 4  # the boxes of four nodes, and a square of the legend
    assert first in single and second not in single


def test_an_interaction_is_drawn_with_its_ways_back_its_routes_and_its_environment(tmp_path):
    """Nodes without an instruction of their own (environments, agents that share a policy) are there, too."""
    code = tmp_path / "flow.py"
    code.write_text(
        "def pick(episode):\n    return None\n\ndef done(episode):\n    return True\n\n"
        "class Game:\n    def reset(self, task, seed): ...\n    def step(self, actions): ...\n"
    )
    dag = DagBuilder("talk")
    first = add_agent(dag, 0, agent_options={"route": f"{code}:pick"})["rollout"]
    guest = {"agent_group": 1, "config": {"rollout.agent.share_instance": 0}}
    dag.node("guest", "MODEL_INFERENCE", "ROLLOUT", dependencies=[first], **guest)
    loop = {"max_turns": 3, "until": f"{code}:done"}
    env = {"env_path": f"{code}:Game"}
    dag.node("game", "ENV_INTERACT", dependencies=["guest", first], config=env, loop=loop, agent_group=1)
    plan = compiled(dag.build(), 2)
    draw(plan, tmp_path / "talk.svg", {})
    text = (tmp_path / "talk.svg").read_text()
    words = " ".join(re.findall(">([^<>]+)</text>", text))  # a box has several lines
    for expected in ("guest", "Game", "with the policy of agent 0", "agent 1: guest"):
        assert expected in words, expected
    assert "again until done, 3 times in all at most" in text
    lines = conversations(plan, {})
    assert [line.split()[1] for line in lines[:4]] == ["who", "rollout_0", "guest", "game"]
    assert f"where {code}:pick says" in lines[1] and "agent_0.rollout (shared)" in lines[2]
    assert lines[3].endswith(
        f"back to rollout_0 until {code}:done is true or it has run 3 times; then the end"
    )
    assert lines[4] == "an episode has at most 6 turns"
    assert node_ranks(plan)["game"] == (0, 1)


def test_an_agent_without_rows_is_drawn_where_it_speaks(tmp_path):
    dag = DagBuilder("talk")
    above = add_agent(dag, 0, placement="0-1")["rollout"]
    frozen = {"agent_group": 1, "dependencies": [above], "placement": "2"}
    dag.node("adviser", "MODEL_INFERENCE", "ROLLOUT", **frozen)
    draw(compiled(dag.build(), 3), tmp_path / "talk.svg", {})
    text = (tmp_path / "talk.svg").read_text()
    for expected in ("adviser", "ranks 0-1", "rank 2", "turns"):
        assert expected in text, expected
