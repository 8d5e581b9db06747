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


BEATS = {"rock": "scissors", "scissors": "paper", "paper": "rock"}


class RockPaperScissors:
    """Both say a word at once. 1 for the word that beats the other's, -1 for the other, -3 for a word that is
    none of the three. Whatever a player prefers, some word beats it.

    A row with an `opponent` in its extra_info is a game against that word, whatever player 1 says.
    """

    def reset(self, task, seed):
        """Nothing is shown."""
        self.scripted = (task.get("extra_info") or {}).get("opponent")
        return Observation("")

    def step(self, actions):
        """Both have spoken."""
        own, other = (" ".join(actions[player].split()[:1]) for player in (0, 1))
        other = self.scripted or other
        return StepResult("", {0: self.earned(own, other), 1: self.earned(other, own)}, True)

    def earned(self, said, other):
        """By one player."""
        if said not in BEATS:
            return -3.0
        return float(BEATS[said] == other or other not in BEATS) - float(BEATS.get(other) == said)


class Tournament(RockPaperScissors):
    """Several say a word at once, and each plays against others with it: what it earns is the mean of these
    games, each with a weight."""

    def __init__(self, weights):
        """weights: {"0-1": 2.0, ...}: what a game of two players counts; those that are not named do not
        play."""
        self.weights = {tuple(map(int, pair.split("-"))): weight for pair, weight in weights.items()}

    def step(self, actions):
        """All have spoken."""
        words = {player: " ".join(said.split()[:1]) for player, said in actions.items()}
        earned, weight_of = dict.fromkeys(words, 0.0), dict.fromkeys(words, 0.0)
        for (one, other), weight in self.weights.items():
            for player, against in ((one, other), (other, one)):
                earned[player] += weight * self.earned(words[player], words[against])
                weight_of[player] += weight
        rewards = {player: earned[player] / (weight_of[player] or 1.0) for player in words}
        return StepResult("", rewards, True)


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
