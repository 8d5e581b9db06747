"""A teacher behind a service, over HTTP to a server with a real model: what it says, and what goes wrong."""

import logging
import random

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from http_harness import serving
from served_teacher import ServedTeacher
from transformers import AutoTokenizer

from siirl import http_service
from siirl.config import load_config
from siirl.errors import DataError, EndpointError, NotSupportedError
from siirl.nodes.teacher_service import TeacherService

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(http_service, "FIRST_WAIT_S", 0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model_dir(tmp_path_factory.mktemp("teacher") / "model", init_std=0.2, seed=6)


def service_at(url, folder, *more):
    keys = (f"teacher.endpoint.{key}" for key in (f"url={url.replace('/score', '/v1/completions')}", *more))
    cfg = load_config([f"actor_rollout_ref.model.path={folder}", *keys])
    return TeacherService(
        cfg.teacher.endpoint, AutoTokenizer.from_pretrained(folder), cfg.actor_rollout_ref.model
    )


def some_rows(count):
    draw = random.Random(1)
    rows = [[draw.randrange(64) for _ in range(draw.randrange(3, 30))] for _ in range(count)]
    return rows, [draw.randrange(1, len(row)) for row in rows]


@pytest.mark.parametrize(
    ("style", "top_k"),
    [("prompt_logprobs", 0), ("prompt_logprobs", 5), ("echo", 0), ("echo", 5), ("texts", 0)],
)
def test_what_a_service_says_is_what_its_model_says(folder, style, top_k):
    teacher = ServedTeacher(folder, style)
    rows, starts = some_rows(12)
    with serving(teacher) as server:
        service = service_at(server.url, folder, "max_concurrent=3", "served_model=it")
        found = service.score(rows, starts, top_k)
        asked = [message for message in server.messages if "prompt" in message]
    for row, start, (ids_TK, log_prob_TK) in zip(rows, starts, found, strict=True):
        with torch.no_grad():
            want_TV = teacher.model(torch.tensor([row])).logits[0, start - 1 : -1].log_softmax(-1)
        assert ids_TK[:, 0].tolist() == row[start:] and ids_TK.shape == (len(row) - start, 1 + top_k)
        torch.testing.assert_close(log_prob_TK, want_TV.gather(1, ids_TK), atol=1e-5, rtol=0)
        torch.testing.assert_close(log_prob_TK[:, 1:], want_TV.topk(top_k).values, atol=1e-5, rtol=0)
    assert {message["model"] for message in asked} == {"it"} and server.most_at_once <= 3
    assert len(asked) <= 12 + 3 * (style != "prompt_logprobs"), "by echo from the first answer on"


def test_a_service_with_another_tokenizer_is_refused_and_one_that_does_not_say_is_warned_of(
    folder, tmp_path, caplog
):
    other = make_tiny_model_dir(tmp_path / "other", vocab=70, weights=False)
    with (
        serving(ServedTeacher(folder, words=other)) as server,
        pytest.raises(DataError, match="another tokenizer"),
    ):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["<new>"])
        service = service_at(server.url, folder)
        service._tokenizer = tokenizer
        service.score([[1, 2]], [1], 0)
    with serving(ServedTeacher(folder, "echo")) as server, caplog.at_level(logging.WARNING):
        service = service_at(server.url, folder)
        assert len(service.score([[1, 2]], [1], 0)) == len(service.score([[3, 2]], [1], 0)) == 1
        assert server.paths.count("/detokenize") == 1
    assert "does not say which tokenizer it has" in caplog.text


def broken(teacher, change):
    """Its answers, each changed."""

    def answer(message):
        status, said = teacher(message)
        if "choices" in said:
            change(said["choices"][0]["prompt_logprobs"])
        return status, said

    return answer


WRONG = {
    "a token more": (lambda said: said.append({}), "asked about 6 tokens, and speaks of 7: it adds some"),
    "cut": (lambda said: said.pop(), "asked about 6 tokens, and speaks of 5: .* or cuts rows"),
    "fewer than asked": (
        lambda said: said.__setitem__(3, {"4": {"logprob": -1.0}, "5": {"logprob": -2.0}}),
        "at place 3 .* log-probs of 2 tokens, .* of the token 4 and of the 3 likeliest",
    ),
    "another token": (
        lambda said: said.__setitem__(3, {str(60 + x): {"logprob": -1.0} for x in range(4)}),
        "at place 3 .* that of the token 4 and",
    ),
    "no number": (lambda said: said[2]["3"].update(logprob=float("nan")), "at place 2 .* or no number"),
    "unknown words": (lambda said: said[2].update({"99": {"logprob": -1.0}}), "beyond the 64 tokens"),
    "no log-probs": (lambda said: said.__setitem__(2, ["x"]), "does not say by prompt_logprobs"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_an_answer_about_something_else_is_refused_by_what_is_wrong_with_it(folder, what):
    change, reason = WRONG[what]
    with serving(broken(ServedTeacher(folder), change)) as server:
        service = service_at(server.url, folder, "max_tries=2")
        with pytest.raises(
            EndpointError, match=f"/v1/completions gave no usable answer after 2 tries: .*{reason}"
        ):
            service.score([[1, 2, 3, 4, 5, 6]], [2], 3)


def test_a_service_is_asked_again_and_what_it_refuses_is_said(folder):
    teacher, failures = ServedTeacher(folder), [503, 500]
    answer = lambda message: (failures.pop(), {}) if failures and "prompt" in message else teacher(message)  # noqa: E731
    with serving(answer) as server:
        assert len(service_at(server.url, folder).score([[1, 2, 3]], [1], 0)) == 1 and not failures
    refused = {"error": {"message": "Requested prompt logprobs of 30, which is greater than max allowed: 20"}}
    with serving(lambda message: (400, refused)) as server:
        service = service_at(server.url, folder)
        with pytest.raises(EndpointError, match=r"after 1 try: HTTP 400 .*greater than max allowed: 20"):
            service.score([[1, 2, 3]], [1], 30)
    with serving(ServedTeacher(folder, "texts")) as server:
        service = service_at(server.url, folder)
        with pytest.raises(NotSupportedError, match="by their texts"):
            service.score([[1, 2, 3]], [1], 2)
    with pytest.raises(EndpointError, match="Start the service"):
        service_at("http://127.0.0.1:9/score", folder, "max_tries=1").score([[1, 2, 3]], [1], 2)
