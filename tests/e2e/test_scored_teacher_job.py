"""A teacher by vLLM or behind a service says of rows what the same model on a training engine says."""

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from http_harness import serving
from job_harness import Inputs, overrides, run_job
from served_teacher import ServedTeacher
from some_cases import some

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KEEP = """
import os
import torch

def keep(context, rows):
    columns = {name: rows[name] for name in rows.keys() if not isinstance(rows[name], list)}
    torch.save(dict(columns), os.path.join({folder!r}, f"{context.step}.{torch.distributed.get_rank()}.pt"))
    return rows.select()
"""
WORKFLOW = """
dag_id: scored
nodes:
  - {node_id: rollout, node_type: MODEL_INFERENCE, node_role: ROLLOUT}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [rollout]}
  - {node_id: computed, node_type: MODEL_INFERENCE, node_role: TEACHER, dependencies: [rollout]}
"""
SCORED = """
  - node_id: scored
    node_type: MODEL_INFERENCE
    node_role: TEACHER
    dependencies: [rollout]
    config: {HOW}
  - node_id: keep
    node_type: COMPUTE
    node_role: DEFAULT
    executable_ref: CODE:keep
    dependencies: [computed, scored]
    reads: [response_length, COLUMNS]
    writes: []
"""
TRAIN = """
  - node_id: train
    node_type: MODEL_TRAIN
    node_role: ACTOR
    dependencies: [reward, TEACHER]
    config: {actor.policy_loss.loss_mode: distill}
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_teacher_by_vllm_gives_the_rows_and_the_loss_of_one_on_a_training_engine(tmp_path, top_k):
    check_equal(tmp_path, top_k, "strategy: vllm", 1)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("top_k", some([3, 0], 3))
def test_a_teacher_behind_a_service_gives_them_too_on_several_ranks(tmp_path, top_k):
    with serving(ServedTeacher(teacher_in(tmp_path))) as server:
        url = server.url.replace("/score", "/v1/completions")
        check_equal(tmp_path, top_k, f'endpoint.url: "{url}", endpoint.max_concurrent: 2', 2)
        assert server.most_at_once <= 4 and server.paths.count("/detokenize") == 2


def teacher_in(folder):
    return make_tiny_model_dir(folder / "teacher", init_std=0.2, seed=6, head_dim=32)


def check_equal(tmp_path, top_k, how, ranks):
    """Jobs with a teacher on a training engine, and with one that is computed as `how` says, agree."""
    inputs = Inputs.make(tmp_path / "inputs")
    teacher = teacher_in(tmp_path)
    (tmp_path / "keep.py").write_text(KEEP.replace("{folder!r}", repr(str(tmp_path))))
    names = ("top_log_prob", "top_ids") if top_k else ("log_prob",)
    columns = ", ".join(f"{node}_teacher_{name}" for node in ("computed", "scored") for name in names)
    scored = SCORED.replace("HOW", how).replace("CODE", str(tmp_path / "keep.py")).replace("COLUMNS", columns)
    losses = {}
    for name, more in (("computed", ""), ("scored", scored)):
        (tmp_path / f"{name}.yaml").write_text(WORKFLOW + more + TRAIN.replace("TEACHER", name))
        keys = (
            f"dag.workflow_path={tmp_path / name}.yaml",
            f"teacher.model.path={teacher}",
            "teacher.fsdp_config.mixed_precision.param_dtype=float32",
            f"{ACTOR}.distill.top_k={top_k}",
            f"{ACTOR}.ppo_mini_batch_size=8",
            f"{ROLLOUT}.max_num_seqs=16",
            f"trainer.n_gpus_per_node={ranks}",
            *("trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1"),
            "trainer.deadline_s=240",
        )
        losses[name] = run_job(ranks, overrides(inputs, tmp_path / name, *keys), 300).values(
            "actor/distill_loss"
        )
    assert len(losses["scored"]) == 2 and losses["scored"] == pytest.approx(losses["computed"], abs=1e-4)
    assert min(map(abs, losses["computed"])) > 1e-2
    for step in (1, 2):
        kept = torch.load(tmp_path / f"{step}.0.pt")
        assert len(kept["response_length"].unique()) > 1 or step == 2
        for name in names:
            one, other = kept[f"computed_teacher_{name}"], kept[f"scored_teacher_{name}"]
            assert one.shape == other.shape and one.dtype == other.dtype and bool((one != 0).any())
            torch.testing.assert_close(other, one, atol=1e-4, rtol=0)
