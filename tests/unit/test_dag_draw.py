"""The drawing: everything of the plan is in it, and the same plan gives the same file."""

from plan_cases import compiled, custom, template_plan

from siirl.dag.draw import draw
from siirl.dag.spec import DagBuilder


def test_the_same_plan_gives_the_same_svg_with_all_nodes_ranks_and_reasons(tmp_path):
    plan = template_plan(4, "trainer.balance_batch=true")
    for name in ("a.svg", "b.svg"):
        draw(plan, tmp_path / name)
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
    draw(plan, tmp_path / "wide.svg")
    text = (tmp_path / "wide.svg").read_text()
    for expected in (*plan.nodes, "rank 1", "ranks 0-1", "ranks 2-3", "weights, if newer (broadcast)"):
        assert expected in text, expected
