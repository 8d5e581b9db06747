"""`siirl serve` by its command: a session over HTTP, requests that are none, the unmodified client."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from fixtures_tiny import make_tiny_model_dir
from ray_lock import ray_to_ourselves

from siirl.compiler.service_needs import adapter_bytes
from siirl.config.load import load_config
from siirl.service.wire import PROTOBUF, messages

CLIENT = Path(sys.prefix) / "tinker" / "bin" / "python"
TOKENS = [5, 6, 7, 8, 9]
ADAM = {"learning_rate": 1e-2, "grad_clip_norm": 1.0}


LIMITED = """
import sys, time
import tinker
from tinker import types

client = tinker.ServiceClient().create_lora_training_client(base_model=sys.argv[1], rank=4)
tokens = list(range(5, 35))
inputs = {"target_tokens": tokens[1:] + [5], "weights": [1.0] * len(tokens)}
datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
begin_s, losses = time.monotonic(), []
for _ in range(14):
    losses.append(client.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
assert len(set(losses)) == 1, losses
print(time.monotonic() - begin_s)
"""
"""Asks for more tokens than it may have at once; each request counts once."""


class Server:
    """A server that runs, and requests to it."""

    def __init__(self, folder, steps: int, head_dim: int | None = None, **more) -> None:
        folder.mkdir(exist_ok=True)
        self.model = make_tiny_model_dir(folder / "model", init_std=0.1, head_dim=head_dim)
        self.output, self.log = folder / "run", folder / "log"
        keys = {
            "actor_rollout_ref.model.path": self.model,
            "actor_rollout_ref.model.lora_rank": 8,
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "float32",
            "actor_rollout_ref.rollout.dtype": "float32",
            "data.max_prompt_length": 32,
            "data.max_response_length": 32,
            "service.address": "127.0.0.1:0",
            "trainer.device": "cpu",
            "trainer.total_training_steps": steps,
            "trainer.output_dir": self.output,
            "trainer.logger": "[]",
        } | {name.replace("__", "."): value for name, value in more.items()}
        torchrun = keys.get("trainer.launcher") == "torchrun"
        start = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"] if torchrun else []
        start = [sys.executable, "-m", *start, "siirl.cli", "serve"]
        self.words = [*start, *(f"{k}={v}" for k, v in keys.items())]
        self.start()

    def start(self) -> None:
        """Begin, or begin again."""
        (self.output / "service" / "client.json").unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.job = subprocess.Popen(self.words, env=os.environ, stdout=log, stderr=log)
        file, end_s = self.output / "service" / "client.json", time.monotonic() + 200
        while not file.is_file():
            assert self.job.poll() is None and time.monotonic() < end_s, self.log.read_text()
            time.sleep(0.1)
        assert file.stat().st_mode & 0o777 == 0o600
        told = json.loads(file.read_text())
        self.url, self.token = told["base_url"], told["token"]

    def ask(self, path: str, body=None, kind: str = "application/json", token: str = ""):
        """Status and answer; bytes as they are."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        heads = {"X-API-Key": token or self.token, "Content-Type": kind}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data, heads)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found = answer.read()
                return answer.status, found if PROTOBUF in answer.headers["Content-Type"] else json.loads(
                    found
                )
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def of(self, path: str, body, kind: str = "application/json"):
        """The answer to a request whose answer comes later."""
        status, told = self.ask(path, body, kind)
        assert status == 200, told
        while True:
            status, found = self.ask("retrieve_future", {"request_id": told["request_id"]})
            if not (isinstance(found, dict) and found.get("type") == "try_again"):
                assert status == 200, found
                return found

    def session(self) -> str:
        return self.ask("create_session", {"tags": []})[1]["session_id"]

    def new_model(self, session: str, rank: int = 4) -> str:
        asked = {"session_id": session, "model_seq_id": 0, "base_model": str(self.model)}
        return self.of("create_model", asked | {"lora_config": {"rank": rank, "seed": 1}})["model_id"]

    def train(self, model: str, number: int, loss: str = "cross_entropy", rows=(TOKENS,)):
        """The loss and the log-probs; or what is wrong."""
        found = self.of("forward_backward", training(model, number, loss, rows), PROTOBUF)
        if isinstance(found, dict):
            return found
        out = messages()["ForwardBackwardOutput"].FromString(found)
        (field,) = out.loss_fn_outputs[0].fields
        return out.metrics[0].value, np.frombuffer(field.value.data, np.float32)


def training(model: str, number: int, loss: str, rows=(TOKENS,)) -> bytes:
    request = messages()["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn=loss)
    for tokens in rows:
        datum, count = request.data.add(), len(tokens) - 1
        datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], np.int32).tobytes()
        for name, values, dtype in (
            ("target_tokens", np.array(tokens[1:], np.int64), 2),
            ("weights", np.ones(count, np.float32), 1),
        ):
            entry = datum.loss_fn_inputs.add(key=name)
            entry.value.dense, entry.value.dtype = values.tobytes(), dtype
            entry.value.shape.append(count)
    return request.SerializeToString()


def a_free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def serving(folder, steps: int, head_dim: int | None = None, **more):
    server = Server(folder, steps, head_dim, **more)
    try:
        yield server
    finally:
        server.job.send_signal(signal.SIGTERM)
        server.job.wait(60)


def fuzzed(server: Server, draw: random.Random, model: str, session: str) -> None:
    """Requests that are none: each is answered, none with an error of the server's own."""
    values = [None, -1, 1 << 70, "x", "../..", [], {}, [{}], True, 0.5, model, session, "\ud800" * 2]
    names = ["session_id", "model_id", "seq_id", "base_model", "lora_config", "adam_params", "path", "prompt"]
    names += ["sampling_session_id", "sampling_params", "request_id", "model_seq_id", "num_samples"]
    paths = ["create_model", "optim_step", "save_weights", "load_weights", "asample", "retrieve_future"]
    paths += ["save_weights_for_sampler", "create_sampling_session", "get_info", "weights_info", "nothing"]
    for _ in range(60):
        body = {name: draw.choice(values) for name in draw.sample(names, 6)} | {"session_id": "none"}
        status, _ = server.ask(draw.choice(paths), body)
        assert 200 <= status < 500
    for body in (b"", b"{", b"[1]", b"\xff" * 40, b"[" * 5000, draw.randbytes(300)):
        for path in ("forward_backward", "asample", "create_model"):
            assert 400 <= server.ask(path, body)[0] < 500


def test_a_session_over_http_trains_samples_saves_and_outlives_what_is_sent(tmp_path):
    with serving(tmp_path, steps=4) as server:
        assert server.ask("get_server_capabilities", token="tml-guess")[0] == 401
        session = server.session()
        model = server.new_model(session)
        first, log_probs = server.train(model, 1)
        assert first == pytest.approx(-log_probs.sum(), rel=1e-5)
        repeated = server.train(model, 1)
        step = {"model_id": model, "adam_params": ADAM}
        norm = server.of("optim_step", step | {"seq_id": 2})["metrics"]["grad_norm:mean"]
        assert repeated[0] == first
        once = server.new_model(server.session())
        server.train(once, 1)
        alone = server.of("optim_step", {"model_id": once, "adam_params": ADAM, "seq_id": 2})
        assert alone["metrics"]["grad_norm:mean"] == norm, "what came twice has counted once"
        refused = server.train(model, 3, "stable_reinforce")
        assert refused["category"] == "user" and "no public definition" in refused["error"]
        fuzzed(server, random.Random(1), model, session)
        assert server.train(model, 4)[0] < first

        saved = server.of("save_weights", {"model_id": model, "seq_id": 5, "path": "one"})["path"]
        asked = {"model_id": model, "seq_id": 6, "sampling_session_seq_id": 0}
        sampler = server.of("save_weights_for_sampler", asked)["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:3]}]}
        params = {"max_tokens": 5, "seed": 1, "temperature": 1.0}
        sample = {"sampling_session_id": sampler, "num_samples": 2, "prompt": prompt}
        sample |= {"sampling_params": params, "prompt_logprobs": True}
        found = server.of("asample", sample | {"seq_id": 1})
        again = server.of("asample", sample | {"seq_id": 2})
        assert found == again, "of one seed"
        out = messages()["SampleResponse"].FromString(found)
        assert len(out.sequences) == 2 and len(out.prompt_logprobs) == 3 * 4
        unknown = server.ask("asample", sample | {"sampling_session_id": f"{session}:sample:9", "seq_id": 1})
        assert unknown[0] == 404
        assert server.ask("weights_info", {"tinker_path": saved})[1]["lora_rank"] == 4
        runs = server.ask("training_runs")[1]["training_runs"]
        assert {run["training_run_id"] for run in runs} == {model, once}
        (kept,) = server.ask(f"training_runs/{model}/checkpoints")[1]["checkpoints"]
        assert kept["tinker_path"] == saved
        cfg = load_config([f"actor_rollout_ref.model.path={server.model}"], "serve")
        assert kept["size_bytes"] == pytest.approx(adapter_bytes(cfg, 4)["state"], rel=0.01)

        assert server.ask(f"sessions/{session}/finish", {"reason": {"type": "success"}})[0] == 200
        assert server.ask("session_heartbeat", {"session_id": session})[0] == 410
        other = {"session_id": server.session(), "model_seq_id": 3, "path": saved, "optimizer": True}
        loaded = server.of("load_weights", other)["model_id"]
        server.train(loaded, 1)
        server.of("optim_step", {"model_id": loaded, "adam_params": ADAM, "seq_id": 2})
        server.train(loaded, 3)
        server.ask("optim_step", {"model_id": loaded, "adam_params": ADAM, "seq_id": 4})
        assert server.job.wait(120) == 0, server.log.read_text()
    lines = [json.loads(line) for line in (server.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["actor/grad_norm"] == pytest.approx(norm)


def a_session(server: Server) -> list:
    """What a client gets of two steps and samples; the same for the same weights."""
    rows = [[5 + (7 * row + place) % 50 for place in range(3 + row)] for row in range(6)]
    model, found = server.new_model(server.session()), []
    for step in (0, 3):
        found += [*server.train(model, step + 1, rows=rows), *server.train(model, step + 2, rows=rows[:1])]
        smooth = ADAM | {"eps": 1e-2}  # else the sign of what is nearly 0 counts
        asked = {"model_id": model, "adam_params": smooth, "seq_id": step + 3}
        found.append(server.of("optim_step", asked)["metrics"]["grad_norm:mean"])
    asked = {"model_id": model, "seq_id": 7, "sampling_session_seq_id": 0}
    sampler = server.of("save_weights_for_sampler", asked)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:3]}]}
    sample = {"sampling_session_id": sampler, "num_samples": 3, "prompt": prompt, "seq_id": 1}
    sample |= {"sampling_params": {"max_tokens": 5, "seed": 1}, "prompt_logprobs": True}
    out = messages()["SampleResponse"].FromString(server.of("asample", sample))
    for one in out.sequences:
        found += [np.frombuffer(one.tokens, np.int32), np.frombuffer(one.logprobs, np.float32)]
    return [*found, np.frombuffer(out.prompt_logprobs, np.float32)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "ray", "torchrun"])
def test_two_ranks_answer_as_one_does_and_alike_each_time(tmp_path, launcher):
    with serving(tmp_path / "one", 100) as server:
        alone = a_session(server)
    two = serving(tmp_path / "two", 100, trainer__n_gpus_per_node=2, trainer__launcher=launcher)
    with ray_to_ourselves(), two as server:
        found, again = a_session(server), a_session(server)
    for one, two, repeated in zip(alone, found, again, strict=True):
        np.testing.assert_array_equal(two, repeated)
        np.testing.assert_allclose(two, one, rtol=1e-6, atol=2e-6)


@pytest.mark.slow
def test_clients_of_a_killed_server_go_on_where_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_TEST", "tml-key")
    with serving(tmp_path, 100, service__token_env="KEY_OF_TEST") as server:
        session = server.session()
        models = [server.new_model(session), server.new_model(server.session())]
        for model in models:
            server.train(model, 1)
            server.of("optim_step", {"model_id": model, "adam_params": ADAM, "seq_id": 2})
            trained = server.train(model, 3)
        asked = {"model_id": models[0], "seq_id": 4, "sampling_session_seq_id": 0}
        sampler = server.of("save_weights_for_sampler", asked)["sampling_session_id"]
        sample = {
            "sampling_session_id": sampler,
            "num_samples": 1,
            "sampling_params": {"max_tokens": 5, "seed": 1},
        }
        sample |= {"prompt": {"chunks": [{"tokens": TOKENS[:3]}]}}
        before = server.of("asample", sample | {"seq_id": 1})
        server.job.kill()
        server.job.wait()
        server.start()
        assert server.ask("session_heartbeat", {"session_id": session})[0] == 200
        assert server.train(models[1], 3)[0] == trained[0], "the answer of before, not a gradient more"
        steps = {"model_id": models[1], "adam_params": ADAM, "seq_id": 4}
        norms = [server.of("optim_step", steps)["metrics"]["grad_norm:mean"]]
        steps = {"model_id": models[0], "adam_params": ADAM, "seq_id": 5}
        norms.append(server.of("optim_step", steps)["metrics"]["grad_norm:mean"])
        assert norms[0] == norms[1] > 0
        assert server.of("asample", sample | {"seq_id": 2}) == before
        lines = (server.output / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4], "steps go on"


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["a rank", "the process that answers"])
def test_a_rank_that_dies_costs_a_restart_and_clients_go_on(tmp_path, dies):
    address = a_free_address()
    with serving(tmp_path, 100, trainer__n_gpus_per_node=2, service__address=address) as server:
        model = server.new_model(server.session())
        server.train(model, 1)
        trained = server.train(model, 2)
        ranks = [
            one
            for one in psutil.Process(server.job.pid).children(recursive=True)
            if "worker_entry" in " ".join(one.cmdline()) and "--standby" not in one.cmdline()
        ]
        pids = {one.pid for one in ranks}
        (answers,) = (one for one in ranks if one.ppid() in pids)  # a fork of the first
        ranks.remove(answers)
        (answers if dies == "the process that answers" else ranks[-1]).kill()
        end_s = time.monotonic() + 200
        while True:
            try:
                if server.ask("get_info", {"model_id": model})[0] == 200 and not ranks[0].is_running():
                    break
            except OSError:
                pass
            assert time.monotonic() < end_s and server.job.poll() is None, server.log.read_text()[-3000:]
            time.sleep(1)
        assert server.train(model, 2)[0] == trained[0], "the answer of before"
        steps = {"model_id": model, "adam_params": ADAM, "seq_id": 3}
        assert server.of("optim_step", steps)["metrics"]["grad_norm:mean"] > 0, "its gradients are there"


POISON = """
import importlib.abc, importlib.machinery, os, signal, sys

class Poison(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "siirl.service.tenants":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def executed(module):
            execute(module)
            train = module.Tenants.train

            def poisoned(tenants, commands):
                first = {one.data[0].tokens[0] for one in commands}
                if os.environ["RANK"] == "1" and 33 in first:
                    raise ValueError("spilled")
                if os.environ["RANK"] == "1" and 34 in first:
                    os.kill(os.getpid(), signal.SIGKILL)
                return train(tenants, commands)

            module.Tenants.train = poisoned

        spec.loader.exec_module = executed
        return spec

sys.meta_path.insert(0, Poison())
"""
"""The second rank raises, or dies, of what begins with one of two tokens."""


POISONER = """
import sys
import tinker
from tinker import types

def datum(first):
    inputs = {"target_tokens": [6, 7, 8], "weights": [1.0] * 3}
    return types.Datum(model_input=types.ModelInput.from_ints([first, 6, 7]), loss_fn_inputs=inputs)

service = tinker.ServiceClient()
model, other = (service.create_lora_training_client(base_model=sys.argv[1], rank=4, seed=1) for _ in range(2))
before = model.forward_backward([datum(5)], "cross_entropy").result().metrics
for first in (33, 34):
    bad = model.forward_backward([datum(first)], "cross_entropy")
    beside = other.forward_backward([datum(5)], "cross_entropy")
    try:
        bad.result()
        raise SystemExit("it is not refused")
    except tinker.RequestFailedError as error:
        assert "has ended 2 times" in str(error), error
    assert beside.result().metrics == before, "what was carried out beside it is not lost"
assert model.forward_backward([datum(5)], "cross_entropy").result().metrics == before
still = types.AdamParams(learning_rate=0.0)
print(*(one.optim_step(still).result().metrics["grad_norm:mean"] for one in (model, other)))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not CLIENT.exists(), reason="the package tinker is not there: make .venv/.tinker")
def test_a_request_that_ends_a_rank_is_refused_and_costs_nobody_else_anything(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    keys = {"trainer.n_gpus_per_node": 2, "trainer.max_restarts": 4, "service.address": a_free_address()}
    with serving(tmp_path, 1000, **keys) as server:
        monkeypatch.delenv("PYTHONPATH")
        variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.token}
        words = [CLIENT, "-c", POISONER, str(server.model)]
        done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}\n{server.log.read_text()[-3000:]}"
        norms = done.stdout.split()
        assert norms[0] == norms[1], "two gradients each, of the same data"
    lines = (server.output / "attempts.jsonl").read_text().splitlines()
    causes = [json.loads(line)["cause"] for line in lines]
    assert len(causes) == 4 and "spilled" in causes[0] and "SIGKILL" in causes[2], causes


CLIENT_THAT_DIES = """
import json, sys, urllib.request
url, token, path, body = sys.argv[1], sys.argv[2], sys.argv[3], sys.stdin.buffer.read()
while True:
    heads = {"X-API-Key": token, "Content-Type": "application/x-protobuf"}
    urllib.request.urlopen(urllib.request.Request(url + path, body, heads), timeout=60).read()
    print("asked", flush=True)
"""


@pytest.mark.slow
def test_a_client_that_dies_amid_its_requests_changes_no_bit_of_another(tmp_path):
    with serving(tmp_path, 1000, service__idle_s=15) as server:
        alone = a_session(server)
        other = server.new_model(server.session())
        rows = [[5 + (3 * row + place) % 50 for place in range(20)] for row in range(64)]
        words = [sys.executable, "-c", CLIENT_THAT_DIES, server.url, server.token, "/api/v1/forward_backward"]
        dying = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert dying.stdin is not None and dying.stdout is not None
        dying.stdin.write(training(other, 1, "cross_entropy", rows))
        dying.stdin.close()
        dying.stdout.readline()
        for number in range(2, 6):  # these wait when it dies, and nobody reads their answers
            server.ask("forward_backward", training(other, number, "cross_entropy", rows), PROTOBUF)
        url = urllib.parse.urlparse(server.url)
        half = socket.create_connection((url.hostname, url.port))
        half.sendall(f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: {url.netloc}\r\nX-API-Key: ".encode())
        half.sendall(f"{server.token}\r\nContent-Length: 100000\r\n\r\nhalf of it".encode())
        dying.kill()
        dying.wait()
        half.close()
        beside = a_session(server)
        for one, again in zip(alone, beside, strict=True):
            np.testing.assert_array_equal(one, again)
        end_s = time.monotonic() + 120
        while server.ask("get_info", {"model_id": other})[0] != 410:
            assert time.monotonic() < end_s, "its session ends when nothing is heard of it"
            time.sleep(20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not CLIENT.exists(), reason="the package tinker is not there: make .venv/.tinker")
def test_the_unmodified_client_waits_for_its_tokens_a_second_and_goes_on(tmp_path):
    with serving(tmp_path, 1000, service__max_tokens_per_s=20) as server:
        variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.token}
        words = [CLIENT, "-c", LIMITED, str(server.model)]
        done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
        took_s = float(done.stdout.split()[-1])
        assert took_s > 5, "420 tokens, of which 200 may come at once, at 20 a second"


@pytest.mark.slow
def test_vllm_samples_from_the_adapter_that_was_asked_for(tmp_path):
    pytest.importorskip("vllm")
    with serving(tmp_path, 100, 32, actor_rollout_ref__rollout__name="vllm") as server:
        session, drawn = server.session(), []
        model = server.new_model(session)
        prompt = [5, 6, 7]
        for number in range(2):
            server.train(model, 3 * number + 1)
            server.of("optim_step", {"model_id": model, "adam_params": ADAM, "seq_id": 3 * number + 2})
            asked = {"model_id": model, "seq_id": 3 * number + 3, "sampling_session_seq_id": number}
            server.of("save_weights_for_sampler", asked)
        asked = {"session_id": session, "sampling_session_seq_id": 2, "base_model": str(server.model)}
        server.ask("create_sampling_session", asked)
        for number in (0, 1, 2, 0):
            sample = {"sampling_session_id": f"{session}:sample:{number}", "num_samples": 1}
            sample |= {"prompt": {"chunks": [{"tokens": prompt}]}, "seq_id": len(drawn) + 1}
            out = server.of("asample", sample | {"sampling_params": {"max_tokens": 8, "seed": 2}})
            (one,) = messages()["SampleResponse"].FromString(out).sequences
            drawn.append(
                found := (np.frombuffer(one.tokens, np.int32), np.frombuffer(one.logprobs, np.float32))
            )
            whole = [*prompt, *found[0].tolist()]
            sample |= {"prompt": {"chunks": [{"tokens": whole}]}, "seq_id": 10 + len(drawn)}
            sample |= {"sampling_params": {"max_tokens": 1}, "prompt_logprobs": True}
            out = messages()["SampleResponse"].FromString(server.of("asample", sample))
            trainer = np.frombuffer(out.prompt_logprobs, np.float32)[len(prompt) :]
            np.testing.assert_allclose(found[1], trainer, atol=1e-4)
    assert len({one[1].tobytes() for one in drawn}) == 3 and drawn[0][1].tobytes() == drawn[3][1].tobytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not CLIENT.exists(), reason="the package tinker is not there: make .venv/.tinker")
def test_each_method_of_the_unmodified_client_is_served_or_refused_with_the_reason(tmp_path):
    with serving(tmp_path, steps=1000) as server:
        variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.token}
        words = [CLIENT, Path(__file__).parents[1] / "support" / "tinker_api.py", server.model]
        done = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}\n{server.log.read_text()[-3000:]}"
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    for line in done.stdout.split():
        assert f"`{line.partition('.')[2]}`" in page, f"{line} is not on the page"
