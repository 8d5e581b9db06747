"""A reward function of your own.

custom_reward_function.path=examples/extend/reward.py custom_reward_function.name=digit_reward
"""

from typing import Any


def digit_reward(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None
) -> dict[str, float]:
    """1 for the right digit, a tenth for any digit; further numbers appear in the metrics."""
    words = solution_str.replace("<eos>", " ").split()
    first = words[0] if words else ""
    right = float(first == str(ground_truth))
    return {"score": max(right, 0.1 * first.isdigit()), "acc": right}
