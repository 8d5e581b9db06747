"""Agents with an adapter each on one base: what the plan makes of them, and which of them are refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from plan_cases import add_agent, compiled, config, run_symbolically

from siirl.compiler.backends import backend_of
from siirl.compiler.compile import compile_plan
from siirl.compiler.memory.estimate import read_shape
from siirl.compiler.plan import Plan
from siirl.config.effects import effect_warnings
from siirl.dag.spec import DagBuilder, DagSpec
from siirl.errors import DagError, NotSupportedError

RANK = "actor_rollout_ref.model.lora_rank"
LORA = f"{RANK}=8"
SHARE = {"rollout.agent.share_instance": 0}


def agents(*options: dict[str, Any], talk: bool = True) -> DagBuilder:
    """Trained agents with these rollout options, the first of them number 0; talk: one after the other."""
    dag, above = DagBuilder("adapters"), []
    for agent, more in enumerate(options):
        above = [add_agent(dag, agent, **({"dependencies": above} if talk else {}), **more)["rollout"]]
    return dag


def on(base: int, **keys: Any) -> dict[str, Any]:
    return {"config": {"rollout.agent.share_instance": base, **keys}}


def bases(plan: Plan) -> dict[str, str | None]:
    return {name: model.base for name, model in plan.models.items()}


def test_agents_with_an_actor_and_lora_share_the_base_and_keep_their_policies():
    keys = (LORA, "actor_rollout_ref.actor.use_kl_loss=true")
    plan = compiled(with_references(agents({}, on(0), on(0))), 2, *keys)
    expected = {}
    for agent in range(3):
        expected |= {f"agent_{agent}.rollout": "agent_0.rollout", f"agent_{agent}.actor": "agent_0.actor"}
        expected |= {f"agent_{agent}.ref": "agent_0.actor"}
    assert bases(plan) == expected
    order = list(plan.models)
    assert max(order.index(f"agent_0.{role}") for role in ("actor", "rollout")) < order.index("agent_1.actor")
    (interaction,) = plan.interactions.values()
    assert [(stage.policy, stage.rows) for stage in interaction.stages] == [(0, True), (1, True), (2, True)]
    assert set(interaction.policies) == {f"agent_{agent}.rollout" for agent in range(3)}
    assert Plan.from_json(plan.to_json()) == plan
    ran = run_symbolically(plan)
    assert {f"train_{agent}" for agent in range(3)} < ran.keys()


def test_an_engine_has_room_for_the_rank_of_each_adapter_on_its_base():
    plan = compiled(agents({}, on(0, **{"model.lora_rank": 2})).build(), 1, LORA)
    own = plan.models["agent_0.rollout"].adapters
    assert own["agent_1.rollout"] == 2 and own["agent_0.rollout"] == int(LORA.partition("=")[2]) != 2


def with_references(dag: DagBuilder, number: int = 3) -> DagSpec:
    """The DAG with a reference for each agent, above its trainer."""
    for agent in range(number):
        above = [f"rollout_{agent}"]
        dag.node(f"ref_{agent}", "MODEL_TRAIN", "REFERENCE", agent_group=agent, dependencies=above)
    spec = dag.build()
    nodes = [
        replace(node, dependencies=(*node.dependencies, f"ref_{node.agent_group}"))
        if node.node_id.startswith("train_")
        else node
        for node in spec.nodes
    ]
    return replace(spec, nodes=tuple(nodes))


def test_agents_that_do_not_talk_share_a_base_too_and_others_keep_copies():
    plan = compiled(agents({}, on(0), {}, talk=False).build(), 2, LORA)
    assert bases(plan) == {
        "agent_0.rollout": "agent_0.rollout",
        "agent_0.actor": "agent_0.actor",
        "agent_1.rollout": "agent_0.rollout",
        "agent_1.actor": "agent_0.actor",
        "agent_2.rollout": None,
        "agent_2.actor": None,
    }
    apart = compiled(agents({"placement": "0"}, on(0) | {"placement": "1"}, talk=False).build(), 2, LORA)
    assert set(bases(apart).values()) == {None}, "on other ranks there is nothing to share"


def test_without_an_actor_node_share_instance_still_means_the_policy():
    dag = agents({})
    dag.node("second", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=["rollout_0"], config=SHARE)
    plan = compiled(dag.build(), 2, LORA)
    assert "agent_1.rollout" not in plan.models and set(bases(plan).values()) == {None}


REFUSED = {
    "no lora": (lambda: agents({}, on(0)), (), ["'reward_1' belongs to agent 1", "model.lora_rank above 0"]),
    "unknown": (lambda: agents({}, on(7)), (LORA,), ["share_instance = 7", "no agent 7", "rollout: 0"]),
    "itself": (lambda: agents({}, on(1)), (LORA,), ["share_instance = 1", "1 -> 1"]),
    "cycle": (lambda: agents({}, on(2), on(1)), (LORA,), ["1 -> 2 -> 1"]),
    "chain": (lambda: agents({}, on(0), on(1)), (LORA,), ["2 -> 1 -> 0"]),
    "trained base": (
        lambda: agents({}, on(0, **{"model.lora_rank": 4})),
        (),
        ["agent 0 trains no LoRA adapter (its model.lora_rank is 0)", "a copy of its own"],
    ),
    "other model": (
        lambda: agents({}, on(0, **{"model.path": "/elsewhere"})),
        (LORA,),
        ["actor_rollout_ref.model.path is /elsewhere here", "model.{lora_rank"],
    ),
    "other engine": (
        lambda: agents({}, on(0, **{"rollout.dtype": "float32"})),
        (LORA,),
        ["actor_rollout_ref.rollout.dtype is float32 here and bfloat16"],
    ),
    "no interaction": (lambda: unheard(), (LORA,), ["'rollout_1'", "in no interaction"]),
}


def unheard() -> DagBuilder:
    dag = agents({})
    dag.node("rollout_1", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, config=SHARE)
    return dag


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_without_a_base_is_refused(name):
    build, keys, fragments = REFUSED[name]
    with pytest.raises(DagError) as caught:
        compiled(build().build(), 2, *keys)
    for fragment in fragments:
        assert fragment in str(caught.value), f"{fragment!r} is not in: {caught.value}"


def test_one_base_is_cut_in_one_way_whoever_shares_rows():
    def with_key(key: str, value: int) -> DagSpec:
        spec, own = agents({}, on(0)).build(), {f"actor.{key}": value}
        nodes = [replace(node, config=own) if node.node_id == "train_1" else node for node in spec.nodes]
        return replace(spec, nodes=tuple(nodes))

    with pytest.raises(DagError, match=r"'train_1'.*'train_0'.*fsdp_size"):
        compiled(with_key("fsdp_config.fsdp_size", 1), 2, LORA)
    plan = compiled(with_key("ulysses_sequence_parallel_size", 2), 2, LORA)
    assert [plan.models[f"agent_{agent}.actor"].dims.cp for agent in (0, 1)] == [1, 2]
    assert bases(plan)["agent_1.actor"] == "agent_0.actor"


def test_the_memory_estimate_counts_the_base_once(tmp_path):
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "intermediate_size": 512, **sizes})
    )
    cfg = config(LORA, f"actor_rollout_ref.model.path={tmp_path}")
    plan, configs = compile_plan(agents({}, on(0)).build(), cfg, 1)
    held = {}
    for name, model in plan.models.items():
        shape = read_shape(configs[model.node], model.role)
        lines = backend_of(model).memory(model, configs[model.node], shape, 32)
        held[name] = {line.what: line.num_bytes for line in lines}
    adapter = 8 * 8 * (4 * (256 + 256) + 3 * (256 + 512))
    base = shape.params
    assert held["agent_0.actor"]["parameters"] == 4 * (base + adapter)
    assert held["agent_1.actor"]["parameters"] == 4 * adapter
    assert held["agent_1.actor"]["optimizer"] == held["agent_0.actor"]["optimizer"] == 8 * adapter
    assert held["agent_0.rollout"]["weights"] == 2 * (base + adapter)
    assert held["agent_1.rollout"]["weights"] == 2 * adapter


def test_trainers_under_megatron_have_copies_of_the_base_that_their_rollouts_share():
    plan = compiled(agents({}, on(0)).build(), 2, LORA, "actor_rollout_ref.actor.strategy=megatron")
    bases = {name: model.base for name, model in plan.models.items()}
    assert bases["agent_0.actor"] is bases["agent_1.actor"] is None
    assert bases["agent_1.rollout"] == "agent_0.rollout"


def test_the_memory_estimate_counts_what_trains_under_megatron(tmp_path):
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "intermediate_size": 512, **sizes})
    )
    keys = (f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.actor.strategy=megatron")
    held = {}
    for rank in (0, 8):
        cfg = config(f"{RANK}={rank}", *keys)
        plan, configs = compile_plan(agents({}).build(), cfg, 1)
        model, own = plan.models["agent_0.actor"], configs[plan.models["agent_0.actor"].node]
        shape = read_shape(own, model.role)
        held[rank] = {line.what: line.num_bytes for line in backend_of(model).memory(model, own, shape, 32)}
    adapter = 8 * 8 * (4 * (256 + 256) + 3 * (256 + 512))
    assert held[8]["parameters"] == held[0]["parameters"] + 2 * adapter
    assert held[8]["gradients"] == 4 * adapter and held[0]["gradients"] == 4 * shape.params
    assert held[8]["optimizer"] == 12 * adapter


def test_adapters_on_experts_and_one_base_do_not_go_together(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 4}))
    keys = (LORA, f"actor_rollout_ref.model.path={tmp_path}")
    with pytest.raises(
        DagError, match=r"gate_proj, up_proj, down_proj of experts: .*attention only"
    ) as caught:
        compiled(agents({}, on(0)).build(), 1, *keys)
    fix = next(
        word for word in str(caught.value).split() if word.startswith("actor_rollout_ref.model.target")
    )
    compiled(agents({}, on(0)).build(), 1, *keys, fix)
    compiled(agents({}, {}).build(), 1, *keys)


ALONE = "actor_rollout_ref.rollout.merge_lora=false"


@pytest.mark.parametrize("engine", ["hf", "vllm"])
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_an_adapter_alone_has_a_base_of_its_own_that_its_reference_uses(engine, strategy):
    keys = [LORA, f"actor_rollout_ref.rollout.name={engine}", "actor_rollout_ref.actor.use_kl_loss=true"]
    keys += [f"actor_rollout_ref.{role}.strategy={strategy}" for role in ("actor", "ref")]
    dag = with_references(agents({}), 1)
    merged, alone = compiled(dag, 2, *keys), compiled(dag, 2, *keys, ALONE)
    assert set(bases(merged).values()) == {None}
    rollout, actor = "agent_0.rollout", "agent_0.actor" if strategy == "fsdp" else None
    assert bases(alone) == {rollout: rollout, "agent_0.actor": actor, "agent_0.ref": actor}
    assert alone.models[rollout].adapters == {rollout: 8}
    assert Plan.from_json(alone.to_json()) == alone


def test_of_agents_each_on_its_own_base_none_uses_anothers():
    own = {"config": {"rollout.merge_lora": False}}
    plan = compiled(agents(own, own, {}).build(), 2, LORA)
    assert {name: base for name, base in bases(plan).items() if base} == {
        f"agent_{agent}.rollout": f"agent_{agent}.rollout" for agent in range(2)
    }


def test_an_agent_on_anothers_base_stays_on_it_whether_it_merges_or_not():
    plan = compiled(agents({}, on(0, **{"rollout.merge_lora": False})).build(), 2, LORA)
    assert bases(plan)["agent_1.rollout"] == bases(plan)["agent_0.rollout"] == "agent_0.rollout"


def test_an_adapter_alone_is_refused_where_no_engine_has_it(tmp_path):
    with pytest.raises(DagError, match=r"rollout.name=sglang: .*one of hf, vllm"):
        compiled(agents({}).build(), 1, LORA, ALONE, "actor_rollout_ref.rollout.name=sglang")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 4}))
    with pytest.raises(DagError, match=r"merge_lora=false, and .* of experts: .*merge_lora=true"):
        compiled(agents({}).build(), 1, LORA, ALONE, f"actor_rollout_ref.model.path={tmp_path}")


@pytest.mark.parametrize("key", ["replace_weights=in_place", "quantization=fp8"])
def test_an_adapter_alone_does_not_go_with_weights_that_come_in_each_sync(key):
    rollout = "actor_rollout_ref.rollout"
    keys = (
        f"{rollout}.name=vllm",
        f"{rollout}.{key}",
        f"{rollout}.max_log_prob_diff=1",
        "trainer.device=cuda",
    )
    compiled(agents({}).build(), 1, LORA, *keys)
    with pytest.raises(NotSupportedError, match="adapters that are not merged"):
        compiled(agents({}).build(), 1, LORA, ALONE, *keys)


def test_the_key_is_told_to_have_no_effect_without_an_adapter():
    (line,) = (line for line in effect_warnings(config(ALONE)) if "merge_lora" in line)
    assert "no effect" in line and "lora_rank" in line
