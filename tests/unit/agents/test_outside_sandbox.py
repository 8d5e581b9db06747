"""Episodes that a program plays in a sandbox of siirl's: its commands, the tests' reward, what is lost."""

import json
import os
import signal
import urllib.request

import pytest
from episode_cases import Script
from outside_cases import episode, play_outside, program

from siirl.agents.outside.endpoint import ProgramLimits
from siirl.agents.task_run import DIED, UNREWARDED
from siirl.cli import main
from siirl.sandbox.box import Box, strongest_isolation
from tests.support.task_folders import harbor

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        strongest_isolation().mode == "process",
        reason="no namespaces here",
    ),
]
ASKED = [
    ("/v1/chat/completions", {"model": "a", "messages": [{"role": "user", "content": "x"}]}),
    ("/exec", {"command": "sleep 1; echo blue > answer"}),
]
SOLVES = """
said = chat(user(ask("/task")[1]["raw_prompt"][0]["content"]))["content"]
status, ran = ask("/exec", {"command": f"echo {said} > answer; cat answer hint.txt nothing; exit 4"})
assert status == 200 and ran["exit_code"] == 4 and not ran["timed_out"] and not ran["cut"], ran
assert ran["output"] == f"{said}\\na colourcat: nothing: No such file or directory\\n", ran
assert ask("/exec", {"command": "sleep 9", "time_s": 0.2})[1]["timed_out"]
for wrong in ({}, {"command": 3}, {"command": "ls", "time_s": 0}, {"command": "ls", "time_s": "1"}, []):
    assert ask("/exec", wrong)[0] == 400, wrong
"""


def play(tmp_path, code, *said, **options):
    folder = harbor(tmp_path / "task", toml=options.pop("toml", ""))
    episodes = [episode(number, task_folder=str(folder)) for number in range(len(said))]
    command = program(tmp_path, code)
    given = {"needs_reward": False, "sandbox": {"time_s": 5}, **options}
    return play_outside(command, {"a": Script(*said)}, episodes, **given)


def test_a_programs_commands_run_in_the_sandbox_of_its_episode_and_its_tests_reward_it(tmp_path):
    played = play(tmp_path, SOLVES, "blue", "grey")
    assert [one.episode.error for one in played] == [None, None]
    rewards = {one.episode.messages[-1].content: one.episode.messages[-1].reward for one in played}
    assert rewards == {"blue": 1.0, "grey": 0.0}


def test_a_reward_of_the_programs_own_counts_in_the_place_of_the_tests(tmp_path):
    (played,) = play(tmp_path, SOLVES + "ask('/reward', {'reward': 0.25})", "grey")
    assert played.kind is None and played.episode.messages[-1].reward == 0.25


def test_commands_do_not_use_up_the_time_of_the_program(tmp_path):
    def works(session):
        for path, body in ASKED:
            head = {"Authorization": f"Bearer {session.api_key}"}
            asked = urllib.request.Request(session.url + path, json.dumps(body).encode(), head)
            urllib.request.urlopen(asked, timeout=30).read()

    folder = harbor(tmp_path)
    limits, one = ProgramLimits(0.7, 64, 8), episode(0, task_folder=str(folder))
    (played,) = play_outside(works, {"a": Script("blue")}, [one], limits=limits, sandbox={})
    assert played.kind is None and played.episode.messages[-1].reward == 1.0


def test_a_sandbox_that_dies_and_tests_that_say_nothing_drop_the_episode_and_nothing_is_left(
    tmp_path, monkeypatch
):
    started, start = [], Box._start
    monkeypatch.setattr(Box, "_start", lambda box: (start(box), started.append(box._process.pid)))
    code = "chat(user('x')); ask('/exec', {'command': 'echo silent > answer'})"
    (played,) = play(tmp_path, code, "blue")
    assert played.kind == UNREWARDED and "written no reward" in played.episode.error

    def killed(box):
        start(box)
        os.killpg(box._process.pid, signal.SIGKILL)

    monkeypatch.setattr(Box, "_start", killed)
    (played,) = play(tmp_path, SOLVES, "blue")
    assert played.kind == DIED and "its sandbox is lost" in played.episode.error
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_without_a_sandbox_there_is_nothing_to_run_commands_in(tmp_path):
    code = "chat(user('x')); assert ask('/exec', {'command': 'ls'})[0] == 404; ask('/reward', {'reward': 1})"
    (played,) = play(tmp_path, code, "blue", sandbox=None)
    assert played.kind is None


def test_check_refuses_a_sandbox_that_is_none(tmp_path, capsys):
    """By the command that a user types."""
    harbor(tmp_path / "tasks" / "one")
    keys = [
        f"data.train_files={tmp_path / 'tasks'}",
        "dag.workflow_path=examples/agents_elsewhere/shopper.yaml",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "actor_rollout_ref.serve.sandbox={kind: dokcer}",
    ]
    assert main(["check", *keys]) == 2
    assert "Did you mean 'docker'" in "".join(capsys.readouterr())
