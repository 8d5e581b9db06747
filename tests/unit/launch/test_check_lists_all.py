"""siirl check and a run list everything that is wrong at once: by place, each once, without follow-ups."""

import random
import re

import pytest

from siirl import main_dag
from siirl.cli import main
from siirl.config.load import load_config
from siirl.config.root import all_keys
from siirl.config.tree import with_broken
from siirl.findings import Findings
from siirl.launch.survey import survey, survey_inputs

pytestmark = pytest.mark.heavy

PLACES = ["command line", "configuration", "workflow", "data", "models", "rewards", "machine"]
DAG = """
dag_id: wrong
nodes:
  - {node_id: rollout, node_type: MODEL_INFERENCE, node_role: ROLLOUT, dependencies: [nobody],
     config: {rollout.tempreture: 1, rollout.top_p: high}}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [rollout]}
  - {node_id: ref_a, node_type: MODEL_INFERENCE, node_role: REFERENCE, dependencies: [rollout]}
  - {node_id: advantage, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [reward], config: {gama: 1}}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantage, ref_a]}
"""


def listed(text: str) -> dict[str, list[str]]:
    """Place -> its problems, of what a command printed."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.removesuffix(":") in PLACES:
            found[line.removesuffix(":")] = []
        elif line.startswith("  - "):
            found[list(found)[-1]].append(line[4:])
    return found


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    """A command line with thirteen mistakes, which do not hide each other."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    dag = tmp_path / "dag.yaml"
    dag.write_text(DAG)
    return [
        f"dag.workflow_path={dag}",
        "data.train_file=/no/train.parquet",
        "nonsense",
        "data.max_prompt_length=abc",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.actor.clip_ratio_low=2",
        "trainer.resume_mode=resume_path",
        "data.val_files=/no/val.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/no_model",
        "custom_reward_function.path=/no/reward.py",
        f"trainer.output_dir={tmp_path}/out",
    ]


EXPECTED = {
    "command line": ["'data.train_file'", "'nonsense'", "data.max_prompt_length=abc", "rollout.mode=async"],
    "configuration": ["clip_ratio_low=2", "trainer.resume_mode=resume_path"],
    "workflow": ["'nobody'", "'actor_rollout_ref.rollout.tempreture'", "top_p=high", "'algorithm.gama'"],
    "data": ["/no/val.parquet"],
    "models": ["no_model does not exist"],
    "rewards": ["/no/reward.py"],
}


def test_check_lists_everything_that_is_wrong_at_once_by_place(wrong, capsys):
    assert main(["check", *wrong]) == 2
    found = listed(capsys.readouterr().err)
    assert list(found) == [place for place in PLACES if place in found]
    for place, words in EXPECTED.items():
        problems = found.get(place, [])
        assert len(problems) == len(words), (place, problems)
        for word in words:
            assert any(word in problem for problem in problems), (place, word, problems)


def test_the_run_prints_the_same_list_and_starts_nothing(wrong, capsys, monkeypatch):
    monkeypatch.setattr(main_dag, "run_local", lambda job: pytest.fail("the run was started"))
    assert main(["check", *wrong]) == 2
    checked = listed(capsys.readouterr().err)
    assert main_dag.main(wrong) == 2
    run = listed(capsys.readouterr().err)
    assert {place: run[place] for place in checked} == checked
    assert set(run) <= {*checked, "machine"}, "the run also looks at this machine's GPUs"


def test_both_files_are_named_when_both_are_missing(wrong, capsys):
    files = ["data.train_files=[/no/a.parquet,/no/b.parquet]", "data.val_files=/no/val.parquet"]
    assert main(["check", *files, "actor_rollout_ref.model.path=nobody/model"]) == 2
    missing = re.findall(r"dataset file (\S+) does not exist", capsys.readouterr().err)
    assert missing == ["/no/a.parquet", "/no/b.parquet", "/no/val.parquet"]


@pytest.mark.parametrize(
    "mistake",
    [
        "data.train_batch_size=many",
        "actor_rollout_ref.actor.ppo_mini_batch_size=7",
        "actor_rollout_ref.rollout.n=four",
        "algorithm.adv_estimator=gea",
        "trainer.nnodes=x",
        "trainer.default_local=x",
        "actor_rollout_ref.actor.strategy=fdsp",
        "actor_rollout_ref.actor.use_kl_los=true",
        "data.max_response_length=long",
        "dag.workflow_path=/no/file.yaml",
        "actor_rollout_ref.model.fsdp_config.fsdp_size=x",
    ],
)
def test_one_mistake_is_one_problem(mistake, capsys):
    """What depends on a key that was refused is left out, rather than judged by the key's default."""
    assert main(["check", "--elsewhere", "actor_rollout_ref.model.path=nobody/model", mistake]) == 2
    error = capsys.readouterr().err
    assert "problems:" not in error, error


def test_a_check_that_reads_a_refused_key_is_skipped_whichever_it_is():
    """For any key: no check trips over its unknown value, and none takes it for a value."""
    cfg = load_config(
        [
            "actor_rollout_ref.model.path=nobody/model",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=4",
        ]
    )
    names = ["actor_rollout_ref.rollout.agent.share_instance"]
    names += random.Random(15).sample(sorted(all_keys()), 60)
    for name in names:
        found = Findings()
        survey_inputs(survey(with_broken(cfg, [name]), found), True, found)
        assert not found.problems, (name, found.problems)


def test_a_model_that_only_one_node_uses_is_looked_for(wrong, tmp_path, capsys):
    right = [key for key in wrong if key.startswith(("data.val_files", "trainer.output_dir"))]
    critic = [f"critic.model.path={tmp_path}/no_critic", "algorithm.adv_estimator=gae"]
    main(["check", *right, *critic])
    assert any("no_critic does not exist" in text for text in listed(capsys.readouterr().err)["models"])
