"""`siirl amend`: what a run may be told while it goes on, and that it then is the run that was resumed so."""

import contextlib
import sys

import psutil
import pytest
import torch
import yaml
from amended_runs import ACTOR, ROLLOUT, Told, check_same
from fixtures_tiny import make_tiny_model_dir
from job_harness import Finished
from killed_jobs import start, wait_until
from safetensors.torch import load_file

from siirl.cli import main
from siirl.compiler.compile import TEMPLATES
from siirl.observe.amendments import recorded
from siirl.runs.audit import audit
from siirl.runs.run_state import read_run
from siirl.view.run_status import health


def test_a_run_is_refused_taken_back_and_amended_as_if_it_were_resumed_so(tmp_path, capsys):
    told = Told(tmp_path)
    bad = tmp_path / "bad.py"
    bad.write_text("def compute_score(*_, **__):\n    raise RuntimeError('no such table')\n")
    keys = (f"{ACTOR}.optim.lr=0.003", "data.mixture={one:3,two:1}", f"{ACTOR}.entropy_coeff=0.01")
    with told.run() as job:
        code, said = told.amend(
            job, "data.train_batch_size=16", f"{ROLLOUT}.n=8", "trainer.n_gpus_per_node=2"
        )
        assert code == 2, said
        for words in (
            "data.train_batch_size: optimizer steps",
            f"{ROLLOUT}.n:",
            "the new plan 2",
            "siirl resume",
        ):
            assert words in said, said
        code, said = told.amend(job, f"custom_reward_function.path={bad}", holds_again=True)
        assert code == 1 and "amended after step 1" in said and "no such table" in said, said
        code, said = told.amend(job, *keys)
        assert code == 0 and f"{ACTOR}.optim.lr: 0.01 -> 0.003" in said, said
        assert "amended after step 2" in said and "step 3 is done" in said, said
    run = Finished.read(told.out)
    assert run.values("actor/lr") == [0.01] * 2 + [0.003] * 4
    check_same(run, told.by_hand(2, *keys))
    assert [one.state for one in recorded(told.out)] == ["applied", "withdrawn", "applied"]
    config = yaml.safe_load((told.out / "run_config.yaml").read_text())
    assert config["actor_rollout_ref"]["actor"]["optim"]["lr"] == 0.003
    assert config["custom_reward_function"]["path"] == str(told.inputs.reward)
    lines, holds = audit(told.out)
    assert holds and any(line.startswith("amended after step 2: ") for line in lines), "\n".join(lines)
    state = read_run(told.out)
    assert state.status == "ended" and not state.attempts
    assert "after step 2: " in health(state, state.unreadable)["amendments"][-1]
    assert main(["amend", str(told.out), f"{ACTOR}.optim.lr=0.1"]) == 2
    assert "no run goes on" in capsys.readouterr().err


LAG = (
    *("trainer.n_gpus_per_node=2", f"{ROLLOUT}.max_lag=2", f"{ROLLOUT}.surplus=1.5", f"{ROLLOUT}.n=2"),
    *("data.max_response_length=64", f"{ROLLOUT}.stop_token_ids=[5,6,7,8]", "trainer.total_training_steps=8"),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_staleness_and_a_teacher_of_two_ranks_are_those_of_a_resume(tmp_path):
    """Responses that go on over the amendment are trained once, none older than the larger bound."""
    told = Told(tmp_path, *LAG)
    workflow = tmp_path / "taught.yaml"
    dag = yaml.safe_load((TEMPLATES / "grpo.yaml").read_text())
    trainer = next(node for node in dag["nodes"] if node.get("only_forward_compute"))
    teacher = {"node_id": "teacher", "node_type": "MODEL_INFERENCE", "node_role": "TEACHER"}
    dag["nodes"].insert(-1, teacher | {"dependencies": trainer["dependencies"]})
    dag["nodes"][-1]["dependencies"].append("teacher")
    workflow.write_text(yaml.safe_dump(dag))
    model = make_tiny_model_dir(tmp_path / "teacher", init_std=0.2, seed=7)
    keys = (
        *(f"dag.workflow_path={workflow}", f"teacher.model.path={model}", f"{ACTOR}.distill.enable=true"),
        *(f"{ROLLOUT}.max_lag=1", f"{ROLLOUT}.surplus=1", f"{ACTOR}.distill.coef=0.5"),
    )
    with told.run() as job:
        code, said = told.amend(job, *keys)
        assert code == 0 and "node teacher: new" in said and "at most 2 -> 1" in said, said
    step = recorded(told.out)[0].step
    before = told.undisturbed("before", "trainer.save_freq=1")
    by_hand = told.by_hand(step, *keys, origin=before.output)
    run = Finished.read(told.out)
    check_same(run, by_hand)
    assert len(run.values("actor/teacher_divergence")) == 8 - step
    assert run.values("reward/score")[:step] == before.values("reward/score")[:step]
    lines, holds = audit(told.out)
    assert holds, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_of_two_agents_is_frozen_with_what_it_has_learnt(tmp_path):
    told = Told(tmp_path, "dag.workflow_path=dag_templates/solver_verifier.yaml", "trainer.save_freq=1")
    key = "dag.node_config.train_verifier.actor.freeze=true"
    with told.run() as job:
        workflow = tmp_path / "alone.yaml"
        workflow.write_text((TEMPLATES / "grpo.yaml").read_text())
        code, said = told.amend(job, f"dag.workflow_path={workflow}")
        assert code == 2 and "agent_1.actor would be gone" in said and "actor.freeze=true" in said, said
        code, said = told.amend(job, key)
        assert code == 0 and "node train_verifier: actor_rollout_ref.actor.freeze" in said, said
    step, run = recorded(told.out)[0].step, Finished.read(told.out)
    assert run.values("agent_1/actor/waits") == [1] * (6 - step) and not run.values("agent_0/actor/waits")
    check_same(run, told.by_hand(step, key), "agent_0.actor")
    for model, same in (("agent_0.actor", False), ("agent_1.actor", True)):
        export = tmp_path / model
        checkpoint = f"{told.out}/checkpoints/global_step_{step}"
        words = [sys.executable, "-m", "siirl.cli", "export", checkpoint, str(export), "--model", model]
        assert start(words, tmp_path / "exported").wait(200) == 0, (tmp_path / "exported").read_text()
        then, now = load_file(export / "model.safetensors"), run.weights(model)
        assert all(torch.equal(then[name], now[name]) for name in now) is same


VLLM = (
    *(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_seqs=64", "trainer.deadline_s=400"),
    *("data.max_response_length=24", "trainer.total_training_steps=8"),
)


def engines_of(job) -> dict[int, float]:
    """Pid -> start of the vLLM engines below a launcher."""
    found = {}
    for one in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "served.server" in " ".join(one.cmdline()):
                found[one.pid] = one.create_time()
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vllm_samples_what_the_amended_policy_says(tmp_path):
    """Its engine ends with the worker that is amended; the next one's new engine has the amended settings."""
    told = Told(tmp_path, *VLLM)
    make_tiny_model_dir(told.inputs.model, init_std=0.5, head_dim=32)
    keys = (f"{ACTOR}.optim.lr=0.003", f"{ROLLOUT}.temperature=0.8")
    with told.run() as job:
        wait_until(lambda: bool(engines_of(job)), job, told.console)
        before = engines_of(job)
        code, said = told.amend(job, *keys)
        assert code == 0 and "amended after step 1" in said, said
        assert len(before) == 1 and not before.items() & engines_of(job).items()
    run = Finished.read(told.out)
    assert run.values("actor/lr") == [0.01] + [0.003] * 7
    differences = run.values("actor/rollout_log_prob_diff")
    assert len(differences) == 8 and max(differences) < 1e-5
    check_same(run, told.by_hand(1, *keys))
