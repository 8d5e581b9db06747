"""Folders of tasks: rows of them, what is refused, and an agent's commands and tests in a sandbox."""

import asyncio
import os
import signal

import pytest

from siirl.agents.environments import HostedEnvironment, load_environment, reset_env, step_env
from siirl.agents.task_run import DIED, UNREWARDED, TaskRun, bash_of, settings_for
from siirl.cli import main
from siirl.data.data_files import list_files, open_rows
from siirl.data.task_folders import read_task, reward_in, reward_of_pytest
from siirl.errors import DagError, DataError, EpisodeFailed
from siirl.sandbox.box import strongest_isolation
from siirl.sandbox.sandboxes import SandboxSettings
from tests.support.sandbox_services import podman_here
from tests.support.task_folders import harbor, terminal_bench, write

pytestmark = pytest.mark.heavy
confined = pytest.mark.skipif(
    strongest_isolation().mode == "process", reason="no namespaces here: the local sandbox refuses commands"
)


def row_of(folder):
    (rows,) = list_files(str(folder))
    return open_rows(rows).read(["prompt", "data_source", "extra_info"]).to_pylist()


def env_of(**kwargs) -> HostedEnvironment:
    return load_environment("sandbox:tasks", "node 'shell'", kwargs)()


def played(folder, *said, **kwargs):
    """What the agent read, its reward, and whether it was over, as it said these."""
    return asyncio.run(_played(folder, *said, **kwargs))


async def _played(folder, *said, **kwargs):
    env, read = env_of(**kwargs), []
    try:
        read.append((await reset_env(env, row_of(folder)[0], 1, 60)).texts)
        for one in said:
            result = await step_env(env, {0: one}, 60)
            read.append(result.observations)
    finally:
        await env.close()
    return read, result.rewards, result.done


def test_a_folder_of_tasks_is_rows_in_the_order_of_their_names(tmp_path):
    harbor(tmp_path / "b", "green")
    terminal_bench(tmp_path / "a", "red")
    (tmp_path / "notes").mkdir()
    rows = row_of(tmp_path)
    assert [row["prompt"][0]["content"] for row in rows] == [
        "Write red to the file answer.",
        "Write green to the file answer.",
    ]
    assert {row["data_source"] for row in rows} == {f"tasks/{tmp_path.name}"}
    assert [row["extra_info"]["task_folder"] for row in rows] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert len(row_of(tmp_path / "a")) == 1


def test_a_dockerfile_that_copies_says_which_files_and_where(tmp_path):
    text = """FROM python:3.12 AS base
# a comment
ENV ONE=1 \\
    TWO="2 3"
ENV THREE three words
WORKDIR /srv/here
COPY data/first.txt hint.txt ./in/
COPY --chown=me hint.txt renamed
ADD data /else
COPY *.txt /many/
WORKDIR deeper
CMD ["bash"]
"""
    of = read_task(harbor(tmp_path, dockerfile=text)).dockerfile
    assert of is not None and of.files is not None
    assert {name: data.decode() for name, data in of.files.items()} == {
        "/srv/here/in/first.txt": "1st",
        "/srv/here/in/hint.txt": "a colour",
        "/srv/here/renamed": "a colour",
        "/else/first.txt": "1st",
        "/many/hint.txt": "a colour",
    }
    assert of.env == {"ONE": "1", "TWO": "2 3", "THREE": "three words"} and of.workdir == "/srv/here/deeper"
    for more in ("RUN make", "COPY --from=base /x /y", "ADD https://a.b/c /c"):
        (tmp_path / "environment/Dockerfile").write_text(f"{text}\n{more}\n")
        assert read_task(tmp_path).dockerfile.files is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"instruction.md": " "}, "has no instruction"),
        ({"task.toml": "[[steps]]\nname='a'\n"}, "not supported yet: it has 1 \\[\\[steps\\]\\]"),
        ({"task.toml": "[verifier]\nenvironment_mode = 'separate'\n"}, "environment of its own"),
        ({"task.toml": "[environment]\nmemory = 'much'\n"}, "no size of memory"),
        ({"task.toml": "= 1"}, "cannot be read"),
        ({"environment/docker-compose.yaml": "services: {main: {}, db: {}}"}, "has 2 services, main, db"),
        ({"environment/Dockerfile": "FROM x\nCOPY nothing /x\n"}, "copies nothing, which is not there"),
    ],
)
def test_tasks_that_cannot_be_played_are_refused_when_rows_are_read(tmp_path, change, told):
    write(harbor(tmp_path / "t"), change)
    with pytest.raises(DataError, match=told):
        row_of(tmp_path)


def test_a_task_without_tests_and_another_parser_are_refused(tmp_path):
    (harbor(tmp_path / "t") / "tests/test.sh").unlink()
    with pytest.raises(DataError, match=r"has no tests/test.sh"):
        row_of(tmp_path / "t")
    write(terminal_bench(tmp_path / "b"), {"task.yaml": "instruction: x\nparser_name: swebench\n"})
    with pytest.raises(DataError, match="parser_name = 'swebench'"):
        row_of(tmp_path / "b")


def test_what_the_settings_leave_open_is_as_the_task_says(tmp_path):
    said = "[environment]\ndocker_image='x:1'\nmemory='3G'\n[verifier]\ntimeout_sec=7\nenv={A='b'}\n"
    task = read_task(harbor(tmp_path, toml=said))
    assert (task.tests_s, task.tests_env, task.memory_mb) == (7, {"A": "b"}, 3072)
    assert settings_for(task, {"kind": "docker"}) == SandboxSettings("docker", "x:1", memory_mb=3072)
    mine = {"kind": "docker", "image": "y", "memory_mb": 5}
    assert settings_for(task, mine) == SandboxSettings("docker", "y", memory_mb=5)
    assert settings_for(task, {}).image is None  # a local one has none


@confined
@pytest.mark.parametrize("layout", [harbor, terminal_bench])
def test_an_agents_commands_are_rewarded_by_the_tests_of_the_task(tmp_path, layout):
    folder = layout(tmp_path / "t")
    read, reward, done = played(folder, "I think:\n```bash\necho blue > answer\n```", "ls missing", "submit")
    assert "one shell command" in read[0] and read[1] == "(exit code 0)"
    assert read[2] == "ls: cannot access 'missing': No such file or directory\n(exit code 2)"
    assert reward == 1.0 and done
    read, reward, done = played(folder, "echo red > answer", "submit")
    assert reward == 0.0 and done


@confined
def test_the_environment_has_the_files_and_variables_of_the_task_and_ends_at_its_limit(tmp_path):
    folder = harbor(tmp_path / "t")
    asked = "cat hint.txt data/first.txt; echo $COLOUR; pwd; ls /tests /solution; echo blue > answer"
    read, reward, done = played(folder, asked, max_commands=1)
    assert read[1].splitlines()[:2] == ["a colour1stred", "/app"] and "check.sh" not in read[1]
    assert reward == 1.0 and done


@confined
def test_tests_that_say_nothing_a_reward_of_the_agents_own_and_a_dead_sandbox_give_no_reward(tmp_path):
    row = row_of(harbor(tmp_path / "t", toml="[verifier]\ntimeout_sec = 0.3\n"))[0]
    run = TaskRun(row)
    run.exec(
        "echo 1 > /logs/verifier/reward.txt; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/check.sh"
    )
    assert run.score() == 0.0
    run.exec("echo silent > answer; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")
    with pytest.raises(EpisodeFailed, match=r"written no reward.*They printed: checking") as failed:
        run.score()
    assert failed.value.kind == UNREWARDED
    run.exec("echo forever > answer")
    assert run.score() == 0.0
    assert run.solve().exit_code == 0 and run.score() == 1.0
    os.killpg(run._sandbox._box._process.pid, signal.SIGKILL)
    with pytest.raises(EpisodeFailed, match="its sandbox is lost") as failed:
        run.score()
    assert failed.value.kind == DIED
    run.close()


@confined
def test_a_dockerfile_that_runs_commands_needs_an_image(tmp_path):
    row = row_of(harbor(tmp_path / "t", dockerfile="FROM x\nRUN apt-get install -y cowsay\n"))[0]
    with pytest.raises(EpisodeFailed, match=r"runs commands.*sandbox.kind=docker") as failed:
        TaskRun(row)
    assert failed.value.kind == DIED


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"sandbox": {"kind": "dokcer"}}, "Did you mean 'docker'"),
        ({"sandbox": {"kind": "docker", "image": "x"}}, "there is no program docker"),
        ({"max_commands": 0}, "at least 1"),
        ({"commands": 3}, "unexpected keyword"),
    ],
)
def test_check_refuses_settings_and_sandboxes_that_are_not_here(kwargs, told, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DagError, match=told):
        env_of(**kwargs)


def test_check_refuses_a_loop_that_ends_before_the_tests(tmp_path, capsys):
    """By the command that a user types."""
    harbor(tmp_path / "tasks" / "one")
    keys = [f"data.train_files={tmp_path / 'tasks'}", "dag.workflow_path=examples/coding/shell.yaml"]
    keys += ["algorithm.adv_estimator=grpo", "dag.node_config.shell.env_kwargs.max_commands=4"]
    assert main(["check", *keys, "trainer.device=cpu"]) == 2
    assert "loop.max_turns = 3 ends an episode before env_kwargs.max_commands = 4" in "".join(
        capsys.readouterr()
    )


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ("ls -l", "ls -l"),
        ("so\n```bash\nls\npwd\n```\nthen", "ls\npwd"),
        ("```sh\none\n```\n```\ntwo\n```", "two"),
        ("```ls -l```", "ls -l"),
        ("```bash\nnever closed", "```bash\nnever closed"),
    ],
)
def test_the_command_is_the_last_block_or_all_that_was_said(said, command):
    assert bash_of(said) == command


def test_rewards_are_read_as_the_layouts_have_them():
    assert reward_in(" 0.5\n", None) == 0.5 and reward_in(None, '{"reward": 1, "speed": 0}') == 1.0
    assert reward_in(None, '{"tests": 0.25}') == 0.25
    for text, as_json in ((None, None), ("good", None), (None, '{"a": 1, "b": 2}'), (None, "3")):
        with pytest.raises(ValueError):
            reward_in(text, as_json)
    summary = "=== short test summary info ===\nPASSED a.py::x\n"
    assert reward_of_pytest("noise PASSED\n" + summary) == 1.0
    assert reward_of_pytest(f"{summary}FAILED a.py::y - assert\n") == 0.0
    assert reward_of_pytest(f"{summary.replace('PASSED', 'SKIPPED')}") == 0.0
    with pytest.raises(ValueError):
        reward_of_pytest("PASSED a.py::x")


@pytest.mark.slow
def test_the_image_of_a_task_is_built_of_its_dockerfile_and_plays_it(tmp_path, monkeypatch):
    podman = podman_here(tmp_path)
    monkeypatch.setenv("PATH", podman.pop("path"))
    image = podman.pop("image")
    text = f"FROM {image}\nWORKDIR /app\nCOPY hint.txt .\nRUN cp hint.txt made && cat made\n"
    row = row_of(harbor(tmp_path / "t", dockerfile=text))[0]
    run = TaskRun(row, {"kind": "podman", **podman})
    assert run.exec("grep -c : /proc/net/dev").output == "1\n", "it has more than the loopback interface"
    assert run.exec("cat made; pwd").output == "a colour/app\n"
    assert run.score() == 0.0 and run.solve().exit_code == 0 and run.score() == 1.0
    run.close()
