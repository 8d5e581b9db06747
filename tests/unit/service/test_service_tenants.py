"""Who has which key reaches what is its own; what was saved is listed, copied, published and deleted."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from siirl.agents.outside.content import BadRequest
from siirl.errors import ConfigError
from siirl.service.commands import Refused
from siirl.service.desk import ComeBack, Desk
from siirl.service.request_journal import Kept
from siirl.service.rest_answers import BODY, TENANT
from siirl.service.saved_weights import OPERATOR, SavedWeights, check_room, owner_of
from siirl.service.service_endpoint import ROOT, Served, ServiceEndpoint
from siirl.service.suspects import Suspects
from siirl.service.tenant_keys import tenant_keys

KEYS = {OPERATOR: "tml-operator", "ann": "tml-ann-0123456789", "bob": "tml-bob-0123456789"}
ANN, BOB, OWN = (f"session-{name}0123456789abcdef:train:0" for name in ("ann-", "bob-", ""))


@pytest.fixture
def saved(tmp_path) -> SavedWeights:
    for model, kind, name in ((ANN, "weights", "v1.0"), (ANN, "weights", "v1.1"), (BOB, "weights", "x")):
        file = tmp_path / model / kind / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"time": time.time(), "size_bytes": 1000, "spec": {"rank": 4}}))
        file.with_suffix(".safetensors").write_text(name)
    adapter = tmp_path / ANN / "external_weights" / "a"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (tmp_path / ANN / "external_weights" / "a.json").write_text(
        json.dumps({"time": time.time(), "size_bytes": 10, "spec": {"rank": 4}})
    )
    return SavedWeights(tmp_path, "secret")


def path(model: str, name: str = "x", kind: str = "weights") -> str:
    return f"tinker://{model}/{kind}/{name}"


def test_what_was_saved_says_whose_it_is():
    assert [owner_of(model) for model in (ANN, BOB, OWN)] == ["ann", "bob", OPERATOR]
    assert owner_of("session-ann-zz:train:0") == OPERATOR, "no session has such a name"


def test_a_tenant_reaches_its_own_and_what_is_published(saved):
    assert [one.path for one in saved.all("bob")] == [path(BOB)]
    assert len(saved.all(OPERATOR)) == 4
    with pytest.raises(LookupError):
        saved.find(path(ANN, "v1.0"), "bob")
    saved.label(saved.find(path(ANN, "v1.0"), "ann"), public=True)
    assert saved.find(path(ANN, "v1.0"), "bob").is_public
    with pytest.raises(LookupError):
        saved.find(path(ANN, "v1.0"), "bob", to_change=True)
    for wrong in ("x", "tinker://../../etc/weights/x", path(ANN, ".."), path(ANN, "a/b"), None, 5):
        with pytest.raises((Refused, LookupError)):
            saved.find(wrong, OPERATOR)


def test_names_that_differ_behind_a_dot_are_different_files(saved, tmp_path):
    saved.delete(saved.find(path(ANN, "v1.0"), "ann"))
    assert (tmp_path / ANN / "weights" / "v1.1.safetensors").read_text() == "v1.1"
    assert [one.name for one in saved.all("ann")] == ["v1.1", "a"]


def test_a_copy_stays_when_what_it_was_made_of_goes(saved, tmp_path):
    one = saved.find(path(ANN, "v1.0"), "ann")
    assert saved.copy(one, OWN, {"expires_s": None}) == saved.copy(one, OWN, {}) == path(OWN, "v1.0")
    saved.delete(one)
    assert (tmp_path / OWN / "weights" / "v1.0.safetensors").read_text() == "v1.0"
    saved.copy(saved.find(path(ANN, "a", "external_weights"), "ann"), OWN, {})
    assert (tmp_path / OWN / "external_weights" / "a" / "adapter_config.json").read_text() == "{}"


def test_what_was_to_be_kept_until_now_goes(saved):
    saved.label(saved.find(path(BOB), "bob"), expires_s=time.time() - 1)
    saved.label(saved.find(path(ANN, "v1.0"), "ann"), expires_s=time.time() + 60)
    assert saved.delete_expired() == [path(BOB)] and len(saved.all(OPERATOR)) == 3


def test_an_address_of_a_file_is_good_for_that_file_and_a_while(saved, monkeypatch):
    ends = saved.files(saved.find(path(ANN, "a", "external_weights"), "ann"))
    _, _, query = ends["adapter_config.json"].partition("?")
    given = dict(part.split("=") for part in query.split("&"))
    assert saved.file(ANN, "a", "adapter_config.json", **given).read_text() == "{}"
    later = {**given, "until": str(int(given["until"]) + 1)}
    for model, file, asked in ((BOB, "adapter_config.json", given), (ANN, "other", given), (ANN, "a", later)):
        with pytest.raises(PermissionError):
            saved.file(model, "a", file, **asked)
    monkeypatch.setattr(time, "time", lambda: float(given["until"]) + 1)
    with pytest.raises(PermissionError):
        saved.file(ANN, "a", "adapter_config.json", **given)


def test_a_tenant_saves_as_much_as_it_may(saved, tmp_path):
    check_room(tmp_path, ANN, 990, 3e-6)
    check_room(tmp_path, ANN, 10**12, 0.0)
    with pytest.raises(Refused, match="max_disk_gb"):
        check_room(tmp_path, ANN, 991, 3e-6)


WRONG = [
    ("ann tml-0123456789abc\nann tml-0123456789abd", "line 2 twice"),
    ("ann tml-0123456789abc\nbob tml-0123456789abc", "line 2 twice"),
    ("Ann tml-0123456789abc", "no tenant in line 1"),
    ("ann 0123456789abcdefg", "no tenant in line 1"),
    ("ann tml-short", "no tenant in line 1"),
    ("# nobody\n", "names nobody"),
]


@pytest.mark.parametrize(("text", "told"), WRONG, ids=[told for _, told in WRONG])
def test_a_file_of_tenants_that_cannot_be_used_is_refused(tmp_path, text, told):
    file = tmp_path / "tenants"
    file.touch(mode=0o600)
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        tenant_keys(str(file))


def test_keys_that_others_can_read_are_refused(tmp_path):
    file = tmp_path / "tenants"
    file.write_text("ann tml-0123456789abc\n\n# and\nbob  tml-0123456789abd")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        tenant_keys(str(file))
    file.chmod(0o600)
    assert tenant_keys(str(file)) == {"ann": "tml-0123456789abc", "bob": "tml-0123456789abd"}


def endpoint(tmp_path: Path, most_models: int = 0) -> ServiceEndpoint:
    return ServiceEndpoint(Desk(), Served("M", 64, (), 60.0, most_models), tmp_path / "models", KEYS)


def asked(server: ServiceEndpoint, tenant: str, answer: str, body: dict, **names: str):
    """What a tenant's request is answered."""
    path = f"{ROOT}{answer[1:]}"
    request = SimpleNamespace(match_info=names, content_length=10, path=path)
    request = type("Request", (dict,), vars(request))({TENANT: tenant, BODY: json.dumps(body).encode()})
    return asyncio.run(getattr(server, answer)(body, request))


def test_a_key_is_its_tenants(tmp_path):
    server = endpoint(tmp_path)
    assert [server._tenant(key) for key in KEYS.values()] == list(KEYS)
    assert server._tenant("tml-ann") is server._tenant("") is None


def test_a_session_is_reached_by_its_tenant_and_the_servers_own_key_alone(tmp_path):
    server = endpoint(tmp_path)
    id = asked(server, "ann", "_create_session", {})["session_id"]
    assert owner_of(id) == "ann"
    body = {"session_id": id, "model_seq_id": 0, "base_model": "M", "lora_config": {"rank": 4}}
    model = asked(server, "ann", "_create_model", body)["model_id"]
    stranger = [
        ("_heartbeat", {"session_id": id}),
        ("_create_model", body | {"model_seq_id": 1}),
        ("_optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}),
        ("_retrieve", {"request_id": f"{model}:0"}),
        ("_create_sampler", {"session_id": id, "sampling_session_seq_id": 0, "base_model": "M"}),
    ]
    for answer, asked_of in stranger:
        with pytest.raises(BadRequest) as refused:
            asked(server, "bob", answer, asked_of)
        assert refused.value.status == 410
    with pytest.raises(BadRequest):
        asked(server, "bob", "_finish", {}, session=id)
    for tenant in ("ann", OPERATOR):
        assert asked(server, tenant, "_heartbeat", {"session_id": id})


def test_a_tenant_trains_as_many_models_as_it_may_and_a_failed_one_does_not_count(tmp_path):
    server = endpoint(tmp_path, most_models=1)
    id = asked(server, "ann", "_create_session", {})["session_id"]
    body = {"session_id": id, "base_model": "M", "lora_config": {"rank": 4}}
    for number in range(2):
        asked(server, "ann", "_create_model", body | {"model_seq_id": number})
    first = server._desk.take(0.0)
    assert server._desk.take(0.0) is None
    assert "max_models_per_tenant" in str(server._desk.ticket(f"{id}:train:1:0").answer)
    server._desk.done(first, Refused("full"))
    asked(server, "ann", "_create_model", body | {"model_seq_id": 2})
    assert server._desk.take(0.0) is not None


def begun_again(tmp_path: Path, model: str) -> ServiceEndpoint:
    """A server that goes on with what another has left, which had answered that a model was created."""
    server = endpoint(tmp_path)
    server.restore([Kept(model, 1, answers=[(0, {"model_id": model})])])
    for one in server._accepted.read():
        asyncio.run(server._take_again(one))
    return server


def test_what_was_accepted_is_taken_by_the_next_server_until_it_is_answered(tmp_path):
    server, files = endpoint(tmp_path, most_models=1), tmp_path / "accepted"
    id = asked(server, "ann", "_create_session", {})["session_id"]
    body = {"session_id": id, "base_model": "M", "lora_config": {"rank": 4}, "model_seq_id": 0}
    model = asked(server, "ann", "_create_model", body)["model_id"]
    step = {"model_id": model, "adam_params": {"learning_rate": 0.5}}
    for number in (3, 1, 2):
        asked(server, "ann", "_optim_step", step | {"seq_id": number})
    (files / f"{model}:4").write_bytes((files / f"{model}:3").read_bytes()[:-1])
    server._desk.done(server._desk.take(0.0), {"model_id": model})
    for _ in range(2):
        server = begun_again(tmp_path, model)
        taken = [server._desk.take(0.0) for _ in range(3)]
        assert [one.id for one in taken] == [f"{model}:{number}" for number in (1, 2, 3)]
        assert {one.command.adam.learning_rate for one in taken} == {0.5} and server._desk.take(0.0) is None
    server._desk.done(taken[0], {})
    asked(server, "ann", "_optim_step", step | {"seq_id": 5})
    assert sorted(one.name[-1] for one in files.iterdir()) == ["2", "3", "5"], "what is answered goes"
    asked(server, "ann", "_finish", {}, session=id)
    assert not list(files.iterdir())


def test_a_request_amid_which_servers_end_is_carried_out_alone_and_then_refused(tmp_path):
    ids = ["a:train:0:1", "b:train:0:12"]
    suspects = Suspects(tmp_path)
    assert suspects.read() == []
    suspects.begin(ids)
    suspects = Suspects(tmp_path)
    assert suspects.read() == ids and not any(map(suspects.problem, ids))
    suspects.begin(ids[:1])
    suspects.end(ids[:1])
    suspects.begin(ids[1:])
    suspects = Suspects(tmp_path)
    assert suspects.read() == ids[1:] and "has ended 2 times" in str(suspects.problem(ids[1]))
    suspects.forget("b")
    assert ids[1] not in suspects


def test_sessions_of_a_tenant_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("siirl.service.service_endpoint.MOST_SESSIONS", 2)
    server = endpoint(tmp_path)
    for _ in range(2):
        asked(server, "ann", "_create_session", {})
    with pytest.raises(ComeBack):
        asked(server, "ann", "_create_session", {})
    assert asked(server, "bob", "_create_session", {})
