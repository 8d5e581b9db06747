"""A JSON service reached over HTTP: retries with back-off, bounds on its requests. No torch."""

import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from siirl.errors import EndpointError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
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
    max_concurrent: int = 16
    max_per_s: float = 0.0
    """Requests per second, tries counted; 0: any number."""
    token_env: str | None = None
    """Environment variable whose value is sent as a bearer token."""


class Endpoint:
    """Posts JSON to one URL. For any number of threads; they share its bounds."""

    def __init__(self, settings: EndpointSettings):
        self.settings = settings
        self.num_retries = 0
        self._slots = threading.Semaphore(settings.max_concurrent)
        self._lock = threading.Lock()
        self._next_s = 0.0

    def post(self, message: Any, trouble: Callable[[Any], str | None] = lambda answer: None) -> Any:
        """The answer to a message, both JSON. trouble: why an answer shows a broken service, or None.

        A try that finds nobody, gets no answer in time, is told to come back, or meets trouble is followed by
        another, after a wait that doubles each time and is never shorter than the service's Retry-After.
        EndpointError, which names URL and tries, after the last one, and at once for any other refusal.
        """
        body = json.dumps(message).encode()
        tries, wait_s = 0, FIRST_WAIT_S
        while True:
            tries += 1
            try:
                with self._slots:
                    self._take_turn()
                    answer = self._try(body)
                if (reason := trouble(answer)) is None:
                    return answer
                asked_s = 0.0
            except urllib.error.HTTPError as error:
                reason, asked_s = _refusal(error), _retry_after(error)
                if error.code not in WORTH_A_RETRY:
                    raise self._failed(reason, tries, "Correct the URL or the service.") from error
            except (OSError, HTTPException, json.JSONDecodeError) as error:
                reason, asked_s = f"{type(error).__name__}: {getattr(error, 'reason', error)}", 0.0
            if tries >= self.settings.max_tries:
                raise self._failed(reason, tries, "Start the service, or correct the URL.")
            with self._lock:
                self.num_retries += 1
            time.sleep(max(asked_s, wait_s * random.uniform(0.5, 1.0)))
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    def _try(self, body: bytes) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.settings.token_env:
            headers["Authorization"] = f"Bearer {os.environ.get(self.settings.token_env, '')}"
        request = urllib.request.Request(self.settings.url, body, headers)
        with urllib.request.urlopen(request, timeout=self.settings.timeout_s) as response:
            return json.loads(response.read(MAX_ANSWER_BYTES))

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


def _refusal(error: urllib.error.HTTPError) -> str:
    text = error.read(500).decode("utf-8", "replace").strip()
    return f"HTTP {error.code} {error.reason}" + (f" ({text})" if text else "")


def _retry_after(error: urllib.error.HTTPError) -> float:
    """Seconds that the service asks to wait, at most LONGEST_WAIT_S; 0 if it says nothing of the kind."""
    try:
        return min(LONGEST_WAIT_S, max(0.0, float(error.headers.get("Retry-After", 0))))
    except ValueError:
        return 0.0
