"""Clients of `siirl serve` at once: tokens a second of one and of several, sample latency, shares in a flood.

    python benchmarks/serve.py [--gpu] [--small] [--parts plain,one,all,sample,flood] [--tenants 8]
        [--rank 8] [--rows 2] [--length 32] [--ahead 1] [--seconds 20] [--steps 20] [--model DIR]
        [--out FILE] [key=value ...]

Starts a server (keys as of `siirl serve`) on a model with random weights and asks it over HTTP, each tenant
from a thread of its own: forward_backward and optim_step one after the other, both sent before either is
read, as the client does, and a step ahead (submit_ahead=1, the default of the cookbook's supervised training;
--ahead 0: none); the package tinker is not needed. The parts: `plain`, a job of siirl that trains an
adapter of that rank on the same rows (supervised, its steps without the first ones), against which a step of
one tenant is held; tokens a second of `one` tenant, then of `all` at once; `sample`, seconds from a request
for 16 tokens to its answer, alone and beside training tenants; `flood`, tokens of each tenant while one has
eight models where the others have one. One server has all parts but the first, and vLLM only for `sample`.
CPU: 2 small layers in float32. --gpu: the shape of Qwen3-1.7B, rank 32, 8 rows of 128 tokens, vLLM. --small:
the same keys on a small model, to try a command. Writes benchmarks/results/serve_cpu.json or serve_gpu.json
after each part; with --parts it keeps the others of a file of the same settings. So a call may be short: on
an H200 `--parts plain,one,all,flood` and then `--parts sample` take about four minutes each.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from grpo_gpu import COMMON, SHAPES, keep_logs, make_model
from report_file import Report, end_by_signals, end_job, rows_of, run_job

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from siirl.service.wire import PROTOBUF, messages  # noqa: E402

START_S, SAMPLED, FLOOD = 600.0, 16, 8
WARM_UP, FIRST_WORD = 5, 2
PARTS = {
    "plain": ("plain_step_s",),
    "one": ("one_tokens_per_s", "one_tokens_per_cpu_s"),
    "all": ("all_tokens_per_s", "all_tokens_per_cpu_s"),
    "sample": ("sample_s",),
    "flood": ("flood",),
}
"""What each tells, in the order in which they run."""
TOLD = ("gain", "over_plain", "most_over_least")
"""What is told of several of them, or for the bars: at least 4, at most 1.05, at most 1.2."""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
}
KEYS = {
    False: (
        "trainer.device=cpu",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
        "actor_rollout_ref.rollout.dtype=float32",
    ),
    True: (),
}
"""By --gpu: of the server and of the plain job. Most CPUs have no products in bf16: they are several times
slower than those in float32."""
ADAM = {"learning_rate": 1e-4}
CLI = [sys.executable, "-m", "siirl.cli"]


class Client:
    """A session of a tenant, with models."""

    def __init__(self, server: dict, base: str, rank: int, num_models: int = 1) -> None:
        self._address, self._key = server["base_url"].removeprefix("http://"), server["token"]
        self._kept = threading.local()
        self.session = self.ask("create_session", {})["session_id"]
        self.models = [f"{self.session}:train:{number}" for number in range(num_models)]
        self._numbers = dict.fromkeys(self.models, 0)
        asked = {"session_id": self.session, "base_model": base, "lora_config": {"rank": rank, "seed": 1}}
        for number in range(num_models):
            self.answer(self.ask("create_model", asked | {"model_seq_id": number}))
        self.samplers = 0

    def ask(self, path: str, body: dict | bytes, kind: str = "application/json") -> dict | bytes:
        """Over a connection that stays, as those of the package `tinker` do; of each thread its own."""
        if not hasattr(self._kept, "connection"):
            self._kept.connection = http.client.HTTPConnection(self._address, timeout=300)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        heads = {"X-API-Key": self._key, "Content-Type": kind}
        self._kept.connection.request("POST", f"/api/v1/{path}", data, heads)
        answer = self._kept.connection.getresponse()
        found = answer.read()
        assert answer.status == 200, found
        return found if PROTOBUF in answer.headers["Content-Type"] else json.loads(found)

    def answer(self, told: dict) -> dict | bytes:
        while True:
            found = self.ask("retrieve_future", {"request_id": told["request_id"]})
            if isinstance(found, bytes) or found.get("type") != "try_again":
                assert isinstance(found, bytes) or "error" not in found, found
                return found

    def step(self, model: str, rows: np.ndarray) -> None:
        """A gradient and a step by it."""
        self.finish(self.submit(model, rows))

    def submit(self, model: str, rows: np.ndarray) -> tuple[dict, dict]:
        """Ask for both; what `finish` waits for."""
        self._numbers[model] += 2
        number = self._numbers[model] - 1
        trained = self.ask("forward_backward", training(model, number, rows), PROTOBUF)
        return trained, self.ask("optim_step", {"model_id": model, "seq_id": number + 1, "adam_params": ADAM})

    def finish(self, submitted: tuple[dict, dict]) -> None:
        for told in submitted:
            self.answer(told)

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

    def __init__(self, clients: list[Client], rows: np.ndarray, ahead: int) -> None:
        self.tokens = [0] * len(clients)
        self._rows, self._ahead = rows, ahead
        self._over, self._lock = threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._train, args=[number, client, model], daemon=True)
            for number, client in enumerate(clients)
            for model in client.models
        ]
        for thread in self._threads:
            thread.start()

    def _train(self, number: int, client: Client, model: str) -> None:
        submitted = deque(client.submit(model, self._rows) for _ in range(self._ahead))
        while not self._over.is_set():
            submitted.append(client.submit(model, self._rows))
            client.finish(submitted.popleft())
            with self._lock:
                self.tokens[number] += self._rows.size - len(self._rows)
        while submitted:
            client.finish(submitted.popleft())

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def per_second(clients: list[Client], rows: np.ndarray, seconds: float, ahead: int) -> list[float]:
    """Tokens a second of each, after a step of each."""
    for client in clients:
        client.step(client.models[0], rows)
    load, begin_s = Load(clients, rows, ahead), time.perf_counter()
    while time.perf_counter() - begin_s < seconds or not all(load.tokens):
        time.sleep(seconds / 100)
    before, took_s = list(load.tokens), time.perf_counter() - begin_s
    load.stop()
    return [one / took_s for one in before]


def latencies(client: Client, base: str, rows: np.ndarray, seconds: float) -> dict[str, float]:
    """The first one apart: it may be the first of the server, or of this sampler."""
    sampler, prompt = client.sampler(base), rows[0, : len(rows[0]) // 2].tolist()
    first_s, found, end_s = client.sample(sampler, 0, prompt), [], time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(found) < 3:
        found.append(client.sample(sampler, 1 + len(found), prompt))
    ordered = sorted(found)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"count": len(found), "first_s": first_s, "p50_s": statistics.median(found), "p99_s": p99}


class Server:
    """A server that runs; `cpu_s` are the processor's seconds of all its processes so far."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        keys = {
            "actor_rollout_ref.model.path": args.model,
            "actor_rollout_ref.model.lora_rank": args.rank,
            "data.max_prompt_length": args.length,
            "data.max_response_length": args.length,
            "service.address": "127.0.0.1:0",
            "service.max_models": args.tenants + FLOOD,
            "trainer.max_restarts": 0,  # a standby would start beside what is measured
            "trainer.output_dir": folder / "run",
            "trainer.logger": "[]",
        }
        if args.gpu and not args.small and "sample" in args.parts:
            keys["actor_rollout_ref.rollout.name"] = "vllm"
        words = [*(f"{name}={value}" for name, value in keys.items()), *args.keys]
        with (folder / "log").open("wb") as log:
            self.job = subprocess.Popen([*CLI, "serve", *words], stdout=log, stderr=log)
        file, end_s = folder / "run" / "service" / "client.json", time.monotonic() + START_S
        while not file.is_file():
            if self.job.poll() is not None or time.monotonic() > end_s:
                end_job(self.job)
                raise SystemExit((folder / "log").read_text()[-3000:])
            time.sleep(0.2)
        self.told = json.loads(file.read_text())

    @property
    def cpu_s(self) -> float:
        process = psutil.Process(self.job.pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return sum(one.user + one.system for one in times)


def plain_steps(args: argparse.Namespace, rows: np.ndarray, folder: Path) -> list[float]:
    """Seconds of the steps of a job that trains an adapter on these rows, each a prompt and a response."""
    word = "{}{:x} ".format
    texts = [[word(chr(97 + i % 26), i) for i in row - FIRST_WORD] for row in rows]
    half = args.length // 2
    told = [{"prompt": "".join(x[:half]), "response": "".join(x[half : args.length])} for x in texts]
    pq.write_table(pa.Table.from_pylist(told * 2), folder / "rows.parquet")
    actor = "actor_rollout_ref.actor"
    keys = {
        "data.train_files": folder / "rows.parquet",
        "data.train_batch_size": args.rows,
        "data.max_prompt_length": args.length,
        "data.max_response_length": args.length,
        "actor_rollout_ref.model.path": args.model,
        "actor_rollout_ref.model.lora_rank": args.rank,
        "actor_rollout_ref.model.lora_alpha": 32,
        "actor_rollout_ref.rollout.name": "dataset",
        f"{actor}.policy_loss.loss_mode": "sft",
        f"{actor}.ppo_mini_batch_size": args.rows,
        f"{actor}.use_dynamic_bsz": True,
        "trainer.total_epochs": args.steps + WARM_UP,
        "trainer.total_training_steps": args.steps + WARM_UP,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.export_hf": False,
        "trainer.max_restarts": 0,
        "trainer.n_gpus_per_node": 1,
        "trainer.output_dir": folder / "plain",
        "trainer.logger": "[]",
    }
    own = [key for key in args.keys if not key.startswith(("service.", "actor_rollout_ref.rollout.name="))]
    with (folder / "plain.log").open("wb") as log:
        words = [*CLI, "run", *(f"{name}={value}" for name, value in keys.items()), *own]
        if run_job(words, lambda: None, stdout=log, stderr=log):
            raise SystemExit((folder / "plain.log").read_text()[-3000:])
    ended_s = [one["time_s"] for one in rows_of(folder / "plain" / "metrics.jsonl")]
    return [after - before for before, after in pairwise(ended_s)][WARM_UP - 1 :]


def say(report: Report, part: str, **told: Any) -> None:
    """Write a part that is done, what follows from it, and the seconds of this process until then."""
    report |= told
    one, all_of_them = report.get("one_tokens_per_s"), report.get("all_tokens_per_s")
    if one and "plain_step_s" in report:
        step_s = report["rows"] * report["length"] / one
        report["over_plain"] = step_s / statistics.mean(report["plain_step_s"]["steps"])
    if one and all_of_them:
        report["gain"] = sum(all_of_them) / one
    if "flood" in report:
        shares = [report["flood"]["flooding"], *report["flood"]["others"]]
        report["most_over_least"] = max(shares) / min(shares)
    report.count(part, 1)
    print(f"{part}: {time.time() - psutil.Process().create_time():.0f} s", flush=True)


def measured(args: argparse.Namespace, server: Server, rows: np.ndarray, report: Report) -> None:
    """The parts that are asked for, but `plain`."""
    base, seconds = str(args.model), args.seconds
    new: Callable[..., Client] = lambda count=1: Client(server.told, base, args.rank, count)  # noqa: E731
    clients = [new() for _ in range(args.tenants)]
    print(f"{len(clients)} clients: {time.time() - psutil.Process().create_time():.0f} s", flush=True)
    for part, asking in (("one", clients[:1]), ("all", clients)):
        if part in args.parts:
            before_s, begin_s = server.cpu_s, time.perf_counter()
            found = per_second(asking, rows, seconds, args.ahead)
            cpu_share = (server.cpu_s - before_s) / (time.perf_counter() - begin_s)
            told = {"one_tokens_per_s": found[0]} if part == "one" else {"all_tokens_per_s": found}
            say(report, part, **told, **{f"{part}_tokens_per_cpu_s": sum(found) / cpu_share})
    if "sample" in args.parts:
        told = {"alone": latencies(clients[0], base, rows, seconds / 2)}
        load = Load(clients[1:], rows, args.ahead)
        told["beside"] = latencies(clients[0], base, rows, seconds)
        load.stop()
        say(report, "sample", sample_s=told)
    if "flood" in args.parts:
        for client in clients[2:]:
            client.close()
        flooding, *others = per_second([new(FLOOD), *clients[:2]], rows, seconds, args.ahead)
        say(report, "flood", flood={"flooding": flooding, "others": others})


def report_of(args: argparse.Namespace) -> Report:
    """A new one; with --parts it goes on with the other parts of a file of the same settings."""
    names = ("gpu", "small", "tenants", "rank", "rows", "length", "ahead", "seconds", "keys")
    own = {name: getattr(args, name) for name in names}
    report = Report(args.out, dict.fromkeys(PARTS, 1), **own)
    old = json.loads(args.out.read_text()) if args.out.is_file() and set(args.parts) != set(PARTS) else {}
    if own == {name: old.get(name) for name in names}:
        for part in set(PARTS) - set(args.parts):
            report |= {name: old[name] for name in PARTS[part] if name in old}
            report["counted_steps"][part] = old["counted_steps"].get(part, 0)
    return report


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="one GPU, the shape of Qwen3-1.7B")
    parser.add_argument(
        "--small", action="store_true", help="a small model and the HF sampler, on any device"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="all by default")
    parser.add_argument("--tenants", type=int, default=8)
    for name, cpu, gpu in (("rank", 8, 32), ("rows", 2, 8), ("length", 32, 128)):
        parser.add_argument(f"--{name}", type=int, help=f"by default {cpu}, with --gpu {gpu}")
    parser.add_argument("--ahead", type=int, default=1, help="steps that are sent before the last is read")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--steps", type=int, default=20, help="of the plain job that are counted")
    parser.add_argument("--model", type=Path, help="where the model is made, unless it is there already")
    parser.add_argument("--out", type=Path)
    parser.add_argument("keys", nargs="*", help="key=value of siirl serve")
    args = parser.parse_args()
    for name, cpu, gpu in (("rank", 8, 32), ("rows", 2, 8), ("length", 32, 128)):
        setattr(args, name, getattr(args, name) or (gpu if args.gpu else cpu))
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    results = REPOSITORY / "benchmarks/results"
    args.out = args.out or results / f"serve_{'gpu' if args.gpu else 'cpu'}.json"
    args.keys = [*KEYS[args.gpu], *args.keys]
    return args


def main() -> None:
    args = arguments()
    end_by_signals()
    if not args.gpu:  # so small products gain nothing by a second thread, which takes the clients' core
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        args.model = args.model or folder / "model"
        shape = SHAPES["A"] if args.gpu and not args.small else TINY
        if not (args.model / "tokenizer.json").is_file():
            make_model(args.model, shape)
        vocabulary = (COMMON | shape)["vocab_size"]
        draw = np.random.default_rng(0)
        rows = draw.integers(FIRST_WORD, vocabulary, (args.rows, args.length + 1))
        report = report_of(args)
        report["load_before"] = os.getloadavg()[0]
        try:
            if "plain" in args.parts:
                steps = plain_steps(args, rows, folder)
                say(report, "plain", plain_step_s={"median": statistics.median(steps), "steps": steps})
            if set(args.parts) - {"plain"}:
                server = Server(args, folder)
                try:
                    measured(args, server, rows, report)
                finally:
                    end_job(server.job)
        except BaseException:
            keep_logs(folder / "run", args.out.parent / "logs")
            raise
        report["load_after"] = os.getloadavg()[0]
        report.finish()
        told = (*(name for part in args.parts for name in PARTS[part]), *TOLD)
        print(json.dumps({name: report[name] for name in told if name in report}, indent=1))


if __name__ == "__main__":
    main()
