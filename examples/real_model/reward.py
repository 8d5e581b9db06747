"""The reward of the three runs: 1 for the right number and nothing else, else 0."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """What was said last; of several agents, by the last one: they win or lose together."""
    said = [
        turn["content"] for turn in (extra_info or {}).get("conversation", []) if turn["agent"] is not None
    ]
    return float((said[-1] if said else solution_str).strip() == ground_truth)


def pre_process(messages, episode):
    """What the checker reads: the task with the solver's answer, to be answered once more."""
    if episode.speaker == 0:
        return messages
    question = messages[0]["content"].rsplit("\n", 1)[-1]
    proposal = episode.last_turn(0).content.strip()
    return [{"role": "user", "content": f"41 + 27 = 58? 68\n9 + 4 = 13? 13\n{question} {proposal}?"}]
