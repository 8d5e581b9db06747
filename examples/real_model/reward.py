"""Rewards of the three runs: 1 for the right number, else 0."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The first number of what was said last; of several agents, the last one's: they win or lose together."""
    said = [turn["content"] for turn in (extra_info or {}).get("conversation", []) if turn["agent"] is not None]
    numbers = re.findall(r"\d+", said[-1] if said else solution_str)
    return float(numbers[:1] == [ground_truth])


def pre_process(messages, episode):
    """What the checker reads: the task with the solver's answer, to be answered once more."""
    if episode.speaker == 0:
        return messages
    question = messages[0]["content"].rsplit("\n", 1)[-1]
    proposal = episode.last_turn(0).content.strip()
    example = "41 + 27 = 58 is wrong: 41 + 27 = 68\n9 + 4 = 13 is right: 9 + 4 = 13"
    return [{"role": "user", "content": f"{example}\n{question} {proposal} is"}]
