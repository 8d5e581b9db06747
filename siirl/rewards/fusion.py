"""A remote sandbox that speaks SandboxFusion's run_code protocol: a program, its stdin, an answer. No torch.

Source: SandboxFusion, POST /run_code (RunCodeRequest, RunCodeResponse).
"""

import difflib
import functools
import json
from collections.abc import Mapping
from typing import Any

from siirl.errors import ConfigError, EndpointError
from siirl.http_service import Endpoint, EndpointSettings
from siirl.sandbox.limits import MIB, Limits, Result, Status

KEY = "reward_model.sandbox_fusion"
KEYS: dict[str, type] = {
    "url": str,
    "max_concurrent": int,
    "memory_limit_mb": int,
    "timeout_s": float,
    "max_tries": int,
}
MAX_CONCURRENT = 64  # unless max_concurrent says otherwise
SLACK_S = 10.0  # what the service may take beyond the program's own time


class FusionSandbox:
    """Runs programs in the remote sandbox. For any number of threads, max_concurrent of which run at once."""

    def __init__(self, settings: EndpointSettings, memory_limit_mb: int):
        self._endpoint = Endpoint(settings)
        self._memory_limit_mb = memory_limit_mb

    def run(self, code: str, stdin: str, limits: Limits) -> Result:
        """Run a Python program there; memory is limited by memory_limit_mb or `limits`, whichever is less.

        EndpointError if the service cannot be reached, or says that it is broken itself.
        """
        message = {
            "code": code,
            "stdin": stdin,
            "language": "python",
            "compile_timeout": limits.time_s,
            "run_timeout": limits.time_s,
            "memory_limit_MB": min(self._memory_limit_mb, limits.memory_bytes // MIB),
            "files": {},
            "fetch_files": [],
        }
        answer = self._endpoint.post(message, _trouble)
        try:
            return _read(answer, limits)
        except (KeyError, TypeError, AttributeError) as error:
            raise EndpointError(
                f"{self._endpoint.settings.url} gave an answer that is not SandboxFusion's: "
                f"{json.dumps(answer)[:300]} ({error!r}). Give the URL of its run_code."
            ) from error


def fusion_sandbox(settings: Mapping[str, Any]) -> FusionSandbox:
    """The sandbox that reward_model.sandbox_fusion describes; one for each description in a process."""
    return _fusion_sandbox(tuple(sorted(settings.items())))


def check_fusion(settings: Mapping[str, Any]) -> None:
    """ConfigError for a key that is unknown, a value of another type, or no URL."""
    for name, value in settings.items():
        if name not in KEYS:
            near = difflib.get_close_matches(name, KEYS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{KEY}.{name}: unknown. Known: {', '.join(KEYS)}.{hint}")
        wanted = (int, float) if KEYS[name] is float else KEYS[name]
        if isinstance(value, bool) or not isinstance(value, wanted) or (wanted is not str and value <= 0):
            what = "a text" if wanted is str else "a number above 0"
            raise ConfigError(f"{KEY}.{name}={value!r}: it must be {what}.")
    url = settings.get("url", "")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{KEY}.url={url!r}: it must be the http(s) address of a SandboxFusion run_code service, e.g. "
            "http://localhost:8080/run_code."
        )


@functools.cache
def _fusion_sandbox(items: tuple[tuple[str, Any], ...]) -> FusionSandbox:
    given = dict(items)
    memory_limit_mb = given.pop("memory_limit_mb", 1024)
    settings = EndpointSettings(**{"max_concurrent": MAX_CONCURRENT, "timeout_s": 30.0 + SLACK_S} | given)
    return FusionSandbox(settings, memory_limit_mb)


def _trouble(answer: Any) -> str | None:
    """SandboxError says that the service failed, not the program."""
    if isinstance(answer, dict) and answer.get("status") == "SandboxError":
        return f"SandboxError: {answer.get('message')!r}"
    return None


def _read(answer: Any, limits: Limits) -> Result:
    """The result in an answer."""
    run = answer.get("run_result") or answer.get("compile_result") or {}
    status: Status = "failed"
    if run.get("status") == "TimeLimitExceeded":
        status = "timeout"
    elif answer["status"] == "Success" and run.get("return_code") in (0, None):
        status = "ok"
    out, err = run.get("stdout") or "", run.get("stderr") or ""
    if len(out) > limits.output_bytes:
        status = "output"
    code = run.get("return_code")
    time_s = float(run.get("execution_time") or 0.0)
    return Result(status, out, err, 1 if code is None else int(code), time_s, time_s, time_s)
