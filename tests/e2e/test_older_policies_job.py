"""Policies in training as teachers: which weights they have, and that a run goes on with them bit for bit."""

from pathlib import Path

import pytest
import torch
import yaml
from fixtures_tiny import make_tiny_model_dir
from job_harness import Finished, Inputs, overrides, run_job
from safetensors.torch import load_file
from torch import Tensor

from siirl.checkpoint.export import export_hf

RATE, STEPS = 0.25, 5
TEACHERS = {
    "old": {"policy": 0, "sync_steps": 2},
    "mean": {"policy": 0, "update_rate": RATE},
    "other": {"policy": 1, "sync_steps": 2},
}
NUMBERS = ("actor/teacher_divergence", "actor/distill_loss", "actor/loss", "actor/grad_norm")


def agent(number: int, path: Path, *above: str, placement: str | None = None) -> list[dict]:
    """The nodes that train an agent of a model by its rewards; above: further nodes before the training."""

    def node(kind: str, node_type: str, role: str, *dependencies: str, **more) -> dict:
        made = {
            "node_id": f"{kind}_{number}",
            "agent_group": number,
            "node_type": node_type,
            "node_role": role,
        }
        return made | {"dependencies": list(dependencies), **more}

    place = {} if placement is None else {"placement": placement}
    return [
        node("rollout", "MODEL_INFERENCE", "ROLLOUT", config={"model.path": str(path)}, **place),
        node("reward", "COMPUTE", "REWARD", f"rollout_{number}"),
        node("advantage", "COMPUTE", "ADVANTAGE", f"reward_{number}"),
        node("old_log_prob", "MODEL_TRAIN", "ACTOR", f"rollout_{number}", only_forward_compute=True, **place),
        node(
            "train", "MODEL_TRAIN", "ACTOR", f"advantage_{number}", f"old_log_prob_{number}", *above, **place
        ),
    ]


def dag_file(path: Path, models: tuple[Path, Path], placement: str | None = None, **more) -> Path:
    """Agent 0 learns from rewards and TEACHERS, agent 1 from rewards. placement, more: of the teachers."""
    place, own = ({}, {}) if placement is None else ({"placement": placement}, {"placement": "0"})
    teachers = [
        {"node_id": name, "node_type": "MODEL_INFERENCE", "node_role": "TEACHER"}
        | {"dependencies": ["rollout_0"], "config": config | more, **place}
        for name, config in TEACHERS.items()
    ]
    first = agent(0, models[0], *TEACHERS, **own)
    first[-1]["config"] = {"actor.distill.enable": True, "actor.distill.coef": 0.3}
    nodes = [*first[:1], *teachers, *first[1:], *agent(1, models[1], **own)]
    path.write_text(yaml.safe_dump({"dag_id": "older", "nodes": nodes}))
    return path


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def models(inputs, tmp_path_factory) -> tuple[Path, Path]:
    other = tmp_path_factory.mktemp("other") / "model"
    return inputs.model, make_tiny_model_dir(other, family="llama", tie=False, init_std=0.2, seed=5)


@pytest.fixture(scope="module")
def whole(inputs, models, tmp_path_factory) -> Finished:
    """STEPS steps on one rank, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("whole")
    keys = (f"dag.workflow_path={dag_file(folder / 'dag.yaml', models)}", "trainer.save_freq=1")
    keys += ("trainer.max_actor_ckpt_to_keep=10", f"trainer.total_training_steps={STEPS}")
    return run_job(1, overrides(inputs, folder / "run", *keys))


def weights(run: Finished, step: int, model: str, folder: Path) -> dict[str, Tensor]:
    checkpoint = run.output / "checkpoints" / f"global_step_{step}"
    out = export_hf(checkpoint, folder / f"{model}_{step}", model)
    return load_file(out / "model.safetensors")


def test_teachers_have_the_weights_that_their_policy_had(whole, models, tmp_path):
    actors = {
        number: [weights(whole, step, f"agent_{number}.actor", tmp_path) for step in range(1, STEPS + 1)]
        for number in (0, 1)
    }
    found = {
        name: [weights(whole, step, f"agent_0.teacher.{name}", tmp_path) for step in range(1, STEPS + 1)]
        for name in TEACHERS
    }
    begun = {number: load_file(path / "model.safetensors") for number, path in enumerate(models)}
    for name, number in (("old", 0), ("other", 1)):
        want = [begun[number], begun[number], actors[number][1], actors[number][1], actors[number][3]]
        for ours, theirs in zip(found[name], want, strict=True):
            assert all(ours[key].equal(theirs[key]) for key in ours)
    mean = {key: tensor.float() for key, tensor in begun[0].items() if key in found["mean"][0]}
    for step in range(STEPS):
        if step:
            mean = {key: (1 - RATE) * mean[key] + RATE * actors[0][step - 1][key] for key in mean}
        for key, tensor in mean.items():
            torch.testing.assert_close(found["mean"][step][key], tensor, atol=1e-6, rtol=0, msg=key)
    assert not all(found["mean"][4][key].equal(found["old"][4][key]) for key in mean)


@pytest.mark.slow
def test_a_run_goes_on_with_its_older_weights_bit_for_bit(whole, inputs, tmp_path):
    resumed = ("trainer.resume_mode=resume_path", f"trainer.total_training_steps={STEPS}")
    resumed += (f"trainer.resume_from_path={whole.output}/checkpoints/global_step_3",)
    dag = f"dag.workflow_path={whole.output.parent / 'dag.yaml'}"
    found = run_job(1, overrides(inputs, tmp_path / "run", dag, *resumed))
    for name in NUMBERS:
        values = whole.values(f"agent_0/{name}")
        assert len(values) == STEPS and found.values(f"agent_0/{name}") == values[3:], name
    for number in (0, 1):
        ours, theirs = (run.weights(f"agent_{number}.actor") for run in (found, whole))
        assert ours and all(ours[key].equal(theirs[key]) for key in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_weights_reach_teachers_on_other_ranks_and_under_megatron(whole, inputs, models, tmp_path, strategy):
    more = {"strategy": strategy} | ({"megatron.param_dtype": "float32"} if strategy == "megatron" else {})
    dag = dag_file(tmp_path / "dag.yaml", models, placement="1", **more)
    keys = (f"dag.workflow_path={dag}", f"trainer.total_training_steps={STEPS}")
    found = run_job(2, overrides(inputs, tmp_path / "run", *keys))
    for name in NUMBERS[:2]:
        assert found.values(f"agent_0/{name}") == pytest.approx(whole.values(f"agent_0/{name}"), abs=1e-6), (
            name
        )
