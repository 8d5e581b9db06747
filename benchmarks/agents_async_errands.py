"""The environment of agents_async.py: 1 to 12 turns, after each of which a tool takes its time."""

import random
import time


class Errands:
    """Over after a number of turns that its seed says, each answered by a tool of log-normal latency."""

    def __init__(self, mean_s: float, most_turns: int = 12, shown_words: int = 4):
        """mean_s: of the latency, whose tail (one call in a thousand) is 13 times as long. shown_words: of an
        answer.
        """
        self._mean_s, self._most_turns, self._shown_words = mean_s, most_turns, shown_words

    def reset(self, task, seed):
        """Nothing is shown before the first turn."""
        self._rng = random.Random(seed)
        self._left = self._rng.randint(1, self._most_turns)
        return ""

    def step(self, actions):
        """Wait as the tool would; 1 for an answer that begins with a letter of the first half."""
        time.sleep(self._mean_s * self._rng.lognormvariate(-0.5, 1.0))
        self._left -= 1
        won = float(actions[0].strip()[:1] < "n")
        said = self._rng.choices(range(512), k=self._shown_words)
        return "".join(f"{chr(97 + i % 26)}{i:x} " for i in said), won, self._left == 0
