"""Engines of a conversation are awake at once: what they take of a device; and what full KL adds."""

import time

import pytest
from plan_cases import add_agent, compiled, config, template_plan

from siirl.compiler.compile import compile_plan
from siirl.compiler.memory.estimate import fsdp_lines, model_shape
from siirl.compiler.memory.resident_engines import resident_shares, shares_text
from siirl.config import with_overrides
from siirl.dag.spec import DagBuilder
from siirl.errors import PlacementError
from siirl.show.plan_text import report

SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
VLLM = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=/no/such/model")


def talk(first=None, second=None, apart=False) -> DagBuilder:
    """Two agents that talk (apart: each by itself), with the config of their rollouts."""
    dag = DagBuilder("talk")
    above = add_agent(dag, 0, config=first or {})["rollout"]
    add_agent(dag, 1, config=second or {}, dependencies=[] if apart else [above])
    return dag


@pytest.mark.parametrize(
    ("dag", "overrides", "sum_of"),
    [
        (talk(), (f"{SHARE}=0.5",), "0.5 (agent_0.rollout) + 0.5 (agent_1.rollout) = 1 "),
        (talk({"rollout.gpu_memory_utilization": 0.8}), (f"{SHARE}=0.2",), "= 1 "),
        (talk({"rollout.engine_kwargs.vllm": {"gpu_memory_utilization": 0.6}}), (f"{SHARE}=0.4",), "= 1 "),
    ],
)
def test_engines_that_do_not_fit_together_are_refused_with_the_shares_and_the_fix(dag, overrides, sum_of):
    with pytest.raises(PlacementError) as caught:
        compiled(dag.build(), 2, *VLLM, *overrides)
    for words in (
        "'rollout_0'",
        "ranks 0-1",
        sum_of,
        f"{SHARE}=0.47",
        "share_instance",
        "ranks of their own",
    ):
        assert words in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("dag", "overrides"),
    [
        (talk(), (f"{SHARE}=0.475",)),
        (talk(apart=True), (f"{SHARE}=0.9",)),
        (talk(), ("trainer.device=cpu",)),
        (talk(second={"rollout.name": "hf"}), (f"{SHARE}=0.9",)),
    ],
)
def test_engines_that_fit_or_take_turns_are_planned(dag, overrides):
    compiled(dag.build(), 2, *VLLM, *overrides)


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        (None, None, [0.47, 0.47]),
        ({"rollout.gpu_memory_utilization": 0.6}, None, [0.6, 0.35]),
        (None, {"rollout.engine_kwargs.vllm": {"gpu_memory_utilization": 0.3}}, [0.5, 0.3]),
    ],
)
def test_engines_divide_a_device_where_nobody_set_a_share(first, second, shares):
    plan, configs = compile_plan(talk(first, second).build(), config(*VLLM), 2)
    assert (
        list(resident_shares(plan.interactions["rollout_0"], plan.models, configs)[0, 1].values()) == shares
    )
    for node, share in zip(("rollout_0", "rollout_1"), shares, strict=True):
        own = with_overrides(config(*VLLM), plan.nodes[node].overrides).actor_rollout_ref.rollout
        assert own.engine_kwargs.vllm.get("gpu_memory_utilization", own.gpu_memory_utilization) == share


def test_the_plan_names_the_share_of_each_engine_that_is_awake():
    plan, configs = compile_plan(talk().build(), config(*VLLM, f"{SHARE}=0.45"), 2)
    shares = resident_shares(plan.interactions["rollout_0"], plan.models, configs)
    assert shares == {(0, 1): {"agent_0.rollout": 0.45, "agent_1.rollout": 0.45}}
    assert shares_text(shares[0, 1]) in report(plan, configs)


def test_full_kl_counts_hidden_states_on_the_host_and_the_output_layer_of_the_reference():
    keys = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full")
    cfg = config(
        *keys, "data.max_response_length=100", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    )
    shape = model_shape(
        {
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "vocab_size": 1000,
        }
    )
    models = template_plan(2, *keys).models
    found = {}
    for role in ("ref", "actor"):
        lines = fsdp_lines(models[f"agent_0.{role}"], cfg, shape, 16)
        (found[role],) = [line for line in lines if line.what == "hidden states"]
    assert found["ref"].host and found["ref"].num_bytes == 16 * 100 * 128 * 2
    assert not found["actor"].host and found["actor"].num_bytes == (1000 + 512 + 100) * 128 * 2
    plain = fsdp_lines(models["agent_0.actor"], config(), shape, 16)
    assert not any(line.what == "hidden states" for line in plain)


def test_a_plan_of_four_agents_that_talk_on_10000_ranks_takes_seconds():
    """0.5 s of a processor; every rank was looked for among all others, which takes the square of them."""
    dag = DagBuilder("four")
    above = []
    for agent in range(4):
        above = [add_agent(dag, agent, dependencies=above)["rollout"]]
    cfg = config(*VLLM, "data.train_batch_size=40000", "actor_rollout_ref.actor.ppo_mini_batch_size=40000")
    begun = time.process_time()
    plan, _ = compile_plan(dag.build(), cfg, 10_000)
    assert time.process_time() - begun < 6
    assert plan.interactions["rollout_0"].policies == tuple(f"agent_{agent}.rollout" for agent in range(4))
