"""What siirl uses of SGLang 0.5.17, on a CPU with a transformers model that reads each row anew for a token.

Names and behaviour are SGLang's as far as siirl sees them: a scheduler in a process of its own, that ends
the engine with itself; aborts by the beginning of a name; limits of a context; a stop token as the last
token that ends as "length"; caches that are flushed, and memory that is given back, with nothing in flight
only. All of its modules are this one.
"""

import asyncio
import importlib
import io
import itertools
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import setproctitle
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

for _name in (
    *("srt", "srt.entrypoints", "srt.entrypoints.engine", "srt.server_args", "srt.configs", "srt.layers"),
    *("srt.configs.model_config", "srt.layers.logprob_processor", "srt.layers.sampler", "srt.managers"),
    *("srt.managers.scheduler", "srt.sampling", "srt.sampling.sampling_batch_info"),
):
    sys.modules[f"sglang.{_name}"] = sys.modules[__name__]

TOP_K_ALL = 1 << 30
ROWS_AT_ONCE = 512
STEP_S = 0.004
"""Least time of a step, about that of a GPU: who stops a response between two finds some of it."""
SAMPLERS: dict[str, Any] = {}


@dataclass
class ServerArgs:
    """Those that siirl sets."""

    model_path: str
    skip_tokenizer_init: bool
    load_format: str
    dtype: str
    device: str
    context_length: int
    max_running_requests: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    disable_cuda_graph: bool
    trust_remote_code: bool
    json_model_override_args: str
    random_seed: int
    grammar_backend: str
    watchdog_timeout: float
    log_level: str
    attention_backend: str
    max_total_tokens: int
    sampling_backend: str
    custom_weight_loader: list[str]
    page_size: int = 1


class ModelConfig:
    """What a model's directory says."""

    def __init__(self, folder: str) -> None:
        self.hf_config = AutoConfig.from_pretrained(folder)

    def _get_hf_eos_token_id(self) -> set[int]:
        return {self.hf_config.eos_token_id}


class Sampler(torch.nn.Module):
    """To be replaced."""


@dataclass
class LogprobResult:
    token_logprobs: Tensor

    def write_output_to(self, logits_output: Any) -> None:
        logits_output.next_token_logprobs = self.token_logprobs


def register_sampler_backend(backend: str, factory: Any) -> None:
    SAMPLERS[backend] = factory


@dataclass
class SamplingBatchInfo:
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    need_top_k_sampling: bool
    need_top_p_sampling: bool
    sampling_seed: Tensor | None = None
    device: str = "cpu"

    @classmethod
    def from_schedule_batch(cls, batch: Any, vocab_size: int) -> "SamplingBatchInfo":
        params = [request.sampling_params for request in batch.reqs]
        info = cls(
            torch.tensor([[one.temperature] for one in params]),
            torch.tensor([one.top_k for one in params], dtype=torch.int32),
            torch.tensor([one.top_p for one in params]),
            any(one.top_k != TOP_K_ALL for one in params),
            any(one.top_p != 1.0 for one in params),
        )
        info.adjusted_from_schedule_batch(batch, vocab_size)
        return info

    def adjusted_from_schedule_batch(self, batch: Any, vocab_size: int) -> None:
        """Nothing, unless replaced."""


@dataclass
class Req:
    rid: str
    input_ids: list[int]
    sampling_params: Any
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    to_finish: dict | None = None

    def finished(self, eos: set[int] | None) -> dict | None:
        params, last = self.sampling_params, self.output_ids[-1]
        if self.to_finish:
            return self.to_finish
        if len(self.output_ids) >= params.max_new_tokens:
            return {"type": "length", "length": params.max_new_tokens}
        if not params.ignore_eos and last in {*params.stop_token_ids, *(eos or ())}:
            return {"type": "stop", "matched": last}
        return None


class Scheduler:
    """One step for all that run, then what was said meanwhile."""

    def __init__(self, args: ServerArgs, connection: Any) -> None:
        self.args, self.connection = args, connection
        self.eos = ModelConfig(args.model_path)._get_hf_eos_token_id()
        config = AutoConfig.from_pretrained(args.model_path)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.model.load_weights = self._load_weights
        self.sampler = SAMPLERS[args.sampling_backend]()
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.asleep: set[str] = set()

    def _load_weights(self, weights: Any) -> None:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                parameters[name].copy_(tensor)

    def run(self) -> None:
        while True:
            while self.connection.poll(None if not (self.waiting or self.running) else 0):
                number, kind, value = self.connection.recv()
                answer = getattr(self, kind)(value)
                if number is not None:
                    self.connection.send((number, answer))
            self.step()

    def generate(self, value: dict) -> None:
        params = SimpleNamespace(**value["sampling_params"])
        if params.temperature < 1e-6:
            params.temperature, params.top_k = 1.0, 1
        params.top_k = TOP_K_ALL if params.top_k == -1 else params.top_k
        room = min(self.args.context_length, self.args.max_total_tokens) - len(value["input_ids"])
        params.max_new_tokens = max(0, min(params.max_new_tokens, room - 2))
        self.waiting.append(Req(value["rid"], value["input_ids"], params))

    def abort(self, rid: str) -> None:
        for request in [one for one in self.waiting if one.rid.startswith(rid)]:
            self.waiting.remove(request)
            self.told(request, {"type": "abort", "message": "Abort in waiting queue"})
        for request in self.running:
            if request.rid.startswith(rid):
                request.to_finish = {"type": "abort", "message": "Aborted"}

    def update_weights(self, value: tuple) -> tuple[bool, str]:
        data, load_format = value
        assert "weights" not in self.asleep
        module, _, name = load_format.rpartition(".")
        if load_format not in self.args.custom_weight_loader:
            return False, f"Unknown load_format={load_format}"
        getattr(importlib.import_module(module), name)(self.model, torch.load(io.BytesIO(data)))
        return True, "Success"

    def flush_cache(self, value: None) -> bool:
        return not (self.waiting or self.running)

    def release(self, tags: list[str]) -> None:
        assert not (self.waiting or self.running), "only when the server is idle"
        self.asleep |= set(tags)
        if "weights" in tags:
            for parameter in self.model.parameters():
                parameter.data.fill_(torch.nan)

    def resume(self, tags: list[str]) -> None:
        for tag in tags:
            self.asleep.remove(tag)

    def read(self, name: str) -> list:
        return self.model.get_parameter(name).tolist()

    def told(self, request: Req, reason: dict) -> None:
        meta = {"finish_reason": reason, "cached_tokens": 0}
        meta["output_token_logprobs"] = [
            (one, token, None) for one, token in zip(request.log_probs, request.output_ids, strict=True)
        ]
        self.connection.send((None, (request.rid, {"output_ids": request.output_ids, "meta_info": meta})))

    def step(self) -> None:
        free = self.args.max_running_requests - len(self.running)
        self.running, self.waiting = self.running + self.waiting[:free], self.waiting[free:]
        assert not self.running or not self.asleep
        until_s = time.monotonic() + STEP_S
        left: list[Req] = []
        for begin in range(0, len(self.running), ROWS_AT_ONCE):
            rows = self.running[begin : begin + ROWS_AT_ONCE]
            for request, token, log_prob in zip(rows, *self.sampled(rows), strict=True):
                request.output_ids.append(token)
                request.log_probs.append(log_prob)
                reason = request.finished(self.eos)
                if reason:
                    self.told(request, reason)
                else:
                    left.append(request)
        self.running = left
        time.sleep(max(0.0, until_s - time.monotonic()))

    @torch.no_grad()
    def sampled(self, rows: list[Req]) -> tuple[list[int], list[float]]:
        texts = [[*one.input_ids, *one.output_ids] for one in rows]
        length_B = torch.tensor([len(text) for text in texts])
        width = int(length_B.max())
        ids_BT = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        logits_BV = self.model(ids_BT).logits[torch.arange(len(rows)), length_B - 1]
        output = SimpleNamespace(next_token_logits=logits_BV)
        info = SamplingBatchInfo.from_schedule_batch(SimpleNamespace(reqs=rows), logits_BV.shape[1])
        token_B = self.sampler(output, info, True, [0] * len(rows), [None] * len(rows), length_B - 1)
        return token_B.tolist(), output.next_token_logprobs.tolist()


def run_scheduler_process(args: ServerArgs, connection: Any) -> None:
    setproctitle.setproctitle("sglang::scheduler")
    torch.set_num_threads(1)
    scheduler = Scheduler(args, connection)
    connection.send("ready")
    scheduler.run()


class Engine:
    """Asks the scheduler, and is ended when that ends."""

    run_scheduler_process_func = staticmethod(run_scheduler_process)
    run_detokenizer_process_func: Any = None

    def __init__(self, **arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        args = (ServerArgs(**arguments), theirs)
        self._process = context.Process(target=self.run_scheduler_process_func, args=args, daemon=True)
        self._process.start()
        theirs.close()
        assert self._connection.recv() == "ready"
        self._outbox: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        for work in (self._watch, self._write):
            threading.Thread(target=work, daemon=True).start()
        self.loop = asyncio.new_event_loop()
        self.loop.add_reader(self._connection.fileno(), self._take)
        self.tokenizer_manager = SimpleNamespace(
            abort_request=lambda rid: self._outbox.put((None, "abort", rid)), flush_cache=self._flush
        )
        self._numbers = itertools.count()
        self._awaited: dict[int | str, asyncio.Future] = {}

    def _watch(self) -> None:
        while self._process.is_alive():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    def _write(self) -> None:
        while True:  # whoever asks goes on reading answers
            self._connection.send(self._outbox.get())

    def _take(self) -> None:
        while self._connection.poll():
            number, value = self._connection.recv()
            key, value = (number, value) if number is not None else value
            self._awaited.pop(key).set_result(value)

    async def _ask(self, kind: str, value: Any) -> Any:
        number = next(self._numbers)
        self._awaited[number] = self.loop.create_future()
        self._outbox.put((number, kind, value))
        return await self._awaited[number]

    async def async_generate(
        self, input_ids: list[int], sampling_params: dict, return_logprob: bool, rid: str
    ) -> dict:
        assert return_logprob
        self._awaited[rid] = future = self.loop.create_future()
        value = {"input_ids": input_ids, "sampling_params": sampling_params, "rid": rid}
        self._outbox.put((None, "generate", value))
        return await future

    async def _flush(self, timeout_s: float) -> Any:
        until_s = time.monotonic() + timeout_s
        while not (success := await self._ask("flush_cache", None)) and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        return SimpleNamespace(success=success)

    def update_weights_from_tensor(
        self, named_tensors: list, load_format: str, flush_cache: bool
    ) -> tuple[bool, str]:
        data = io.BytesIO()
        torch.save(named_tensors, data)
        return self.loop.run_until_complete(self._ask("update_weights", (data.getvalue(), load_format)))

    def release_memory_occupation(self, tags: list[str]) -> None:
        self.loop.run_until_complete(self._ask("release", tags))

    def resume_memory_occupation(self, tags: list[str]) -> None:
        self.loop.run_until_complete(self._ask("resume", tags))

    def get_weights_by_name(self, name: str, truncate_size: int) -> list:
        return self.loop.run_until_complete(self._ask("read", name))
