"""An agent whose adapter goes to its engine alone trains as one whose adapter is merged, with fewer bytes."""

import pytest
from fixtures_tiny import make_tiny_model_dir
from job_harness import Inputs, overrides, run_job

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    made = Inputs.make(tmp_path_factory.mktemp("inputs"))
    make_tiny_model_dir(made.model, init_std=0.2, head_dim=32)  # vLLM's CPU attention has no smaller heads
    return made


def run(inputs: Inputs, out, world: int, merges: bool, *more: str):
    keys = (
        "trainer.total_training_steps=3",
        f"{MODEL}.lora_rank=4",
        f"{ROLLOUT}.merge_lora={merges}",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.optim.lr=0.01",
    )
    return run_job(world, overrides(inputs, out, *keys, *more), 300)


MEGATRON = (f"{ACTOR}.strategy=megatron", f"{REF}.strategy=megatron", f"{ACTOR}.megatron.param_dtype=float32")
VLLM = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_seqs=64", "trainer.deadline_s=240")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world", "keys"),
    [
        pytest.param(1, (), id="one rank"),
        pytest.param(2, (), marks=pytest.mark.slow, id="two ranks"),
        pytest.param(2, MEGATRON, marks=pytest.mark.slow, id="megatron"),
        pytest.param(1, VLLM, marks=pytest.mark.slow, id="vllm"),
    ],
)
def test_an_adapter_alone_is_what_a_merged_one_is(inputs, tmp_path, world, keys):
    merged, alone = (run(inputs, tmp_path / str(merges), world, merges, *keys) for merges in (True, False))
    for name in ("reward/score", "actor/grad_norm", "actor/ref_kl", "actor/entropy"):
        assert alone.values(name) == pytest.approx(merged.values(name), rel=1e-3, abs=1e-6), name
    assert alone.values("actor/ref_kl")[-1] > 1e-4, "the adapter has moved from the reference, which has none"
    assert max(alone.values("actor/rollout_log_prob_diff_max")) < 1e-3
    before, after = merged.weights(), alone.weights()
    assert before.keys() == after.keys()
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 1e-4
    sent = alone.values("weight_sync/bytes")
    assert max(sent[1:]) < 0.3 * min(merged.values("weight_sync/bytes"))
