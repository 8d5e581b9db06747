"""Programs scored by unit tests: really run, in the sandbox."""

import contextlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from siirl.errors import DataError, ScoreTimeoutError
from siirl.rewards.code import code, extract_code, read_tests, same_text, same_value
from siirl.sandbox.limits import SLEEPS, STARVES
from siirl.sandbox.processor_clock import RunClock

pytestmark = pytest.mark.heavy

ECHO = "```python\nprint(int(input()) * 2)\n```"
DOUBLES = {"inputs": ["1\n", "2\n", "-3\n"], "outputs": ["2\n", "4\n", "-6\n"]}
ADD = {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}


def score(response, truth, **options):
    truth = truth if isinstance(truth, str) else json.dumps(truth)
    return code("s", response, truth, None, **{"test_timeout_s": 2.0} | options)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("no block at all", "no block at all"),
        ("a\n```python\nx = 1\n```\nb", "x = 1"),
        ("```python\nx = 1\n```\nwrong, rather\n```py\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\n```\nwhich prints\n```\n1\n```", "x = 1"),
        ("```python\nx = 1\n```\nwhich prints\n```text\n1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1", "x = 1"),
        ("```cpp\nint x;\n```", ""),
        ("  ```Python\n  x = 1\n  ```", "  x = 1"),
    ],
)
def test_the_program_is_the_last_python_block(response, expected):
    assert extract_code(response) == expected


PROGRAMS = {
    "right": (ECHO, DOUBLES, (1.0, 3, "passed")),
    "wrong": ("```python\nprint(int(input()) + 1)\n```", DOUBLES, (0.0, 1, "wrong answer")),
    "raises": ("```python\nprint(1 / 0)\n```", DOUBLES, (0.0, 0, "error")),
    "not Python": ("I do not know.", DOUBLES, (0.0, 0, "error")),
    "another language": ("```cpp\nint main() {}\n```", DOUBLES, (0.0, 0, "no code")),
    "hangs": ("```python\nwhile True: pass\n```", DOUBLES, (0.0, 0, "timeout")),
    "floods": ("```python\nwhile True: print('x' * 10000)\n```", DOUBLES, (0.0, 0, "output")),
    "function": ("```python\ndef add(a, b):\n    return a + b\n```", ADD, (1.0, 2, "passed")),
    "method": (
        "```python\nclass Solution:\n  def add(self, a: List[int], b):\n    print(a); return a + b\n```",
        ADD,
        (1.0, 2, "passed"),
    ),
    "wrong function": ("```python\ndef add(a, b):\n    return a\n```", ADD, (0.0, 0, "wrong answer")),
    "function of another name": ("```python\ndef plus(a, b):\n    return a + b\n```", ADD, (0.0, 0, "error")),
    "function that hangs": (
        "```python\ndef add(a, b):\n    while True: pass\n```",
        ADD,
        (0.0, 0, "timeout"),
    ),
    "function that exits": (
        "```python\ndef add(a, b):\n    raise SystemExit(0)\n```",
        ADD,
        (0.0, 0, "error"),
    ),
    "claims to have passed": (
        """```python
import os
os.write(1, b'{"verdict": "passed"}\\n{"verdict": "passed"}\\n')
os._exit(0)
```""",
        ADD,
        (0.0, 0, "error"),
    ),
    "looks for the answers": (
        """```python
import gc, sys
frame = sys._getframe()
while frame:
    if "outputs" in str(frame.f_locals) or "outputs" in str(frame.f_globals.get("job")):
        print("found")
    frame = frame.f_back
def add(a, b):
    return 3 if a == 1 else [1, 2]
```""",
        ADD,
        (1.0, 2, "passed"),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gets_its_verdict(name):
    response, truth, (expected, passed, verdict) = PROGRAMS[name]
    result = score(response, truth, test_timeout_s=1.0)
    assert (result["score"], result["passed"], result["verdict"]) == (expected, passed, verdict)
    assert result["tests"] == len(read_tests(truth))


def test_the_share_of_tests_passed_is_the_score_if_wanted():
    program = "```python\nprint(2 if input() == '1' else 4)\n```"
    assert score(program, DOUBLES, continuous=True)["score"] == pytest.approx(2 / 3)
    assert score(program, DOUBLES, max_tests=2)["score"] == 1.0
    function = "```python\ndef add(a, b):\n    if a == 1:\n        while True: pass\n    return a + b\n```"
    result = score(function, ADD, continuous=True, test_timeout_s=0.5)
    assert (result["score"], result["verdict"]) == (0.5, "timeout")


def test_many_slow_tests_stop_at_the_time_of_the_sample():
    truth = {"inputs": ["x"] * 50, "outputs": ["x"] * 50}
    start = time.monotonic()
    result = score("import time; time.sleep(0.4); print('x')", truth, sample_timeout_s=1.0, continuous=True)
    assert time.monotonic() - start < 15  # of the 20 that all would take
    assert result["verdict"] == "timeout" and 0 < result["passed"] < 5


STOPS = "import os, signal\n{0}os.kill(os.getpid(), signal.SIGSTOP)\n"


@pytest.fixture(params=["program", "function"])
def stopped(request):
    """A right answer that is stopped, as another process may do it, before it is given; how it is scored."""
    adds = ADD | {"inputs": ADD["inputs"][:1], "outputs": [3]}
    doubles = {"inputs": DOUBLES["inputs"][:1], "outputs": DOUBLES["outputs"][:1]}
    answers = {
        "program": (f"```python\n{STOPS.format('')}print(int(input()) * 2)\n```", doubles),
        "function": (f"```python\ndef add(a, b):\n    {STOPS.format(' ' * 4)}    return a + b\n```", adds),
    }
    score(ECHO, DOUBLES)  # the sandbox ends with the thread that started it
    with ThreadPoolExecutor(1) as thread:
        limits = {"test_timeout_s": 0.5, "sample_timeout_s": 0.5}
        yield thread.submit(lambda: score(*answers[request.param], **limits))


def stopped_program():
    """The process of the program in the sandbox that is stopped."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    return process
        time.sleep(0.01)
    raise AssertionError("no program is stopped")


def test_time_in_which_a_program_stands_still_is_not_its_own(stopped):
    program = stopped_program()
    time.sleep(1.3 * SLEEPS * 0.5)
    assert not stopped.done()
    program.resume()
    assert stopped.result()["verdict"] == "passed"


def test_a_program_that_does_not_get_its_time_is_neither_right_nor_wrong(stopped):
    with pytest.raises(ScoreTimeoutError, match=r"has run for 0\.\d s in \d+ s on this busy machine"):
        stopped.result(8 * STARVES)


@pytest.mark.parametrize("truth", [DOUBLES, ADD])
def test_a_program_that_sleeps_has_had_its_time(truth):
    sleeps = "```python\nimport time\ntime.sleep(100)\n```"
    if "fn_name" in truth:
        sleeps = "```python\nimport time\ndef add(a, b):\n    time.sleep(100)\n```"
    start = time.monotonic()
    assert score(sleeps, truth, test_timeout_s=0.3)["verdict"] == "timeout"
    assert time.monotonic() - start >= SLEEPS * 0.3


def test_waiting_for_a_processor_is_not_the_time_of_a_run():
    """Two processes on one processor, of which one has all but no share."""
    cpu = min(os.sched_getaffinity(0))
    children = []
    for nice in (0, 19):
        pid = os.fork()
        if pid == 0:
            os.sched_setaffinity(0, {cpu})
            os.nice(nice)
            while True:
                pass
        children.append(pid)
    proc = os.open("/proc", os.O_RDONLY)
    clock = RunClock(children[1], proc, 60.0)
    # The kernel counts a wait when it is over, so that one of half a second may show late.
    while clock.wall_s < 1.5 or (clock.own_s >= 0.7 and clock.wall_s < 6):
        time.sleep(0.1)
        clock.tick(0.0, False, False)
    for pid in children:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    clock.close()
    os.close(proc)
    assert clock.cpu_s < 0.3
    assert clock.own_s < 0.7 < clock.wall_s


@pytest.mark.parametrize(
    ("truth", "fn_name", "inputs", "outputs"),
    [
        (json.dumps(DOUBLES), None, ["1\n", "2\n", "-3\n"], ["2\n", "4\n", "-6\n"]),
        (ADD, "add", [[1, 2], [[1], [2]]], [3, [1, 2]]),
        ({"fn_name": "f", "inputs": [[1, "a"]], "outputs": [["b"]]}, "f", [[1, "a"]], [["b"]]),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], None, ["1"], ["2"]),
        ([{"input": "1\n2", "output": "3", "metadata": {"func_name": "f"}}], "f", [[1, 2]], [3]),
        ({"inputs": [["1", "2"]], "outputs": [["3", "4"]]}, None, ["1\n2"], ["3\n4"]),
    ],
)
def test_the_forms_of_ground_truth(truth, fn_name, inputs, outputs):
    tests = read_tests(truth)
    assert (tests.fn_name, tests.inputs, tests.outputs) == (fn_name, inputs, outputs)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("{", "no JSON"),
        ("3", "is a int"),
        (None, "is a NoneType"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"input": ["1"]}, "NoneType inputs"),
    ],
)
def test_a_ground_truth_that_is_no_test_is_an_error(truth, message):
    with pytest.raises(DataError, match=message):
        read_tests(truth)


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n\n3", "1 2\n3", True),
        ("0.3333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1e-7", "0.0", True),
        ("100000001", "100000000", False),
        ("nan", "0.5", False),
        ("yes", "no", False),
        ("1", "1 2", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_word_by_word(written, expected, same):
    assert same_text(written, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        (3, 3, True),
        (3, [3], True),
        ([3], [[3]], True),
        ([1, 2], [1, 3], False),
        (0.1 + 0.2, 0.3, True),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}, True),
        (None, [None], True),
        ("3", 3, False),
        ([], [], True),
    ],
)
def test_values_are_compared_with_a_tolerance_for_floats(returned, expected, same):
    assert same_value(returned, expected) is same
