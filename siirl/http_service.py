"""A JSON service reached over HTTP: retries with back-off, bounds on its requests. No torch."""

import json
import os
import random
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from siirl.deadline import Deadline
from siirl.errors import EndpointError

if TYPE_CHECKING:
    import httpx  # when a service is asked, not before: it takes a third of a second

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
KEPT_S = 1.0
"""How long a connection is kept without use: services close theirs after some seconds, maybe as we ask."""
WORTH_A_RETRY = (408, 425, 429, 500, 502, 503, 504)
MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True)
class EndpointSettings:
    """How to ask a service."""

    url: str
    timeout_s: float = 30.0
    """Of one try."""
    max_tries: int = 5
    """The first included."""
    away_s: float = 0.0
    """One that has answered before is tried for so long at least: it is being started again, or moves."""
    max_concurrent: int = 16
    max_per_s: float = 0.0
    """Requests per second, tries counted; 0: any number."""
    token_env: str | None = None
    """Environment variable whose value is sent as a bearer token."""


def settings_of(endpoint: Any) -> EndpointSettings:
    """Those of a group `endpoint` of the configuration."""
    return EndpointSettings(
        url=str(endpoint.url),
        timeout_s=endpoint.timeout_s,
        max_tries=endpoint.max_tries,
        away_s=getattr(endpoint, "away_s", 0.0),
        max_concurrent=endpoint.max_concurrent,
        max_per_s=endpoint.max_per_s,
        token_env=endpoint.token_env,
    )


class Endpoint:
    """Posts JSON to one URL. For any number of threads; they share its connections and bounds."""

    def __init__(self, settings: EndpointSettings):
        """Nothing is sent yet. EndpointError for a proxy of the environment that cannot be used."""
        import httpx

        self.settings = settings
        self.num_retries = 0
        self._has_answered = False
        self._slots = threading.Semaphore(settings.max_concurrent)
        self._lock = threading.Lock()
        self._next_s = 0.0
        self._client = httpx.Client(
            timeout=settings.timeout_s,
            limits=httpx.Limits(keepalive_expiry=KEPT_S),
            proxy=_proxy(settings.url),
            trust_env=False,
            verify=ssl.create_default_context(),  # the system's authorities: a company's own among them
        )

    def post(self, message: Any, trouble: Callable[[Any], str | None] = lambda answer: None) -> Any:
        """The answer to a message, both JSON. trouble: why an answer shows a broken service, or None.

        A try that finds nobody, gets no answer in time, is told to come back, or meets trouble is followed by
        another, after a wait that doubles each time and is never shorter than the service's Retry-After.
        EndpointError, which names URL and tries, after the last one, and at once for any other refusal.
        The last is that of max_tries; of a service that has answered before, one after away_s at least.
        """
        import httpx

        body = json.dumps(message).encode()
        headers = self._headers()
        tries, wait_s, away = 0, FIRST_WAIT_S, Deadline(self.settings.away_s)
        while True:
            tries, asked_s = tries + 1, 0.0
            try:
                response, content = self._try(body, headers)
                answer = json.loads(content) if response.is_success else None
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                reason = trouble(answer) if response.is_success else _refusal(response, content)
                if reason is None:
                    self._has_answered = True
                    return answer
                if not response.is_success and response.status_code not in WORTH_A_RETRY:
                    raise self._failed(reason, tries, "Correct the URL or the service.")
                asked_s = _retry_after(response)
            waits = self._has_answered and not away.over
            if tries >= self.settings.max_tries and not waits:
                raise self._failed(reason, tries, "Start the service, or correct the URL.")
            with self._lock:
                self.num_retries += 1
            time.sleep(max(asked_s, wait_s * random.uniform(0.5, 1.0)))
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        name = self.settings.token_env
        if name and (token := os.environ.get(name, "").strip()):
            if not (token.isascii() and token.isprintable()):  # the error of the library would print it
                raise EndpointError(
                    f"{self.settings.url} cannot be asked: the value of {name} has characters that no token "
                    "has, such as an end of line. Correct it."
                )
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _try(self, body: bytes, headers: dict[str, str]) -> tuple["httpx.Response", bytearray]:
        content = bytearray()
        with self._slots:
            self._take_turn()
            with self._client.stream("POST", self.settings.url, content=body, headers=headers) as response:
                for part in response.iter_bytes():
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES >> 20} MiB")
        return response, content

    def _take_turn(self) -> None:
        """Wait until the next request may go out."""
        if self.settings.max_per_s <= 0:
            return
        with self._lock:
            now = time.monotonic()
            turn_s = max(now, self._next_s)
            self._next_s = turn_s + 1 / self.settings.max_per_s
        time.sleep(turn_s - now)

    def _failed(self, reason: str, tries: int, fix: str) -> EndpointError:
        times = "1 try" if tries == 1 else f"{tries} tries"
        return EndpointError(f"{self.settings.url} gave no usable answer after {times}: {reason}. {fix}")


def _proxy(url: str) -> str | None:
    """The proxy for a URL by http_proxy, https_proxy and no_proxy, in small letters or capitals."""
    from urllib.request import getproxies, proxy_bypass

    service = urlsplit(url)
    proxy = None if proxy_bypass(service.netloc) else getproxies().get(service.scheme)
    if proxy is None or proxy.startswith(("http://", "https://")):
        return proxy
    if "://" not in proxy:
        return f"http://{proxy}"
    raise EndpointError(
        f"{url}: {service.scheme}_proxy names a proxy of kind {urlsplit(proxy).scheme}: only http and https "
        "ones can be used. Correct it, or have no_proxy name the host of the service."
    )


def _refusal(response: "httpx.Response", content: bytearray) -> str:
    place = f" to {response.headers['Location']}" if "Location" in response.headers else ""
    text = content[:500].decode("utf-8", "replace").strip()
    return f"HTTP {response.status_code} {response.reason_phrase}{place}" + (f" ({text})" if text else "")


def _retry_after(response: "httpx.Response") -> float:
    """Seconds that the service asks to wait, at most LONGEST_WAIT_S; 0 if it says nothing of the kind."""
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(response.headers.get("Retry-After", 0))))
    except ValueError:
        return 0.0
