"""The reward of the colour-naming task."""

from typing import Any

COLOURS = ("red", "green", "blue", "yellow", "purple", "white", "black", "orange")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any
) -> dict[str, float]:
    """1 for the image's colour, 0.1 for another one (a first step to climb), 0 otherwise."""
    answer = solution_str.strip()
    right = answer == ground_truth
    return {"score": 1.0 if right else 0.1 if answer in COLOURS else 0.0, "accuracy": float(right)}
