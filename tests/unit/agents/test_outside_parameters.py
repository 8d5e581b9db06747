"""Every parameter that a client or a server knows acts, is free, or is refused by name: none is lost."""

import ast
import importlib.util
from pathlib import Path

import pytest

from siirl.agents.outside import chat_wire, completions_wire, messages_wire, responses_wire
from siirl.agents.outside.content import BadRequest
from siirl.agents.outside.parameters import FREE, OF_THE_RUN, REFUSED

USER = [{"role": "user", "content": "x"}]
WIRES = {
    "chat": (chat_wire, {"model": "a", "messages": USER}),
    "messages": (messages_wire, {"model": "a", "max_tokens": 5, "messages": USER}),
    "responses": (responses_wire, {"model": "a", "input": "x"}),
    "completions": (completions_wire, {"model": "a", "prompt": "x"}),
}
CLIENTS = {
    "chat": ["openai.types.chat.completion_create_params:CompletionCreateParamsBase"],
    "completions": ["openai.types.completion_create_params:CompletionCreateParamsBase"],
    "responses": ["openai.types.responses.response_create_params:ResponseCreateParamsBase"],
    "messages": [
        "anthropic.types.message_create_params:MessageCreateParamsBase",
        "anthropic.types.beta.message_create_params:MessageCreateParamsBase",
    ],
}
SERVERS = {
    "chat": "openai/chat_completion/protocol.py:ChatCompletionRequest",
    "completions": "openai/completion/protocol.py:CompletionRequest",
    "responses": "openai/responses/protocol.py:ResponsesRequest",
    "messages": "anthropic/protocol.py:AnthropicMessagesRequest",
}


def known(wire):
    module, _ = WIRES[wire]
    return module.ACTS | FREE | set(OF_THE_RUN) | set(REFUSED) | set(getattr(module, "REFUSED", ()))


@pytest.mark.parametrize("wire", WIRES)
def test_what_the_official_clients_can_send_is_known(wire):
    for place in CLIENTS[wire]:
        module, _, name = place.partition(":")
        fields = vars(importlib.import_module(module))[name].__annotations__
        assert len(fields) > 15 and set(fields) - known(wire) == set(), place


@pytest.mark.parametrize("wire", WIRES)
def test_what_vllms_server_takes_is_known(wire):
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    place, _, name = SERVERS[wire].partition(":")
    file = Path(found.submodule_search_locations[0]) / "entrypoints" / place
    if not file.is_file():
        pytest.skip(f"this vLLM has no {place}")
    classes = [one for one in ast.parse(file.read_text()).body if isinstance(one, ast.ClassDef)]
    (request,) = (one for one in classes if one.name == name)
    fields = {
        one.target.id for one in request.body if isinstance(one, ast.AnnAssign) and one.target.id[0] != "_"
    }
    assert len(fields) > 10 and fields - known(wire) == set()


@pytest.mark.parametrize("wire", WIRES)
def test_a_name_that_nobody_knows_is_refused_and_null_is_not_given(wire):
    module, body = WIRES[wire]
    for name in ("reponse_format", "Stop", "stop ", "x" * 100):
        with pytest.raises(BadRequest, match="no parameter of this name is known here"):
            module.asked_of({**body, name: 1})
        module.asked_of({**body, name: None})
    names = known(wire) - module.ACTS
    module.asked_of({**body, **dict.fromkeys(names)})


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_refused_is_refused_by_name_for_every_value_but_its_plain_one(wire):
    module, body = WIRES[wire]
    refused = REFUSED | getattr(module, "REFUSED", {})
    for name in sorted(set(refused) - module.ACTS):
        plain, why = refused[name]
        module.asked_of({**body, name: plain})
        for value in (7, "other", {"type": "other"}, [None], 0.5, plain is not True):
            with pytest.raises(BadRequest, match=f"^{name} = ") as error:
                module.asked_of({**body, name: value})
            assert error.value.status == 400 and why in str(error.value)


@pytest.mark.parametrize("wire", WIRES)
def test_what_the_run_says_is_taken_and_told(wire):
    module, body = WIRES[wire]
    for name in OF_THE_RUN:
        assert module.asked_of({**body, name: 0.5}).unused == (name,) and module.asked_of(body).unused == ()
