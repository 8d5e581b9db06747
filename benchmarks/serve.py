"""Clients of `siirl serve` at once: tokens a second of one and of several, sample latency, shares in a flood.

    python benchmarks/serve.py [--model DIR] [--tenants 8] [--rank 32] [--rows 8] [--length 128]
        [--seconds 20] [--out FILE] [key=value ...]

Starts a server (keys as of `siirl serve`; without --model one of 2 layers, made here) and asks it over HTTP,
each tenant from a thread of its own: forward_backward and optim_step one after the other, both sent before
either is read, as the client does. Three parts: tokens a second of one tenant, then of all at once; seconds
from a request for 16 tokens to its answer, alone and beside training tenants; tokens of each tenant while one
floods, with eight models where the others have one. Writes benchmarks/results/serve.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
from report_file import Report, end_by_signals

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from siirl.service.wire import PROTOBUF, messages  # noqa: E402

START_S, SAMPLED, FLOOD = 600.0, 16, 8
ADAM = {"learning_rate": 1e-4}


class Client:
    """A session of a tenant, with models."""

    def __init__(self, server: dict, base: str, rank: int, num_models: int = 1) -> None:
        self._url, self._key = server["base_url"], server["token"]
        self.session = self.ask("create_session", {})["session_id"]
        self.models = [f"{self.session}:train:{number}" for number in range(num_models)]
        self._numbers = dict.fromkeys(self.models, 0)
        asked = {"session_id": self.session, "base_model": base, "lora_config": {"rank": rank, "seed": 1}}
        for number in range(num_models):
            self.answer(self.ask("create_model", asked | {"model_seq_id": number}))
        self.samplers = 0

    def ask(self, path: str, body: dict | bytes, kind: str = "application/json") -> dict | bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        heads = {"X-API-Key": self._key, "Content-Type": kind}
        request = urllib.request.Request(f"{self._url}/api/v1/{path}", data, heads)
        with urllib.request.urlopen(request, timeout=300) as answer:
            found = answer.read()
            return found if PROTOBUF in answer.headers["Content-Type"] else json.loads(found)

    def answer(self, told: dict) -> dict | bytes:
        while True:
            found = self.ask("retrieve_future", {"request_id": told["request_id"]})
            if isinstance(found, bytes) or found.get("type") != "try_again":
                assert isinstance(found, bytes) or "error" not in found, found
                return found

    def step(self, model: str, rows: np.ndarray) -> None:
        """A gradient and a step by it."""
        self._numbers[model] += 2
        number = self._numbers[model] - 1
        trained = self.ask("forward_backward", training(model, number, rows), PROTOBUF)
        stepped = self.ask("optim_step", {"model_id": model, "seq_id": number + 1, "adam_params": ADAM})
        self.answer(trained)
        self.answer(stepped)

    def sampler(self, base: str) -> str:
        self.samplers += 1
        asked = {"session_id": self.session, "sampling_session_seq_id": self.samplers, "base_model": base}
        return self.ask("create_sampling_session", asked)["sampling_session_id"]

    def sample(self, sampler: str, number: int, prompt: list[int]) -> float:
        """Seconds until the answer."""
        begin_s = time.perf_counter()
        params = {"max_tokens": SAMPLED, "stop": [], "temperature": 1.0}
        asked = {"sampling_session_id": sampler, "seq_id": number, "sampling_params": params}
        self.answer(self.ask("asample", asked | {"prompt": {"chunks": [{"tokens": prompt}]}}))
        return time.perf_counter() - begin_s

    def close(self) -> None:
        self.ask(f"sessions/{self.session}/finish", {"reason": {"type": "success"}})


def training(model: str, number: int, rows: np.ndarray) -> bytes:
    request = messages()["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn="cross_entropy")
    for row in rows:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = row[:-1].astype(np.int32).tobytes()
        entry = datum.loss_fn_inputs.add(key="target_tokens")
        entry.value.dense, entry.value.dtype = row[1:].astype(np.int64).tobytes(), 2
        entry.value.shape.append(len(row) - 1)
    return request.SerializeToString()


class Load:
    """Models that are trained by threads until `stop`; tokens of each tenant meanwhile."""

    def __init__(self, clients: list[Client], rows: np.ndarray) -> None:
        self.tokens = [0] * len(clients)
        self._rows, self._over, self._lock = rows, threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._train, args=[number, client, model], daemon=True)
            for number, client in enumerate(clients)
            for model in client.models
        ]
        for thread in self._threads:
            thread.start()

    def _train(self, number: int, client: Client, model: str) -> None:
        while not self._over.is_set():
            client.step(model, self._rows)
            with self._lock:
                self.tokens[number] += self._rows.size - len(self._rows)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def per_second(clients: list[Client], rows: np.ndarray, seconds: float) -> list[float]:
    """Tokens a second of each, after a step of each."""
    for client in clients:
        client.step(client.models[0], rows)
    load, begin_s = Load(clients, rows), time.perf_counter()
    time.sleep(seconds)
    before, took_s = list(load.tokens), time.perf_counter() - begin_s
    load.stop()
    return [one / took_s for one in before]


def latencies(client: Client, base: str, rows: np.ndarray, seconds: float) -> dict[str, float]:
    sampler, found, end_s = client.sampler(base), [], time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(found) < 3:
        found.append(client.sample(sampler, len(found), rows[0, : len(rows[0]) // 2].tolist()))
    ordered = sorted(found)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"count": len(found), "p50_s": statistics.median(found), "p99_s": p99}


def started(args: argparse.Namespace, folder: Path) -> tuple[subprocess.Popen, dict]:
    keys = {
        "actor_rollout_ref.model.path": args.model,
        "actor_rollout_ref.model.lora_rank": args.rank,
        "data.max_prompt_length": args.length,
        "data.max_response_length": args.length,
        "service.address": "127.0.0.1:0",
        "service.max_models": args.tenants + FLOOD,
        "trainer.output_dir": folder / "run",
        "trainer.logger": "[]",
    }
    words = [*(f"{name}={value}" for name, value in keys.items()), *args.keys]
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen([sys.executable, "-m", "siirl.cli", "serve", *words], stdout=log, stderr=log)
    file, end_s = folder / "run" / "service" / "client.json", time.monotonic() + START_S
    while not file.is_file():
        if job.poll() is not None or time.monotonic() > end_s:
            raise SystemExit((folder / "log").read_text()[-3000:])
        time.sleep(0.2)
    return job, json.loads(file.read_text())


def measured(args: argparse.Namespace, server: dict, report: Report) -> None:
    base, seconds = str(args.model), args.seconds
    vocabulary = json.loads((Path(base) / "config.json").read_text())["vocab_size"]
    rows = np.random.default_rng(0).integers(2, vocabulary, (args.rows, args.length + 1))
    new: Callable[..., Client] = lambda count=1: Client(server, base, args.rank, count)  # noqa: E731
    clients = [new() for _ in range(args.tenants)]
    one = per_second(clients[:1], rows, seconds)
    report["tokens_per_s"] = {"one": one[0]}
    report.count("one", 1)
    all_of_them = per_second(clients, rows, seconds)
    report["tokens_per_s"] |= {
        "all": sum(all_of_them),
        "each": all_of_them,
        "gain": sum(all_of_them) / one[0],
    }
    report.count("all", 1)
    report["sample_s"] = {"alone": latencies(clients[0], base, rows, seconds / 2)}
    load = Load(clients[1:], rows)
    report["sample_s"]["beside"] = latencies(clients[0], base, rows, seconds)
    load.stop()
    report.count("sample", 1)
    for client in clients[2:]:
        client.close()
    shares = per_second([new(FLOOD), *clients[:2]], rows, seconds)
    report["flood"] = {
        "flooding": shares[0],
        "others": shares[1:],
        "most_over_least": max(shares) / min(shares),
    }
    report.count("flood", 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    for name, default in (("tenants", 8), ("rank", 32), ("rows", 8), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks/results/serve.json")
    parser.add_argument("keys", nargs="*", help="key=value of siirl serve")
    args = parser.parse_args()
    end_by_signals()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.model is None:
            words = [sys.executable, str(REPOSITORY / "examples/serve/prepare.py"), "--out", name]
            subprocess.run([*words, "--letters"], check=True)
            args.model = folder / "letters"
        parts = dict.fromkeys(("one", "all", "sample", "flood"), 1)
        told = {
            name: getattr(args, name) for name in ("tenants", "rank", "rows", "length", "seconds", "keys")
        }
        report = Report(args.out, parts, **told)
        job, server = started(args, folder)
        try:
            measured(args, server, report)
        finally:
            job.terminate()
            job.wait(60)
        report.finish()
        print(json.dumps({part: report[part] for part in ("tokens_per_s", "sample_s", "flood")}, indent=1))


if __name__ == "__main__":
    main()
