"""siirl finds the user's modules in the working directory, as python -m siirl.main_dag does."""

import sys

import pytest

from siirl.cli import main
from siirl.command_line import import_from_here
from siirl.user_code.load_object import load_object

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return bonus()\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A user's folder, in which a console script has been started: it is not where modules are found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project" / "bonus.py").write_text("def f(context, rows):\n    return rows\n")
    (tmp_path / "my_reward.py").write_text(f"from neighbour_of_mine import bonus\n\n\n{REWARD}")
    (tmp_path / "neighbour_of_mine.py").write_text("def bonus():\n    return 1.0\n")
    return tmp_path


KEYS = [
    "--elsewhere",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "trainer.n_gpus_per_node=1",
    "data.train_batch_size=256",
]


@pytest.mark.parametrize(
    "key",
    [
        "custom_reward_function.path=my_reward",
        "actor_rollout_ref.actor.policy_loss.loss_mode=losses_of_mine:loss",
    ],
)
def test_modules_of_the_working_directory_are_found_by_check(here, key, capsys):
    (here / "losses_of_mine.py").write_text(
        "from neighbour_of_mine import bonus\n\n\ndef loss(inputs, options):\n    return bonus()\n"
    )
    code, told = main(["check", *KEYS, key]), capsys.readouterr()
    assert "no such module" not in told.err and "imports" not in told.err, told.err
    assert code == 0, told.err


def test_commands_that_only_read_folders_import_nothing_from_there(here, capsys):
    main(["ls", str(here)])
    assert str(here) not in sys.path
    import_from_here()
    assert sys.path[-1] == str(here), "last: no file there is taken for a module of a package"


def test_a_file_may_import_its_neighbour_wherever_it_lies(here, tmp_path, monkeypatch):
    deep = here / "deep"
    deep.mkdir()
    (deep / "near_by.py").write_text("WORTH = 3\n")
    (deep / "mine.py").write_text("from near_by import WORTH\n\n\ndef worth(keys):\n    return WORTH\n")
    code = main(["check", *KEYS, f"actor_rollout_ref.actor.policy_loss.loss_mode={deep}/mine.py:worth"])
    assert code == 0
    assert load_object(f"{deep}/mine.py:worth", "a key")({}) == 3
