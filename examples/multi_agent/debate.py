"""Two debaters of one policy, each with half of the evidence: which of two numbers is larger?

The first opens with its number, the second answers, and the last statement decides; so it is with more rounds
(max_turns in dag_templates/debate.yaml). The data is that of solver_verifier.py.
"""


def pre_process(messages, episode):
    """The debater's side, the question with its own number, and what was said so far."""
    number = episode.task["extra_info"]["numbers"][episode.speaker]
    side = {"role": "system", "content": ("first", "second")[episode.speaker]}
    return [side, {"role": "user", "content": f"larger of {number} ?"}, *messages[1:]]


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The judge: half for the verdict, which both debaters share, half for the share of one's own statements
    that are right. An opening is right if it states one's number, all others if they name the larger one."""
    turns = [said for said in extra_info["conversation"] if said["agent"] is not None]
    wanted = [str(extra_info["numbers"][0]), *[ground_truth] * (len(turns) - 1)]
    right = [float(said["content"] == truth) for said, truth in zip(turns, wanted, strict=True)]
    own = [value for value, said in zip(right, turns, strict=True) if said["agent"] == extra_info["agent"]]
    return {"score": (right[-1] + sum(own) / len(own)) / 2, "accuracy": right[-1]}
