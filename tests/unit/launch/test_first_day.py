"""What is said on the first day: of a logger that is not installed, a reward that raises, Ctrl-C."""

import importlib.util
from types import SimpleNamespace

import pytest

from siirl.cli import main
from siirl.config import load_config, to_dict
from siirl.launch.outcome import Stop, conclude
from siirl.observe.loggers import LOGGERS, check_installed
from siirl.rewards.sample import describe


@pytest.mark.parametrize("name", [name for name, logger in LOGGERS.items() if logger.package])
def test_a_destination_whose_package_is_not_installed_is_refused(name, monkeypatch):
    find, package = importlib.util.find_spec, LOGGERS[name].package.replace("-", "_")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == package else find(module)
    )
    with pytest.raises(
        Exception, match=rf"'{name}', and the package .*pip install {LOGGERS[name].package}\)"
    ):
        check_installed(["console", name])
    check_installed(["console", "tensorboard"])


def test_check_lists_it_beside_what_else_is_wrong(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else find(name, *more)
    )
    keys = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.logger=[console,wandb]"]
    assert main(["check", *keys, "data.train_files=/none.parquet"]) == 2
    told = capsys.readouterr().err
    assert "the package wandb is not installed" in told and "/none.parquet" in told


def test_the_line_of_a_reward_that_raises_is_the_users(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import json\n\n\ndef score(text):\n    return json.loads(text)['score']\n"
    )
    spec = importlib.util.spec_from_file_location("mine_of_first_day", tmp_path / "mine.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ValueError) as raised:
        module.score("no json")
    assert describe(raised.value).endswith(f"(at {tmp_path}/mine.py:5)"), "not the line of the json package"


@pytest.mark.parametrize(
    "step, said", [(None, "There is no checkpoint in"), (7, "To go on after step 7: siirl resume")]
)
def test_a_run_that_is_stopped_says_how_it_goes_on(tmp_path, capsys, step, said):
    config = to_dict(load_config([f"trainer.default_local_dir={tmp_path / 'checkpoints'}"]))
    if step is not None:
        (tmp_path / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"global_step_{step}" / "manifest.json").write_text("{}")
    job = SimpleNamespace(config=config, output_path=tmp_path, run_id="x")
    assert conclude(job, [], Stop([2]), {}) == 130
    told = capsys.readouterr().err
    assert "stopped by SIGINT" in told and said in told, told
