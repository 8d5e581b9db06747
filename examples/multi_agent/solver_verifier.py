"""Two policies that need each other: the larger of two numbers, of which each sees one.

The solver reads "larger of 3 ?" and proposes a word; the verifier reads "larger of PROPOSAL 5 ?", where 5 is
the number that it alone sees, and answers.
"""


def pre_process(messages, episode):
    """The solver sees the question as it is, the verifier what the solver said beside its own number."""
    if episode.speaker == 0:
        return messages
    number = episode.task["extra_info"]["numbers"][1]
    return [{"role": "user", "content": f"larger of {episode.last_turn(0).content} {number} ?"}]


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The verifier: 1 for the right answer. The solver: half for that, half for saying its number, without
    which it would have no signal for as long as the verifier does not listen."""
    proposal, answer = (said["content"] for said in extra_info["conversation"] if said["agent"] is not None)
    team, own = float(answer == ground_truth), float(proposal == str(extra_info["numbers"][0]))
    if extra_info["agent"] == 0:
        return {"score": (own + team) / 2, "accuracy": own}
    return {"score": team, "accuracy": team}


def alone(data_source, solution_str, ground_truth, extra_info):
    """The reward of a single agent that sees what the solver sees, and answers."""
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "accuracy": right}
