"""The team's reward of an episode, which every agent gets; in self-play each player's own."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """From what the environment or the tools have said in the conversation of the episode."""
    conversation, agent = extra_info["conversation"], extra_info["agent"]
    if data_source == "planner_worker":
        answers = [message["content"] for message in conversation if message["role"] == "tool"]
        solved = float(ground_truth in answers)
        called = 0.1 * bool(answers) + 0.1 * any(not answer.startswith("Error") for answer in answers)
        return {"score": solved + called, "team": solved}  # first steps to climb: to call, and rightly
    own = sum(message["reward"] for message in conversation if message["agent"] == agent)
    if data_source == "self_play":
        return {"score": own, "right": right_moves(conversation)}
    return {"score": own, "team": own}


def right_moves(conversation):
    """The share of right moves where there was one: those that leave a multiple of 3 (see games.py)."""
    moves, pile = [], 0
    for message in conversation:
        words = message["content"].split()
        if message["agent"] is None and words[:1] == ["pile"]:
            pile = int(words[1])
        elif message["agent"] is not None and pile % 3:
            moves.append(float(words[:1] == [str(pile % 3)]))
    return sum(moves) / max(len(moves), 1)
