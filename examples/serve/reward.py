"""The reward of the cookbook's recipe for GSM8K: 1 for the right number in a box, less a tenth without a box.

A response of one token ends by its length, which the recipe counts as no box.
"""

import re

BOXED = re.compile(r"\\boxed\{(\d+)\}")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    """verl's interface."""
    found = BOXED.fullmatch(solution_str.strip())
    return float(found is not None and found[1] == ground_truth) - 0.1
