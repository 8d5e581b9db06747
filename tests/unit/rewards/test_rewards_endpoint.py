"""A remote service over real HTTP on this machine."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_harness import serving

from siirl import http_service
from siirl.errors import EndpointError
from siirl.http_service import Endpoint, EndpointSettings
from siirl.rewards.code import code
from siirl.rewards.fusion import fusion_sandbox
from siirl.sandbox.box import run_code
from siirl.sandbox.limits import Limits

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(http_service, "FIRST_WAIT_S", 0.02)


def asking(url, **settings):
    return Endpoint(EndpointSettings(url, **settings))


def test_a_message_is_answered_in_one_try(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "abc")
    with serving(lambda message: (200, {"twice": message["x"] * 2})) as service:
        assert asking(service.url, token_env="MY_TOKEN").post({"x": 4}) == {"twice": 8}
    assert len(service.messages) == 1
    assert service.headers[0]["Authorization"] == "Bearer abc"


@pytest.mark.parametrize("trouble", [(503, {}), (429, {}), (200, b"<html>"), (500, {})])
def test_trouble_that_passes_is_tried_again_with_growing_waits(trouble):
    answers = [trouble, trouble, trouble, (200, 7)]
    with serving(lambda message: answers.pop(0)) as service:
        asked = asking(service.url)
        assert asked.post({}) == 7
    assert asked.num_retries == 3
    waits = [after - before for before, after in zip(service.times, service.times[1:], strict=False)]
    assert waits[0] >= 0.01 and waits[2] >= 0.04


def test_the_service_may_ask_for_a_longer_wait():
    answers = [(429, {}, {"Retry-After": "0.3"}), (200, 7)]
    with serving(lambda message: answers.pop(0)) as service:
        assert asking(service.url).post({}) == 7
    assert service.times[1] - service.times[0] >= 0.3


def test_a_refusal_is_not_tried_again():
    with (
        serving(lambda message: (422, {"detail": "no such field"})) as service,
        pytest.raises(EndpointError, match=rf"{service.url} .* after 1 try: HTTP 422 .*no such field"),
    ):
        asking(service.url).post({})
    assert len(service.messages) == 1


def test_connections_are_kept_from_one_message_to_the_next():
    with serving(lambda message: (200, message)) as service:
        asked = asking(service.url)
        assert [asked.post(number) for number in range(5)] == list(range(5))
    assert len(service.connections) == 1


def test_a_service_that_has_moved_is_not_followed_with_the_token(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    with serving(lambda message: (200, 1)) as other:
        moved = (302, {}, {"Location": other.url})
        with (
            serving(lambda message: moved) as service,
            pytest.raises(
                EndpointError, match=rf"{service.url} .* after 1 try: HTTP 302 Found to {other.url}"
            ),
        ):
            asking(service.url, token_env="MY_TOKEN").post({})
    assert not other.connections


@pytest.mark.parametrize("token", ["s3cret\nX-Other: 1", "s3crét"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(monkeypatch, token):
    monkeypatch.setenv("MY_TOKEN", token)
    with (
        serving(lambda message: (200, 1)) as service,
        pytest.raises(EndpointError, match="MY_TOKEN") as caught,
    ):
        asking(service.url, token_env="MY_TOKEN").post({})
    assert "s3c" not in str(caught.value) and not service.messages


@pytest.mark.parametrize(("token", "sent"), [("abc\n", "Bearer abc"), ("", None)])
def test_a_token_is_sent_without_the_end_of_line_of_its_file(monkeypatch, token, sent):
    monkeypatch.setenv("MY_TOKEN", token)
    with serving(lambda message: (200, 1)) as service:
        assert asking(service.url, token_env="MY_TOKEN").post({}) == 1
    assert service.headers[0].get("Authorization") == sent


def test_an_answer_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(http_service, "MAX_ANSWER_BYTES", 1 << 20)
    with (
        serving(lambda message: (200, "x" * (1 << 21))) as service,
        pytest.raises(EndpointError, match="more than 1 MiB"),
    ):
        asking(service.url, max_tries=1).post({})


PROXY_KEYS = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture
def no_proxies(monkeypatch):
    for name in PROXY_KEYS:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(("name", "scheme"), [("http_proxy", "http://"), ("HTTP_PROXY", "")])
def test_a_proxy_of_the_environment_is_asked(monkeypatch, no_proxies, name, scheme):
    with serving(lambda message: (200, "of the proxy")) as proxy:
        monkeypatch.setenv(name, scheme + proxy.url.removeprefix("http://").removesuffix("/score"))
        assert asking("http://judge.invalid/score").post({}) == "of the proxy"
    assert proxy.paths == ["http://judge.invalid/score"]


@pytest.mark.parametrize("named", ["127.0.0.1", "*", "judge.invalid,127.0.0.1"])
def test_hosts_of_no_proxy_are_asked_themselves(monkeypatch, no_proxies, named):
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", named)
    with serving(lambda message: (200, 7)) as service:
        assert asking(service.url).post({}) == 7


def test_a_proxy_of_another_kind_is_refused_where_it_would_be_used_alone(monkeypatch, no_proxies):
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")  # for other programs
    with serving(lambda message: (200, 7)) as service:
        assert asking(service.url).post({}) == 7
        monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:9")
        with pytest.raises(EndpointError, match=rf"{service.url}: http_proxy names a proxy of kind socks5"):
            asking(service.url)


def test_an_unreachable_service_is_named_with_the_tries():
    with serving(lambda message: (200, 1)) as service:
        pass
    with pytest.raises(EndpointError, match=rf"{service.url} gave no usable answer after 3 tries.*refused"):
        asking(service.url, max_tries=3).post({})


def test_a_service_that_has_answered_may_be_away_for_a_while():
    """It is tried beyond max_tries, for away_s; one that never answered is not."""
    answers = [(200, 1), *[(503, {})] * 5, (200, 7)]
    with serving(lambda message: answers.pop(0)) as service:
        asked = asking(service.url, max_tries=2, away_s=30.0)
        assert [asked.post({}), asked.post({})] == [1, 7] and asked.num_retries == 5
    with serving(lambda message: answers.pop(0) if answers else (503, {})) as service:
        with pytest.raises(EndpointError, match="after 2 tries: HTTP 503"):
            asking(service.url, max_tries=2, away_s=30.0).post({})
        answers.append((200, 1))
        asked = asking(service.url, max_tries=2, away_s=0.3)
        asked.post({})
        began_s = time.monotonic()
        with pytest.raises(EndpointError, match=r"after [3-9] tries: HTTP 503"):
            asked.post({})
        assert time.monotonic() - began_s > 0.3


def test_a_service_that_does_not_answer_is_given_up():
    def slow(message):
        time.sleep(0.5)
        return 200, 1

    with serving(slow) as service, pytest.raises(EndpointError, match=r"after 2 tries: .*timed out"):
        asking(service.url, timeout_s=0.1, max_tries=2).post({})


def test_no_more_requests_run_at_once_than_allowed():
    def slow(message):
        time.sleep(0.05)
        return 200, 1

    with serving(slow) as service, ThreadPoolExecutor(12) as pool:
        asked = asking(service.url, max_concurrent=3)
        assert list(pool.map(asked.post, range(12))) == [1] * 12
    assert service.most_at_once == 3


def test_no_more_requests_per_second_than_allowed():
    with serving(lambda message: (200, 1)) as service, ThreadPoolExecutor(6) as pool:
        asked = asking(service.url, max_per_s=20)
        list(pool.map(asked.post, range(6)))
    assert service.times[-1] - service.times[0] >= 0.2


def fusion_answer(message):
    """What SandboxFusion answers, by running the program here."""
    result = run_code(message["code"], message["stdin"], limits=Limits(time_s=message["run_timeout"]))
    status = {"timeout": "TimeLimitExceeded"}.get(result.status, "Finished")
    return 200, {
        "status": "Success" if result.status == "ok" else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": status,
            "execution_time": result.time_s,
            "return_code": None if result.status == "timeout" else result.exit,
            "stdout": result.stdout,
            "stderr": result.stderr,
        },
    }


@pytest.mark.parametrize(
    ("program", "truth", "verdict"),
    [
        ("print(int(input()) * 2)", {"inputs": ["1", "2"], "outputs": ["2", "4"]}, "passed"),
        ("print(int(input()) + 1)", {"inputs": ["1", "2"], "outputs": ["2", "4"]}, "wrong answer"),
        ("1 / 0", {"inputs": ["1"], "outputs": ["2"]}, "error"),
        ("while True: pass", {"inputs": ["1"], "outputs": ["2"]}, "timeout"),
        ("def add(a, b): return a + b", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, "passed"),
    ],
)
@pytest.mark.heavy
def test_a_remote_sandbox_gives_the_verdicts_of_the_local_one(program, truth, verdict):
    options = {"test_timeout_s": 1.0}
    with serving(fusion_answer) as service:
        there = code(
            "s", program, truth, None, **options, sandbox_fusion={"url": service.url, "memory_limit_mb": 512}
        )
    assert there == code("s", program, truth, None, **options)
    assert there["verdict"] == verdict
    assert service.messages[0]["memory_limit_MB"] == 512
    assert service.messages[0]["language"] == "python"


def test_a_remote_sandbox_that_is_broken_is_not_the_programs_fault():
    answers = [(200, {"status": "SandboxError", "message": "no pods"}), fusion_answer]

    def recovering(message):
        answer = answers.pop(0)
        return answer(message) if callable(answer) else answer

    with serving(recovering) as service:
        result = fusion_sandbox({"url": service.url}).run("print(1)", "", Limits(time_s=1))
    assert result.stdout == "1\n"
    with (
        serving(lambda message: (200, {"status": "SandboxError", "message": "no pods"})) as service,
        pytest.raises(EndpointError, match="after 2 tries: SandboxError: 'no pods'"),
    ):
        fusion_sandbox({"url": service.url, "max_tries": 2}).run("print(1)", "", Limits())


def test_a_service_of_another_kind_is_named():
    with (
        serving(lambda message: (200, {"score": 1})) as service,
        pytest.raises(EndpointError, match="is not SandboxFusion's"),
    ):
        fusion_sandbox({"url": service.url}).run("print(1)", "", Limits())
