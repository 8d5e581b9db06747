"""Workflows of your own, in Python: GRPO with a bonus and own advantages, or with a reward that asks a model.

dag.custom_pipeline_fn=examples/extend/dag.py:with_bonus
dag.custom_pipeline_fn=examples/extend/dag.py:with_fluency
"""

from pathlib import Path

from siirl.dag.spec import DagBuilder, DagSpec

NODE = Path(__file__).with_name("node.py")


def with_bonus() -> DagSpec:
    """rollout -> reward, bonus -> advantages -> training."""
    dag = DagBuilder("with_bonus", "a bonus for short responses")
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    reward = dag.node("reward", "COMPUTE", "REWARD", dependencies=[rollout])
    bonus = dag.node(
        "bonus",
        "COMPUTE",
        dependencies=[rollout],
        executable_ref=f"{NODE}:short_bonus",
        reads=["response_length"],
        writes=["bonus"],
        config={"weight": 0.05},
    )
    advantages = dag.node(
        "advantages",
        "COMPUTE",
        dependencies=[reward, bonus],
        executable_ref=f"{NODE}:add_bonus",
        reads=["score", "bonus", "response_mask"],
        writes=["advantage"],
    )
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantages])
    return dag.build()


def with_fluency() -> DagSpec:
    """rollout -> a reward that asks the reference model, too -> advantages -> training."""
    dag = DagBuilder("with_fluency", "a reward that asks the reference model, too")
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    reward = dag.node(
        "reward",
        "MODEL_INFERENCE",
        "REWARD",
        dependencies=[rollout],
        executable_ref=f"{NODE.with_name('op.py')}:fluent_reward",
    )
    advantages = dag.node("advantages", "COMPUTE", "ADVANTAGE", dependencies=[reward])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantages])
    return dag.build()
