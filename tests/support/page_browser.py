"""A real browser without a window, driven through its debugging pipe; only the standard library is needed."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-features=SpareRendererForSitePerProcess", "--enable-precise-memory-info"),
)


def browser_path() -> str:
    """The browser of this machine; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed: the page was not opened in a browser")
    return found


class Tab:
    """An empty tab; calls wait for their answers."""

    def __init__(self, send: int, receive: int):
        self._send, self._receive, self._buffer, self._count = send, receive, b"", 0
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        size = {"width": 1360, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def call(self, method: str, whole_browser: bool = False, **params: Any) -> dict[str, Any]:
        """A command of the Chrome DevTools Protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session and not whole_browser:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, address: str) -> None:
        """Go there; the page may still be reading when this returns."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)

    def value(self, script: str) -> Any:
        """What a script in the page gives, as JSON; a promise is waited for."""
        about = {"expression": script, "awaitPromise": True, "returnByValue": True}
        found = self.call("Runtime.evaluate", **about)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, script: str, limit_s: float = 120.0) -> float:
        """Until a script in the page is true; seconds that it took."""
        began_s = time.monotonic()
        while not self.value(script):
            assert time.monotonic() - began_s < limit_s, f"not within {limit_s} s: {script}"
            time.sleep(0.02)
        return time.monotonic() - began_s

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def memory_mib(self) -> float:
        """Memory of the page's process, shared pages by their part."""
        told = self.call("SystemInfo.getProcessInfo", whole_browser=True)["processInfo"]
        sizes = []
        for process in told:
            if process["type"] == "renderer":
                lines = Path(f"/proc/{process['id']}/smaps_rollup").read_text().splitlines()
                sizes += [int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")]
        return max(sizes)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._receive, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def opened_tab(folder: Path, *flags: str) -> Iterator[Tab]:
    """A browser with its profile in a folder, until the block ends. flags: further ones of its command."""
    to_browser, from_browser = os.pipe(), os.pipe()
    command = [browser_path(), *FLAGS, *flags, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    pipes = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    with subprocess.Popen(
        ["bash", "-c", pipes, "browser", *command],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Tab(to_browser[1], from_browser[0])
        finally:
            os.close(to_browser[1])
            os.close(from_browser[0])
            process.terminate()
