"""Plays the rows of verifiers' environments (siirl/data/verifiers_rows.py): serve.command=verifiers.

Each interpreter that rows name is one process, which plays the episodes of this one beside each other.
"""

import concurrent.futures
import itertools
import json
import queue
import shlex
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from siirl.agents.outside.program import KEPT_COMMAND, MOST_LINES, SessionInfo
from siirl.data.verifiers_rows import ARGS, VerifiersRows, missing_package
from siirl.errors import EpisodeFailed
from siirl.user_code import verifiers_program

POLL_S = 0.05
_LOCK = threading.Lock()
_RUNNING: dict[str, "_Interpreter"] = {}
"""Interpreter -> the process that takes its new episodes."""


def play(session: SessionInfo) -> float:
    """One episode, of a row that `verifiers:ENVIRONMENT` made: its reward."""
    extra = session.task["extra_info"]
    if not isinstance(extra, dict) or "input" not in extra:
        raise EpisodeFailed(
            "the row is none of an environment of verifiers. Set data.train_files=verifiers:ENVIRONMENT, or "
            "another serve.command",
            "program_raised",
        )
    rows = VerifiersRows(extra["dataset"])
    options = rows.options
    asked = {
        "env": rows.env,
        ARGS: options[ARGS],
        "input": json.loads(extra["input"]),
        "base_url": session.base_url,
        "api_key": session.api_key,
        "model": session.task["models"][0],
    }
    running, number, future = _asked(str(options["python"]), asked)
    try:
        while not future.done():
            concurrent.futures.wait([future], timeout=POLL_S)  # a thread is broken off between two lines
        answer = future.result()
    finally:
        if not future.done():  # given up, maybe as code of an environment hangs, which holds up all others
            running.give_up(number)
    if "error" in answer:
        raise EpisodeFailed(answer["error"], "program_raised")
    return answer["reward"]


def _asked(python: str, asked: dict[str, Any]) -> tuple["_Interpreter", int, concurrent.futures.Future]:
    with _LOCK:
        if (running := _RUNNING.get(python)) is None or running.retired:
            running = _RUNNING[python] = _Interpreter(python)
        return (running, *running.ask(asked))


class _Interpreter:
    """A running process of an interpreter.

    Threads of its own write to it and read from it; whoever asks holds _LOCK.
    """

    def __init__(self, python: str):
        self._python = python
        self.retired = False
        """Takes no more episodes: it has ended, or one was given up, and it ends with its last."""
        self._numbers = itertools.count()
        self._asked: dict[int, concurrent.futures.Future] = {}
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._printed: deque[str] = deque(maxlen=MOST_LINES)
        self._pipe, theirs = socket.socketpair()
        command = shlex.join([python, verifiers_program.__file__, "play"])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", KEPT_COMMAND, str(theirs.fileno()), command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        for task in (self._write, self._read_answers, self._read_errors):
            threading.Thread(target=task, name="verifiers", daemon=True).start()

    def ask(self, asked: dict[str, Any]) -> tuple[int, concurrent.futures.Future]:
        """Begin an episode: its number, and what will hold the answer."""
        number, future = next(self._numbers), concurrent.futures.Future()
        self._asked[number] = future
        self._lines.put({"number": number, **asked})
        return number, future

    def give_up(self, number: int) -> None:
        """Nobody waits for an episode any more."""
        with _LOCK:
            self.retired = True
            self._asked.pop(number, None)
            self._lines.put({"number": number, "give_up": True})
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.retired and not self._asked:
            self._pipe.close()  # its keeper kills it, and all that it has started

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: _read_answers tells those who wait
            while line := self._lines.get():
                print(json.dumps(line), file=self._process.stdin, flush=True)

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        problem = ""
        for line in self._process.stdout:
            answer = json.loads(line)
            if verifiers_program.MISSING in answer:
                problem = missing_package(self._python)
                continue
            with _LOCK:
                future = self._asked.pop(answer["number"], None)
                self._end_if_idle()
            if future is not None:
                future.set_result(answer)
        code = self._process.wait()
        with _LOCK:
            self.retired = True
            self._lines.put({})  # the end of _write
            left, self._asked = self._asked, {}
        told = problem or "\n".join([f"the process of {self._python} ended with code {code}", *self._printed])
        for future in left.values():
            future.set_result({"error": told})

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._printed.append(line.rstrip())
