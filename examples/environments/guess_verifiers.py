"""An environment of verifiers (before 0.4): guess a number, with hints. Right at the first try is worth 1."""

import verifiers as vf
from datasets import Dataset


def said(completion) -> list[str]:
    return [message["content"].strip() for message in completion if message["role"] == "assistant"]


def found(completion, answer) -> float:
    """1 in the first turn, 0.75 in the second, and so on."""
    guesses = said(completion)
    return 1.25 - 0.25 * len(guesses) if guesses[-1] == answer else 0.0


class Number(vf.MultiTurnEnv):
    """Tells whether the number is higher or lower, until it is named."""

    @vf.stop
    async def named(self, state, **kwargs):
        """The end of an episode."""
        turns = [dict(message) for step in state["trajectory"] for message in step["completion"]]
        return state["answer"] in said(turns)

    async def env_response(self, messages, state, **kwargs):
        """The hint that follows a guess."""
        guess = said(map(dict, messages))[-1]
        hint = "guess" if not guess.isdigit() else "higher" if int(guess) < int(state["answer"]) else "lower"
        return [{"role": "user", "content": hint}]


def load_environment(num_examples: int = 1600, seed: int = 0):
    """What verifiers calls."""
    rows = [
        {"prompt": [{"role": "user", "content": "number ?"}], "answer": str((seed + 3 * row) % 7)}
        for row in range(num_examples)
    ]
    return Number(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[found]), max_turns=4)
