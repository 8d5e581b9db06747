"""The folder of a run: one run at a time, never the results of two, and it says what it is."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
import yaml

from siirl.checkpoint.files import POINTER
from siirl.cli import main
from siirl.config import load_config, to_dict
from siirl.errors import ConfigError
from siirl.launch import run_folder, run_record
from siirl.launch.job import Job
from siirl.launch.run_folder import clear, held, refuse_busy, refuse_used

HOLD = """
import sys, time
from siirl.config import load_config
from siirl.launch.run_folder import held
with held(load_config(sys.argv[1:]), "first"):
    print("held", flush=True)
    time.sleep(600)
"""


def config(folder: Path, *more: str):
    return load_config([f"trainer.output_dir={folder}", *more])


@pytest.fixture
def other_run():
    """Starts a process that holds the folders of a command line."""
    running = []

    def start(*keys: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", HOLD, *keys], stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.heavy
def test_a_second_run_in_a_folder_is_refused_until_the_first_is_gone_however_it_goes(
    tmp_path, other_run, end
):
    first = other_run(f"trainer.output_dir={tmp_path}")
    for refused in (
        lambda: held(config(tmp_path), "second").__enter__(),
        lambda: refuse_busy(config(tmp_path)),
    ):
        with pytest.raises(ConfigError) as error:
            refused()
        assert f"trainer.output_dir={tmp_path} is in use by a run (process {first.pid} on " in str(
            error.value
        )
        for way in ("trainer.resume_mode=auto", "another folder", "trainer.overwrite=true"):
            assert way in str(error.value)
    with held(config(tmp_path), "first"):  # another process of the same run
        pass
    os.kill(first.pid, end)
    first.wait()
    refuse_busy(config(tmp_path))
    with held(config(tmp_path), "second"):
        assert json.loads((tmp_path / run_folder.LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    "keys",
    [
        ("trainer.default_local_dir={0}/shared", "trainer.save_freq=1"),
        ("trainer.dump_rollouts_dir={0}/shared",),
    ],
)
@pytest.mark.heavy
def test_every_folder_that_a_run_writes_is_held(tmp_path, other_run, keys):
    keys = [key.format(tmp_path) for key in keys]
    other_run(f"trainer.output_dir={tmp_path}/a", *keys)
    with pytest.raises(ConfigError, match=r"shared is in use by a run"):
        held(config(tmp_path / "b", *keys), "second").__enter__()
    with held(config(tmp_path / "c"), "third"):
        pass


def used(folder: Path, *steps: int) -> Path:
    """A folder in which a run has ended, with checkpoints of these steps."""
    for name in ("metrics.jsonl", "hf_model/model.safetensors", "hf_critic/config.json", "reward_curve.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}\n")
    for name in ("tensorboard/events.out.tfevents.1.host", "rollouts/train/step_1.txt", "logs/rank_0.log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    for step in steps:
        (folder / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
        (folder / "checkpoints" / POINTER).write_text(str(step))
    return folder


REFUSED = {
    "a finished run without checkpoints": ((), (), "resume it (not possible here"),
    "start over without saying so": ((5, 10), ("trainer.resume_mode=disable",), "go on from its step 10"),
    "sampling only": ((5,), ("trainer.rollout_only=true",), "go on from its step 5"),
    "another run's checkpoint": (
        (),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path=/elsewhere/global_step_3"),
        "resume it (not possible here",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_with_results_is_refused_with_three_ways_out(tmp_path, case):
    steps, keys, first_way = REFUSED[case]
    used(tmp_path, *steps)
    with pytest.raises(ConfigError) as error:
        refuse_used(config(tmp_path, *keys))
    for words in ("metrics.jsonl and hf_model and hf_critic of an earlier run", first_way, "another folder"):
        assert words in str(error.value)
    refuse_used(config(tmp_path, *keys, "trainer.overwrite=true"))
    refuse_used(config(tmp_path / "other", *keys))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("metrics.jsonl", "metrics.jsonl"),
        ("hf_model/config.json", "hf_model"),
        ("hf_critic/config.json", "hf_critic"),
        ("checkpoints/global_step_5/manifest.json", "checkpoints has checkpoints"),
    ],
)
def test_each_result_alone_makes_a_folder_a_used_one(tmp_path, name, what):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"{what} of an earlier run"):
        refuse_used(config(tmp_path, "trainer.resume_mode=disable"))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "keys",
    [(), ("trainer.resume_mode=resume_path", "trainer.resume_from_path={0}/checkpoints/global_step_5")],
)
def test_a_run_that_goes_on_from_its_checkpoint_keeps_everything(tmp_path, keys, overwrite):
    used(tmp_path, 5, 10)
    before = sorted(tmp_path.rglob("*"))
    cfg = config(tmp_path, *(key.format(tmp_path) for key in keys), f"trainer.overwrite={overwrite}")
    refuse_used(cfg)
    clear(cfg)
    assert sorted(tmp_path.rglob("*")) == before


def test_overwriting_removes_what_a_run_wrote_and_nothing_else(tmp_path):
    used(tmp_path, 5, 10)
    mine = [
        "notes.txt",
        "tensorboard/mine",
        "checkpoints/mine/model.safetensors",
        "weights/w.pt",
        "logs/mine.log",
        "code/mine.py",
    ]
    for name in mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    clear(config(tmp_path, "trainer.resume_mode=disable", "trainer.overwrite=true"))
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(mine)


def test_a_run_that_died_before_it_had_results_leaves_nothing_that_is_mixed_with_the_next(tmp_path):
    events = tmp_path / "tensorboard" / "events.out.tfevents.1.host"
    events.parent.mkdir()
    events.write_text("")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").write_text("why it died")
    (tmp_path / run_folder.CODE_DIR / "home").mkdir(parents=True)
    (tmp_path / run_folder.CODE_DIR / "home" / "reward.py").write_text("")
    refuse_used(config(tmp_path))
    clear(config(tmp_path))
    assert not events.exists() and not (tmp_path / run_folder.CODE_DIR).exists()
    assert (tmp_path / "logs" / "rank_0.log").exists()


@pytest.mark.heavy
def test_the_folder_says_what_was_started_and_its_configuration_starts_the_same_run(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    cfg = config(tmp_path, "data.train_batch_size=48", "actor_rollout_ref.model.hf_hub_token=secret")
    command = ["python", "-m", "siirl.main_dag", "data.train_batch_size=48", "a.hf_hub_token=secret"]
    for run_id in ("one", "two"):
        run_record.open_folder(cfg, run_id, command)
    first, second = yaml.safe_load_all((tmp_path / run_record.RUN_FILE).read_text())
    assert (first["run_id"], second["run_id"]) == ("one", "two")
    assert second["command"].endswith("data.train_batch_size=48 'a.hf_hub_token=...'") or second[
        "command"
    ].endswith("data.train_batch_size=48 a.hf_hub_token=...")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert second["siirl"].get("commit", "") == head and second["project"].get("commit", "") == head
    assert {"torch", "transformers", "siirl"} <= second["packages"].keys()
    assert second["packages"] == {name: version(name) for name in second["packages"]}
    assert len(second["packages"]) == len({found.metadata["Name"] for found in distributions()})
    for name in (run_record.RUN_FILE, run_record.CONFIG_FILE):
        assert "secret" not in (tmp_path / name).read_text()
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    again = load_config([], str(tmp_path / run_record.CONFIG_FILE))
    expected = to_dict(config(tmp_path, "data.train_batch_size=48"))
    assert {**to_dict(again), "explicit": ()} == {**expected, "explicit": ()}


def test_a_folder_without_git_has_no_commit(tmp_path):
    assert run_record.commit_of(tmp_path) == {}


def test_the_job_is_for_this_user_alone(tmp_path):
    job = Job({}, "{}", str(tmp_path), 1, 1)
    path = job.prepare()
    assert path.stat().st_mode & 0o777 == 0o600
    assert job.prepare() == path and Job.read(path) == job


@pytest.mark.heavy
def test_a_run_that_finds_no_machines_is_one_that_failed_and_says_of_what(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    keys = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=8",
    ]
    run = [
        "run",
        *keys,
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        f"trainer.output_dir={tmp_path}/out",
    ]
    assert main(run) == 2
    assert "no Ray cluster was found" in capsys.readouterr().err
    assert main(["ls", str(tmp_path)]) == 0
    assert "failed: trainer.nnodes=2, but no Ray" in capsys.readouterr().out


@pytest.mark.parametrize(
    "before, written, left",
    [
        ("", "", None),
        ("", "run_config.yaml", {".run.lock", "run_config.yaml"}),
        ("own", "", {".run.lock"}),
    ],
)
def test_a_folder_of_a_run_that_is_refused_goes_again_if_it_was_made_for_it(tmp_path, before, written, left):
    """Each refused run left one with its lock, below a fresh name."""
    folder = tmp_path / "project" / "run"
    if before:
        folder.mkdir(parents=True)
    with contextlib.suppress(ConfigError), held(config(folder), "a"):
        if written:
            (folder / written).touch()
        raise ConfigError("refused")
    assert left == ({path.name for path in folder.iterdir()} if folder.exists() else None)
    assert (tmp_path / "project").exists() == (left is not None)
