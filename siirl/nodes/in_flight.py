"""Prompts of a rollout whose responses go on from step to step: what of them is there, and who leaves."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tensordict import TensorDict

from siirl.data.buffer import ORDER
from siirl.engines.rollout.base import (
    Completion,
    Key,
    Request,
    RolloutEngine,
    RolloutStream,
    SamplingParams,
)
from siirl.errors import EpisodeFailed, RolloutError
from siirl.nodes.deadlines import is_enough, leaving
from siirl.nodes.prompts_in_flight import PromptsInFlight

POLL_S = 0.5


@dataclass
class Response:
    """One response of a prompt, so far."""

    seed: int
    """Of its prompt."""

    number: int
    """Among the responses of its prompt."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    versions: list[int] = field(default_factory=list)
    """Of the weights that sampled each token."""

    first_step: int | None = None
    """The training step in which its first token was sampled."""

    last_step: int | None = None

    finish_reason: str | None = None
    """None: it goes on."""

    def extend(self, part: Completion, step: int) -> None:
        """What was sampled of it in a step."""
        if part.token_ids:
            self.token_ids += part.token_ids
            self.log_probs += part.log_probs
            self.versions += [part.weight_version] * len(part.token_ids)
            self.first_step, self.last_step = self.first_step or step, step
        self.finish_reason = None if part.finish_reason == "paused" else part.finish_reason


@dataclass
class Taken:
    """Groups that are complete and leave: what the ranks of a shard tell each other."""

    orders: list[int]
    responses: list[Response]
    """n of each group, in the order of the groups."""

    num_restarted: int
    """Groups that were begun anew, as a token of theirs was older than the bound."""

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def decode(cls, values: dict[str, Any]) -> "Taken":
        responses = [Response(**response) for response in values["responses"]]
        return cls(values["orders"], responses, values["num_restarted"])


class RolloutsInFlight(PromptsInFlight):
    """The prompts of one shard that have been loaded and not been given, with their responses so far.

    The first rank of a shard, which has the engine's stream, keeps the responses.
    """

    def __init__(self, engine: RolloutEngine, n: int, max_lag: int, surplus: float, batch_size: int) -> None:
        """n: responses of each prompt. The rest as of PromptsInFlight."""
        super().__init__(max_lag, surplus, batch_size)
        self._engine, self._n = engine, n
        self.responses: dict[int, list[Response]] = {}
        """ORDER of a group -> its n responses; on the first rank of the shard."""

    def admit(self, rows: TensorDict, step: int, seed_of: Callable[[int, int], int]) -> None:
        """Take the prompts that were loaded, whose group_ids go on from batch to batch.

        seed_of: (number of the batch, group_id in it) -> seed; the first batch of a run has number 1.
        """
        for batch, orders in self._admitted(rows, step):
            for slot, order in orders.items():
                seed = seed_of(batch, slot)
                self.responses[order] = [Response(seed, i) for i in range(self._n)]

    def sample(self, params: SamplingParams, step: int) -> Taken:
        """Let responses go on until a batch of groups can leave. On the first rank of the shard.

        RolloutError as of the engine's stream, also for a prompt that cannot run. What is not complete is
        paused.
        """
        num_restarted = self._restart_stale(params.max_tokens, step)
        active = self._active()
        prompts = self._prompts()
        unfinished = {
            f"{order}/{one.number}": (order, one)
            for order in active
            for one in self.responses[order]
            if one.finish_reason is None
        }
        num_open = dict.fromkeys(active, 0) | dict(Counter(order for order, _ in unfinished.values()))
        running = set(unfinished)

        def ended(keys: Iterable[Key]) -> bool:
            """Note responses that have completed, maybe said twice; whether a batch can leave."""
            for key in running.intersection(keys):
                running.remove(key)
                num_open[unfinished[str(key)][0]] -= 1
            return self._is_enough(num_open, step)

        stream = self._engine.stream(ended)
        stream.submit(
            [_request(key, prompts[order], one, params) for key, (order, one) in unfinished.items()]
        )
        while not ended(()):
            self._require(stream)
            for key, answer in stream.collect(POLL_S):
                unfinished[str(key)][1].extend(_complete(answer), step)
                ended([key])
        for key, answer in stream.pause():
            one = unfinished[str(key)][1]
            one.extend(_complete(answer), step)
            if one.finish_reason is not None:
                ended([key])
        return self._leave(num_open, step, num_restarted)

    def give(self, taken: Taken) -> TensorDict:
        """The prompts of the groups that leave, with the group_ids of a batch. On all ranks of the shard."""
        for order in taken.orders:
            self.responses.pop(order, None)
        return self.give_prompts(taken.orders)

    def state(self) -> dict[str, Any]:
        """See RowBuffer."""
        responses = [[asdict(one) for one in self.responses[order]] for order in self._orders()]
        return super().state() | {"responses": responses}

    def load_state(self, states: Sequence[dict[str, Any]], shard: int, num_shards: int) -> None:
        """See PromptsInFlight. Groups with another number of responses than n begin anew."""
        super().load_state(states, shard, num_shards)
        known: dict[int, list[Response]] = {}
        for state in states:
            orders = sorted(set(state["columns"].get(ORDER, {"values": []})["values"]))
            for order, group in zip(orders, state.get("responses", ()), strict=True):
                known[order] = [Response(**one) for one in group]
        self.responses = {order: known[order] for order in self._orders()}
        for order, group in self.responses.items():
            if len(group) != self._n:
                self.responses[order] = [Response(group[0].seed, i) for i in range(self._n)]

    def _prompts(self) -> dict[int, list[int]]:
        """ORDER -> the tokens of its prompt."""
        if self.rows is None:
            return {}
        columns = (self.rows[name].tolist() for name in (ORDER, "prompt_ids", "prompt_length"))
        return {order: ids[len(ids) - length :] for order, ids, length in zip(*columns, strict=True)}

    def _oldest(self, order: int, step: int) -> int:
        """The step of a group's oldest token; `step` if it has none yet."""
        return min(step if one.first_step is None else one.first_step for one in self.responses[order])

    def _restart_stale(self, max_tokens: int, step: int) -> int:
        """Begin the groups anew that cannot be trained any more; how many they are.

        None is older than the bound while it and the number of shards stay the same.
        """
        num_restarted = 0
        for order, group in self.responses.items():
            cut = any(one.finish_reason is None and len(one.token_ids) >= max_tokens for one in group)
            if cut or self._oldest(order, step) < step - self._max_lag:
                self.responses[order] = [Response(one.seed, one.number) for one in group]
                num_restarted += 1
        return num_restarted

    def _is_enough(self, num_open: dict[int, int], step: int) -> bool:
        """Whether the step may end; see deadlines.py."""
        return is_enough(num_open, self._oldest_of(num_open, step), len(self._slots), step, self._max_lag)

    def _oldest_of(self, orders: Iterable[int], step: int) -> dict[int, int]:
        return {order: self._oldest(order, step) for order in orders}

    def _leave(self, num_open: dict[int, int], step: int, num_restarted: int) -> Taken:
        chosen = leaving(num_open, self._oldest_of(num_open, step), len(self._slots))
        lags = [step - self._oldest(order, step) for order in chosen]
        assert max(lags, default=0) <= self._max_lag, f"rows of {max(lags)} steps ago"
        return Taken(chosen, [one for order in chosen for one in self.responses[order]], num_restarted)

    def _require(self, stream: RolloutStream) -> None:
        if not stream.num_pending:
            raise RolloutError(
                f"rollout engine {self._engine.name!r}: {len(self._slots)} groups are wanted, "
                f"{len(self._orders())} are there, and no request runs."
            )


def _request(key: str, prompt: list[int], one: Response, params: SamplingParams) -> Request:
    """The rest of a response."""
    done = len(one.token_ids)
    rest = replace(params, n=1, max_tokens=params.max_tokens - done)
    return Request(key, [*prompt, *one.token_ids], rest, one.seed, one.number, done)


def _complete(answer: Completion | EpisodeFailed) -> Completion:
    """An answer that is one; RolloutError for a prompt that cannot run."""
    if isinstance(answer, EpisodeFailed):
        raise RolloutError(str(answer))
    return answer
