"""A workflow of your own, in Python: GRPO with a bonus node and own advantages.

dag.custom_pipeline_fn=examples/extend/dag.py:with_bonus
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
