"""Generated Python programs scored by unit tests, in the local sandbox or in a remote one."""

import atexit
import functools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from siirl.rewards.fusion import fusion_sandbox
from siirl.rewards.registry import register_reward
from siirl.rewards.unit_tests import UnitTests, read_tests, same_text, same_value
from siirl.sandbox.box import Box
from siirl.sandbox.limits import MIB, Limits, Result

Run = Callable[[str, str, Limits], Result]

PASSED, WRONG = "passed", "wrong answer"
VERDICTS = {"failed": "error", "timeout": "timeout", "output": "output"}  # of a run that did not end well
OUTPUT_BYTES = 4 * MIB

PRELUDE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate, combinations, permutations, product
from math import ceil, comb, factorial, floor, gcd, inf, sqrt
from typing import *
"""  # what code that answers with a function, as LeetCode wants it, takes for granted

CALLER = """
import io, json, signal, sys

def expire(number, frame):
    raise TimeoutError

def plain(value):
    return list(value) if hasattr(value, "__iter__") else str(value)

job = json.loads(sys.stdin.read())
answers, sys.stdout, sys.stdin = sys.stdout, io.StringIO(), io.StringIO()
sys.setrecursionlimit(100_000)
names = {"__name__": "solution"}
exec(job["prelude"], names)
exec(compile(job["code"], "solution.py", "exec"), names)
signal.signal(signal.SIGALRM, expire)
for arguments in job["inputs"]:
    signal.setitimer(signal.ITIMER_REAL, job["test_timeout_s"])
    try:
        owner = names["Solution"]() if "Solution" in names else None
        function = getattr(owner, job["fn_name"]) if owner is not None else names[job["fn_name"]]
        answer = json.dumps({"value": function(*arguments)}, default=plain)
    except TimeoutError:
        answer = json.dumps({"verdict": "timeout"})
    except Exception:
        answer = json.dumps({"verdict": "error"})
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(answer, file=answers, flush=True)
    if job["stop_at_failure"] and "verdict" in json.loads(answer):
        break
"""


@register_reward("code")
def code(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    test_timeout_s: float = 6.0,
    sample_timeout_s: float = 20.0,
    memory_mb: int = 1024,
    max_tests: int = 0,
    continuous: bool = False,
    sandbox_fusion: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """1 if the program in the response passes all its unit tests, else 0; the share it passes if continuous.

    Unless continuous the first failing test ends the sample. max_tests: only the first so many; 0: all. A
    test that has not begun after sample_timeout_s counts as a timeout. The expected outputs never enter the
    sandbox. Further values: passed, tests, and verdict, which is "passed" or why the first failing test
    failed ("wrong answer", "error", "timeout", "output", "no code").
    """
    tests = read_tests(ground_truth)
    tests = tests.first(max_tests) if max_tests else tests
    program = extract_code(solution_str)
    limits = Limits(time_s=test_timeout_s, memory_bytes=memory_mb * MIB, output_bytes=OUTPUT_BYTES)
    run = _run_here if sandbox_fusion is None else fusion_sandbox(sandbox_fusion).run
    if not program.strip():
        verdicts = ["no code"]
    elif tests.fn_name is None:
        deadline = time.monotonic() + sample_timeout_s
        verdicts = _judge_program(program, tests, run, limits, deadline, continuous)
    else:
        seconds = min(sample_timeout_s, test_timeout_s * len(tests))
        limits = Limits(**limits.__dict__ | {"time_s": seconds})
        verdicts = _judge_function(program, tests, run, limits, test_timeout_s, continuous)
    passed = verdicts.count(PASSED)
    verdict = next((verdict for verdict in verdicts if verdict != PASSED), PASSED)
    score = passed / len(tests) if continuous else float(passed == len(tests))
    return {"score": score, "passed": passed, "tests": len(tests), "verdict": verdict}


def extract_code(response: str) -> str:
    """The last fenced block that is Python or says nothing; the whole response if it has no block at all.

    A block that is not closed ends with the response. Blocks marked as Python come before unmarked ones.
    """
    blocks: list[tuple[str, list[str]]] = []
    inside = False
    for line in response.split("\n"):
        if line.lstrip().startswith("```"):
            inside = not inside
            if inside:
                blocks.append((line.strip().strip("`").strip().lower(), []))
        elif inside:
            blocks[-1][1].append(line)
    if not blocks:
        return response
    for languages in (("python", "python3", "py"), ("",)):
        for language, lines in reversed(blocks):
            if language in languages:
                return "\n".join(lines)
    return ""


def _judge_program(
    program: str, tests: UnitTests, run: Run, limits: Limits, deadline: float, continuous: bool
) -> list[str]:
    """One verdict for each test that was run, a new process for each."""
    verdicts: list[str] = []
    for given, expected in zip(tests.inputs, tests.outputs, strict=True):
        if time.monotonic() >= deadline:
            return [*verdicts, "timeout"]
        result = run(program, given, limits)
        if result.status == "ok":
            verdicts.append(PASSED if same_text(result.stdout, expected) else WRONG)
        else:
            verdicts.append(VERDICTS[result.status])
        if verdicts[-1] != PASSED and not continuous:
            break
    return verdicts


def _judge_function(
    program: str, tests: UnitTests, run: Run, limits: Limits, test_timeout_s: float, continuous: bool
) -> list[str]:
    """One verdict for each call that was made, all in one process; then why there are no more."""
    job = {
        "prelude": PRELUDE,
        "code": program,
        "fn_name": tests.fn_name,
        "inputs": tests.inputs,
        "test_timeout_s": test_timeout_s,
        "stop_at_failure": not continuous,
    }
    result = run(CALLER, json.dumps(job), limits)
    verdicts: list[str] = []
    for line, expected in zip(result.stdout.splitlines(), tests.outputs, strict=False):
        answer = _read_answer(line)
        if "value" in answer:
            verdicts.append(PASSED if same_value(answer["value"], expected) else WRONG)
        else:
            verdicts.append("timeout" if answer.get("verdict") == "timeout" else "error")
    if len(verdicts) < len(tests):
        verdicts.append(VERDICTS.get(result.status, "error"))
    return verdicts


def _read_answer(line: str) -> dict[str, Any]:
    """A line of CALLER; empty if the program wrote one of its own."""
    try:
        answer = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _run_here(program: str, stdin: str, limits: Limits) -> Result:
    return _box().run(program, stdin, limits=limits)


@functools.cache
def _box() -> Box:
    """The sandbox of this reward worker."""
    box = Box()
    atexit.register(box.close)
    return box
