"""Continuous batching of the HF engine: requests join a running batch between two decode steps.

A forward reads the last token of each row that runs, and what is new of each prompt that joins. When a row
ends, its slot of the cache keeps what it has read until others need the slot: a request whose prompt begins
with that (the next turn of an episode) takes it over, and only the rest of its prompt is read.
Shapes: B rows, N tokens, V vocabulary.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from siirl.engines.rollout.base import Completion, Key, Request, RolloutStream, SamplingParams
from siirl.engines.rollout.checks import check_finite
from siirl.engines.rollout.decode import CHECK_EVERY
from siirl.engines.rollout.sampling import derive_seed, sample_tokens, uniforms
from siirl.engines.rollout.slots import GROWTH, SLOT_ATTENTION, Reading, Rows, SlotCache
from siirl.observe.spans import phase

if TYPE_CHECKING:
    from siirl.engines.rollout.hf import HFRollout

NO_LIMIT = 1 << 62
SLOTS_PER_ROW = 3
"""Slots, at most, for each row of those that ever ran at once: rows wait while others speak."""


@dataclass(eq=False)
class Row:
    """A request that runs: what it has said so far. held: tokens of its prompt that its slot had."""

    request: Request
    seed: int
    held: int = 0
    ended: bool = False
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return self.request.params.max_tokens - len(self.token_ids)

    @property
    def positions(self) -> int:
        """How many columns it may need."""
        return len(self.request.prompt) + self.request.params.max_tokens

    @property
    def unread(self) -> Sequence[int]:
        """The tokens that its slot does not hold yet."""
        return self.token_ids[-1:] or self.request.prompt[self.held :]

    @property
    def last_column(self) -> int:
        """Where the last of them belongs."""
        return len(self.request.prompt) + len(self.token_ids) - 1

    def hear(self, token: int, log_prob: float) -> None:
        """Take the next sampled token, unless the response is complete."""
        if self.ended:
            return
        params = self.request.params
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.ended = not self.remaining or (token in params.stop_token_ids and not params.ignore_eos)

    def completion(self, weight_version: int) -> Completion:
        params = self.request.params
        stopped = self.token_ids[-1] in params.stop_token_ids and not params.ignore_eos
        return Completion(self.token_ids, self.log_probs, "stop" if stopped else "length", weight_version)


@dataclass(eq=False)
class Idle:
    """A slot in which no row runs. tokens: what it holds. since: the step at which its row ended."""

    tokens: list[int] = field(default_factory=list)
    since: int = -1

    def begins(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt goes on from what it holds."""
        count = len(self.tokens)
        if not 0 < count < len(prompt) or prompt[count - 1] != self.tokens[-1]:
            return False
        return list(prompt[:count]) == self.tokens


@dataclass(frozen=True)
class Room:
    """What a batch may hold: rows, and positions of all rows together (rows times the longest).

    prefill_tokens: of the prompts that join at once; a single one may be longer.
    """

    rows: int
    positions: int = NO_LIMIT
    prefill_tokens: int = NO_LIMIT

    def fits(self, num_rows: int, longest: int) -> bool:
        return num_rows <= 1 or (num_rows <= self.rows and num_rows * longest <= self.positions)


class RunningBatch:
    """Rows that are decoded together, and their cache: row i is in slot i, the idle slots are behind them.

    Everything in it runs under inference_mode.
    """

    def __init__(self, model: PreTrainedModel, room: Room) -> None:
        self._model, self._room = model, room
        self.clear()

    def clear(self) -> None:
        """Forget all rows, and what was read."""
        self.rows: list[Row] = []
        self._idle: list[Idle] = []
        self._cache = SlotCache()
        self._num_steps = self._most_rows = 0

    @property
    def num_slots(self) -> int:
        return len(self.rows) + len(self._idle)

    def step(self, new: Sequence[Row] = ()) -> list[Row]:
        """Sample the next token of each row, on a GPU several of them; the rows that ended with it.

        new: rows that join; equal prompts of theirs are read once.
        """
        self._num_steps += 1
        copies = self._join(new) if new else {}
        most_steps = CHECK_EVERY.get(self._model.device.type, 8)
        num_steps = min(most_steps, min(row.remaining for row in self.rows))
        said = [len(row.token_ids) for row in self.rows]
        table = uniforms([row.seed for row in self.rows], num_steps, said)
        uniform_TB = torch.from_numpy(table).to(self._model.device)
        with phase("prefill", prompts=len(new)) if new else contextlib.nullcontext():
            logits_BV = self._read(copies)
        token_TB, log_prob_TB = [], []
        for step in range(num_steps):
            if step:
                logits_BV = self._read_next(token_TB[-1], step)
            token_B, log_prob_B = self._sample(logits_BV, uniform_TB[step])
            token_TB.append(token_B)
            log_prob_TB.append(log_prob_B)
        tokens, log_probs = torch.stack(token_TB).tolist(), torch.stack(log_prob_TB).tolist()
        for token_B, log_prob_B in zip(tokens, log_probs, strict=True):
            for row, token, log_prob in zip(self.rows, token_B, log_prob_B, strict=True):
                row.hear(token, log_prob)
        return self._let_go()

    def _join(self, new: Sequence[Row]) -> dict[int, int]:
        """Give each new row a slot; the rows whose prompt another row reads, with that row, by slot."""
        readers: dict[tuple[int, ...], Row] = {}
        for row in new:
            readers.setdefault(tuple(row.request.prompt), row)
        others = [row for row in new if readers[tuple(row.request.prompt)] is not row]
        chosen: dict[Row, Idle] = {}
        for row in readers.values():
            fitting = [s for s in self._idle if s.begins(row.request.prompt) and s not in chosen.values()]
            if fitting:
                chosen[row] = max(fitting, key=lambda slot: len(slot.tokens))
                row.held = len(chosen[row].tokens)
        most = self._make_slots(new, len(new) - len(chosen))
        spare = iter(sorted(set(self._idle) - set(chosen.values()), key=lambda slot: slot.since))
        order = list(range(self.num_slots))
        for row in [*readers.values(), *others]:
            slot, first = chosen.get(row) or next(spare), len(self.rows)
            place = self._idle.index(slot)
            _swap(order, first, first + place)
            self._idle[place] = self._idle[0]
            del self._idle[0]
            self.rows.append(row)
        self._arrange(order)
        del self._idle[most - len(self.rows) :]
        slot_of = {id(row): slot for slot, row in enumerate(self.rows)}
        return {slot_of[id(row)]: slot_of[id(readers[tuple(row.request.prompt)])] for row in others}

    def _make_slots(self, new: Sequence[Row], num_spare: int) -> int:
        """Have an idle slot for each new row, and num_spare empty ones as far as there is room; the most
        slots that there is room for."""
        longest = max(row.positions for row in [*self.rows, *new])
        least = len(self.rows) + len(new)
        self._most_rows = max(self._most_rows, least)
        fitting = min(self._room.rows, self._room.positions // (longest + GROWTH))
        most = max(least, min(SLOTS_PER_ROW * self._most_rows, fitting))
        missing = num_spare - sum(not slot.tokens for slot in self._idle)
        if missing > 0:
            wanted = max(self.num_slots + missing, 3 * self.num_slots // 2)
            self._idle += [Idle() for _ in range(min(wanted, most) - self.num_slots)]
        return most

    def _let_go(self) -> list[Row]:
        """Take the rows that ended out of the batch; their slots keep what they have read."""
        ended = [row for row in reversed(self.rows) if row.ended]
        order = list(range(self.num_slots))
        for row in ended:
            place, last = self.rows.index(row), len(self.rows) - 1
            _swap(order, place, last)
            self.rows[place] = self.rows[last]
            self.rows.pop()
            self._idle.insert(0, Idle([*row.request.prompt, *row.token_ids[:-1]], self._num_steps))
        self._arrange(order)
        return ended[::-1]

    def _arrange(self, order: list[int]) -> None:
        """Move what the slots hold: slot i gets that of slot order[i]."""
        targets = [slot for slot, source in enumerate(order) if slot != source]
        if targets:
            width = max(
                [row.last_column + 1 for row in self.rows] + [len(slot.tokens) for slot in self._idle]
            )
            self._cache.move([order[slot] for slot in targets], targets, width, self.num_slots)

    def _read(self, copies: dict[int, int]) -> Tensor:
        """Logits after what the rows have not read yet, [B, V]. copies: slots that get others' prompts."""
        reading = self.rows[: len(self.rows) - len(copies)]
        num_old = sum(bool(row.token_ids) for row in reading)
        parts = [
            Rows(
                start,
                [len(row.unread) for row in rows],
                [row.last_column for row in rows],
                self._model.device,
            )
            for start, rows in ((0, reading[:num_old]), (num_old, reading[num_old:]))
            if rows
        ]
        last_N = torch.tensor([len(row.unread) for row in reading]).cumsum(0) - 1
        wanted_B = last_N[[copies.get(slot, slot) for slot in range(len(self.rows))]]
        tokens = torch.tensor([token for row in reading for token in row.unread])
        logits_BV = self._forward(tokens, parts, wanted_B)
        if copies:
            width = max(len(self.rows[slot].request.prompt) for slot in copies)
            self._cache.move(list(copies.values()), list(copies), width, self.num_slots)
        return logits_BV

    def _read_next(self, token_B: Tensor, step: int) -> Tensor:
        """Logits after one more token of each row; step: how many of its tokens the host has not seen."""
        last = [row.last_column + step for row in self.rows]
        rows = Rows(0, [1] * len(last), last, self._model.device)
        return self._forward(token_B, [rows], torch.arange(len(last)))

    def _forward(self, token_N: Tensor, parts: list[Rows], wanted_B: Tensor) -> Tensor:
        """Logits [B, V] after the wanted ones of N tokens, which are written to the cache."""
        device = self._model.device
        reading = self._cache.reading = Reading(parts, self.num_slots, device)
        return self._model(
            input_ids=token_N.to(device)[None],
            position_ids=reading.columns_N[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=wanted_B.to(device),
            reading=reading,
        ).logits[0]

    def _sample(self, logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each row, by its own parameters: (token_B, log_prob_B)."""
        alike: dict[tuple[float, int, float], list[int]] = {}
        for index, row in enumerate(self.rows):
            params = row.request.params
            alike.setdefault((params.temperature, params.top_k, params.top_p), []).append(index)
        if len(alike) == 1:
            return sample_tokens(logits_BV, uniform_B, self.rows[0].request.params)
        token_B = torch.empty(len(self.rows), dtype=torch.int64, device=uniform_B.device)
        log_prob_B = torch.empty(len(self.rows), device=uniform_B.device)
        for indices in alike.values():
            part = torch.tensor(indices, device=uniform_B.device)
            params: SamplingParams = self.rows[indices[0]].request.params
            token_B[part], log_prob_B[part] = sample_tokens(logits_BV[part], uniform_B[part], params)
        return token_B, log_prob_B


class HFStream(RolloutStream):
    """A stream that decodes inside `collect`."""

    def __init__(self, engine: "HFRollout", model: PreTrainedModel, room: Room) -> None:
        self._engine, self._model, self._room = engine, model, room
        self._batch = RunningBatch(model, room)
        self._waiting: deque[Row] = deque()
        self._pending: set[Key] = set()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutStream; wakes the engine."""
        self._engine.check_requests(requests, self._pending)
        self._waiting += [Row(request, derive_seed(request.seed, 0)) for request in requests]
        self._pending |= {request.key for request in requests}

    def collect(self, timeout_s: float) -> list[tuple[Key, Completion]]:
        """See RolloutStream; decodes until a response is complete, at least one step."""
        deadline_s = time.monotonic() + timeout_s
        with torch.inference_mode(), attention_by(self._model, SLOT_ATTENTION):
            while self._pending:
                ended = self._batch.step(self._admitted())
                if ended:
                    return self._answers(ended)
                if time.monotonic() >= deadline_s:
                    break
        return []

    def close(self) -> None:
        """See RolloutStream."""
        self._waiting.clear()
        self._pending = set()
        self._batch.clear()

    def forget(self) -> None:
        """Forget what was read: the weights are others now. Only while nothing is pending."""
        self._batch.clear()

    def _admitted(self) -> list[Row]:
        """The waiting rows that join the batch now, as far as they fit; first come, first served."""
        admitted: list[Row] = []
        if not self._waiting:
            return admitted
        running = self._batch.rows
        longest = max((row.positions for row in running), default=0)
        prompts: set[tuple[int, ...]] = set()
        while self._waiting:
            row = self._waiting[0]
            longest = max(longest, row.positions)
            prompts.add(tuple(row.request.prompt))
            if not self._room.fits(len(running) + len(admitted) + 1, longest):
                break
            if admitted and sum(map(len, prompts)) > self._room.prefill_tokens:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _answers(self, ended: list[Row]) -> list[tuple[Key, Completion]]:
        version = self._engine.weight_version
        answers = [(row.request.key, row.completion(version)) for row in ended]
        check_finite(
            ((f"request {key!r}", completion) for key, completion in answers), str(self._model.dtype)
        )
        self._pending -= {key for key, _ in answers}
        self._engine.count_held(sum(row.held for row in ended), sum(len(row.request.prompt) for row in ended))
        return answers


def can_stream(model: PreTrainedModel) -> bool:
    """Whether a model lets others compute its attention."""
    return model._supports_attention_backend


@contextlib.contextmanager
def attention_by(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let an attention function of transformers run in all layers."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _swap(items: list[int], one: int, other: int) -> None:
    items[one], items[other] = items[other], items[one]
