"""What the four agents of four_agents.yaml see and are rewarded for: the larger of two numbers, handed on."""


def pre_process(messages, episode):
    """The solver sees the question, each other one its number and what the one before it said."""
    if episode.speaker == 0:
        return messages
    number = episode.task["extra_info"]["numbers"][1]
    return [
        {"role": "user", "content": f"larger of {episode.last_turn(episode.speaker - 1).content} {number} ?"}
    ]


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Half for the last answer, half for one's own; the solver's own is its number."""
    said = [turn["content"] for turn in extra_info["conversation"] if turn["agent"] is not None]
    agent = extra_info["agent"]
    wanted = str(extra_info["numbers"][0]) if agent == 0 else ground_truth
    team, own = float(said[-1] == ground_truth), float(said[agent] == wanted)
    return {"score": (own + team) / 2, "accuracy": own}
