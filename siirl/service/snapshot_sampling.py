"""Samples of a snapshot, or of the base: the rollout engines take the adapter that is asked for, and sample.

On the worker's thread. Collective over the service's ranks: each engine decodes its share of the samples.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from siirl.config import Config
from siirl.data.completions import Request, SamplingParams
from siirl.engines.rollout.base import DRAIN_S, RolloutEngine
from siirl.engines.train.adapters.adapted_layers import Adapter
from siirl.engines.train.adapters.lora import adapter_name
from siirl.engines.train.base import TrainEngine
from siirl.engines.train.fsdp.adapter_engine import Computed, Work
from siirl.errors import EpisodeFailed, UserError
from siirl.service.commands import BASE, Cells, Refused, Sample, Sampled, Top
from siirl.service.tenants import Snapshot, Tenants


class Sampler:
    """The rollout engine, and which adapter is in it."""

    def __init__(
        self,
        cfg: Config,
        engine: RolloutEngine,
        base: TrainEngine,
        tenants: Tenants,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """base: has the frozen weights."""
        self._cfg, self._engine, self._base = cfg, engine, base
        self._tenants, self._tokenizer = tenants, tokenizer
        self._loaded: str | None = None
        self._num_loads = 0
        self._read: tuple[str, Adapter | None] | None = None

    @property
    def most_requests(self) -> int:
        """So many commands are decoded together at most."""
        return self._cfg.actor_rollout_ref.rollout.max_num_seqs

    def prepare(self, speaks: bool) -> None:
        """Have the engine load the base, and sample from it once, so that no client waits for that."""
        longest = self._cfg.data.max_prompt_length + self._cfg.data.max_response_length
        params = SamplingParams(max_tokens=min(2, longest - 1), ignore_eos=True)
        prompt = [0] * min(16, longest - params.max_tokens)
        (found,) = self.sample([Sample(BASE, prompt, params, num_samples=1, seed=0)], speaks)
        if isinstance(found, Refused):
            raise found

    def sample(self, commands: Sequence[Sample], speaks: bool) -> list[Sampled | Refused]:
        """Answers to commands of one source, decoded together. Refused, for all, if there is no such
        source. speaks: this rank asks its engine; of the ranks that share one, one does."""
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
        found = self._decoded(requests, speaks)
        answers = [self._answer(one, number, found) for number, one in enumerate(commands)]
        self._tell_log_probs(commands, answers, snapshot)
        return answers

    def _decoded(self, requests: dict[str, Request], speaks: bool) -> dict[str, Any]:
        """What each becomes, of all ranks; an error of one is raised on all."""
        group = self._tenants.engine.group
        told: list[Any] = [None] * group.size()
        dist.all_gather_object(told, speaks, group=group)
        place, speakers = sum(told[: group.rank()]), sum(told)
        try:
            mine: Any = self._own(list(requests.values())[place::speakers] if speaks else [])
        except (UserError, RuntimeError, OSError) as error:  # raised below, on all ranks
            mine = error
        dist.all_gather_object(told, mine, group=group)
        for one in told:
            if isinstance(one, Exception):
                raise one
        return {key: one for of_rank in told for key, one in of_rank.items()}

    def _own(self, requests: Sequence[Request]) -> dict[Any, Any]:
        if not requests:
            return {}
        stream, found = self._engine.stream(), {}
        try:
            stream.submit(requests)
            while stream.num_pending:
                found.update(stream.collect(DRAIN_S))
        finally:
            stream.close()
        return found

    def _answer(self, command: Sample, number: int, found: dict) -> Sampled | Refused:
        sequences: list[tuple[list[int], list[float], bool]] = []
        vocab = self._tenants.vocab
        if command.targets is not None and (most := command.targets.values.max()) >= vocab:
            return Refused(f"target_prompt_logprobs are ids below {vocab}, not up to {most}")
        for sample in range(command.num_samples):
            one = found[f"{number}:{sample}"]
            if isinstance(one, EpisodeFailed):
                return Refused(str(one))
            end = self._end(one.token_ids, command.stops)
            stopped = end is not None or one.finish_reason == "stop"
            sequences.append((one.token_ids[:end], one.log_probs[:end], stopped))
        return Sampled(sequences)

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

    def _tell_log_probs(
        self, commands: Sequence[Sample], answers: Sequence[Sampled | Refused], snapshot: Snapshot | None
    ) -> None:
        """Log-probs of prompts, and of likely words, by the base that trains: no rollout engine is asked.

        They are at temperature 1.
        """
        works: list[Work] = []

        tell: list[Callable[[Computed], None]] = []

        def ask(told: Callable[[Computed], None], tokens: Sequence[int], top_k: int = 0, **more: Any) -> None:
            targets = more.pop("targets", np.asarray(tokens[1:], np.int64))
            adapter, turn = self._adapter(commands[0].source, snapshot), len(works)
            works.append(Work(adapter, [tokens[:-1]], [targets], top_k=top_k, turn=turn, **more))
            tell.append(told)

        for command, answer in zip(commands, answers, strict=True):
            if isinstance(answer, Refused):
                continue
            prompt = command.prompt
            if (command.prompt_log_probs or command.top_prompt) and len(prompt) > 1:
                ask(partial(_tell_prompt, command, answer), prompt, command.top_prompt)
            elif command.prompt_log_probs:
                answer.prompt_log_probs.append(math.nan)
            if command.drawn_prompt and len(prompt) > 1:
                drawn = (command.params.temperature, command.seed % (1 << 63))
                ask(partial(_tell_drawn, answer), prompt, command.drawn_prompt, drawn=drawn)
            if command.targets is not None:
                ids, at = _in_rows(command.targets)
                ask(partial(_tell_targets, command.targets, at, answer), prompt, targets=ids)
            if command.top_samples:
                for tokens, *_ in answer.sequences:
                    told = partial(_tell_sample, answer, len(prompt) - 1)
                    ask(told, [*prompt, *tokens], command.top_samples)
        if works:
            for told, (found, _) in zip(tell, self._tenants.engine.run(works, gradients=False), strict=True):
                told(found)

    def _adapter(self, source: str, snapshot: Snapshot | None) -> Adapter | None:
        """The snapshot on the device, kept until another is asked for."""
        if self._read is None or self._read[0] != source:
            adapter = None if snapshot is None else self._tenants.engine.new_adapter(snapshot.rank)
            if adapter is not None:
                adapter.take(snapshot.weights)  # type: ignore[union-attr]
            self._read = (source, adapter)
        return self._read[1]


def _words(found: Computed, start: int = 0) -> Top:
    log_probs, words = found.top[0]
    return Top(words[start:].astype(np.int32), log_probs[start:].astype(np.float32))


def _tell_prompt(command: Sample, answer: Sampled, found: Computed) -> None:
    told = found.log_probs[0]
    before = len(told) - (command.last or len(told))
    if command.prompt_log_probs:
        answer.prompt_log_probs.extend([math.nan] * (1 + before) + told[before:].tolist())
    if command.top_prompt:
        answer.top_prompt.append(_words(found, before))


def _tell_drawn(answer: Sampled, found: Computed) -> None:
    answer.drawn_prompt.append(_words(found))


def _tell_sample(answer: Sampled, start: int, found: Computed) -> None:
    answer.top_samples.append(_words(found, start))


def _tell_targets(asked: Cells, at: tuple[np.ndarray, ...], answer: Sampled, found: Computed) -> None:
    told = np.zeros(len(asked.values), np.float32)
    told[asked.values >= 0] = found.log_probs[0][at]
    answer.targets.append(replace(asked, values=told))


def _in_rows(asked: Cells) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The ids that are asked for, [N, as many as a row has at most], and where each of them is."""
    named = asked.values >= 0
    rows = asked.rows[named]
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    ids = np.zeros((asked.shape[0], place.max() + 1), np.int64)
    ids[rows, place] = asked.values[named]
    return ids, (rows, place)


def _widened(name: str, snapshot: Snapshot | None, shape: tuple[int, ...], rank: int) -> Tensor:
    """A matrix of an adapter in the shape of one of this rank, which computes the same; zeros of none.

    Both are scaled by alpha / rank, so B is what makes up for the larger rank.
    """
    found = None if snapshot is None else snapshot.weights.get(name)
    if found is not None and found.shape == shape:
        return found
    whole = torch.zeros(shape)
    if found is None or snapshot is None:
        return whole
    part = found.float() * (rank / snapshot.rank if ".lora_B" in name else 1.0)
    whole[: part.shape[0], : part.shape[1]] = part
    return whole
