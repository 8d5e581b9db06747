"""`siirl test`: a sound workflow passes, and each broken one is caught by the assertion that is about it."""

import copy
from pathlib import Path

import pytest
from faults_page import REFUSED as FIRST
from faults_page import not_listed
from fixtures_tiny import make_arithmetic_parquet, make_tiny_model_dir
from some_cases import some

from siirl.cli import main
from siirl.testing.assertions import judged
from siirl.testing.trial import play
from siirl.testing.verdicts import calls, credits, trains_policy

ROOT = Path(__file__).parents[2]
ESTIMATOR = """
import torch
from siirl.algorithms.advantages import Advantages, register_advantage

@register_advantage("mine", needs=("reward", "response_mask", "group_id"))
def mine(reward_BT, response_mask_BT, group_id_B):
    total = reward_BT.sum(-1)
    mean = torch.stack([total[group_id_B == group].mean() for group in group_id_B])
    return Advantages(torch.where(response_mask_BT, (FORMULA)[:, None], 0))
"""
SOUND = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 1.0 if solution_str.startswith(str(ground_truth)) else len(set(solution_str)) / 100
"""
REWARDS = {
    "a reward that is constant": ("return 0.0", "rewards are numbers that differ"),
    "a reward that compares a text with a number": (
        "return float(solution_str == 10 * ground_truth)",
        "rewards are numbers that differ",
    ),
    "a reward of random numbers": (
        "import random; return random.random()",
        "rewards are numbers that differ",
    ),
    "a reward by the clock": ("import time; return time.time() % 1", "rewards are numbers that differ"),
    "a reward that counts its calls": (
        "compute_score.calls = getattr(compute_score, 'calls', 0) + 1; return float(compute_score.calls)",
        "rewards are numbers that differ",
    ),
    "a caught error of a service": (
        "try: open('/nowhere')\n    except Exception: pass\n    return len(set(solution_str)) / 100",
        "reward errors are no zeros",
    ),
    "a caught NameError": (
        "try: return scored(solution_str)\n    except Exception: return len(set(solution_str)) / 100",
        "reward errors are no zeros",
    ),
    "a reward of NaN": ("return float('nan')", "the steps run"),
    "a reward that reads a key that rows lack": ("return extra_info['difficulty']", "the steps run"),
    "a reward that raises for some answers": ("return float(solution_str.split()[-1])", "the steps run"),
    "a reward without `score`": ("return {'right': 1.0}", "the steps run"),
}
"""Body of the reward -> the assertion that it does not pass."""
PICKY = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 100 + 0 * int(solution_str[:1])
"""
ESTIMATORS = {
    "advantages of other rows": ("(total - mean).roll(1)", "better answers become likelier"),
    "advantages of the wrong sign": ("-1.0 * (total - mean)", "better answers become likelier"),
    "advantages of 0": ("0.0 * total", "better answers become likelier"),
}
RUNS_DIFFER = {
    "a mean over the rows of a rank": ("total - total.mean() * (1 + len(total))", "one rank equals two"),
    "a counter that a resume forgets": (
        "(total - mean) / (setattr(mine, 'n', getattr(mine, 'n', 0) + 1) or mine.n)",
        "resume equals undisturbed",
    ),
}
KEYS = {
    "a learning rate of 0": (("actor_rollout_ref.actor.optim.lr=0",), "better answers become likelier"),
    "errors that count as 0": (
        ("custom_reward_function.on_error=zero", "custom_reward_function.path=FOLDER/picky.py"),
        "reward errors are no zeros",
    ),
    "answers that are cut": (("data.max_response_length=1",), "answers are whole"),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    model = make_tiny_model_dir(folder / "model")
    train = make_arithmetic_parquet(folder / "train.parquet", 32)
    (folder / "reward.py").write_text(SOUND)
    (folder / "picky.py").write_text(PICKY)
    (folder / "answers.yaml").write_text('"*": ["{ground_truth}", "7 or 8", null, "no"]')
    return folder, [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=4",
        f"data.train_files={train}",
        "data.max_prompt_length=32",
        "data.max_response_length=16",
        f"custom_reward_function.path={folder / 'reward.py'}",
    ]


def failed(settings, folder, out, only=("alone",)):
    """The assertions that fail of those about the runs that are played."""
    verdicts = judged(play(settings, out, answers=str(folder / "answers.yaml"), only=only))
    return [name for name, one in verdicts.items() if one.status == "FAIL"]


def test_a_sound_workflow_passes_by_the_users_command(job, capsys):
    folder, settings = job
    code = main(["test", *settings, "--answers", str(folder / "answers.yaml")])
    told = capsys.readouterr().out
    assert code == 0 and "0 of 16 assertions failed" in told, told
    assert told.count("n/a") == 2 and "equal bit for bit" in told and "=<eos><assistant>>>" in told


def test_what_a_busy_machine_did_not_finish_is_not_done_rather_than_failed(job, capsys, monkeypatch):
    folder, settings = job
    monkeypatch.setattr("siirl.testing.trial.DEADLINE_S", 0.0)
    code = main(["test", *settings, "--answers", str(folder / "answers.yaml")])
    told = capsys.readouterr().out
    assert code == 1 and "FAIL" not in told, told
    assert told.startswith("not done  the steps run  the run 'alone' was not done 0 s after the test began")
    assert "0 of 1 assertions failed, 1 not done" in told


@pytest.mark.slow
def test_conversations_that_go_on_over_a_step_pass(job, tmp_path):
    """The age of their rows is that of the episode, and a resume plays those in flight again."""
    folder, settings = job
    workflow = f"dag.workflow_path={ROOT / 'dag_templates' / 'solver_verifier.yaml'}"
    settings = [workflow, *settings, "actor_rollout_ref.rollout.max_lag=1"]
    trial = play(settings, tmp_path / "out", answers=str(folder / "answers.yaml"), only=("alone", "resumed"))
    verdicts = judged(trial)
    assert not [name for name, one in verdicts.items() if one.status == "FAIL"], verdicts
    assert verdicts["rows are of their own policy"].status == "pass", verdicts
    assert "equal bit for bit" in verdicts["resume equals undisturbed"].evidence, verdicts


@pytest.mark.parametrize("name", some(REWARDS, "a caught NameError"))
def test_a_broken_reward_is_caught_by_the_right_assertion(name, job, tmp_path):
    body, assertion = REWARDS[name]
    folder, settings = job
    reward = tmp_path / "broken.py"
    reward.write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
    )
    settings = [*settings, f"custom_reward_function.path={reward}"]
    assert failed(settings, folder, tmp_path / "out") == [assertion]


@pytest.mark.parametrize("name", some(KEYS, "answers that are cut"))
def test_broken_keys_are_caught_by_the_right_assertion(name, job, tmp_path):
    keys, assertion = KEYS[name]
    folder, settings = job
    keys = [key.replace("FOLDER", str(folder)) for key in keys]
    assert assertion in failed([*settings, *keys], folder, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS_DIFFER)
def test_what_depends_on_the_run_is_caught_by_the_right_assertion(name, job, tmp_path):
    formula, assertion = RUNS_DIFFER[name]
    folder, settings = job
    code = tmp_path / "mine.py"
    code.write_text(ESTIMATOR.replace("FORMULA", formula))
    settings = [*settings, f"algorithm.adv_estimator={code}:mine"]
    runs = ("alone", "resumed" if "resume" in assertion else "two_ranks")
    assert failed(settings, folder, tmp_path / "out", runs) == [assertion]


@pytest.mark.parametrize("name", some(ESTIMATORS, "advantages of the wrong sign"))
def test_a_broken_estimator_is_caught_by_the_right_assertion(name, job, tmp_path):
    formula, assertion = ESTIMATORS[name]
    folder, settings = job
    code = tmp_path / "mine.py"
    code.write_text(ESTIMATOR.replace("FORMULA", formula))
    settings = [*settings, f"algorithm.adv_estimator={code}:mine"]
    assert failed(settings, folder, tmp_path / "out") == [assertion]


NODE = "{node_id: mine, node_type: COMPUTE, dependencies: [rollout_actor], executable_ref: 'm.py:f'"
REFUSED = {
    "groups of one": ("actor_rollout_ref.rollout.n=1", "there are none. Set actor_rollout_ref.rollout.n=2"),
    "a key that nothing reads": ("actor_rollout_ref.rollout.temprature=0.7", "temperature"),
    "a reward whose file is not there": ("custom_reward_function.path=nowhere.py", "nowhere.py"),
    "a reward without the function": ("custom_reward_function.name=score", "no such function"),
    "responses that a node writes anew": (
        NODE + ", reads: [response_ids], writes: [response_ids]}",
        "both write agent_0.response_ids",
    ),
    "prompts that a node changes": (
        NODE + ", reads: [prompt_ids], writes: [prompt_ids]}",
        "writes agent_0.prompt_ids",
    ),
}
"""What is not even run -> a key, or a node more; what is said."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_before_it_runs(name, job, tmp_path, capsys):
    (more, told), (_, settings) = REFUSED[name], job
    if more.startswith("{"):
        text = (ROOT / "dag_templates" / "grpo.yaml").read_text().rstrip()
        workflow = tmp_path / "grpo.yaml"
        workflow.write_text(f"{text}\n  - {more}\n")
        (tmp_path / "m.py").write_text("def f(context, rows):\n    return rows\n")
        more = f"dag.workflow_path={workflow}"
    assert main(["test", *settings, more]) == 2
    assert told in capsys.readouterr().err


def _other_group(trial):
    column = next(calls(trial, credits)).read["group_id"]
    column[0] = column[-1]


def _other_token(trial):
    next(calls(trial, trains_policy)).read["response_ids"][0, 0] += 1


def _longer_mask(trial):
    record = next(calls(trial, trains_policy))
    record.read["response_mask"] = record.read["response_mask"] | True


def _other_context(trial):
    record = next(calls(trial, trains_policy))
    record.read["rollout_log_prob"] = record.read["rollout_log_prob"].roll(1, 0)


def _older_weights(trial):
    for record in calls(trial, lambda node: node.spec.is_rollout):
        record.wrote["weight_version"] = record.wrote["weight_version"] - record.step + 1


def _double_credit(trial):
    next(calls(trial, credits)).wrote["reward"] *= 2


ON_THE_WAY = {
    "a row in another prompt's group": (_other_group, "groups are as declared"),
    "a token that was not sampled": (_other_token, "only sampled tokens are trained"),
    "a mask over what follows the response": (_longer_mask, "only sampled tokens are trained"),
    "log-probs of another row": (_other_context, "rows are of their own policy"),
    "weights that engines did not get": (_older_weights, "rows are of their own policy"),
    "rewards that count twice": (_double_credit, "credit adds up"),
}
"""What no workflow can do, as it is refused, or as siirl writes it: a change of what a run has seen."""


@pytest.mark.slow
def test_what_is_broken_on_its_way_is_caught_by_the_right_assertion(job, tmp_path):
    folder, settings = job
    trial = play(settings, tmp_path / "out", answers=str(folder / "answers.yaml"), only=("alone",))
    for name, (change, assertion) in ON_THE_WAY.items():
        changed = copy.deepcopy(trial)
        change(changed)
        found = [each for each, one in judged(changed).items() if one.status == "FAIL"]
        assert found == [assertion], name


@pytest.mark.slow
def test_without_a_baseline_equal_rewards_teach(job, tmp_path):
    folder, settings = job
    code = tmp_path / "mine.py"
    code.write_text(ESTIMATOR.replace("FORMULA", "total"))
    settings = [*settings, f"algorithm.adv_estimator={code}:mine"]
    assert failed(settings, folder, tmp_path / "out", ("alone", "equal")) == ["equal rewards teach nothing"]


def test_the_page_lists_each_fault():
    tables = (REWARDS, KEYS, ESTIMATORS, RUNS_DIFFER, ON_THE_WAY)
    faults = [(name, case[1]) for table in tables for name, case in table.items()]
    faults += [("advantages without a baseline", "equal rewards teach nothing")]
    assert not not_listed([*faults, *((name, FIRST) for name in REFUSED)])
