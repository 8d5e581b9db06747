"""Rewards of several nodes: their weights as written, the sum of a row, and what is refused."""

import pytest
import torch
from op_contexts import op_context
from plan_cases import compiled, run_symbolically

from siirl.compiler.plan import NodePlan
from siirl.config import load_config
from siirl.config.reward_weights import RewardWeights
from siirl.dag.spec import DagBuilder
from siirl.data.rows import make_rows, objects
from siirl.errors import ConfigError, DagError, RewardError
from siirl.nodes.context import OpContext
from siirl.nodes.function_reward import finished
from siirl.nodes.reward_combine import combine_rewards
from siirl.nodes.services import find_op

ENABLE = ("reward_model.enable=true", "reward_model.model.path=/models/rm")


def several_rewards(reads=("rule", "rule_info", "helpful"), **combine):
    """Responses are scored by functions and by two reward models, and the scores added up."""
    dag = DagBuilder("several")
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    nodes = [
        dag.node("functions", "COMPUTE", "REWARD", dependencies=[rollout], writes=["rule"]),
        dag.node("model", "MODEL_INFERENCE", "REWARD", dependencies=[rollout], writes=["helpful"]),
        dag.node(
            "other_model", "MODEL_INFERENCE", "REWARD", dependencies=[rollout], writes=["harmless"],
            config={"model.path": "/models/other"}, placement="0",
        ),
    ]  # fmt: skip
    total = dag.node("total", "COMPUTE", "REWARD", dependencies=nodes, reads=list(reads), **combine)
    advantage = dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=[total])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage])
    return dag.build()


def test_each_reward_has_a_field_and_a_model_of_its_own():
    plan = compiled(several_rewards(("rule", "rule_info", "helpful", "harmless")), 2, *ENABLE)
    run_symbolically(plan)
    run_symbolically(plan, "validation")
    assert [name for name, model in plan.models.items() if model.role == "reward"] == [
        "agent_0.reward.helpful",
        "agent_0.reward.harmless",
    ]
    assert [key.name for key in plan.run_of("model").writes] == ["helpful", "helpful_info"]
    assert {"rule", "rule_info", "harmless"} <= {key.name for key in plan.run_of("total").reads}
    assert [key.name for key in plan.run_of("total").writes] == ["score", "reward_info"]


def test_a_reward_that_nobody_reads_costs_nothing():
    plan = compiled(several_rewards(), 2, *ENABLE)
    assert plan.pruned == {"other_model": "nothing reads harmless, harmless_info"}
    assert "agent_0.reward.harmless" not in plan.models


@pytest.mark.parametrize(
    ("options", "overrides", "error", "message"),
    [
        ({"reads": ("rule", "harmles")}, (), DagError, "reads agent_0.harmles, which no node writes"),
        (
            {"config": {"weights": {"*": {"rule": 1, "helpfull": 1}}}},
            (),
            ConfigError,
            "node 'total': reward_model.weights.*unknown reward 'helpfull'.*Did you mean 'helpful'",
        ),
        ({"config": {"weights": {"*": {"rule": {"wieght": 1}}}}}, (), ConfigError, "no option 'wieght'"),
        ({"config": {"weights": {"*": {"rule": {"standardize": 2}}}}}, (), ConfigError, "true or false"),
        ({"config": {"weights": {"*": {}}}}, (), ConfigError, "is empty: name at least one of rule, helpful"),
        ({"writes": ["a", "b"]}, (), DagError, "writes one score under a name of its own"),
        ({"writes": ["advantage"]}, (), DagError, "writes one score under a name of its own"),
    ],
)
def test_a_sum_that_cannot_be_is_refused_before_the_start(options, overrides, error, message):
    with pytest.raises(error, match=message):
        compiled(several_rewards(**options), 2, *ENABLE, *overrides)


def test_weights_without_a_node_that_adds_up_are_refused():
    dag = DagBuilder("one")
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    reward = dag.node("reward", "COMPUTE", "REWARD", dependencies=[rollout])
    advantage = dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=[reward])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage])
    with pytest.raises(DagError, match="no node of the DAG adds up rewards"):
        compiled(dag.build(), 1, "reward_model.weights={'*': {a: 1}}")
    dag.node("second", "COMPUTE", "REWARD", dependencies=[rollout])
    with pytest.raises(DagError, match=r"both write agent_0\.score.*writes: \[NAME\]"):
        compiled(dag.build(), 1)


def context(*overrides: str, **more) -> OpContext:
    cfg = load_config(["actor_rollout_ref.rollout.name=hf", *overrides])
    return op_context("total", cfg, **more)


def scored_rows(**columns):
    count = len(next(iter(columns.values())))
    return make_rows(
        {
            "row_id": list(range(count)),
            "sample_index": [100 + row for row in range(count)],
            "data_source": ["math", "chat", "chat"][:count],
            **{name: torch.tensor(values) for name, values in columns.items()},
            "rule_info": [{"acc": 1.0}, {}, {}][:count],
        }
    )


def test_the_weights_of_its_data_source_make_the_score_of_a_row():
    ctx = context(
        "+reward_model.weights={math:{rule:1},c*:{rule:{weight:1,low:-1,high:1},helpful:3}}",
        "+reward_model.reward_kwargs.normalize_weights=True",
    )
    rows = scored_rows(rule=[0.5, -1.0, 1.0], helpful=[9.0, 0.0, 1.0])
    out = combine_rewards(ctx, rows)
    assert out["score"].tolist() == [0.5, 0.0, 1.0]
    assert objects(out, "reward_info")[0] == {"rule": 0.5, "helpful": 9.0, "rule/acc": 1.0}
    metrics = ctx.metrics.values()
    assert metrics["reward/chat/mean"] == 0.5 and metrics["reward/math/helpful/mean"] == 9.0
    plain = combine_rewards(context(), rows)
    assert plain["score"].tolist() == [9.5, -1.0, 2.0]


def test_a_data_source_without_weights_is_named():
    weights = RewardWeights({"math": {"rule": 1}}, ("rule",), False)
    with pytest.raises(ConfigError, match=r"'chat' has no weights: .* knows math"):
        weights.parts("chat")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            [1.0, float("nan"), float("inf")],
            "reads 'helpful'.* 2 of 3 .*sample_index 101 .*'chat'.* with nan",
        ),
        ([[1.0], [2.0], [3.0]], r"scores of shape \[3, 1\] for 3 responses"),
    ],
)
def test_a_reward_that_is_no_number_is_named_with_its_sample(column, message):
    with pytest.raises(RewardError, match=message):
        combine_rewards(context(), scored_rows(rule=[0.0, 0.0, 0.0], helpful=column))


def test_the_score_of_a_custom_node_is_checked(tmp_path):
    code = tmp_path / "mine.py"
    code.write_text("def score(ctx, rows):\n    return ctx.options['out']\n")
    node = NodePlan("mine", 0, (), "custom", None, f"{code}:score", {}, {})
    rows = make_rows({"row_id": torch.tensor([7, 8])})
    for column, message in (([1.0, float("nan")], "row_id 8 with nan"), ([1.0], "shape .1. for 2 responses")):
        ctx = context(options={"out": make_rows({"score": torch.tensor(column)})})
        ctx.writes = ("score",)
        with pytest.raises(RewardError, match=f"node 'total' .*{message}"):
            find_op(node)(ctx, rows)


def test_a_rank_without_rows_has_no_scores():
    named_ctx = context()
    named_ctx.writes = ("helpful", "helpful_info")
    none = make_rows({"score": torch.zeros(0), "reward_info": [], "sample_index": [], "data_source": []})
    helpful = finished(named_ctx, none, none)
    assert set(helpful.keys()) == {"helpful", "helpful_info"} and len(helpful) == 0
    rows = make_rows(
        {
            "data_source": [],
            "row_id": [],
            "sample_index": [],
            "helpful": torch.zeros(0),
            "helpful_info": [],
        }
    )
    out = combine_rewards(context(), rows)
    assert len(out) == 0 and objects(out, "reward_info") == []
