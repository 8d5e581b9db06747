"""Rewards of prompts that reasoning-gym makes: its own scores. No torch."""

import ast
from typing import Any

from siirl.errors import DataError
from siirl.rewards.reward_registry import register_reward


@register_reward("reasoning_gym")
def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, answer_tag: str = "answer"
) -> float:
    """What the data set's own score_answer gives: between 0 and 1.

    The answer is what the last <answer>...</answer> holds, or another answer_tag, else the whole response.
    """
    from siirl.data.reasoning_gym_rows import dataset_of  # pyarrow, which other reward workers do not need

    row = extra_info if isinstance(extra_info, dict) else {}
    if not {"dataset", "entry"} <= row.keys():
        raise DataError(
            f"the row of {data_source!r} is none that reasoning_gym:TASK?size=N&seed=N makes: its extra_info "
            "lacks dataset and entry"
        )
    dataset = dataset_of(row["dataset"])
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(solution_str, answer_tag)
    answer = solution_str.strip() if answer is None else answer
    return float(dataset.score_answer(answer, ast.literal_eval(row["entry"])))
