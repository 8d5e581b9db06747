"""What responses and episodes that outlive a step have alike: a run of some shards, and its random cases."""

import json
from typing import Any, Self

from hypothesis import strategies as st

from siirl.data.loader import PromptLoader

CASES = st.tuples(
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.floats(0, 1),
    st.integers(1, 7),
)
"""Shards, groups a step, members of a group, max_lag, the share of it that is begun beyond a step, steps."""


class Prompts:
    """A dataset whose prompt number i is the token i + 1."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def rows(self, indices: Any) -> list[dict[str, Any]]:
        return [{"prompt_ids": [int(i) + 1], "prompt_length": 1, "sample_index": int(i)} for i in indices]


class Run:
    """What is in flight in a run on some shards, without the rest of it.

    read: prompts that the loader gives at once, if not those of a step.
    """

    def __init__(self, shards: int, batch: int, n: int, steps: int, prompts: int, read: int = 0) -> None:
        self.shards, self.batch, self.n, self.steps = shards, batch, n, steps
        self.loaders = [
            PromptLoader(Prompts(prompts), read or batch, s, shards, seed=3) for s in range(shards)
        ]
        self.kept: list[Any] = []
        """Of each shard what is in flight there."""
        self.step, self.trained, self.lags, self.restarted, self.dropped = 0, [], [], 0, []
        """trained: (prompt, what came of each member) of each group; dropped: of those sampled in vain."""
        self.given_up = self.partial = 0
        """Groups that are too old, and members that a step has left half sampled."""

    def advance(self) -> None:
        """One step."""
        raise NotImplementedError

    def finish(self) -> Self:
        while self.step < self.steps:
            self.advance()
        self.close()
        return self

    def close(self) -> None:
        """End what a step has left running."""

    def state(self) -> str:
        return json.dumps([[kept.state() for kept in self.kept], self.loaders[0].state_dict()])

    def resume(self, step: int, text: str) -> None:
        states, position = json.loads(text)
        self.step = step
        for shard, (kept, loader) in enumerate(zip(self.kept, self.loaders, strict=True)):
            kept.load_state(states, shard, self.shards)
            loader.load_state_dict(position)
