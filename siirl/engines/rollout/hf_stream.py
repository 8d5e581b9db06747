"""Continuous batching of the HF engine: requests join a running batch between two decode steps.

The rows of the batch are aligned on the right: all write the next token at the same position of the cache,
and each sees what lies right of its own padding. New prompts are prefilled apart and gathered with the rows
that still run into one cache; rows that ended leave then, or once enough of them have ended. Shapes: B rows,
S positions, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from siirl.engines.rollout.base import Completion, Key, Request, RolloutStream, SamplingParams
from siirl.engines.rollout.checks import check_finite
from siirl.engines.rollout.decode import CHECK_EVERY, KEEP_SHARE
from siirl.engines.rollout.kv_cache import Block, gather
from siirl.engines.rollout.prefill import read_prompts
from siirl.engines.rollout.sampling import derive_seed, sample_tokens, uniforms
from siirl.observe.spans import phase

if TYPE_CHECKING:
    from siirl.engines.rollout.hf import HFRollout

JOIN_SHARE, JOIN_STEPS = 0.125, 8
"""Requests join once they are this share of the rows that run, or one has waited this many steps: reading
prompts costs a forward, and the cache is copied for it."""
NO_LIMIT = 1 << 62


@dataclass
class Row:
    """A request that runs: what it has said so far, and the columns of the cache left of its prompt."""

    request: Request
    seed: int
    pad: int = 0
    ended: bool = False
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return self.request.params.max_tokens - len(self.token_ids)

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


@dataclass(frozen=True)
class Room:
    """What a batch may hold: rows, and positions of all rows together (rows times the longest)."""

    rows: int
    positions: int = NO_LIMIT

    def fits(self, num_rows: int, longest: int) -> bool:
        return num_rows <= 1 or (num_rows <= self.rows and num_rows * longest <= self.positions)


class RunningBatch:
    """Rows that are decoded together, and their cache. Everything in it runs under inference_mode."""

    def __init__(self, model: PreTrainedModel, prefill_tokens: int) -> None:
        self.rows: list[Row] = []
        self._model, self._prefill_tokens = model, prefill_tokens
        self._cache: Cache | None = None
        self._pad_B = torch.zeros(0, dtype=torch.int64)
        self._logits_BV: Tensor | None = None  # after each row's last token; None: that is not read yet
        self._token_B: Tensor | None = None

    @property
    def running(self) -> list[Row]:
        return [row for row in self.rows if not row.ended]

    def clear(self) -> None:
        """Forget all rows."""
        self.rows, self._cache, self._token_B, self._logits_BV = [], None, None, None

    def join(self, rows: Sequence[Row]) -> None:
        """Read the prompts of new rows, equal ones once, and let them run with the others."""
        self._read_tokens()
        by_prompt: dict[tuple[int, ...], list[Row]] = {}
        for row in sorted(rows, key=lambda row: len(row.request.prompt)):
            by_prompt.setdefault(tuple(row.request.prompt), []).append(row)
        count_D = torch.tensor([len(same) for same in by_prompt.values()])
        with phase("prefill", prompts=len(by_prompt), tokens=sum(map(len, by_prompt))):
            logits_BV, blocks = read_prompts(self._model, list(by_prompt), count_D, self._prefill_tokens)
        new = [row for same in by_prompt.values() for row in same]
        for row in new:
            row.pad = -len(row.request.prompt)  # relative to the width, until the rows are gathered
        self._gather(new, blocks, logits_BV)

    def step(self) -> list[Row]:
        """Sample the next token of each row, on a GPU several of them; the rows that ended with it."""
        self._read_tokens()
        running = self.running
        most_steps = CHECK_EVERY.get(self._model.device.type, 8)
        num_steps = min(most_steps, min(row.remaining for row in running))
        said = [len(row.token_ids) for row in self.rows]
        table = uniforms([row.seed for row in self.rows], num_steps, said)
        uniform_TB = torch.from_numpy(table).to(self._model.device)
        token_TB, log_prob_TB = [], []
        for step in range(num_steps):
            self._read_tokens()
            token_B, log_prob_B = self._sample(uniform_TB[step])
            token_TB.append(token_B)
            log_prob_TB.append(log_prob_B)
            self._token_B, self._logits_BV = token_B, None
        tokens, log_probs = torch.stack(token_TB).tolist(), torch.stack(log_prob_TB).tolist()
        for token_B, log_prob_B in zip(tokens, log_probs, strict=True):
            for row, token, log_prob in zip(self.rows, token_B, log_prob_B, strict=True):
                row.hear(token, log_prob)
        self._let_go()
        return [row for row in running if row.ended]

    def _read_tokens(self) -> None:
        """One forward over the tokens that were sampled last, if they are not in the cache yet."""
        if self._logits_BV is not None or self._cache is None:
            return
        assert self._token_B is not None
        width = self._cache.get_seq_length()
        mask_BS = None
        if any(row.pad for row in self.rows):
            mask_BS = torch.arange(width + 1, device=self._pad_B.device) >= self._pad_B[:, None]
        self._logits_BV = self._model(
            input_ids=self._token_B[:, None],
            position_ids=(width - self._pad_B)[:, None],
            attention_mask=mask_BS,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _sample(self, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
        """The next token of each row, by its own parameters: (token_B, log_prob_B)."""
        assert self._logits_BV is not None
        alike: dict[tuple[float, int, float], list[int]] = {}
        for index, row in enumerate(self.rows):
            params = row.request.params
            alike.setdefault((params.temperature, params.top_k, params.top_p), []).append(index)
        if len(alike) == 1:
            return sample_tokens(self._logits_BV, uniform_B, self.rows[0].request.params)
        token_B = torch.empty(len(self.rows), dtype=torch.int64, device=uniform_B.device)
        log_prob_B = torch.empty(len(self.rows), device=uniform_B.device)
        for indices in alike.values():
            part = torch.tensor(indices, device=uniform_B.device)
            params: SamplingParams = self.rows[indices[0]].request.params
            token_B[part], log_prob_B[part] = sample_tokens(self._logits_BV[part], uniform_B[part], params)
        return token_B, log_prob_B

    def _let_go(self) -> None:
        """Drop ended rows if that pays. Those that stay go on for nothing, from an empty context."""
        running = self.running
        if not running:
            self.clear()
        elif len(running) <= KEEP_SHARE * len(self.rows):
            self._gather([], [], None)
        elif any(row.ended for row in self.rows):
            assert self._cache is not None
            for row in self.rows:  # its positions would pass the model's last one
                row.pad = self._cache.get_seq_length() if row.ended else row.pad
            self._pad_B = torch.tensor([row.pad for row in self.rows], device=self._pad_B.device)

    def _gather(self, new: list[Row], blocks: list[Block], logits_BV: Tensor | None) -> None:
        """Make one batch of the rows that run and the new ones, without columns that nobody sees."""
        device = self._model.device
        stay = [index for index, row in enumerate(self.rows) if not row.ended]
        if stay:
            assert self._cache is not None
            rows = torch.tensor(stay, device=device)
            start = min(self.rows[index].pad for index in stay)
            width = self._cache.get_seq_length()
            for index in stay:
                self.rows[index].pad -= width  # relative to the width, as those of the new rows
            blocks = [Block(self._cache, rows, start), *blocks]
            if self._token_B is not None:
                self._token_B = self._token_B[rows]
            if self._logits_BV is not None and logits_BV is not None:
                logits_BV = torch.cat([self._logits_BV[rows], logits_BV])
        self._cache = gather(blocks, NO_LIMIT)
        self._logits_BV = logits_BV
        self.rows = [self.rows[index] for index in stay] + new
        for row in self.rows:
            row.pad += self._cache.get_seq_length()
        self._pad_B = torch.tensor([row.pad for row in self.rows], device=device)


class HFStream(RolloutStream):
    """A stream that decodes inside `collect`."""

    def __init__(self, engine: "HFRollout", model: PreTrainedModel, prefill_tokens: int, room: Room) -> None:
        self._engine, self._room = engine, room
        self._dtype = str(model.dtype)
        self._batch = RunningBatch(model, prefill_tokens)
        self._waiting: deque[Row] = deque()
        self._waited_steps = 0  # how long the first of them has waited
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
        with torch.inference_mode():
            while self._pending:
                if joining := self._admitted():
                    self._batch.join(joining)
                ended = self._batch.step()
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

    def _admitted(self) -> list[Row]:
        """The waiting rows that join the batch now, as far as they fit; first come, first served."""
        running = self._batch.running
        if len(self._waiting) < JOIN_SHARE * len(running) and self._waited_steps < JOIN_STEPS:
            self._waited_steps += 1 if self._waiting else 0
            return []
        self._waited_steps = 0
        longest = max((_positions(row) for row in running), default=0)
        admitted: list[Row] = []
        while self._waiting:
            longest = max(longest, _positions(self._waiting[0]))
            if not self._room.fits(len(running) + len(admitted) + 1, longest):
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _answers(self, ended: list[Row]) -> list[tuple[Key, Completion]]:
        version = self._engine.weight_version
        answers = [(row.request.key, row.completion(version)) for row in ended]
        check_finite(((f"request {key!r}", completion) for key, completion in answers), self._dtype)
        self._pending -= {key for key, _ in answers}
        return answers


def _positions(row: Row) -> int:
    return len(row.request.prompt) + row.request.params.max_tokens
