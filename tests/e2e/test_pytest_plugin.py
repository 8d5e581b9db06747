"""The pytest plugin: each assertion of `siirl test` is a test of the user's own, and says what to change."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest
from fixtures_tiny import make_arithmetic_parquet, make_tiny_model_dir

pytest_plugins = ["pytester"]
PLUGIN = "siirl.testing.plugin"
LOADED = [] if any(one.value == PLUGIN for one in entry_points(group="pytest11")) else ["-p", PLUGIN]
TESTS = """
import pytest
from siirl.testing import expect

SETTINGS = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=MODEL", "data.train_files=TRAIN",
    "actor_rollout_ref.rollout.n=4", "data.max_prompt_length=32", "data.max_response_length=16")
OPTIONS = {"answers": "answers.yaml", "only": ("alone",)}
WORKFLOW = "dag_templates/grpo.yaml"

@pytest.mark.siirl(WORKFLOW, *SETTINGS, "custom_reward_function.path=sound.py", **OPTIONS)
def test_sound(siirl_assertion):
    siirl_assertion()

@pytest.mark.siirl(WORKFLOW, *SETTINGS, "custom_reward_function.path=constant.py", **OPTIONS)
def test_constant(siirl_trial):
    expect.groups_are_as_declared(siirl_trial)
    expect.rewards_are_numbers_that_differ(siirl_trial)

@pytest.mark.siirl(*SETTINGS, "custom_reward_function.path=nowhere.py", **OPTIONS)
def test_refused(siirl_trial):
    pass

def test_unmarked(siirl_trial):
    pass
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return BODY
"""
BODIES = {
    "sound": "1.0 if solution_str.startswith(str(ground_truth)) else len(set(solution_str)) / 100",
    "constant": "0.0",
}


def test_assertions_are_tests_and_functions(pytester: pytest.Pytester):
    folder = Path(pytester.path)
    train = make_arithmetic_parquet(folder / "train.parquet", 32)
    model = make_tiny_model_dir(folder / "model")
    for name, body in BODIES.items():
        (folder / f"{name}.py").write_text(REWARD.replace("BODY", body))
    (folder / "answers.yaml").write_text('"*": ["{ground_truth}", "7 or 8", null, "no"]')
    (folder / "test_mine.py").write_text(TESTS.replace("MODEL", str(model)).replace("TRAIN", str(train)))
    done = pytester.runpytest_inprocess(*LOADED, "-p", "no:xdist", "-p", "no:cacheprovider", "-rfE")
    said = done.stdout.str()
    done.assert_outcomes(passed=11, skipped=5, failed=1, errors=2)
    assert "rewards are numbers that differ: " in said and "test_constant" in said
    assert "siirl test refuses it: " in said and "nowhere.py" in said
    assert "the test has no workflow. Mark it: @pytest.mark.siirl(" in said
    assert "siirl/testing/assertions.py" not in said, "a reader is shown the line of the test, not siirl's"
