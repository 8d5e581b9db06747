"""What a model of few words reads and says in TextArena's Nim: "piles 2 3", and "1-2" for two of pile 1."""

import re


def show(observation, info):
    """The piles, as the game told them last."""
    piles = dict(re.findall(r"pile (\d+): (\d+)", observation))  # a later one stands for an earlier one
    return " ".join(["piles", *piles.values()])


def read(text, info):
    """The move as the game wants it: [1 2]."""
    pile, _, count = text.strip().partition("-")
    return f"[{pile} {count}]"
