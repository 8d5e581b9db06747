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

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from siirl.engines.rollout.base import Completion, Key, Request, RolloutStream, SamplingParams
from siirl.engines.rollout.checks import check_finite
from siirl.engines.rollout.decode import CHECK_EVERY
from siirl.engines.rollout.sampling import derive_seed, sample_tokens, uniforms
from siirl.engines.rollout.slots import (
    GROWTH,
    NO_LIMIT,
    SLOT_ATTENTION,
    Reading,
    Rows,
    SlotCache,
    alike,
    are_dense,
)
from siirl.errors import EpisodeFailed
from siirl.observe.spans import phase

if TYPE_CHECKING:
    from siirl.engines.rollout.hf import HFRollout

SLOTS_PER_ROW = 3
"""Slots, at most, for each row of those that ever ran at once: rows wait while others speak."""
IDLE_BETWEEN = 0.5
"""Idle slots between rows, at most, for each row: reading over them costs as much as a row does."""


@dataclass(eq=False)
class Row:
    """A request that runs: what it has said so far. held: tokens of its prompt that its slot had; read: that
    its slot has."""

    request: Request
    seed: int
    held: int = 0
    read: int = 0
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
        return self.token_ids[-1:] or self.request.prompt[self.read :]

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
        self.ended = len(self.token_ids) >= params.max_tokens or (
            not params.ignore_eos and token in params.stop_token_ids
        )

    def completion(self, weight_version: int) -> Completion:
        params = self.request.params
        stopped = self.token_ids[-1] in params.stop_token_ids and not params.ignore_eos
        return Completion(self.token_ids, self.log_probs, "stop" if stopped else "length", weight_version)


@dataclass(eq=False)
class Slot:
    """A place in the cache. row: who runs in it. tokens: what it holds of the row that has ended; since: at
    which step that was."""

    row: Row | None = None
    tokens: list[int] = field(default_factory=list)
    since: int = -1

    @property
    def num_held(self) -> int:
        """How many columns of it have been written, at most."""
        return self.row.last_column + 1 if self.row else len(self.tokens)

    def begins(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt goes on from what it holds."""
        count = len(self.tokens)
        if not 0 < count < len(prompt) or prompt[count - 1] != self.tokens[-1]:
            return False
        return list(prompt[:count]) == self.tokens


@dataclass(frozen=True)
class Room:
    """What a batch may hold: rows, and positions of all rows together (rows times the longest).

    prefill_tokens: of the prompts that join at once; a longer one is read in several forwards.
    """

    rows: int
    positions: int = NO_LIMIT
    prefill_tokens: int = NO_LIMIT

    def fits(self, num_rows: int, longest: int) -> bool:
        return num_rows <= 1 or (num_rows <= self.rows and num_rows * longest <= self.positions)


class RunningBatch:
    """Rows that are decoded together, and their cache. A row stays in its slot until it ends, except that
    rows move together once there are many idle slots between them.

    Everything in it runs under inference_mode.
    """

    def __init__(self, model: PreTrainedModel, room: Room) -> None:
        self._model, self._room = model, room
        self._cache = SlotCache()
        self.clear()

    def clear(self) -> None:
        """Forget all rows, and what was read."""
        self.rows: dict[int, Row] = {}
        """By slot, in ascending order."""
        self._slots: list[Slot] = []
        self._said_B: Tensor | None = None  # the last token of each row, unless other rows run since
        self._alike: list[tuple[SamplingParams, list[int]]] = []  # rows by how they are sampled
        self._cache.release()
        self._cache = SlotCache()
        self._num_steps = self._most_rows = 0

    def step(self, new: Sequence[Row] = ()) -> list[Row]:
        """Sample the next token of each row, on a GPU several of them; the rows that ended with it.

        new: rows that join; equal prompts of theirs are read once.
        """
        self._num_steps += 1
        copies = self._join(new) if new else {}
        self._close_ranks()
        rows = list(self.rows.values())
        most_steps = CHECK_EVERY.get(self._model.device.type, 8)
        num_steps = min(most_steps, min(row.remaining for row in rows))
        table = uniforms([row.seed for row in rows], num_steps, [len(row.token_ids) for row in rows])
        uniform_TB = torch.from_numpy(table).to(self._model.device)
        with phase("prefill", prompts=len(new)) if new else contextlib.nullcontext():
            logits_BV = self._read(copies) if self._said_B is None else self._read_next(self._said_B, 0)
        token_TB, log_prob_TB = [], []
        for step in range(num_steps):
            if step:
                logits_BV = self._read_next(token_TB[-1], step)
            token_B, log_prob_B = self._sample(logits_BV, uniform_TB[step])
            token_TB.append(token_B)
            log_prob_TB.append(log_prob_B)
        tokens, log_probs = torch.stack(token_TB).tolist(), torch.stack(log_prob_TB).tolist()
        for token_B, log_prob_B in zip(tokens, log_probs, strict=True):
            for row, token, log_prob in zip(rows, token_B, log_prob_B, strict=True):
                row.hear(token, log_prob)
        self._said_B = token_TB[-1]
        return self._let_go()

    def _join(self, new: Sequence[Row]) -> dict[Row, Row]:
        """Give each new row a slot; the rows whose prompt another row reads, with that row."""
        readers: dict[tuple[int, ...], Row] = {}
        copies: dict[Row, Row] = {}
        for row in new:
            reader = readers.setdefault(tuple(row.request.prompt), row)
            if reader is not row:
                copies[row] = reader
        chosen: dict[Row, Slot] = {}
        for row in readers.values():
            taken = set(chosen.values())
            fitting = [s for s in self._slots if s.begins(row.request.prompt) and s not in taken]
            if fitting:
                chosen[row] = max(fitting, key=lambda slot: len(slot.tokens))
                row.held = row.read = len(chosen[row].tokens)
        self._make_slots(new, chosen)
        taken = set(chosen.values())
        idle = [slot for slot in self._slots if slot.row is None and slot not in taken]
        spare = iter(sorted(idle, key=lambda slot: slot.since))
        for row in new:
            slot = chosen.get(row) or next(spare)
            slot.row, slot.tokens = row, []
        self._find_rows()
        return copies

    def _make_slots(self, new: Sequence[Row], chosen: dict[Row, Slot]) -> None:
        """Have a slot for each new row, and empty ones as far as there is room for them; the others of those
        that hold something are lost, the oldest first. chosen: slots that new rows take over."""
        longest = max(row.positions for row in [*self.rows.values(), *new])
        least = len(self.rows) + len(new)
        self._most_rows = max(self._most_rows, least)
        self._cache.longest = max(self._cache.longest, longest)
        fitting = min(self._room.rows, self._room.positions // (longest + GROWTH))
        most = max(least, min(SLOTS_PER_ROW * self._most_rows, fitting))
        empty = sum(slot.row is None and not slot.tokens for slot in self._slots)
        missing = len(new) - len(chosen) - empty
        if missing > 0:
            wanted = max(len(self._slots) + missing, 3 * len(self._slots) // 2)
            self._slots += [Slot() for _ in range(min(wanted, most) - len(self._slots))]
        if len(self._slots) > most:
            kept = set(chosen.values())
            free = [i for i, slot in enumerate(self._slots) if slot.row is None and slot not in kept]
            lost = set(sorted(free, key=lambda i: self._slots[i].since)[: len(self._slots) - most])
            behind = [i for i in range(most, len(self._slots)) if i not in lost]
            self._exchange(list(zip(sorted(lost), behind, strict=False)))
            del self._slots[most:]
        self._cache.room = max(longest, self._room.positions // len(self._slots))
        for slot in self._slots:
            if len(slot.tokens) > self._cache.room:
                slot.tokens = []

    def _let_go(self) -> list[Row]:
        """Take the rows that ended out of the batch; their slots keep what they have read."""
        ended = {slot: row for slot, row in self.rows.items() if row.ended}
        for slot, row in ended.items():
            tokens = [*row.request.prompt, *row.token_ids[:-1]]
            self._slots[slot] = Slot(None, tokens, self._num_steps)
        if ended:
            self._find_rows()
        return list(ended.values())

    def _close_ranks(self) -> None:
        """Move the rows to the first slots, if too many others are between them."""
        if are_dense(list(self.rows), IDLE_BETWEEN):
            return
        behind = [slot for slot in self.rows if slot >= len(self.rows)]
        gaps = [slot for slot in range(len(self.rows)) if slot not in self.rows]
        self._exchange(list(zip(gaps, behind, strict=True)))
        self._find_rows()

    def _exchange(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Exchange what pairs of slots hold."""
        if not pairs:
            return
        slots = self._slots
        held = [(one, other, max(slots[one].num_held, slots[other].num_held)) for one, other in pairs]
        self._cache.exchange(held, len(slots))
        for one, other in pairs:
            slots[one], slots[other] = slots[other], slots[one]

    def _find_rows(self) -> None:
        """Other rows run from now on, or in other slots."""
        self.rows = {i: slot.row for i, slot in enumerate(self._slots) if slot.row is not None}
        self._said_B = None
        alike: dict[tuple[float, int, float], list[int]] = {}
        for index, row in enumerate(self.rows.values()):
            params = row.request.params
            alike.setdefault((params.temperature, params.top_k, params.top_p), []).append(index)
        rows = list(self.rows.values())
        self._alike = [(rows[indices[0]].request.params, indices) for indices in alike.values()]

    def _read(self, copies: dict[Row, Row]) -> Tensor:
        """Logits after what the rows have not read yet, [B, V]. copies: rows that get others' prompts."""
        old = {slot: row for slot, row in self.rows.items() if row.token_ids}
        joining = {slot: row for slot, row in self.rows.items() if not row.token_ids and row not in copies}
        for slot, row in joining.items():
            self._read_ahead(slot, row)
        items = list(joining.items())
        groups = alike([len(r.unread) for _, r in items], [r.last_column + 1 for _, r in items])
        together = [rows for rows in (old, *(dict(items[i] for i in group) for group in groups)) if rows]
        parts = [self._rows(rows) for rows in together]
        reading = [row for rows in together for row in rows.values()]
        ends = np.cumsum([len(row.unread) for row in reading]) - 1
        last = dict(zip(reading, ends.tolist(), strict=True))
        tokens = torch.tensor([token for row in reading for token in row.unread])
        wanted_B = torch.tensor([last[copies.get(row, row)] for row in self.rows.values()])
        logits_BV = self._forward(tokens, parts, wanted_B)
        if copies:
            slot_of = {row: slot for slot, row in self.rows.items()}
            width = max(len(row.request.prompt) for row in copies)
            sources, targets = ([slot_of[row] for row in rows] for rows in (copies.values(), copies))
            self._cache.copy(sources, targets, width)
        return logits_BV

    def _read_ahead(self, slot: int, row: Row) -> None:
        """Read a prompt that is longer than one forward's tokens, but for the last ones."""
        count = self._room.prefill_tokens
        while len(row.unread) > count:
            rows = Rows([slot], [count], [row.read + count - 1], self._model.device)
            self._forward(torch.tensor(row.unread[:count]), [rows], torch.tensor([count - 1]))
            row.read += count

    def _rows(self, rows: dict[int, Row]) -> Rows:
        """What rows have not read yet."""
        counts, last = [len(r.unread) for r in rows.values()], [r.last_column for r in rows.values()]
        return Rows(list(rows), counts, last, self._model.device)

    def _read_next(self, token_B: Tensor, step: int) -> Tensor:
        """Logits after one more token of each row; step: how many of its tokens the host has not seen."""
        last = [row.last_column + step for row in self.rows.values()]
        rows = Rows(list(self.rows), [1] * len(last), last, self._model.device)
        return self._forward(token_B, [rows], torch.arange(len(last)))

    def _forward(self, token_N: Tensor, parts: list[Rows], wanted_B: Tensor) -> Tensor:
        """Logits [B, V] after the wanted ones of N tokens, which are written to the cache."""
        device = self._model.device
        reading = self._cache.reading = Reading(parts, len(self._slots), device)
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
        if len(self._alike) == 1:
            return sample_tokens(logits_BV, uniform_B, self._alike[0][0])
        token_B = torch.empty(len(uniform_B), dtype=torch.int64, device=uniform_B.device)
        log_prob_B = torch.empty(len(uniform_B), device=uniform_B.device)
        for params, indices in self._alike:
            part = torch.tensor(indices, device=uniform_B.device)
            token_B[part], log_prob_B[part] = sample_tokens(logits_BV[part], uniform_B[part], params)
        return token_B, log_prob_B


class HFStream(RolloutStream):
    """A stream that decodes inside `collect`."""

    def __init__(self, engine: "HFRollout", model: PreTrainedModel, room: Room) -> None:
        self._engine, self._model, self._room = engine, model, room
        self._batch = RunningBatch(model, room)
        self._waiting: deque[Row] = deque()
        self._refused: list[tuple[Key, EpisodeFailed]] = []
        self._pending: set[Key] = set()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutStream; wakes the engine."""
        refused = self._engine.check_requests(requests, self._pending)
        if not self._pending:
            self._engine.wake()
        self._refused += refused.items()
        able = [request for request in requests if request.key not in refused]
        self._waiting += [Row(request, derive_seed(request.seed, 0)) for request in able]
        self._pending |= {request.key for request in requests}

    def collect(self, timeout_s: float) -> Sequence[tuple[Key, Completion | EpisodeFailed]]:
        """See RolloutStream; decodes until a response is complete, at least one step. RolloutError for
        log-probs that are not finite: the weights are broken."""
        if self._refused:
            refused, self._refused = self._refused, []
            self._pending -= {key for key, _ in refused}
            return refused
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
        self._refused.clear()
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
        longest = max((row.positions for row in running.values()), default=0)
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
