"""A run keeps to the code that it began with, says what changed, and does not go on with other inputs."""

import json
import shutil

import pytest
import yaml
from job_harness import Inputs, overrides

from siirl.cli import main
from siirl.main_dag import main as run

pytestmark = pytest.mark.timeout(300)
REWARD = """
import os
from pathlib import Path
from parts.value import VALUE

HERE = Path(__file__).parent

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if not (HERE / "written").exists():  # an edit while the run goes on, and this worker is replaced
        (HERE / "written").touch()
        (HERE / "parts" / "value.py").write_text("VALUE = 0.75  # edited")
        (HERE / "reward.py").write_text("def compute_score(**given): return 0.75")
        os._exit(1)
    return VALUE
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    inputs = Inputs.make(tmp_path_factory.mktemp("inputs"))
    inputs.reward.write_text(REWARD)
    (inputs.reward.parent / "parts").mkdir()
    (inputs.reward.parent / "parts" / "value.py").write_text("VALUE = 0.25")
    return inputs


def test_one_run_is_scored_by_one_version_and_a_changed_one_is_refused(inputs, tmp_path, capfd):
    keys = ("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.logger=[console]")
    words = overrides(inputs, tmp_path / "out", *keys, "trainer.progress=plain", "trainer.test_freq=-1")
    assert run(words) == 0
    told = capfd.readouterr()
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    means = [line["reward/score"] for line in lines if "reward/score" in line]
    assert means == [0.25, 0.25], "each sample is scored by the code of the start"
    log = (tmp_path / "out" / "logs" / "rank_0.log").read_text()
    for name in ("reward.py", "parts/value.py"):
        assert log.count(f"{inputs.reward.parent / name} was changed while the run goes on") == 1
    copy = tmp_path / "out" / "run_code" / str(inputs.reward).lstrip("/")
    assert copy.read_text() == REWARD and copy.stat().st_mode & 0o077 == 0
    (record,) = yaml.safe_load_all((tmp_path / "out" / "run.yaml").read_text())
    assert {
        "custom_reward_function.path, parts/value.py",
        "actor_rollout_ref.model.path, model.safetensors",
        "data.train_files, train.parquet",
    } <= record["inputs"].keys()

    longer = [*words, "trainer.total_training_steps=3"]
    assert main(["check", *longer]) == 2
    told = capfd.readouterr()
    assert "custom_reward_function.path, reward.py: " in told.out + told.err
    assert main(["check", *longer, "trainer.resume_changed=true"]) == 0
    restore(inputs)
    assert main(["check", *longer]) == 0
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(inputs.reward.parent, elsewhere)
    moved = [word.replace(str(inputs.reward.parent), str(elsewhere)) for word in longer]
    assert moved != longer and main(["check", *moved]) == 0, "what lies elsewhere is the same by its content"
    (elsewhere / "parts" / "value.py").write_text("VALUE = 0.5")
    assert main(["check", *moved]) == 2
    capfd.readouterr()
    weights = inputs.model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + b"\0\0\0\1")
    assert main(["check", *longer]) == 2
    told = capfd.readouterr()
    assert "actor_rollout_ref.model.path, model.safetensors: " in told.out + told.err
    weights.write_bytes(content)


def restore(inputs: Inputs) -> None:
    inputs.reward.write_text(REWARD)
    (inputs.reward.parent / "parts" / "value.py").write_text("VALUE = 0.25")


MODEL_CHANGED = """
import os, signal
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    file = Path({weights!r})
    content = file.read_bytes()
    if content[-1] != 1 and extra_info is not None:
        file.write_bytes(content[:-4] + bytes((0, 0, 0, 1)))
        keeper = os.getppid()
        rank = int(Path(f"/proc/{{keeper}}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(rank, signal.SIGKILL)
    return 0.5
"""


def test_a_second_attempt_does_not_read_a_model_that_was_changed_in_place(inputs, tmp_path, capfd):
    reward = tmp_path / "spoils.py"
    reward.write_text(MODEL_CHANGED.format(weights=str(inputs.model / "model.safetensors")))
    more = (f"custom_reward_function.path={reward}", "trainer.total_training_steps=2", "trainer.test_freq=-1")
    assert run(overrides(inputs, tmp_path / "out", *more, "trainer.progress=plain")) == 2
    told = capfd.readouterr()
    assert "what the run reads was changed since it began" in told.err
    assert "actor_rollout_ref.model.path, model.safetensors" in told.err
