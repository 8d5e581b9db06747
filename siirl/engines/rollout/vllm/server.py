"""The process of a vLLM engine: started by a worker, driven by messages over a socket, ends with it.

    python -m siirl.engines.rollout.vllm.server FD

FD: the inherited socket. The first message, "start", brings vLLM's arguments; each later one is answered by
"done", or by "error". "submit" alone has no such answer: its requests join those that run, and those that a
step has completed are told by a "finished", whatever else the worker sends (or by a "stream_error", which
ends them all). While it generates, the process says "alive" about every second, from the thread that runs the
engine: an engine that hangs falls silent.
"""

import argparse
import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from siirl.engines.rollout.base import SamplingParams
from siirl.engines.rollout.channel import Channel, ChannelClosed
from siirl.errors import UserError

ALIVE_EVERY_S = 1.0
PR_SET_PDEATHSIG = 1


Message = tuple[str, dict[str, Any], dict[str, np.ndarray]]
Result = tuple[dict[str, Any], dict[str, np.ndarray]]


class Server:
    """Answers the worker's messages with one engine."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._engine: Any = None
        self._running: set[str] = set()  # requests of the stream
        self._spoken_s = time.monotonic()
        self._inbox: queue.Queue[Message | None] = queue.Queue()

    def run(self) -> None:
        """Until the worker closes the channel or says "stop"."""
        # A reader of its own: the worker can always send, also while it does not read what we send.
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            while self._running and self._inbox.empty():
                self._guarded("stream_error", self._advance)
            message = self._inbox.get()
            if message is None or message[0] == "stop":
                return
            if message[0] == "submit":
                self._guarded("stream_error", self._submit, *message[1:])
            else:
                self._guarded("error", self._answer, *message)

    def _read(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                self._inbox.put(self._channel.receive())
        self._inbox.put(None)

    def _answer(self, kind: str, values: dict, arrays: dict) -> None:
        values, arrays = getattr(self, f"on_{kind}")(values, arrays) or ({}, {})
        self._channel.send("done", arrays, **values)

    def _guarded(self, report: str, work: Callable[..., None], *arguments: Any) -> None:
        """Do it; an error goes to the worker, under the name `report`, which ends the run or goes on."""
        try:
            work(*arguments)
        except ChannelClosed:
            raise
        except Exception as error:  # noqa: BLE001 - the edge of the process: the worker is told
            if report == "stream_error":
                self.on_abort({}, {})
            known = isinstance(error, UserError)
            self._channel.send(
                report,
                text=str(error) if known else f"{type(error).__name__}: {error}",
                user_error=known,
                traceback=traceback.format_exc(),
            )

    def _submit(self, values: dict, arrays: dict) -> None:
        """Let requests join those that run. Arrays as in on_generate; a seed for each of values["names"]."""
        bounds = np.cumsum(arrays["prompt_lengths"])[:-1]
        prompts = np.split(arrays["prompts"], bounds)
        for name, prompt, params, seed in zip(
            values["names"], prompts, values["params"], arrays["seeds"].tolist(), strict=True
        ):
            self._engine.add(name, prompt.tolist(), SamplingParams(**params), seed, values["adapter"])
            self._running.add(name)

    def _advance(self) -> None:
        """One step of the engine for the stream's requests."""
        finished = self._engine.step()
        names = [response.request_id.split("-")[0] for response in finished]
        self._running.difference_update(names)
        if finished:
            values, arrays = _responses(finished)
            if not self._running:
                values["stats"] |= self._engine.stats()
            self._channel.send("finished", arrays, names=names, **values)
        self._say_alive(f"{len(self._running)} requests are running")

    def _say_alive(self, progress: str) -> None:
        if time.monotonic() - self._spoken_s > ALIVE_EVERY_S:
            self._spoken_s = time.monotonic()
            self._channel.send("alive", progress=progress)

    def on_abort(self, values: dict, arrays: dict) -> None:
        """Forget the requests of the stream."""
        if self._running:
            self._engine.abort(sorted(self._running))
        self._running.clear()

    def on_start(self, values: dict, arrays: dict) -> Any:
        from siirl.engines.rollout.vllm.native import NativeEngine

        self._engine = NativeEngine(values["arguments"])

    def on_generate(self, values: dict, arrays: dict) -> Any:
        """Arrays prompts (all tokens in a row), prompt_lengths, seeds [prompt, sample]; a row a sample."""
        params = SamplingParams(**values["params"])
        bounds = np.cumsum(arrays["prompt_lengths"])[:-1]
        prompts = [part.tolist() for part in np.split(arrays["prompts"], bounds)]
        pending: dict[str, int] = {}
        for prompt, seeds in zip(prompts, arrays["seeds"].tolist(), strict=True):
            for seed in seeds:
                row = len(pending)
                self._engine.add(str(row), prompt, params, seed, values["adapter"])
                pending[str(row)] = row
        rows: list[Any] = [None] * len(pending)
        done = 0
        while done < len(rows):
            for finished in self._engine.step():
                rows[int(finished.request_id.split("-")[0])] = finished
                done += 1
            self._say_alive(f"{done} of {len(rows)} responses are complete")
        values, arrays = _responses(rows)
        values["stats"] |= self._engine.stats()
        return values, arrays

    def on_sleep(self, values: dict, arrays: dict) -> None:
        self._engine.sleep(values["keeps_weights"])

    def on_wake(self, values: dict, arrays: dict) -> None:
        self._engine.wake(values["part"])

    def on_begin_update(self, values: dict, arrays: dict) -> None:
        self._engine.begin_update()

    def on_update(self, values: dict, arrays: dict) -> None:
        self._engine.update(values["bucket"])

    def on_finish_update(self, values: dict, arrays: dict) -> None:
        self._engine.finish_update()

    def on_load_adapter(self, values: dict, arrays: dict) -> None:
        self._engine.load_adapter(values["name"], values["number"], values["folder"])

    def on_read_tensor(self, values: dict, arrays: dict) -> Any:
        parts = self._engine.read_tensor(values["name"])
        return {}, {str(worker): part.numpy() for worker, part in enumerate(parts)}


def _responses(finished: Sequence[Any]) -> Result:
    """Completed responses as one message: tokens and log-probs of all in a row, and their lengths."""
    cached = float(sum(response.num_cached_tokens for response in finished))
    return {
        "finish_reasons": [response.finish_reason for response in finished],
        "stats": {"cached_tokens": cached},
    }, {
        "tokens": np.array([token for response in finished for token in response.token_ids], np.int64),
        "log_probs": np.array([value for response in finished for value in response.log_probs], np.float32),
        "lengths": np.array([len(response.token_ids) for response in finished], np.int64),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="a vLLM engine of a siirl run; started by a worker")
    parser.add_argument("fd", type=int)
    descriptor = parser.parse_args(argv).fd
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the worker, which ends us
    sock = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    with contextlib.suppress(ChannelClosed):
        Server(Channel(sock)).run()
    sys.stdout.flush()
    os._exit(0)  # vLLM's own teardown can hang; nothing is left to save


if __name__ == "__main__":
    main()
