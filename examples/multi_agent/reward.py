"""The score of each agent: its part of what the team has achieved ("team"), and what it did for that.

What an environment gives counts by itself (algorithm.credit.turn): the scores of its games are 0, and what is
said besides are metrics.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """score and what else is measured, of an agent in an episode, or of a plain answer."""
    if "conversation" not in extra_info:
        team = float(solution_str.strip() == ground_truth)
        return {"score": team, "team": team}
    if data_source == "league" or data_source.startswith("against_"):
        return of_cycle(extra_info["conversation"], extra_info["agent"])
    known = {"reasoner_actor": of_doors, "planner_worker": of_shop, "tree": of_luck}
    score = known.get(data_source, of_nim)
    return score(extra_info["conversation"], extra_info["agent"], ground_truth, extra_info)


def of_doors(conversation, agent, ground_truth, extra_info):
    """team: the share of doors that were opened, which is what the environment gave the actor."""
    return {"score": 0.0, "team": sum(m["reward"] for m in conversation if m["agent"] == 1)}


def of_luck(conversation, agent, ground_truth, extra_info):
    """right: whether the door was named; luck is not told."""
    shown, said = (
        [m["content"].split() for m in conversation if (m["agent"] is None) == other] for other in (1, 0)
    )
    return {"score": 0.0, "right": float(said[-1][:1] == shown[-1][1:2])}


def of_cycle(conversation, agent):
    """earned: by the player, whose policy may speak for its opponent, too; and what it says."""
    if agent:
        return {"score": 0.0}
    own = next(message for message in conversation if message["agent"] == 0)
    said = " ".join(own["content"].split()[:1])
    says = {f"says_{word}": float(said == word) for word in ("rock", "paper", "scissors")}
    return {"score": 0.0, "earned": own["reward"], **says}


def of_shop(conversation, agent, ground_truth, extra_info):
    """Half for the right price. The rest of the planner's for naming the thing; of the worker's for calling
    what the planner says and for saying what the tool says. Any call and any number are a first step."""
    plan, *turns = [message["content"].strip() for message in conversation if message["agent"] is not None]
    answer = turns[-1]
    prices = [m["content"] for m in conversation if m["role"] == "tool" and "error" not in m]
    team = float(answer == ground_truth)
    if agent == 0:
        named = float(plan == extra_info["wanted"])
        return {"score": (team + named) / 2, "team": team, "named": named}
    followed = bool(prices) * (1.0 if f'"{plan}"' in turns[0] else 0.2)
    repeated = 1.0 if answer in prices else 0.2 * answer.isdigit()
    own = {"followed": followed, "repeated": repeated}
    return {"score": team / 2 + sum(own.values()) / 4, "team": team, **own}


def of_nim(conversation, agent, ground_truth, extra_info):
    """right: the share of right moves of both players, where there was one (games.py).

    Against a scripted opponent: whether the policy has won, told by the row of its side.
    """
    if extra_info.get("opponent"):
        won = sum(message["reward"] for message in conversation if message["agent"] == agent) > 0
        return {"score": 0.0} | ({"won": float(won)} if agent == extra_info["side"] else {})
    moves, pile = [], 0
    for message in conversation:
        words = message["content"].split()
        if message["agent"] is None and words[:1] == ["pile"]:
            pile = int(words[1])
        elif message["agent"] is not None and pile % 3:
            moves.append(float(words[:1] == [str(pile % 3)]))
    return {"score": 0.0, "right": sum(moves) / max(len(moves), 1)}
