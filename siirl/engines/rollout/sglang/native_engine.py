"""What siirl knows of SGLang's own interfaces, version 0.5.17: only native*.py depend on them.

Imported in an engine process, never in a training worker. SGLang's scheduler and model run in a process that
the engine process starts; there native_scheduler draws the tokens and loads the weights.
"""

import asyncio
import dataclasses
import json
from http import HTTPStatus
from typing import Any

import numpy as np
import torch

from siirl.data.completions import PAUSED, Completion, Request
from siirl.engines.rollout.sampling import later_seed
from siirl.engines.rollout.served.draws import signed
from siirl.engines.rollout.served.messages import UNKNOWN, Answer
from siirl.engines.rollout.sglang.native_scheduler import LOADER, SAMPLER, run_scheduler
from siirl.errors import ConfigError, NotSupportedError, RolloutError
from siirl.spelling import suggest

# After native_scheduler, which lets SGLang be imported beside newer transformers.
from sglang.srt.entrypoints.engine import Engine  # isort: skip
from sglang.srt.server_args import ServerArgs  # isort: skip

STEP_S = 0.002
"""Longest wait for what completes, after which the worker's messages are looked for."""
ABORT_AGAIN_S = 0.05
"""A request that has not reached the scheduler yet is aborted again after this time."""
IDLE_S = 60.0
"""Longest wait for the scheduler to have nothing in flight."""


class _Engine(Engine):
    """SGLang's engine, with a scheduler that draws and takes weights as ours do."""

    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *arguments: Any, **options: Any) -> tuple[list, list]:
        """None: requests and answers are token ids, and go past it."""
        return [], []


class NativeEngine:
    """An SGLang engine: requests in, finished responses out."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Start it; arguments: those of SGLang's ServerArgs. ConfigError for one that it does not have."""
        known = {item.name for item in dataclasses.fields(ServerArgs)}
        for name in arguments:
            if name not in known:
                raise ConfigError(
                    f"actor_rollout_ref.rollout.engine_kwargs.sglang.{name}: SGLang's engine has no such "
                    f"argument. {suggest(name, known)}"
                )
        fixed = {"sampling_backend": SAMPLER, "custom_weight_loader": [LOADER]}
        self._engine = _Engine(**arguments | fixed)
        self._tasks: dict[str, asyncio.Task] = {}  # under the names of their requests
        self._done: list[str] = []
        self._some_done = asyncio.Event()

    def add(self, request: Request, adapter: str | None) -> None:
        """Queue one response. What it draws depends on its seed and positions alone."""
        if adapter is not None or request.seen.images:
            raise NotSupportedError("not supported yet: adapters and images with SGLang")
        name = str(request.key)
        task = self._engine.loop.create_task(self._asked(name, request))
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._ended(name))

    async def _asked(self, name: str, request: Request) -> Answer:
        params, prompt = request.params, list(request.prompt)
        # SGLang says to a sampler at which position the last token stands that was read.
        seed = signed(later_seed(request.seed, request.start + 1 - len(prompt)))
        answer = await self._engine.async_generate(
            input_ids=prompt,
            sampling_params={
                "max_new_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "stop_token_ids": list(params.stop_token_ids),
                "ignore_eos": params.ignore_eos,
                "sampling_seed": seed,
            },
            return_logprob=True,
            rid=_rid(name),
        )
        assert isinstance(answer, dict)
        return _response(name, answer, request)

    def _ended(self, name: str) -> None:
        self._done.append(name)
        self._some_done.set()

    def step(self) -> list[Answer]:
        """What completes within a moment."""
        return self._completed(STEP_S)

    def _completed(self, timeout_s: float) -> list[Answer]:
        self._engine.loop.run_until_complete(self._wait(timeout_s))
        names, self._done = self._done, []
        return [self._tasks.pop(name).result() for name in names if name in self._tasks]

    async def _wait(self, timeout_s: float) -> None:
        self._some_done.clear()
        if not self._done:
            with_timeout = asyncio.wait_for(self._some_done.wait(), timeout_s)
            await asyncio.gather(with_timeout, return_exceptions=True)
        await asyncio.sleep(0)  # others that have completed with it

    def stop(self, request_ids: list[str]) -> list[Answer]:
        """End requests that were added under these names; what there is of each, maybe nothing.

        One that completes meanwhile ends in its own way.
        """
        ended: list[Answer] = []
        while names := [name for name in request_ids if name in self._tasks]:
            for name in names:
                self._engine.tokenizer_manager.abort_request(_rid(name))
            ended += self._completed(ABORT_AGAIN_S)
        return ended

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests that were added under these names."""
        self.stop(request_ids)

    def sleep(self, keeps_weights: bool) -> None:
        """Give back the device memory of weights and KV cache; the weights are gone."""
        assert not keeps_weights, "a model whose weights stay is refused by the check"
        self._flush()
        self._engine.release_memory_occupation(["kv_cache", "weights"])

    def wake(self, part: str) -> None:
        """Take memory again: part "weights" or "kv_cache"."""
        self._engine.resume_memory_occupation([part])

    def begin_update(self) -> None:
        """Begin to replace the weights."""

    def update(self, bucket: dict[str, Any]) -> None:
        """Load the tensors of a bucket (see WeightTransfer.fill), by SGLang's update interface."""
        told = torch.frombuffer(bytearray(json.dumps(bucket).encode()), dtype=torch.uint8)
        _check(self._engine.update_weights_from_tensor([("bucket", told)], LOADER, flush_cache=False))

    def finish_update(self) -> None:
        """Complete an update; what was computed with other weights is forgotten."""
        self._flush()

    def _flush(self) -> None:
        manager, loop = self._engine.tokenizer_manager, self._engine.loop
        answer = loop.run_until_complete(manager.flush_cache(timeout_s=IDLE_S))
        _check((answer.success, getattr(answer, "message", "") or "requests are in flight"))

    def read_tensor(self, name: str) -> list[tuple[list[float], list[int]]]:
        """A parameter under its Hugging Face name, float32: values and shape. Of models that can say it."""
        values = np.asarray(self._engine.get_weights_by_name(name, truncate_size=1 << 30), dtype=np.float32)
        return [(values.flatten().tolist(), list(values.shape))]

    def stats(self) -> dict[str, float]:
        """SGLang's counters go to a server of its own, which is not started."""
        return {}


def _rid(name: str) -> str:
    """A request's name in SGLang, which aborts all that begin as what it is told."""
    return f"{name};"


def _check(answer: Any) -> None:
    success, message = answer
    if not success:
        raise RolloutError(f"SGLang: {message}")


def _response(name: str, answer: dict[str, Any], request: Request) -> Answer:
    meta = answer["meta_info"]
    log_probs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
    token_ids = list(answer["output_ids"])[: len(log_probs)]
    return Answer(
        name,
        Completion(
            token_ids=token_ids,
            log_probs=log_probs[: len(token_ids)],
            finish_reason=_reason(meta["finish_reason"], token_ids, request),
            weight_version=UNKNOWN,
        ),
        meta.get("cached_tokens", 0),
    )


def _reason(said: dict[str, Any], token_ids: list[int], request: Request) -> str:
    """As Completion has it, whatever SGLang says of the last token.

    At the last one that is allowed it says "length", whichever token that is; of a request that was aborted
    while its last token was drawn, "abort".
    """
    params, code = request.params, said.get("status_code")
    if code is not None:
        return f"{said.get('message')} ({HTTPStatus(code).phrase})"
    if token_ids and not params.ignore_eos and token_ids[-1] in params.stop_token_ids:
        return "stop"
    if len(token_ids) == params.max_tokens:
        return "length"
    return PAUSED if said["type"] == "abort" else f"{said['type']} after {len(token_ids)} tokens"
