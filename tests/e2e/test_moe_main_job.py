"""The main job with mixtures of experts: every layout, and FSDP2, trains what one rank does."""

import functools

import causal_lms
import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from job_harness import Finished, Inputs, overrides, run_job

from siirl.engines.weights.target import stored_tensors_of
from siirl.models.families import types_with

GROUP_ROUTED = types_with(lambda row: row.experts and row.experts.groups)

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
REF = "actor_rollout_ref.ref"
FOUR_OPTIMIZER_STEPS = (
    "trainer.total_training_steps=2",
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.optim.lr=1e-3",
    f"+{ACTOR}.optim.override_optimizer_config={{eps:1e-6}}",
    f"{MEGATRON}.param_dtype=float32",
    f"{REF}.megatron.param_dtype=float32",
)
TP2 = (f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.sequence_parallel=True")
EP2 = (f"{MEGATRON}.expert_model_parallel_size=2",)
ON_MEGATRON = f"{ACTOR}.strategy=megatron"
LAYOUTS = {
    "alone": (ON_MEGATRON,),
    "ep2": (ON_MEGATRON, *EP2),
    "tp2": (ON_MEGATRON, *TP2),
    "tp2 ep2": (ON_MEGATRON, *TP2, *EP2),
    "fsdp": (f"{ACTOR}.strategy=fsdp",),
    "fsdp alone": (f"{ACTOR}.strategy=fsdp",),
    "fsdp ep2": (f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.expert_parallel_size=2"),
}


CASES = [
    ("mixtral", "hf", "ep2"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("qwen3_moe", "vllm", "tp2 ep2"),
            ("qwen3_moe", "vllm", "ep2"),
            ("qwen3_moe", "vllm", "tp2"),
            ("qwen3_moe", "hf", "tp2"),
            ("mixtral", "hf", "fsdp"),
            ("qwen3_moe", "vllm", "fsdp"),
            ("mixtral", "hf", "fsdp ep2"),
            ("qwen3_moe", "vllm", "fsdp ep2"),
            ("gpt_oss", "hf", "fsdp"),
            ("gpt_oss", "hf", "fsdp ep2"),
            ("mixtral", "vllm", "tp2"),
            ("mixtral", "vllm", "tp2 ep2"),
            ("glm4_moe", "hf", "tp2 ep2"),
            ("glm4_moe", "hf", "fsdp ep2"),
        )
    ),
]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs a job once: (family, rollout engine, layout) -> what is left of it."""

    @functools.cache
    def inputs(family: str) -> Inputs:
        made = Inputs.make(tmp_path_factory.mktemp("inputs"))
        if family in GROUP_ROUTED:
            sizes = {"max_position_embeddings": 512, "tie_word_embeddings": False}
            causal_lms.write_model(
                make_tiny_model_dir(made.model, weights=False), causal_lms.tiny_config(family, **sizes)
            )
            return made
        # Of Qwen3's, experts of 24, which vLLM's CPU kernel fills up to 32.
        mlp = {"qwen3_moe": 48, "mixtral": 64, "gpt_oss": 64}[family]
        make_tiny_model_dir(made.model, family, tie=False, init_std=0.2, head_dim=32, mlp=mlp)
        return made

    @functools.cache
    def run(family: str, rollout: str = "hf", layout: str = "alone") -> Finished:
        engine = (f"actor_rollout_ref.rollout.name={rollout}", "trainer.deadline_s=300")
        folder = tmp_path_factory.mktemp("run")
        arguments = overrides(inputs(family), folder, *FOUR_OPTIMIZER_STEPS, *engine, *LAYOUTS[layout])
        return run_job(1 if layout.endswith("alone") else 2, arguments, deadline_s=500)

    return run


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "rollout", "layout"), CASES)
def test_a_mixture_of_experts_trains_alike_in_every_layout(train, family, rollout, layout):
    alone = "fsdp alone" if family == "gpt_oss" else "alone"
    ours, theirs = train(family, rollout, layout), train(family, layout=alone)
    for name in ("actor/loss", "actor/grad_norm", "actor/ref_kl", "reward/score"):
        assert len(ours.values(name)) == 2, name
        assert ours.values(name) == pytest.approx(theirs.values(name), rel=1e-4, abs=2e-5), name
    assert max(ours.values("actor/rollout_log_prob_diff")) < 1e-5
    mine, wanted = ours.weights(), theirs.weights()
    assert mine.keys() == wanted.keys()
    assert max(float((mine[name] - wanted[name]).abs().max()) for name in wanted) < 1e-4


@pytest.mark.parametrize("layout", ["ep2", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_exported_model_is_the_one_that_rolled_out_last(train, layout):
    from transformers import AutoModelForCausalLM

    run = train("mixtral", "hf", layout)
    model = AutoModelForCausalLM.from_pretrained(run.output / "hf_model", dtype=torch.float32)
    parts = stored_tensors_of(model)
    assert parts.keys() == run.weights().keys()
    for name, weight in run.weights().items():
        assert torch.equal(parts[name], weight), name
