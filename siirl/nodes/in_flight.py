"""Prompts of a rollout whose responses go on from step to step: what of them is there, and who leaves."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tensordict import TensorDict

from siirl.data.buffer import ORDER
from siirl.data.chosen_experts import longer
from siirl.data.rows import seen_of
from siirl.data.seen import Seen
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

    steps: list[int] = field(default_factory=list)
    """The training step whose weights sampled each token; ascending."""

    experts: str | None = None
    """What tokens were computed by when they were first read, see Completion; in hex digits."""

    finish_reason: str | None = None
    """None: it goes on."""

    @property
    def first_step(self) -> int | None:
        """That of its first token; None without one."""
        return self.steps[0] if self.steps else None

    def extend(self, part: Completion, step_of: Callable[[int], int]) -> None:
        """Add what was sampled of it. step_of: version of weights -> the step that they are those of."""
        self.experts = longer(self.experts, part.experts and part.experts.hex())
        self.token_ids += part.token_ids
        self.log_probs += part.log_probs
        self.versions += part.token_versions
        known = {version: step_of(version) for version in set(part.token_versions)}
        self.steps += [known[version] for version in part.token_versions]
        self.finish_reason = None if part.finish_reason == "paused" else part.finish_reason


@dataclass
class FinishedGroups:
    """Groups that are complete and leave: what the ranks of a shard tell each other."""

    orders: list[int]
    responses: list[Response]
    """n of each group, in the order of the groups."""

    num_restarted: int
    """Groups that were begun anew, as a token of theirs was older than the bound."""

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def decode(cls, values: dict[str, Any]) -> "FinishedGroups":
        responses = [Response(**response) for response in values["responses"]]
        return cls(values["orders"], responses, values["num_restarted"])


class RolloutsInFlight(PromptsInFlight):
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

        The rest as of PromptsInFlight.
        """
        super().__init__(max_lag, surplus, batch_size, step_size, stale)
        self._engine, self._n, self._runs_in_background = engine, n, runs_in_background
        self._stream: RolloutStream | None = None  # while requests may be pending
        self._running: dict[Key, int] = {}  # requests that are -> the step in which they were submitted
        self._version_of: dict[int, int] = {}  # step -> version of the engine's weights
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
            _key(order, one): order
            for order in active
            for one in self.responses[order]
            if one.finish_reason is None
        }
        num_open = dict.fromkeys(active, 0) | dict(Counter(unfinished.values()))
        missing = set(unfinished)

        def ended(keys: Iterable[Key]) -> bool:
            """Note responses that have completed, maybe said twice; whether a batch can leave."""
            for key in missing.intersection(keys):
                missing.remove(key)
                num_open[unfinished[str(key)]] -= 1
            return self._is_enough(num_open, step)

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
        return self._leave(num_open, step, num_restarted)

    def pause(self) -> list[Key]:
        """Take back from the engine what is not complete; which responses have completed meanwhile."""
        if self._stream is None:
            return []
        stream, self._stream = self._stream, None
        return self._extend(stream.pause())

    def _submit(self, keys: Sequence[Key], params: SamplingParams, step: int) -> None:
        assert self._stream is not None
        prompts, seen = self._prompts(), self._seen()
        named = self._named(keys).items()
        self._stream.submit(
            [_request(key, prompts[order], seen[order], one, params) for key, (order, one) in named]
        )
        self._running |= dict.fromkeys(keys, step)

    def _extend(self, answers: Sequence[tuple[Key, Completion | EpisodeFailed]]) -> list[Key]:
        """Add to responses what was sampled of them; which of them are complete."""
        ended = []
        for key, answer in answers:
            del self._running[key]
            _, one = self._named([key])[key]
            one.extend(_complete(answer), self._step_of)
            if one.finish_reason is not None:
                ended.append(key)
        return ended

    def _step_of(self, version: int) -> int:
        """The last step whose weights are of a version; new ones are those of the next step."""
        steps = [step for step, known in self._version_of.items() if known == version]
        return max(steps, default=max(self._version_of) + 1)

    def _named(self, keys: Iterable[Key]) -> dict[Key, tuple[int, Response]]:
        """Groups and responses by the keys of their requests."""
        places = {key: map(int, str(key).split("/")) for key in keys}
        return {key: (order, self.responses[order][number]) for key, (order, number) in places.items()}

    def give(self, taken: FinishedGroups) -> TensorDict:
        """The prompts of the groups that leave, numbered over all shards. On all ranks of the shard."""
        for order in taken.orders:
            self.responses.pop(order, None)
        return self.give_prompts(taken.orders)

    def state(self) -> dict[str, Any]:
        """See RowBuffer; what runs is taken back."""
        self.pause()
        responses = [[asdict(one) for one in self.responses[order]] for order in self._orders()]
        return super().state() | {"responses": responses}

    def load_state(self, states: Sequence[dict[str, Any]], shard: int, num_shards: int) -> None:
        """See PromptsInFlight. Groups with another number of responses than n begin anew."""
        super().load_state(states, shard, num_shards)
        self.responses = {order: self.responses[order] for order in self._orders()}

    def _load_work(self, states: Sequence[dict[str, Any]]) -> None:
        """See PromptsInFlight."""
        for state in states:
            orders = sorted(set(state["columns"].get(ORDER, {"values": []})["values"]))
            for order, group in zip(orders, state.get("responses", ()), strict=True):
                self.responses[order] = [Response(**one) for one in group]
                if len(group) != self._n:
                    self._begin_anew(order)

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
            one.first_step or self._running.get(_key(order, one), step) for one in self.responses[order]
        )

    def _in_turn(self, orders: Sequence[int]) -> list[int]:
        """See PromptsInFlight."""
        return sorted(orders, key=lambda order: (self._oldest(order, sys.maxsize), order))

    def _too_old(self, step: int) -> list[int]:
        """See PromptsInFlight."""
        found = [order for order in self.responses if self._oldest(order, step) < step - self._max_lag]
        return self._engine.share(found if self._engine.leads else None)

    def _forget(self, orders: Sequence[int]) -> None:
        """See PromptsInFlight."""
        self._take_back(orders)
        for order in orders:
            del self.responses[order]

    def _restart_stale(self, max_tokens: int, step: int) -> int:
        """Begin the groups anew that cannot be trained any more; how many they are.

        Where steps wait, none is older than the bound while it and the number of shards stay the same.
        """
        stale = [
            order
            for order, group in self.responses.items()
            if self._oldest(order, step) < step - self._max_lag
            or any(one.finish_reason is None and len(one.token_ids) >= max_tokens for one in group)
        ]
        self._take_back(stale)
        for order in stale:
            self._begin_anew(order)
        return len(stale)

    def _begin_anew(self, order: int) -> None:
        """With the seed that it had."""
        seed = self.responses[order][0].seed
        self.responses[order] = [Response(seed, number) for number in range(self._n)]

    def _take_back(self, orders: Sequence[int]) -> None:
        """Have nothing of these groups run."""
        keys = {_key(order, one) for order in orders for one in self.responses[order]} & self._running.keys()
        if keys:
            assert self._stream is not None
            self._extend(self._stream.pause(keys))

    def _is_enough(self, num_open: dict[int, int], step: int) -> bool:
        """Whether the step may end; see deadlines.py."""
        oldest, leave = self._oldest_of(num_open, step), self._num_leaving
        return is_enough(num_open, oldest, leave, self._steady, step, self._bound)

    def _oldest_of(self, orders: Iterable[int], step: int) -> dict[int, int]:
        return {order: self._oldest(order, step) for order in orders}

    def _leave(self, num_open: dict[int, int], step: int, num_restarted: int) -> FinishedGroups:
        chosen = leaving(num_open, self._oldest_of(num_open, step), self._num_leaving)
        lags = [step - self._oldest(order, step) for order in chosen]
        assert max(lags, default=0) <= self._max_lag, f"rows of {max(lags)} steps ago"
        return FinishedGroups(
            chosen, [one for order in chosen for one in self.responses[order]], num_restarted
        )

    def _require(self, stream: RolloutStream) -> None:
        if not stream.num_pending:
            raise RolloutError(
                f"rollout engine {self._engine.name!r}: {self._num_leaving} groups are wanted, "
                f"{len(self._orders())} are there, and no request runs."
            )


def _key(order: int, one: Response) -> str:
    """Name of a response's request."""
    return f"{order}/{one.number}"


def _request(key: Key, prompt: list[int], seen: Seen, one: Response, params: SamplingParams) -> Request:
    """The rest of a response."""
    done = len(one.token_ids)
    rest = replace(params, n=1, max_tokens=params.max_tokens - done)
    begun = one.versions[0] if done else None
    return Request(key, [*prompt, *one.token_ids], rest, one.seed, one.number, done, begun, seen)


def _complete(answer: Completion | EpisodeFailed) -> Completion:
    """An answer that is one; RolloutError for a prompt that cannot run."""
    if isinstance(answer, EpisodeFailed):
        raise RolloutError(str(answer))
    return answer
