"""`siirl ls`: every state of a run, whatever has become of its folder."""

import json
import os
import random
import re
import shutil

import pytest
from run_folders import COMMAND, rewards, written
from some_cases import some

from siirl.cli import main
from siirl.launch.run_folder import held
from siirl.observe.curve import read_series
from siirl.observe.printable import UNPRINTABLE
from siirl.runs.folder_reader import Skipped
from siirl.runs.run_files import latest_metrics, read_history, scan_metrics
from siirl.runs.run_list import find_runs, size_on_disk
from siirl.runs.run_state import read_run

pytestmark = pytest.mark.heavy


def ended(folder, *keys):
    return (
        written(folder, *keys).start().steps(rewards(range(1, 41))).positions({0: (40, "actor", 1e9)}).end()
    )


def told(folder, capsys) -> dict[str, dict]:
    """Name of the folder -> its object in the JSON of `siirl ls`."""
    assert main(["ls", str(folder), "--json"]) == 0
    return {run["folder"].rpartition("/")[2]: run for run in json.loads(capsys.readouterr().out)}


def test_each_state_of_a_run_is_told_by_what_it_wrote(tmp_path, capsys):
    ended(tmp_path / "ended")
    failed = written(tmp_path / "failed").start().steps(rewards(range(1, 8)))
    failed.failure(0, RuntimeError("Connection closed by peer"), 8, "reshard")
    failed.failure(1, MemoryError("no room for 3 GiB\nat all"), 8, "actor_train")
    cut = written(tmp_path / "deep" / "cut").start().steps(rewards(range(1, 4)))
    cut.positions({0: (4, "rollout", 1e9), 1: (4, "actor_train", 1e9)})
    running = written(tmp_path / "running").start().steps(rewards(range(1, 13)))
    with held(running.cfg, "id"):
        runs = told(tmp_path, capsys)
        assert main(["ls", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert {name: run["state"] for name, run in runs.items()} == {
        "ended": "ended", "failed": "failed", "cut": "interrupted", "running": "running",
    }  # fmt: skip
    assert runs["failed"]["cause"] == "rank 1, step 8, actor_train: MemoryError: no room for 3 GiB"
    assert runs["cut"]["cause"] == "in step 4, rollout"
    assert (runs["running"]["step"], runs["running"]["total_steps"]) == (12, 40)
    assert runs["ended"]["validation_reward"]["val/reward/mean"] == {
        "last": 0.8,
        "best": 0.8,
        "best_step": 40,
    }
    assert runs["ended"]["command"] == " ".join(COMMAND)
    rows = {line.split("  ")[0]: line for line in table.splitlines()}
    assert re.search(r"failed: rank 1, step 8, actor_train: Memory", rows["failed"])
    assert re.search(r" 12/40 +validation +0\.200 +0\.200 @10 +1 ", rows["running"])
    assert "deep/cut" in rows
    assert read_run(tmp_path / "running").status == "interrupted"  # the lock is gone with its holder


def test_an_interrupted_run_with_a_checkpoint_has_its_line_to_go_on(tmp_path, capsys):
    """In `siirl ls`, whose commands are short, and in `siirl watch`; one that ended needs none."""
    long = ("python", "-m", "siirl.main_dag", f"data.train_files={'x' * 600}.parquet")
    runs = {name: written(tmp_path / name) for name in ("cut", "none", "done")}
    for name, run in runs.items():
        run.start(command=long).steps(rewards(range(1, 31))).positions({0: (31, "rollout", 1e9)})
        if name != "none":
            (run.folder / "checkpoints" / "global_step_30").mkdir(parents=True)
            (run.folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("30")
    runs["cut"].end("stopped", "stopped by SIGINT")
    runs["done"].end()
    on = f"To go on after step 30: siirl resume {tmp_path / 'cut'}"
    assert main(["ls", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert table.count("To go on") == 1 and table.splitlines()[-1] == on
    assert "data.train_files=xxx" in table and max(map(len, table.splitlines())) < 400
    steps = {name: run["checkpoint_step"] for name, run in told(tmp_path, capsys).items()}
    assert steps == {"cut": 30, "none": None, "done": None}
    assert main(["watch", "--once", str(tmp_path / "cut")]) == 0
    assert on in capsys.readouterr().out
    moved = shutil.copytree(tmp_path / "cut", tmp_path / "else" / "where")
    assert read_run(moved).how_on.endswith(f"siirl resume {moved}")


def test_a_run_that_ended_and_was_killed_after_it_went_on_has_not_ended(tmp_path):
    run = ended(tmp_path / "run").start(run_id="second")
    assert (read_run(run.folder).status, read_run(run.folder).starts) == ("interrupted", 2)
    run.begin(50)
    assert (read_run(run.folder).status, read_run(run.folder).total_steps) == ("interrupted", 50)


def test_how_a_run_ended_is_what_it_recorded(tmp_path):
    killed = written(tmp_path / "killed").start().positions({0: (4, "rollout", 1e9)})
    killed.begin(40).end("failed", "rank 1, step 4, rollout: killed by SIGKILL")
    stopped = written(tmp_path / "stopped").start().positions({0: (4, "rollout", 1e9)})
    stopped.begin(40).end("stopped", "stopped by SIGINT")
    late = ended(tmp_path / "late").end("failed", "rank 1: exit code 3")
    told = {
        run.folder.name: (read_run(run.folder).status, read_run(run.folder).cause)
        for run in (killed, stopped, late)
    }
    assert told == {
        "killed": ("failed", "rank 1, step 4, rollout: killed by SIGKILL"),
        "stopped": ("interrupted", "stopped by SIGINT in step 4, rollout"),
        "late": ("failed", "rank 1: exit code 3"),
    }


def test_what_a_run_did_after_the_step_that_it_went_on_from_does_not_count(tmp_path):
    run = written(tmp_path / "run").start()
    run.steps({step: {"reward/score": 9.0 if step == 7 else step / 10} for step in range(1, 8)})
    run.start(run.began_s + 500).steps(
        {5: {"reward/score": 0.5}, 6: {"reward/score": 0.6}}, 20.0, run.began_s + 500
    )
    state = read_run(run.folder)
    assert (state.step, state.starts, state.step_s) == (6, 2, 20.0)
    assert state.rewards == {"reward/score": {step: step / 10 for step in range(1, 7)}}


@pytest.mark.parametrize("seed", range(6))
def test_the_quick_scan_reads_the_numbers_that_the_json_has(seed, tmp_path):
    dice = random.Random(seed)
    agents = dice.choice([[""], ["agent_0/", "agent_1/", "agent_12/"]])
    names = [f"{agent}{name}" for agent in agents for name in ("reward/score", "val/reward/mean")]
    values = {
        step: {
            name: dice.choice([dice.gauss(0, 1), 1e-9 * dice.random(), 3.0, 0, float("nan"), -1e12, 1e300])
            for name in [*names, "reward/score_max", "actor/lr", "val/reward/mean@4"]
            if dice.random() < 0.8
        }
        for step in range(30)
    }
    run = written(tmp_path).start().steps(values)
    scan, series = scan_metrics(run.folder, Skipped()), read_series(run.folder / "metrics.jsonl")
    assert scan.rewards == {name: points for name, points in series.items() if name in names}
    assert read_history(run.folder, Skipped()).series == {
        name: p for name, p in series.items() if name != "time_s"
    }
    assert (
        latest_metrics(run.folder).items()
        <= {name: points[max(points)] for name, points in series.items()}.items()
    )


def test_the_steps_of_an_unset_total_are_those_that_the_workers_counted(tmp_path):
    run = written(tmp_path, "trainer.total_training_steps=null").start().steps(rewards(range(1, 9)))
    assert read_run(run.folder).total_steps is None
    run.begin(625)
    assert read_run(run.folder).total_steps == 625


def damage(folder, dice: random.Random) -> None:
    """Something of a run folder is cut, overwritten, of another kind, or gone."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    path = dice.choice(files)
    content = path.read_bytes()
    match dice.randrange(9):
        case 0:
            path.write_bytes(content[: dice.randrange(len(content) + 1)])
        case 1:
            at = dice.randrange(len(content) + 1)
            path.write_bytes(content[:at] + dice.randbytes(20) + content[at + 20 :])
        case 2:
            path.unlink()
            path.mkdir()
        case 3:
            path.unlink()
            os.mkfifo(path)
        case 4:
            path.unlink()
        case 5:
            path.write_bytes(b"[" * 100_000)
        case 6:
            path.write_bytes(
                dice.choice([b"null\n", b"[1]\n", b'"text"\n', b"---\n- 1\n", b'{"step": "x"}\n', b"\0" * 99])
            )
        case 7:
            path.write_bytes(re.sub(rb"\d+", b"9" * 5000, content, count=dice.randrange(1, 9)))
        case _:
            path.write_bytes(re.sub(rb'("[a-z]+"|[a-z]+): [^,\n]+', rb"\1: {}", content))


@pytest.mark.parametrize("seed", some(range(60), *range(15)))
def test_no_damage_ends_a_command_with_a_traceback(seed, tmp_path, capsys, template):
    dice = random.Random(seed)
    for name in ("one", "two"):
        shutil.copytree(template, tmp_path / name)
        for _ in range(dice.randrange(1, 5)):
            damage(tmp_path / name, dice)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert main(["ls", str(tmp_path)]) == 0
    assert main(["ls", str(tmp_path), "--json"]) == 0
    for command in (["watch", one, "--once"], ["compare", one, two], ["compare", one, two, "--json"]):
        assert main(command) in (0, 2)
    said = capsys.readouterr()
    assert UNPRINTABLE.search(said.out + said.err) is None
    assert "one" in said.out or not any(find_runs(tmp_path / "one", Skipped()))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template") / "run"
    run = ended(folder).failure(0, ValueError("wrong"))
    run.positions({0: (40, "rollout", 1e9), 1: (39, "actor_train", 1e9)})
    with held(run.cfg, "id"):
        (folder / "logs" / "rank_0.log").write_text(" 40/40  0.4\n12:00:00 [rank 0] W siirl: slow\n")
    return folder


def test_names_and_texts_of_others_move_no_cursor(tmp_path, capsys):
    evil = "\x1b[2Jred\u202e"
    run = written(tmp_path / evil).start(command=["python", "-m", "siirl.main_dag", f"a={evil}"])
    run.failure(0, RuntimeError(evil), node=evil).positions({0: (1, evil, 1e9)})
    (tmp_path / os.fsdecode(b"\xff\xfe")).mkdir()
    shutil.copy(run.folder / "run.yaml", tmp_path / os.fsdecode(b"\xff\xfe"))
    for command in (["ls", str(tmp_path)], ["watch", str(run.folder), "--once"]):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert r"\x1b[2Jred\u202e" in out and UNPRINTABLE.search(out) is None


def test_what_a_run_writes_is_not_searched_and_runs_in_runs_are_found(tmp_path):
    for name in ("run", "run/sweep/a", "run/rollouts/x", "run/global_step_5/y", ".hidden/z", "plain/b/c/d/e"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    os.symlink(tmp_path / "run", tmp_path / "again")
    found = {str(path.relative_to(tmp_path)) for path in find_runs(tmp_path, Skipped())}
    assert found == {"run", "run/sweep/a", "plain/b/c/d/e"}
    os.makedirs(tmp_path / "plain/b/c/d/e/f")
    (tmp_path / "plain/b/c/d/e/f/metrics.jsonl").touch()
    assert len(list(find_runs(tmp_path, Skipped()))) == 3  # six folders down: too deep


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.yaml", "job.json", "x", ".hidden"])
def test_links_that_lead_to_themselves_end_no_list(tmp_path, capsys, name):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / name).symlink_to(name)
    (tmp_path / "runs" / "two").symlink_to("two")
    assert main(["ls", str(tmp_path / "runs")]) == 0
    assert main(["ls", "--json", str(tmp_path / "runs")]) == 0


def test_the_size_is_what_du_says(tmp_path):
    import subprocess

    ended(tmp_path / "run")
    (tmp_path / "run" / "big").write_bytes(b"x" * 300_000)
    os.symlink("/usr", tmp_path / "run" / "link")
    du = subprocess.run(
        ["du", "-s", "--block-size=1", tmp_path / "run"], capture_output=True, text=True, check=True
    )
    folders = sum(
        p.stat().st_blocks * 512
        for p in [tmp_path / "run", *(tmp_path / "run").rglob("*")]
        if p.is_dir() and not p.is_symlink()
    )
    assert size_on_disk(tmp_path / "run") == int(du.stdout.split()[0]) - folders


@pytest.mark.parametrize("command", [["ls"], ["watch", "--once"], ["compare", "{run}"]])
def test_a_folder_that_cannot_be_read_is_refused_with_what_to_do(command, tmp_path, capsys):
    ended(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    command = [word.format(run=tmp_path / "run") for word in command]
    assert main([*command, str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "file")]) == 2
    if command == ["ls"]:
        assert main(["ls", str(tmp_path / "empty")]) == 0
        assert "no runs in" in capsys.readouterr().out
    else:
        assert main([*command, str(tmp_path / "empty")]) == 2
        assert "is not the folder of a run" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not read")
@pytest.mark.parametrize("command", [["ls"], ["watch", "--once"]])
def test_a_folder_of_somebody_else_is_refused_with_what_to_do(command, public_path, capsys):
    folder, inside = public_path / "run", public_path / "run" / "inside"
    ended(folder)
    ended(inside)
    folder.chmod(0o700)
    os.seteuid(65534)
    try:
        for named in (folder, inside):
            assert main([*command, str(named)]) == 2
            assert "cannot be read: Permission denied." in capsys.readouterr().err
        if command == ["ls"]:
            assert main(["ls", str(public_path)]) == 0
            assert "not read" in capsys.readouterr().out
    finally:
        os.seteuid(0)
