"""Episodes of environments of verifiers, in an interpreter of their own: rewards are their rubrics'."""

import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from episode_cases import END, text_of
from outside_cases import episode as plain_episode
from outside_cases import play_outside

from siirl.agents.episode import Episode
from siirl.agents.outside.endpoint import ProgramLimits
from siirl.agents.outside.verifiers_episodes import play
from siirl.data.completions import Completion
from siirl.data.verifiers_rows import VerifiersRows
from siirl.errors import DataError

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]
PYTHON = Path(os.environ.get("VERIFIERS_PYTHON", Path(sys.prefix) / "verifiers/bin/python"))
WORLDS = Path(__file__).parents[2] / "support/verifiers_worlds.py"
TASKS = WORLDS.with_name("verifiers_tasks.py")
HERE = "agent.runtime.type=subprocess"  # without it: a service of the package's makers
TASKSETS = Path(os.environ.get("VERIFIERS_TASKSETS_PYTHON", Path(sys.prefix) / "verifiers-0.4/bin/python"))
needs_package = pytest.mark.skipif(not PYTHON.exists(), reason=f"make setup installs verifiers for {PYTHON}")


class Player:
    """A policy that reads the conversation, and is right at times, by the seed."""

    def __init__(self, line_of):
        self._line_of = line_of

    async def generate(self, prompt, params, seed, seen=None):
        line = self._line_of(text_of(prompt), random.Random(seed))
        tokens = [*map(ord, line), END]
        return Completion(tokens, [-1.0] * len(tokens), "stop", 5)


def adder(read, rng):
    number = int(re.findall(r"u:(\d+)\+1", read)[-1])
    return f"{'so ' * rng.randrange(3)}{number + rng.randrange(2)}"


def guesser(read, rng):
    return str(rng.randrange(10)) if rng.random() < 0.8 else "no idea"


def buyer(read, rng):
    item = re.findall(r"u:(\w+)/", read)[0]
    if read.count("t:") < rng.randrange(3):
        call = {"name": "price", "arguments": {"item": item}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    told = re.findall(r"t:(\d+)/", read)
    return told[-1] if told else "9"


PLAYERS = {"sum": adder, "guess": guesser, "shop": buyer}
LIMITS = ProgramLimits(200, 64, 64)


def rows_of(options: str, world: Path = WORLDS, python: Path | str = PYTHON) -> list[dict]:
    text = f"verifiers:{world}?python={python}&{options}"
    return VerifiersRows(text).table("prompt", "data_source").to_pylist()


def episodes_of(rows: list[dict]) -> list[Episode]:
    tasks = [
        {"raw_prompt": row["prompt"], "data_source": row["data_source"], "extra_info": row["extra_info"]}
        for row in rows
    ]
    return [Episode(number, 0, number, 100 + number, task) for number, task in enumerate(tasks)]


def wire(message) -> dict:
    """A message of an episode, as its program saw it."""
    return {"role": "assistant" if message.turn is not None else message.role, "content": message.content}


def compare(rows, line_of, *command) -> list[list[dict]]:
    """Play, and let the command score what was said; the messages after the prompts."""
    played = play_outside(play, {"a": Player(line_of)}, episodes_of(rows), limits=LIMITS)
    assert [one.episode.error for one in played] == [None] * 64
    said = [[wire(message) for message in one.episode.messages[1:]] for one in played]
    inputs = [json.loads(row["extra_info"]["input"]) for row in rows]
    text = json.dumps(list(zip(inputs, said, strict=True)))
    scored = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    given = [one.contexts[0].rows[-1].rewards[-1] for one in played]
    assert given == pytest.approx(json.loads(scored.stdout), abs=1e-9)
    assert len(set(given)) >= 3
    return said


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("sum", 1), ("guess", 7), ("shop", 5)])
def test_rewards_of_64_episodes_are_those_of_the_rubric(kind, most):
    rows = rows_of(f"args.kind={kind}&seed=1")
    assert len(rows) == 64 and {row["data_source"] for row in rows} == {"verifiers/verifiers_worlds"}
    said = compare(rows, PLAYERS[kind], PYTHON, WORLDS, kind)
    assert max(map(len, said)) == most


@pytest.mark.skipif(not TASKSETS.exists(), reason=f"make setup installs verifiers 0.4 for {TASKSETS}")
@pytest.mark.slow
def test_rewards_of_64_episodes_of_a_taskset_are_those_of_its_tasks():
    rows = rows_of(f"args.{HERE}", TASKS, TASKSETS)
    assert rows[3]["prompt"] == [{"role": "user", "content": "guess"}]
    assert max(map(len, compare(rows, guesser, TASKSETS, TASKS))) == 7
    assert len(rows_of(f"args.{HERE}&num_examples=5&seed=1", TASKS, TASKSETS)) == 5


@needs_package
@pytest.mark.slow
def test_what_hangs_or_is_killed_costs_the_episodes_of_its_process_and_the_next_ones_have_another():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    rows = rows_of("num_examples=4")
    hangs = rows_of("num_examples=4&args.hang=score")

    def reasons(rows, limits=LIMITS, line_of=adder):
        played = play_outside(play, {"a": Player(line_of)}, episodes_of(rows), limits=limits)
        return [one.kind for one in played], [one.episode.error for one in played]

    assert reasons(rows)[0] == [None] * 4
    assert reasons(hangs, ProgramLimits(8, 64, 64))[0] == ["program_hung"] * 4
    time.sleep(1)  # until its threads have given up their episodes
    assert reasons(rows)[0] == [None] * 4

    def kill(read, rng):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.pid not in before and "verifiers_program.py" in " ".join(child.cmdline()):
                    child.kill()
        return "1"

    kinds, errors = reasons(rows, line_of=kill)
    assert kinds == ["program_raised"] * 4 and "ended with code -9" in errors[0], errors
    assert reasons(rows)[0] == [None] * 4


def test_a_row_of_another_file_is_told_what_is_missing():
    (played,) = play_outside(play, {"a": Player(adder)}, [plain_episode()])
    assert played.kind == "program_raised" and "data.train_files=verifiers:ENV" in played.episode.error


REFUSED = [
    ("seeds=1", PYTHON, "no option 'seeds': there are python, split, num_examples, seed, args.NAME. Did you"),
    ("args=1", PYTHON, "no option 'args'"),
    ("seed=1", "/no/python", "cannot be started .* Make the interpreter that has verifiers: python -m venv"),
    (
        "seed=1",
        f"{sys.executable}",
        "has no package verifiers. Install it, in an environment of its own: python",
    ),
]


@pytest.mark.parametrize(("options", "python", "said"), REFUSED)
def test_rows_that_cannot_be_made_are_refused_with_the_fix(options, python, said):
    with pytest.raises(DataError, match=said):
        rows_of(options, python=python)


@needs_package
@pytest.mark.slow
def test_an_environment_that_cannot_be_made_says_why():
    for options, said in (
        ("args.hang=load", "no such world"),
        ("args.size=3", "unexpected keyword argument 'size'"),
    ):
        with pytest.raises(DataError, match=said):
            rows_of(options)
    with pytest.raises(DataError, match="no_such_world"):
        rows_of("seed=1", Path("no-such-world"))
