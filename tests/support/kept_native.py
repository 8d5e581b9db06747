"""An engine without a model, for tests of what stays when a worker is gone: it writes down its life."""

import json
import os
import subprocess
import time
from pathlib import Path

from siirl.data.completions import Completion
from siirl.engines.rollout.served.messages import UNKNOWN, Answer


class NativeEngine:
    """What it is told goes to a file, a line each; a request of n tokens takes n steps of 20 ms."""

    def __init__(self, arguments):
        self.life, self.requests = Path(arguments["life"]), {}
        self.faults = set(arguments.get("faults", ()))
        for number in range(arguments.get("ranks", 0)):  # as vLLM's own processes, for an engine of several
            words = [f"VLLM::Worker_TP{number}", "600"]
            subprocess.Popen(words, executable="/bin/sleep")
        self._note("start")

    def _note(self, what, **more):
        with self.life.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "what": what, **more}) + "\n")

    def add(self, request, adapter):
        self._note("add", name=str(request.key))
        self.requests[str(request.key)] = (request, 0)

    def step(self):
        time.sleep(0.02)
        self.requests = {name: (request, done + 1) for name, (request, done) in self.requests.items()}
        ended = [name for name, (request, done) in self.requests.items() if done >= request.params.max_tokens]
        return [self._said(name, self.requests.pop(name)[0]) for name in ended]

    def _said(self, name, request):
        number = request.params.max_tokens
        return Answer(name, Completion([7] * number, [-1.0] * number, "length", UNKNOWN), 0)

    def abort(self, names):
        for name in names:
            self.requests.pop(name)

    def stats(self):
        return {}

    def begin_update(self):
        pass

    def update(self, bucket):
        if "update" in self.faults:
            raise RuntimeError("it has no room")

    def finish_update(self, keeps_kv):
        self._note("weights")

    def sleep(self, keeps_weights):
        self._note("sleep", requests=len(self.requests))

    def wake(self, part):
        self._note("wake", part=part)

    def renew(self):
        self._note("renew", requests=len(self.requests))
        if "renew" in self.faults:
            raise RuntimeError("requests are still in flight")
        self.requests.clear()

    def greet(self):
        self._note("greet")
        if "greet" in self.faults:
            time.sleep(600)
