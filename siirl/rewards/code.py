"""Generated Python programs scored by unit tests, in the local sandbox or in a remote one."""

import atexit
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from siirl.errors import DataError, ScoreTimeoutError
from siirl.rewards.fusion import fusion_sandbox
from siirl.rewards.reward_registry import register_reward
from siirl.sandbox.box import Box
from siirl.sandbox.limits import MIB, SLEEPS, STARVES, Limits, Result

TOLERANCE = 1e-6  # relative, and absolute near zero, of numbers with a decimal point
FORMS = (
    '{"inputs": [...], "outputs": [...]} with or without "fn_name", or [{"input": ..., "output": ...}, ...]'
)


@dataclass(frozen=True)
class UnitTests:
    """The tests of one program."""

    fn_name: str | None
    """The function to call, on inputs that are lists of arguments; None: a program to run, on inputs that are
    texts for stdin."""
    inputs: list[Any]
    outputs: list[Any]
    """What is right."""

    def __len__(self) -> int:
        return len(self.inputs)

    def first(self, count: int) -> "UnitTests":
        return UnitTests(self.fn_name, self.inputs[:count], self.outputs[:count])


def read_tests(ground_truth: Any) -> UnitTests:
    """The tests of a row: a dict or list of one of FORMS, or that as JSON text. DataError otherwise."""
    try:
        given = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except json.JSONDecodeError as error:
        raise DataError(f"reward_model.ground_truth is no JSON: {error}. It must be {FORMS}") from error
    if isinstance(given, list) and all(isinstance(case, dict) for case in given):
        names = [(case.get("metadata") or {}).get("func_name") for case in given]
        fn_name = next((name for name in names if name), None)
        inputs, outputs = [case.get("input") for case in given], [case.get("output") for case in given]
    elif isinstance(given, dict):
        fn_name, inputs, outputs = given.get("fn_name"), given.get("inputs"), given.get("outputs")
    else:
        raise DataError(f"reward_model.ground_truth is a {type(given).__name__}: it must be {FORMS}")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or len(inputs) != len(outputs)
        or not inputs
    ):
        sizes = [len(part) if isinstance(part, list) else type(part).__name__ for part in (inputs, outputs)]
        raise DataError(
            f"reward_model.ground_truth has {sizes[0]} inputs and {sizes[1]} outputs: it needs as many of "
            f"both, and at least one. It must be {FORMS}"
        )
    if fn_name:
        return UnitTests(fn_name, [_arguments(case) for case in inputs], [_value(case) for case in outputs])
    return UnitTests(None, [_text(case) for case in inputs], [_text(case) for case in outputs])


def same_text(written: str, expected: str) -> bool:
    """Whether a program wrote what it should: word by word, numbers with a decimal point within TOLERANCE."""
    got, wanted = written.split(), expected.split()
    return len(got) == len(wanted) and all(map(_same_word, got, wanted))


def same_value(returned: Any, expected: Any) -> bool:
    """Whether a function returned what it should; a list of one expected value stands for that value too."""
    if _equal(returned, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _equal(returned, expected[0])


def _same_word(got: str, wanted: str) -> bool:
    if got == wanted:
        return True
    if "." not in wanted and "e" not in wanted.lower():
        return False
    try:
        left, right = Decimal(got), Decimal(wanted)
    except InvalidOperation:
        return False
    if not (left.is_finite() and right.is_finite()):
        return False
    return math.isclose(float(left), float(right), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, float | int) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return left == right


def _arguments(case: Any) -> list[Any]:
    """A call's arguments: a list of them, or a text with one JSON value on each line."""
    if isinstance(case, str):
        return [_value(line) for line in case.split("\n") if line.strip()]
    return case if isinstance(case, list) else [case]


def _value(case: Any) -> Any:
    if not isinstance(case, str):
        return case
    try:
        return json.loads(case)
    except json.JSONDecodeError:
        return case


def _text(case: Any) -> str:
    """A text; a list is its lines."""
    if isinstance(case, Sequence) and not isinstance(case, str):
        return "\n".join(map(str, case))
    return str(case)


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
import io, json, signal, sys, time

def expire(number, frame):
    raise TimeoutError("timeout")

def look(number, frame):
    global looks
    looks += 1
    idle = time.process_time() - began_s < 0.1 * job["test_timeout_s"]
    if idle and looks > 1:  # the first look may have waited for a process that was stopped
        raise TimeoutError("idle")

def limit(seconds):
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, job["sleeps"] * seconds / 2, job["sleeps"] * seconds / 2)

def plain(value):
    return list(value) if hasattr(value, "__iter__") else str(value)

job = json.loads(sys.stdin.read())
answers, sys.stdout, sys.stdin = sys.stdout, io.StringIO(), io.StringIO()
sys.setrecursionlimit(100_000)
names = {"__name__": "solution"}
exec(job["prelude"], names)
exec(compile(job["code"], "solution.py", "exec"), names)
signal.signal(signal.SIGALRM, look)
signal.signal(signal.SIGPROF, expire)
for arguments in job["inputs"]:
    began_s, looks = time.process_time(), 0
    limit(job["test_timeout_s"])
    try:
        owner = names["Solution"]() if "Solution" in names else None
        function = getattr(owner, job["fn_name"]) if owner is not None else names[job["fn_name"]]
        answer = json.dumps({"value": function(*arguments)}, default=plain)
    except TimeoutError as error:
        answer = json.dumps({"verdict": str(error)})
    except Exception:
        answer = json.dumps({"verdict": "error"})
    limit(0)
    print(answer, file=answers, flush=True)
    if job["stop_at_failure"] and "verdict" in json.loads(answer):
        break
"""


@register_reward("code", reads_truth=read_tests)
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

    Unless continuous the first failing test ends the sample. max_tests: only the first so many; 0: all. The
    limits are processor time; a program that sleeps ends after SLEEPS times as long. A test that has not
    begun when sample_timeout_s are used up counts as a timeout. The expected outputs never enter the sandbox.
    Further values: passed, tests, and verdict, which is "passed" or why the first failing test failed ("wrong
    answer", "error", "timeout", "output", "no code"). ScoreTimeoutError if this machine has not given a
    program its time: there is no score then.
    """
    tests = read_tests(ground_truth)
    tests = tests.first(max_tests) if max_tests else tests
    program = extract_code(solution_str)
    limits = Limits(time_s=test_timeout_s, memory_bytes=memory_mb * MIB, output_bytes=OUTPUT_BYTES)
    run = _run_here if sandbox_fusion is None else fusion_sandbox(sandbox_fusion).run
    if not program.strip():
        verdicts = ["no code"]
    elif tests.fn_name is None:
        verdicts = _judge_program(program, tests, run, limits, sample_timeout_s, continuous)
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


def longest_s(test_timeout_s: float = 6.0, sample_timeout_s: float = 20.0, **options: Any) -> float:
    """The longest that a sample may take by the wall; the defaults are those of `code`."""
    return STARVES * (test_timeout_s + sample_timeout_s)


def _judge_program(
    program: str, tests: UnitTests, run: Run, limits: Limits, sample_timeout_s: float, continuous: bool
) -> list[str]:
    """One verdict for each test that was run, a new process for each."""
    verdicts: list[str] = []
    used_s = 0.0
    for given, expected in zip(tests.inputs, tests.outputs, strict=True):
        if used_s >= sample_timeout_s:
            return [*verdicts, "timeout"]
        result = run(program, given, limits)
        used_s += result.own_s
        if result.status == "ok":
            verdicts.append(PASSED if same_text(result.stdout, expected) else WRONG)
        else:
            verdicts.append(_verdict(result, limits))
        if verdicts[-1] != PASSED and not continuous:
            break
    return verdicts


def _verdict(result: Result, limits: Limits) -> str:
    """Of a run that did not end well. ScoreTimeoutError if that is not the program's doing."""
    if result.status == "starved":
        raise ScoreTimeoutError(
            f"a program has run for {result.cpu_s:.1f} s in {result.time_s:.0f} s on this busy machine: "
            f"it may have {limits.time_s:g} s"
        )
    return VERDICTS.get(result.status, "error")


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
        "sleeps": SLEEPS,
        "stop_at_failure": not continuous,
    }
    result = run(CALLER, json.dumps(job), limits)
    verdicts: list[str] = []
    for line, expected in zip(result.stdout.splitlines(), tests.outputs, strict=False):
        answer = _read_answer(line)
        if "value" in answer:
            verdicts.append(PASSED if same_value(answer["value"], expected) else WRONG)
        else:
            verdicts.append(_verdict_of_call(answer, result, test_timeout_s))
    if len(verdicts) < len(tests):
        verdicts.append(_verdict(result, limits))
    return verdicts


def _verdict_of_call(answer: dict[str, Any], result: Result, test_timeout_s: float) -> str:
    """Of a call that returned nothing. "idle": it used all but no processor in SLEEPS times its limit.

    ScoreTimeoutError if it may have waited for a processor in all of that time but its limit.
    """
    verdict, waited_s = answer.get("verdict"), result.time_s - result.own_s
    if verdict == "idle" and waited_s > (SLEEPS - 1) * test_timeout_s:
        raise ScoreTimeoutError(
            f"a call took {SLEEPS * test_timeout_s:g} s on this busy machine, of which it may have waited "
            f"{waited_s:.1f} s for a processor: it may have {test_timeout_s:g} s"
        )
    return "timeout" if verdict in ("idle", "timeout") else "error"


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
