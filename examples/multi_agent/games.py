"""Environments of the examples: a task that needs two, and a game of two. Words are single tokens."""

import random

from siirl.agents.environments import Observation, StepResult


class Doors:
    """Rooms one after another; one door of each leads on, any other ends the game. The first word counts.

    The reasoner (agent 0) reads which door it is and says something; the actor (agent 1), who hears only
    that, names one, and gets its share of 1 for the right door. The reasoner gets half a share for naming it:
    words mean nothing to models with random weights, and no one listens to one who says nothing.
    """

    def reset(self, task, seed):
        """The doors are the row's ground truth, one word for each room."""
        self.doors = task["ground_truth"].split()
        self.share = 1 / len(self.doors)
        return Observation({0: f"door {self.doors[0]}"})

    def step(self, actions):
        """The actor has spoken, after the reasoner."""
        door = self.doors.pop(0)
        named, opened = (actions[agent].split()[:1] == [door] for agent in (0, 1))
        rewards = {0: self.share / 2 * named, 1: self.share * opened}
        if not (opened and self.doors):
            return StepResult("", rewards, True)
        return StepResult({0: f"door {self.doors[0]}"}, rewards, False)


class Luck:
    """Two turns: any first word, which draws a door and luck; then the door is to be named.

    What is earned is that luck, of deviation 3, and 1 for the right door. So episodes with other first words
    say little of the second one. info: whether that was right.
    """

    replayable = True

    def reset(self, task, seed):
        """Nothing is shown."""
        self.seed, self.door = seed, None
        return Observation("")

    def step(self, actions):
        """The player has spoken."""
        word = " ".join(actions[0].split()[:1])
        if self.door is None:
            rng = random.Random(f"{self.seed} {word}")
            self.luck, self.door = rng.gauss(0, 3), str(rng.randrange(4))
            return StepResult(f"door {self.door}")
        right = float(word == self.door)
        return StepResult("", self.luck + right, True, {"right": right})


OPPONENTS = {
    "random": lambda pile, rng: rng.randint(1, min(2, pile)),
    "perfect": lambda pile, rng: pile % 3 or 1,
}
"""Scripted players of Nim: what each takes from a pile."""


class Nim:
    """Two take 1 or 2 from a pile in turn; who takes the last wins. 1 for the winner, -1 for the other.

    Whoever faces a multiple of 3 loses to a player that always leaves one. A move that is no "1" or "2", or
    more than there is, loses at once. info: whether the last move was right, where one was.

    A row with an `opponent` in its extra_info is a game against that scripted player: the policy is player
    `side`, and what it says on the other side is not heard.
    """

    def reset(self, task, seed):
        """The pile is the row's ground truth."""
        extra = task.get("extra_info") or {}
        self.scripted = OPPONENTS.get(extra.get("opponent"))
        self.side = extra.get("side")
        self.rng = random.Random(seed)
        self.pile = int(task["ground_truth"])
        return Observation({0: f"pile {self.pile}"})

    def step(self, actions):
        """One player moves."""
        ((player, said),) = actions.items()
        other = 1 - player
        if self.scripted and player != self.side:
            said = str(self.scripted(self.pile, self.rng))
        said = " ".join(said.split()[:1])
        legal = said in ("1", "2") and int(said) <= self.pile
        info = {"right": float(legal and (self.pile - int(said)) % 3 == 0)} if self.pile % 3 else {}
        if not legal:
            return StepResult("", {player: -1.0}, True, {**info, "illegal": 1.0})
        self.pile -= int(said)
        if self.pile == 0:
            return StepResult("", {player: 1.0, other: -1.0}, True, info)
        return StepResult({other: f"pile {self.pile}"}, 0.0, False, info)
