"""An op of a kind of its own: a reward that asks a model and the reward functions.

dag.custom_pipeline_fn=examples/extend/dag.py:with_fluency
"""

from tensordict import TensorDict

from siirl.data.rows import make_rows, objects
from siirl.engines.train.base import TrainEngine
from siirl.nodes.context import OpContext, declare_op
from siirl.nodes.function_reward import finished
from siirl.rewards.scorer import RewardScorer

WEIGHT = 0.1


@declare_op(
    reads=(
        "row_id",
        "sample_index",
        "raw_prompt",
        "data_source",
        "ground_truth",
        "extra_info",
        "prompt_ids",
        "prompt_length",
        "response_ids",
        "response_length",
        "response_mask",
    ),
    writes=("score", "reward_info"),
    model="ref",
    needs=("engine", "scorer"),
)
def fluent_reward(
    ctx: OpContext, rows: TensorDict, *, engine: TrainEngine, scorer: RewardScorer
) -> TensorDict:
    """score [B]: that of the reward function, and WEIGHT x the reference's mean log-prob of a token.

    Collective over the reference's ranks, while the scorer's processes work.
    """
    pending = scorer.submit(rows)
    log_prob_BT = engine.compute(rows, ("log_prob",), 1.0)["log_prob"]
    mask_BT = rows["response_mask"]
    mean_B = (log_prob_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)
    scored = pending.result()
    rule_B = scored["score"]
    infos = [
        {**(info or {}), "rule": rule, "fluency": mean}
        for info, rule, mean in zip(
            objects(scored, "reward_info"), rule_B.tolist(), mean_B.tolist(), strict=True
        )
    ]
    return finished(ctx, rows, make_rows({"score": rule_B + WEIGHT * mean_B, "reward_info": infos}))
