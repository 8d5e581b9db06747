"""The reward of benchmarks/grpo_cpu.py, the same function for siirl and for TRL."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Share of words that are the right digit: differs between samples at every response length."""
    words = solution_str.split()
    return sum(word == ground_truth for word in words) / max(len(words), 1)
