"""Environments of the examples: a task that needs two, and a game of two. Words are single tokens."""

from siirl.agents.environments import Observation, StepResult


class Doors:
    """The reasoner (agent 0) sees which door is right and says something; the actor (agent 1), who hears only
    that, names one. Both get 1 if it is right. Neither can win alone. The first word counts.
    """

    def __init__(self, doors: int = 4):
        self.doors = doors

    def reset(self, task, seed):
        """The door is the row's ground truth."""
        self.right = task["ground_truth"]
        return Observation({0: f"door {self.right}", 1: "open"})

    def step(self, actions):
        """The actor has spoken after the reasoner: the episode is over."""
        won = float(actions[1].split()[:1] == [self.right])
        return StepResult(rewards={0: won, 1: won}, done=True, info={"won": won})


class Nim:
    """Two take 1 or 2 from a pile in turn; who takes the last wins. 1 for the winner, -1 for the other.

    Whoever faces a multiple of 3 loses to a player that always leaves one. A move that is no "1" or "2", or
    more than there is, loses at once. info: whether the last move was right, where one was.
    """

    def reset(self, task, seed):
        """The pile is the row's ground truth."""
        self.pile = int(task["ground_truth"])
        return Observation({0: f"pile {self.pile}"})

    def step(self, actions):
        """One player moves."""
        ((player, said),) = actions.items()
        other = 1 - player
        said = " ".join(said.split()[:1])
        legal = said in ("1", "2") and int(said) <= self.pile
        info = {"right": float(legal and (self.pile - int(said)) % 3 == 0)} if self.pile % 3 else {}
        if not legal:
            return StepResult("", {player: -1.0}, True, {**info, "illegal": 1.0})
        self.pile -= int(said)
        if self.pile == 0:
            return StepResult("", {player: 1.0, other: -1.0}, True, info)
        return StepResult({other: f"pile {self.pile}"}, 0.0, False, info)
