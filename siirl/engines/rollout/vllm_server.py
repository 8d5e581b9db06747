"""The process of a vLLM engine: started by a worker, driven by messages over a socket, ends with it.

    python -m siirl.engines.rollout.vllm_server FD

FD: the inherited socket. The first message, "start", brings vLLM's arguments; each later one is answered by
"done", or by "error". While it generates, the process says "alive" about every second, from the thread that
runs the engine: an engine that hangs falls silent.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import numpy as np

from siirl.engines.rollout.base import SamplingParams
from siirl.engines.rollout.channel import Channel, ChannelClosed
from siirl.errors import UserError

ALIVE_EVERY_S = 1.0
PR_SET_PDEATHSIG = 1


class Server:
    """Answers the worker's messages with one engine."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._engine: Any = None

    def run(self) -> None:
        """Until the worker closes the channel or says "stop"."""
        while True:
            kind, values, arrays = self._channel.receive()
            if kind == "stop":
                return
            try:
                result = getattr(self, f"on_{kind}")(values, arrays)
            except Exception as error:  # told to the worker, which ends the run or goes on
                self._channel.send(
                    "error",
                    text=str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}",
                    user_error=isinstance(error, UserError),
                    traceback=traceback.format_exc(),
                )
                continue
            values, arrays = result or ({}, {})
            self._channel.send("done", arrays, **values)

    def on_start(self, values: dict, arrays: dict) -> Any:
        from siirl.engines.rollout.vllm_native import NativeEngine

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
                self._engine.add(str(row), prompt, params, seed)
                pending[str(row)] = row
        rows: list[Any] = [None] * len(pending)
        done, spoken_s = 0, time.monotonic()
        while done < len(rows):
            for finished in self._engine.step():
                rows[int(finished.request_id.split("-")[0])] = finished
                done += 1
            if time.monotonic() - spoken_s > ALIVE_EVERY_S:
                spoken_s = time.monotonic()
                self._channel.send("alive", done=done, total=len(rows))
        reasons = [row.finish_reason for row in rows]
        stats = self._engine.stats() | {"cached_tokens": float(sum(row.num_cached_tokens for row in rows))}
        return {"finish_reasons": reasons, "stats": stats}, {
            "tokens": np.array([token for row in rows for token in row.token_ids], np.int64),
            "log_probs": np.array([value for row in rows for value in row.log_probs], np.float32),
            "lengths": np.array([len(row.token_ids) for row in rows], np.int64),
        }

    def on_sleep(self, values: dict, arrays: dict) -> None:
        self._engine.sleep()

    def on_wake(self, values: dict, arrays: dict) -> None:
        self._engine.wake(values["part"])

    def on_begin_update(self, values: dict, arrays: dict) -> None:
        self._engine.begin_update()

    def on_update(self, values: dict, arrays: dict) -> None:
        self._engine.update(values["bucket"])

    def on_finish_update(self, values: dict, arrays: dict) -> None:
        self._engine.finish_update()

    def on_read_tensor(self, values: dict, arrays: dict) -> Any:
        parts = self._engine.read_tensor(values["name"])
        return {}, {str(worker): part.numpy() for worker, part in enumerate(parts)}


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
