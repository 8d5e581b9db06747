"""The command that a user types, for a model directory of every role: accepted whole, refused if not."""

import shutil

import pytest
from fixtures_tiny import make_tiny_model_dir, make_tiny_reward_model
from job_harness import Inputs, overrides

from siirl import main_dag
from siirl.compiler.plan import Plan
from siirl.config.roles import ROLE_GROUPS

FROZEN = """
dag_id: one_of_two_is_frozen
nodes:
  - {node_id: solver, node_type: MODEL_INFERENCE, node_role: ROLLOUT}
  - {node_id: critic, node_type: MODEL_INFERENCE, node_role: ROLLOUT, agent_group: 1,
     dependencies: [solver], config: {actor_rollout_ref.model.path: PATH}}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [critic]}
  - {node_id: advantages, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [reward]}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantages]}
"""
JUDGE = ("reward_model.enable=True", "reward_model.model.path=MODEL", "reward_model.judge.name=hf")
TEACHER = (
    "actor_rollout_ref.actor.policy_loss.loss_mode=distill",
    "dag.node_config.teacher.teacher.model.path=MODEL",
)
ROLES = {
    "actor": ("actor_rollout_ref.model.path=MODEL",),
    "rollout": ("actor_rollout_ref.model.path=MODEL", "trainer.rollout_only=true"),
    "ref": ("actor_rollout_ref.model.path=MODEL", "actor_rollout_ref.actor.use_kl_loss=True"),
    "critic": ("algorithm.adv_estimator=gae", "critic.model.path=MODEL", "critic.ppo_mini_batch_size=4"),
    "reward": ("reward_model.enable=True", "reward_model.model.path=MODEL"),
    "judge": (*JUDGE, "reward_model.judge.prompt='Rate {response}'"),
    "teacher": TEACHER,
    "scoring_teacher": (*TEACHER, "dag.node_config.teacher.teacher.strategy=vllm"),
    "frozen_agent": ("dag.workflow_path=DAG", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
}
"""Role -> what gives it the model directory MODEL; frozen_agent: one of a talk that is not trained."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def launch(inputs, tmp_path, monkeypatch, capsys):
    """(exit code, stderr, plan) of the main job with a model of a role; workers are not started."""
    started = []
    monkeypatch.setattr(main_dag, "run_local", lambda job: started.append(Plan.from_json(job.plan)) or 0)
    monkeypatch.setattr(main_dag, "setup_logging", lambda rank, folder: None)

    def call(role, model, *more):
        dag = tmp_path / "dag.yaml"
        dag.write_text(FROZEN.replace("PATH", str(model)))
        keys = [key.replace("MODEL", str(model)).replace("DAG", str(dag)) for key in ROLES[role]]
        code = main_dag.main(overrides(inputs, tmp_path / "out", *keys, *more))
        return code, capsys.readouterr().err, started.pop() if started else None

    return call


def model_dir(folder, role):
    path = folder / f"model_of_{role}"
    if role == "reward":
        return make_tiny_reward_model(path)
    return make_tiny_model_dir(path, head_dim=32)  # which vLLM has a kernel for on a CPU


def test_every_role_is_here():
    """frozen models are those of a user's op: tests/unit/compiler/test_op_table.py."""
    assert ROLES.keys() == {*ROLE_GROUPS, "frozen_agent"} - {"frozen", "frozen_score"}


@pytest.mark.parametrize("role", ROLES)
def test_a_model_directory_of_a_role_is_accepted_and_refused_without_its_weights(role, launch, tmp_path):
    model = model_dir(tmp_path, role)
    code, said, plan = launch(role, model)
    assert code == 0, said
    wanted = ("rollout", 1) if role == "frozen_agent" else (role, 0)
    assert wanted in {(model.role, model.agent) for model in plan.models.values()}
    for file in model.glob("*.safetensors"):
        file.unlink()
    code, said, plan = launch(role, model)
    assert code == 2 and plan is None
    assert f"model directory {model} has no *.safetensors file" in said and "Traceback" not in said


@pytest.mark.parametrize("role", ["actor", "ref", "critic", "reward"])
def test_a_model_directory_under_megatron_is_accepted(role, launch, tmp_path):
    code, said, plan = launch(role, model_dir(tmp_path, role), f"{ROLE_GROUPS[role]}.strategy=megatron")
    assert code == 0, said
    assert {model.backend for model in plan.models.values() if model.role == role} == {"megatron"}


@pytest.mark.parametrize("role", ROLES)
def test_a_folder_that_is_no_model_is_refused_for_every_role(role, launch, tmp_path):
    model = model_dir(tmp_path, role)
    shutil.move(model / "config.json", model / "config.old")
    code, said, _ = launch(role, model)
    assert code == 2
    assert f"{model} has no config.json" in said and "Traceback" not in said
