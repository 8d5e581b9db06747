"""Samples of a snapshot, or of the base: the rollout engine takes the adapter that is asked for, and samples.

On the worker's thread.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from siirl.config import Config
from siirl.data.completions import Request
from siirl.data.rows import make_rows
from siirl.engines.rollout.base import DRAIN_S, RolloutEngine
from siirl.engines.train.adapters.lora import adapter_name
from siirl.engines.train.base import TrainEngine
from siirl.errors import EpisodeFailed
from siirl.service.commands import BASE, Refused, Sample, Sampled
from siirl.service.tenants import Snapshot, Tenants, local_part


class Sampler:
    """The rollout engine, and which adapter is in it."""

    def __init__(
        self,
        cfg: Config,
        engine: RolloutEngine,
        base: TrainEngine,
        tenants: Tenants,
        tokenizer: PreTrainedTokenizerBase,
        make: Callable[[str, Config], TrainEngine],
    ) -> None:
        """base: has the frozen weights. make: as of Tenants."""
        self._cfg, self._engine, self._base = cfg, engine, base
        self._tenants, self._tokenizer, self._make = tenants, tokenizer, make
        self._loaded: str | None = None
        self._num_loads = 0
        self._reader: TrainEngine | None = None
        self._read: str | None = None

    @property
    def most_requests(self) -> int:
        """So many commands are decoded together at most."""
        return self._cfg.actor_rollout_ref.rollout.max_num_seqs

    def sample(self, commands: Sequence[Sample]) -> list[Sampled | Refused]:
        """Answers to commands of one source, decoded together. Refused, for all, if there is no such
        source."""
        source = commands[0].source
        assert all(one.source == source for one in commands), "of one source"
        snapshot = None if source == BASE else self._tenants.snapshot(source)
        if self._loaded != source:
            self._loaded = None
            self._engine.load_weights(self._weights(snapshot), self._num_loads)
            self._loaded, self._num_loads = source, self._num_loads + 1
        requests = {
            f"{number}:{sample}": Request(f"{number}:{sample}", one.prompt, one.params, one.seed, sample)
            for number, one in enumerate(commands)
            for sample in range(one.num_samples)
        }
        stream, found = self._engine.stream(), {}
        try:
            stream.submit(list(requests.values()))
            while stream.num_pending:
                found.update(stream.collect(DRAIN_S))
        finally:
            stream.close()
        return [self._answer(one, number, found, snapshot) for number, one in enumerate(commands)]

    def _answer(
        self, command: Sample, number: int, found: dict, snapshot: Snapshot | None
    ) -> Sampled | Refused:
        sequences: list[tuple[list[int], list[float], bool]] = []
        for sample in range(command.num_samples):
            one = found[f"{number}:{sample}"]
            if isinstance(one, EpisodeFailed):
                return Refused(str(one))
            end = self._end(one.token_ids, command.stops)
            stopped = end is not None or one.finish_reason == "stop"
            sequences.append((one.token_ids[:end], one.log_probs[:end], stopped))
        log_probs = self._prompt_log_probs(command, snapshot) if command.prompt_log_probs else []
        return Sampled(sequences, log_probs)

    def _end(self, tokens: list[int], stops: Sequence[str]) -> int | None:
        """How many of the tokens there are up to the first whose text has one of these in it."""
        if not stops or not any(stop in self._tokenizer.decode(tokens) for stop in stops):
            return None
        low, high = 1, len(tokens)  # texts grow: halve
        while low < high:
            middle = (low + high) // 2
            text = self._tokenizer.decode(tokens[:middle])
            low, high = (low, middle) if any(stop in text for stop in stops) else (middle + 1, high)
        return low

    def _weights(self, snapshot: Snapshot | None) -> Iterator[tuple[str, Tensor]]:
        """What the engine takes: the base, once, and an adapter; zeros where there is none."""
        if self._engine.takes == "base_and_adapter":
            yield from self._base.export_weights()
        rank = self._cfg.actor_rollout_ref.model.lora_rank
        for name, (shape, dtype) in self._engine.weight_specs().items():
            if adapter_name(name) is not None:
                yield name, _widened(name, snapshot, shape, rank).to(dtype)

    def _prompt_log_probs(self, command: Sample, snapshot: Snapshot | None) -> list[float]:
        """By a training engine, as a trainer computes them: no rollout engine is asked."""
        if len(command.prompt) < 2:
            return [math.nan] * len(command.prompt)
        if self._reader is None:
            self._reader = self._make("prompts", self._cfg)
        if self._read != command.source:
            self._read = None
            rank = self._cfg.actor_rollout_ref.model.lora_rank
            for name, own in self._reader.state_dict()["model"].items():
                shape = tuple(own.shape)
                local_part(own).copy_(_widened(adapter_name(name) or name, snapshot, shape, rank))
            self._read = command.source
        tokens = torch.tensor([command.prompt])
        length = torch.tensor([len(command.prompt) - 1])
        row = {
            "row_id": torch.arange(1),
            "prompt_ids": tokens[:, :1],
            "prompt_length": torch.ones(1, dtype=torch.long),
            "response_ids": tokens[:, 1:],
            "response_length": length,
            "response_mask": torch.ones_like(tokens[:, 1:], dtype=torch.bool),
        }
        columns = self._reader.compute(make_rows(row), ("log_prob",), 1.0)
        return [math.nan, *columns["log_prob"][0].tolist()]


def _widened(name: str, snapshot: Snapshot | None, shape: tuple[int, ...], rank: int) -> Tensor:
    """A matrix of an adapter in the shape of one of this rank, which computes the same; zeros of none.

    Both are scaled by alpha / rank, so B is what makes up for the larger rank.
    """
    found, whole = None if snapshot is None else snapshot.weights.get(name), torch.zeros(shape)
    if found is None or snapshot is None:
        return whole
    part = found.float() * (rank / snapshot.rank if ".lora_B" in name else 1.0)
    whole[: part.shape[0], : part.shape[1]] = part
    return whole
