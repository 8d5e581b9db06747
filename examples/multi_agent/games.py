"""Environments of the examples: a task that needs two, and a game of two. Words are single tokens."""

from siirl.agents.environments import Observation, StepResult


class Doors:
    """Rooms one after another; one door of each leads on, any other ends the game. The first word counts.

    The reasoner (agent 0) reads which door it is and says something; the actor, who hears only that, names
    one, and gets its share of 1 for the right door. The reasoner gets half a share for naming it: words mean
    nothing to models with random weights, and no one listens to one who says nothing. actor: who opens doors;
    0 plays alone, and sees no door.
    """

    def __init__(self, actor: int = 1):
        self.actor = actor

    def reset(self, task, seed):
        """The doors are the row's ground truth, one word for each room."""
        self.doors = task["ground_truth"].split()
        self.share = 1 / len(self.doors)
        return self._clue()

    def step(self, actions):
        """The actor has spoken, after the reasoner."""
        right = self.doors.pop(0)
        named = {agent: said.split()[:1] == [right] for agent, said in actions.items()}
        rewards = {
            agent: self.share * was / (1 if agent == self.actor else 2) for agent, was in named.items()
        }
        done = not (named[self.actor] and self.doors)
        return StepResult("" if done else self._clue().texts, rewards, done, {"named": named})

    def _clue(self):
        return Observation({1 - self.actor: f"door {self.doors[0]}"})


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
