"""Prompts of an asynchronous rollout: what there is of their responses, and who leaves."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensordict import TensorDict

from siirl.data.buffer import ORDER
from siirl.data.completions import Completion, Key, PartialCompletion, Request, SamplingParams
from siirl.data.rows import seen_of
from siirl.data.seen import Seen
from siirl.engines.rollout.base import RolloutEngine, RolloutStream
from siirl.errors import EpisodeFailed, RolloutError
from siirl.nodes.in_flight import InFlight

POLL_S = 0.5


@dataclass(frozen=True)
class FinishedGroups:
    """Groups that are complete and leave: what the ranks of a shard tell each other."""

    orders: list[int]
    responses: list[PartialCompletion]
    """n of each group, in the order of the groups."""

    num_restarted: int
    """Groups that were restarted, as a token of theirs was older than the bound."""


class RolloutsInFlight(InFlight[PartialCompletion]):
    """The prompts of one shard that have been loaded and not been given, with their responses so far.

    The first rank of a shard, which has the engine's stream, keeps the responses.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        n: int,
        max_lag: int,
        surplus: float,
        batch_size: int,
        step_size: int | None = None,
        stale: str = "wait",
        runs_in_background: bool = False,
    ) -> None:
        """n: responses of each prompt. runs_in_background: the engine goes on between the steps, while others
        train.

        The rest as of InFlight.
        """
        super().__init__(max_lag, surplus, batch_size, step_size, stale)
        self._engine, self._n, self._runs_in_background = engine, n, runs_in_background
        self._stream: RolloutStream | None = None  # while requests may be pending
        self._running: dict[Key, int] = {}  # requests that are -> the step in which they were submitted
        self._version_of: dict[int, int] = {}  # step -> version of the engine's weights
        self._seeds: dict[int, int] = {}  # ORDER of a group -> seed of its prompt

    def admit(self, rows: TensorDict, step: int, seed_of: Callable[[int, int], int]) -> None:
        """Take the prompts that were loaded, whose group_ids go on from batch to batch.

        seed_of: (number of the batch, group_id in it) -> seed; the first batch of a run has number 1.
        """
        for batch, orders in self._admitted(rows, step):
            for slot, order in orders.items():
                self._seeds[order] = seed_of(batch, slot)
                self._start_over(order)

    def sample(self, params: SamplingParams, step: int) -> FinishedGroups:
        """Let responses go on until a batch of groups can leave. On the first rank of the shard.

        RolloutError as of the engine's stream, also for a prompt that cannot run. What is not complete is
        paused, unless the engine decodes on.
        """
        kept = {k: version for k, version in self._version_of.items() if step - k <= self._max_lag}
        self._version_of = kept | {step: self._engine.weight_version}
        num_restarted = self._restart_stale(params.max_tokens, step)
        active = self._active()
        unfinished = {
            _key(order, number): order
            for order in active
            for number, one in enumerate(self.work[order])
            if one.finish_reason is None
        }
        num_open = dict.fromkeys(active, 0) | dict(Counter(unfinished.values()))
        missing = set(unfinished)

        def ended(keys: Iterable[Key]) -> bool:
            """Note responses that have completed, maybe said twice; whether a batch can leave."""
            for key in missing.intersection(keys):
                missing.remove(key)
                num_open[unfinished[str(key)]] -= 1
            oldest = lambda: {order: self._oldest(order, step) for order in num_open}  # noqa: E731
            return self._may_end(num_open, oldest, step)

        if self._stream is None:
            self._stream = self._engine.stream(
                lambda keys: bool(keys) and ended(keys), runs_in_background=self._runs_in_background
            )
        self._submit([key for key in unfinished if key not in self._running], params, step)
        while not ended(()):
            self._require(self._stream)
            ended(self._extend(self._stream.collect(POLL_S)))
        if not self._runs_in_background:
            ended(self.pause())
        chosen = self._chosen(num_open, step)
        return FinishedGroups(chosen, [one for order in chosen for one in self.work[order]], num_restarted)

    def pause(self) -> list[Key]:
        """Take back from the engine what is not complete; which responses have completed meanwhile."""
        if self._stream is None:
            return []
        stream, self._stream = self._stream, None
        return self._extend(stream.pause())

    def _submit(self, keys: Sequence[Key], params: SamplingParams, step: int) -> None:
        assert self._stream is not None
        prompts, seen, one_of_n = self._prompts(), self._seen(), replace(params, n=1)
        wanted = []
        for key in keys:
            order, number = _place(key)
            seed = self._seeds[order]
            whole = Request(key, prompts[order], one_of_n, seed, number, seen=seen[order])
            wanted.append(self.work[order][number].rest(whole))
        self._stream.submit(wanted)
        self._running |= dict.fromkeys(keys, step)

    def _extend(self, answers: Sequence[tuple[Key, Completion | EpisodeFailed]]) -> list[Key]:
        """Add to responses what was sampled of them; which of them are complete."""
        ended = []
        for key, answer in answers:
            del self._running[key]
            order, number = _place(key)
            one = self.work[order][number]
            one.extend(_complete(answer), self._step_of)
            if one.finish_reason is not None:
                ended.append(key)
        return ended

    def _step_of(self, version: int) -> int:
        """The last step whose weights are of a version; new ones are those of the next step."""
        steps = [step for step, known in self._version_of.items() if known == version]
        return max(steps, default=max(self._version_of) + 1)

    def give(self, taken: FinishedGroups) -> TensorDict:
        """The prompts of the groups that leave, numbered over all shards. On all ranks of the shard."""
        for order in taken.orders:
            self.work.pop(order, None)
            self._seeds.pop(order, None)
        return self.give_prompts(taken.orders)

    def state(self) -> dict[str, Any]:
        """See RowBuffer; what runs is taken back."""
        self.pause()
        responses = [
            [{"seed": self._seeds[order]} | one.state() for one in self.work[order]]
            for order in self._orders()
        ]
        return super().state() | {"responses": responses}

    def load_state(self, states: Sequence[dict[str, Any]], shard: int, num_shards: int) -> None:
        """See InFlight. Groups with another number of responses than n restart."""
        super().load_state(states, shard, num_shards)
        self.work = {order: self.work[order] for order in self._orders()}
        self._seeds = {order: self._seeds[order] for order in self._orders()}

    def _load_work(self, states: Sequence[dict[str, Any]]) -> None:
        """See InFlight."""
        for state in states:
            orders = sorted(set(state["columns"].get(ORDER, {"values": []})["values"]))
            for order, group in zip(orders, state.get("responses", ()), strict=True):
                self._seeds[order] = group[0]["seed"]
                self.work[order] = [PartialCompletion.of_state(one) for one in group]
                if len(group) != self._n:
                    self._start_over(order)

    def _prompts(self) -> dict[int, list[int]]:
        """ORDER -> the tokens of its prompt."""
        if self.rows is None:
            return {}
        columns = (self.rows[name].tolist() for name in (ORDER, "prompt_ids", "prompt_length"))
        return {order: ids[len(ids) - length :] for order, ids, length in zip(*columns, strict=True)}

    def _seen(self) -> dict[int, Seen]:
        """ORDER -> the images of its prompt."""
        if self.rows is None:
            return {}
        return dict(zip(self.rows[ORDER].tolist(), seen_of(self.rows), strict=True))

    def _oldest(self, order: int, step: int) -> int:
        """The step of a group's oldest token, also of one that is not told yet; `step` if it has none."""
        return min(
            one.first_step or self._running.get(_key(order, number), step)
            for number, one in enumerate(self.work[order])
        )

    def _in_turn(self, orders: Sequence[int]) -> list[int]:
        """See InFlight."""
        return sorted(orders, key=lambda order: (self._oldest(order, sys.maxsize), order))

    def _too_old(self, step: int) -> list[int]:
        """See InFlight."""
        return self._engine.share(super()._too_old(step) if self._engine.leads else None)

    def _forget(self, orders: Sequence[int]) -> None:
        """See InFlight."""
        self._take_back(orders)
        for order in orders:
            del self.work[order], self._seeds[order]

    def _restart_stale(self, max_tokens: int, step: int) -> int:
        """Begin the groups anew that cannot be trained any more; how many they are.

        Where steps wait, none is older than the bound while it and the number of shards stay the same.
        """
        stale = [
            order
            for order, group in self.work.items()
            if self._oldest(order, step) < step - self._max_lag
            or any(one.finish_reason is None and len(one.token_ids) >= max_tokens for one in group)
        ]
        self._take_back(stale)
        for order in stale:
            self._start_over(order)
        return len(stale)

    def _start_over(self, order: int) -> None:
        """With the seed that it had."""
        self.work[order] = [PartialCompletion() for _ in range(self._n)]

    def _take_back(self, orders: Sequence[int]) -> None:
        """Have nothing of these groups run."""
        keys = {_key(order, i) for order in orders for i in range(self._n)} & self._running.keys()
        if keys:
            assert self._stream is not None
            self._extend(self._stream.pause(keys))

    def _require(self, stream: RolloutStream) -> None:
        if not stream.num_pending:
            raise RolloutError(
                f"rollout engine {self._engine.name!r}: {self._num_leaving} groups are wanted, "
                f"{len(self._orders())} are there, and no request runs."
            )


def _key(order: int, number: int) -> str:
    """Name of a response's request. number: among the responses of its prompt."""
    return f"{order}/{number}"


def _place(key: Key) -> tuple[int, int]:
    """The group of a request and the number of its response."""
    order, _, number = str(key).partition("/")
    return int(order), int(number)


def _complete(answer: Completion | EpisodeFailed) -> Completion:
    """An answer that is one; RolloutError for a prompt that cannot run."""
    if isinstance(answer, EpisodeFailed):
        raise RolloutError(str(answer))
    return answer
