"""Whatever is sent to the training service: each request is answered, none by an error of the server's own,
and the server answers the next one.

The server is real, over HTTP; a thread in the worker's place takes what it is handed, and looks whether it
could be carried out.
"""

import json
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
from fuzzing import NASTY, cases, explore
from hypothesis import strategies as st

from siirl.service.commands import Command, Refused, num_tokens, tokens_of
from siirl.service.desk import Desk
from siirl.service.saved_weights import OPERATOR
from siirl.service.service_endpoint import Served, ServiceEndpoint
from siirl.service.wire import PROTOBUF, messages

TOKEN = "tml-fuzzed-0123456789"
COMMANDS = (*Command.__args__,)
ANSWERED = {200, 204, 400, 401, 403, 404, 405, 410, 413, 429}


@contextmanager
def served(folder):
    """Where a server listens, and what has gone wrong in the worker's place."""
    desk, wrong = Desk(max_tokens_per_s=1e12), []
    server = ServiceEndpoint(
        desk, Served("M", 64, (1,), 600.0, 4), folder, {OPERATOR: TOKEN, "ann": "tml-ann"}
    )

    def work() -> None:
        while not desk.is_closed:
            ticket = desk.take(0.1)
            if ticket is None:
                continue
            try:
                assert isinstance(ticket.command, COMMANDS), ticket.command
                assert num_tokens(ticket.command) >= 0 and tokens_of(ticket.command, None) is None
            except Exception as error:  # noqa: BLE001 - the edge of a thread: the test shows it
                wrong.append(repr(error))
            desk.done(ticket, Refused("fuzzed"))

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    server.start("127.0.0.1", 0)
    try:
        yield server, wrong
    finally:
        server.close()
        desk.close()
        worker.join(10)


def ask(server: ServiceEndpoint, method: str, path: str, body: bytes | None, kind: str) -> tuple[int, bytes]:
    heads = {"X-API-Key": TOKEN, "Content-Type": kind}
    request = urllib.request.Request(f"{server.url}/api/v1/{path}", body, heads, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(tmp_path_factory.mktemp("models")) as (server, wrong):
        told = json.loads(ask(server, "POST", "create_session", b"{}", "application/json")[1])
        yield server, wrong, told["session_id"]


def routes(server: ServiceEndpoint) -> list[tuple[str, str]]:
    found = [(method, path) for method, path, _ in (*server._routes(), *server._rest.routes())]
    return [*found, ("POST", "forward_backward"), ("GET", "files/{run}/{name}/{file}")]


NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.none())
VALUES = st.recursive(
    st.one_of(NUMBERS, st.sampled_from(NASTY), st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
NUMBERS_OF_TENSOR = st.one_of(st.lists(st.integers(-2, 5), max_size=4), VALUES)
FIELDS = (
    *("session_id", "model_id", "seq_id", "model_seq_id", "base_model", "model_path", "lora_config", "path"),
    *("optimizer_config", "adam_params", "prompt", "sampling_params", "num_samples", "sampling_session_id"),
    *("sampling_session_seq_id", "request_id", "ttl_seconds", "tinker_path", "source_path", "user_metadata"),
    *("overwrite", "optimizer", "prompt_logprobs", "topk_prompt_logprobs", "age_encryption_recipients"),
    *("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n", "record_stability_info"),
)


def plausible(session: str) -> dict[str, st.SearchStrategy]:
    """Values that get a request past the first look, by field."""
    model = f"{session}:train:0"
    return {
        "session_id": st.just(session),
        "model_id": st.just(model),
        "sampling_session_id": st.just(f"{session}:sample:0"),
        "base_model": st.just("M"),
        "request_id": st.just(f"{model}:0"),
        "seq_id": st.integers(-1, 30),
        "model_seq_id": st.integers(0, 2),
        "sampling_session_seq_id": st.integers(0, 2),
        "lora_config": st.fixed_dictionaries({"rank": VALUES}),
        "prompt": st.fixed_dictionaries(
            {"chunks": st.lists(st.fixed_dictionaries({"tokens": VALUES}), max_size=2)}
        ),
        "target_prompt_logprobs": st.fixed_dictionaries(
            {"data": NUMBERS_OF_TENSOR, "dtype": st.just("int64"), "shape": NUMBERS_OF_TENSOR},
            optional={f"sparse_{x}_indices": NUMBERS_OF_TENSOR for x in ("crow", "col")},
        ),
        "sampling_params": st.dictionaries(
            st.sampled_from(["max_tokens", "temperature", "top_k", "top_p", "seed", "stop"]), VALUES
        ),
        "adam_params": st.dictionaries(st.sampled_from(["learning_rate", "beta1", "eps"]), VALUES),
    }


@cases()
def test_whatever_a_request_holds_it_is_answered_and_the_server_goes_on(service, num_cases):
    server, wrong, session = service
    good = plausible(session)
    fields = st.fixed_dictionaries(
        {}, optional={name: st.one_of(good.get(name, VALUES), VALUES) for name in FIELDS}
    )

    def check(route: tuple[str, str], body: dict, names: list[str], raw: bytes | None) -> None:
        method, path = route
        for place in ("session", "sampler", "run", "kind", "name", "file"):
            word = urllib.request.quote(names.pop(), safe="") or "x"
            path = path.replace(f"{{{place}}}", word)
        data = raw if raw is not None else json.dumps(body).encode()
        sent = None if method == "GET" and raw is None else data
        status, said = ask(server, method, path, sent, "application/json")
        assert status in ANSWERED, (status, said)
        assert not wrong and ask(server, "GET", "healthz", None, "application/json")[0] == 200

    name = st.one_of(st.just(session), st.sampled_from(["weights", "..", "x"]), st.text(max_size=20))
    explore(
        num_cases,
        check,
        st.sampled_from(routes(server)),
        fields,
        st.lists(name, min_size=6, max_size=6),
        st.one_of(st.none(), st.none(), st.binary(max_size=60)),
    )


def training(model: str, draw: dict) -> bytes:
    request = messages()["ForwardBackwardRequest"](
        model_id=model, seq_id=draw["number"], loss_fn=draw["loss"]
    )
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = draw["tokens"]
    entry = datum.loss_fn_inputs.add(key=draw["name"])
    entry.value.dtype = draw["dtype"]
    entry.value.shape.extend(draw["shape"])
    if draw["sparse"]:
        entry.value.sparse_csr.values = draw["values"]
        entry.value.sparse_csr.crow_indices = np.array(draw["rows"], np.int64).tobytes()
        entry.value.sparse_csr.col_indices = np.array(draw["columns"], np.int64).tobytes()
    else:
        entry.value.dense = draw["values"]
    return request.SerializeToString()


@cases()
def test_whatever_is_to_be_trained_on_is_answered_and_the_server_goes_on(service, num_cases):
    server, wrong, session = service
    model = f"{session}:train:7"
    body = {"session_id": session, "model_seq_id": 7, "base_model": "M", "lora_config": {"rank": 4}}
    ask(server, "POST", "create_model", json.dumps(body).encode(), "application/json")
    small = st.integers(-(2**31), 2**31 - 1)
    drawn = st.fixed_dictionaries(
        {
            "number": st.integers(-2, 10_000),
            "loss": st.sampled_from(["cross_entropy", "ppo", "gspo", ""]),
            "tokens": st.binary(max_size=24),
            "name": st.sampled_from(["target_tokens", "weights", "x"]),
            "dtype": st.integers(-1, 5),
            "shape": st.lists(st.one_of(st.integers(-2, 5), st.just(2**40)), max_size=3),
            "sparse": st.booleans(),
            "values": st.binary(max_size=32),
            "rows": st.lists(small, max_size=4),
            "columns": st.lists(small, max_size=4),
        }
    )

    def check(draw: dict, cut: int, noise: bytes) -> None:
        body = training(model, draw)
        body = body[: cut or len(body)] + noise
        status, said = ask(server, "POST", "forward_backward", body, PROTOBUF)
        assert status in ANSWERED, (status, said)
        assert not wrong and ask(server, "GET", "healthz", None, "application/json")[0] == 200

    explore(num_cases, check, drawn, st.integers(0, 40), st.binary(max_size=4))
