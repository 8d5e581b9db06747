"""The reward of grpo_gpu.py: cheap, and different for every response of a random model."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Share of the response's characters that are letters of the first half of the alphabet."""
    return sum(character.lower() in "abcdefghijklm" for character in solution_str) / max(len(solution_str), 1)
