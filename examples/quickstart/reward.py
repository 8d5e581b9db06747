"""The quickstart's reward function: what a user writes to train on a task of their own."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 for the right digit, 0.1 for any single digit (a first step to climb), 0 otherwise."""
    answer = solution_str.strip()
    right = answer == ground_truth
    return {
        "score": 1.0 if right else 0.1 if answer.isdigit() and len(answer) == 1 else 0.0,
        "accuracy": float(right),
    }
