"""`siirl resume` and `siirl eval` of a run's folder that others can change: refused, or --trust."""

import os
import subprocess

import pytest

from siirl import cli, main_dag
from siirl.checkpoint.files import MANIFEST, POINTER
from siirl.config import load_config
from siirl.launch.run_record import CONFIG_FILE, write_record

pytestmark = pytest.mark.heavy
REWARD = "open('ran', 'w').close()\ndef compute_score(*a, **k): return 1.0\n"


@pytest.fixture
def run(public_path, monkeypatch):
    """The folder of a run that has a checkpoint, started in `project`; what would be started is kept."""
    project, folder = public_path / "project", public_path / "run"
    for made in (project, folder, folder / "global_step_1"):
        made.mkdir(mode=0o755)
    (project / "reward.py").write_text(REWARD)
    (project / "reward.py").chmod(0o644)
    monkeypatch.chdir(project)
    cfg = load_config(
        [
            "actor_rollout_ref.model.path=nobody/model",
            "custom_reward_function.path=reward.py",
            "actor_rollout_ref.model.external_lib=evil",
            "trainer.resume_changed=true",
            "trainer.behind_firewall=true",
            "actor_rollout_ref.model.trust_remote_code=true",
            f"trainer.output_dir={folder}",
            f"trainer.default_local_dir={folder}",
        ]
    )
    write_record(folder, cfg, ["python"], "id")
    (folder / POINTER).write_text("1")
    (folder / "global_step_1" / MANIFEST).write_text("{}")
    monkeypatch.chdir(public_path)
    return folder


@pytest.fixture
def started(monkeypatch):
    """The words of the jobs that were started."""
    found = []

    class Done:
        returncode = 1

    monkeypatch.setattr(main_dag, "main", lambda words: found.append(words) or 0)
    real = subprocess.run

    def started_by_eval(words, **more):
        if "--config-name" not in words:
            return real(words, **more)
        found.append(words[3:])
        return Done()

    monkeypatch.setattr("siirl.commands.evaluate.subprocess.run", started_by_eval)
    return found


def give_away(path):
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(path, 65534, 65534)


CHANGEABLE = {
    "folder": lambda run: (run, lambda path: path.chmod(0o777), "all users may write"),
    "config": lambda run: (run / CONFIG_FILE, lambda path: path.chmod(0o666), "all users may write"),
    "a group's": lambda run: (
        run / CONFIG_FILE,
        lambda path: (os.chown(path, -1, 12345), path.chmod(0o660)),
        "its group may write",
    ),
    "a stranger's": lambda run: (run, give_away, "belongs to"),
    "a stranger's record": lambda run: (run / "run.yaml", give_away, "belongs to"),
    "code": lambda run: (run.parent / "project" / "reward.py", lambda path: path.chmod(0o666), "all users"),
    "a stranger's code": lambda run: (run.parent / "project" / "reward.py", give_away, "belongs to"),
    "directory": lambda run: (run.parent / "project", lambda path: path.chmod(0o1777), "all users may write"),
    "code below": lambda run: (run / "code", lambda path: (path.mkdir(), path.chmod(0o777)), "all users"),
    "a folder above": lambda run: (run.parent, lambda path: path.chmod(0o777), "a folder above it"),
}


BY_EVAL = ("config", "a stranger's code", "a folder above")
"""Started for who trusts it, too; with `eval`, which asks as `resume` does, all but the first are slow."""


@pytest.mark.parametrize(
    ("what", "command"),
    [(what, "resume") for what in CHANGEABLE]
    + [pytest.param(what, "eval", marks=[pytest.mark.slow] * (what != BY_EVAL[0])) for what in CHANGEABLE],
)
def test_a_folder_that_others_can_change_is_started_for_who_trusts_it(what, command, run, started, capsys):
    path, change, words = CHANGEABLE[what](run)
    change(path)
    here = os.getcwd()
    assert cli.main([command, str(run)]) == 2
    refused = capsys.readouterr().err
    assert not started and os.getcwd() == here and "--trust" in refused
    assert words in refused and (str(path) in refused or what == "a folder above")
    for named in ("custom_reward_function.path=reward.py", "external_lib=evil", "trust_remote_code=True"):
        assert named in refused, named
    if what not in BY_EVAL:
        return
    cli.main([command, str(run), "--trust"])
    (job,) = started
    said = capsys.readouterr().err
    assert "others can change" in said and "external_lib=evil" in said
    cfg = load_config(job[2:], job[1])
    assert not (cfg.trainer.behind_firewall or cfg.actor_rollout_ref.model.trust_remote_code)
    assert cfg.trainer.resume_changed is (command == "eval"), "nothing goes on"
    assert not list(run.parent.rglob("ran")), "nothing of it has run"


def test_the_own_folder_is_started_without_a_word_and_its_permissions_are_asked_again(run, started, capsys):
    assert cli.main(["resume", str(run)]) == 0
    assert cli.main(["resume", str(run), "trainer.resume_changed=true"]) == 0
    for job in started:
        assert "trainer.resume_changed=false" in job and not any("trust_remote" in word for word in job)
    assert started[1][-1] == "trainer.resume_changed=true", "what is typed comes last"
    run.parent.chmod(0o700)
    run.chmod(0o777)
    assert cli.main(["resume", str(run)]) == 0, "nobody else gets there"
    assert "others can change" not in capsys.readouterr().err
