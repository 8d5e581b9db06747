"""What a DAG means, shown on compiled plans: a node runs when all its dependencies have run, and so on."""

from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from plan_cases import add_agent, compiled, custom, moves, order, run_symbolically, template_plan

from siirl.compiler.compile import TEMPLATES
from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Free, Load, Reshard, Run, SyncWeights
from siirl.dag.spec import DagBuilder
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import DagError, NotSupportedError, UserError
from siirl.show.plan_text import sizes
from siirl.types import FieldKey, Layout

KL = "actor_rollout_ref.actor.use_kl_loss=true"
BALANCE = "trainer.balance_batch=true"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size=4"


def run_of(plan: Plan, node: str) -> Run:
    return plan.run_of(node)


def names(keys: tuple[FieldKey, ...]) -> set[str]:
    return {key.name for key in keys}


def test_grpo_on_one_layout_moves_no_rows():
    plan = template_plan(4)
    assert order(plan) == ["rollout_actor", "function_reward", "calculate_advantages", "actor_train"]
    assert moves(plan)["Reshard"] == 0
    assert run_symbolically(plan) == dict.fromkeys(order(plan), (0, 1, 2, 3))
    assert run_symbolically(plan, "validation") == dict.fromkeys(order(plan)[:2], (0, 1, 2, 3))


def test_a_reference_is_built_only_if_a_kl_term_reads_it():
    assert "reference_log_prob" in template_plan(2).pruned
    assert "agent_0.ref" not in template_plan(2).models
    for overrides in ((KL,), ("algorithm.use_kl_in_reward=true",)):
        plan = template_plan(2, *overrides)
        assert "reference_log_prob" not in plan.pruned
        assert plan.models["agent_0.ref"].trains is False
        run_symbolically(plan)


def test_old_log_probs_are_computed_only_if_a_batch_is_cut_into_mini_batches():
    for epochs in (1, 2):
        plan = template_plan(2, f"actor_rollout_ref.actor.ppo_epochs={epochs}")
        assert "one mini-batch" in plan.pruned["actor_old_log_prob"]
        several = template_plan(2, f"actor_rollout_ref.actor.ppo_epochs={epochs}", MINI)
        assert FieldKey(0, "old_log_prob") in run_of(several, "actor_train").reads
        assert several.nodes["actor_old_log_prob"].op == "later_old_log_prob"
        assert FieldKey(0, "row_id") in run_of(several, "actor_old_log_prob").reads
    off = template_plan(2, MINI, "actor_rollout_ref.actor.recompute_old_log_prob=false")
    assert "recompute_old_log_prob is off" in off.pruned["actor_old_log_prob"]


@pytest.mark.parametrize(
    ("overrides", "op"),
    [
        ((MINI,), "later_old_log_prob"),
        ((MINI, KL), "later_old_log_prob"),
        ((MINI, "actor_rollout_ref.rollout.max_lag=2"), "later_old_log_prob"),
        ((MINI, "actor_rollout_ref.actor.shuffle=true"), "later_old_log_prob"),
        ((MINI, "algorithm.filter_groups.enable=true"), "later_old_log_prob"),  # below the sampling
        ((MINI, "algorithm.use_kl_in_reward=true"), "old_log_prob"),  # read before the update
        ((MINI, "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"), "old_log_prob"),  # picks by them
        (
            (MINI, "algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true"),
            "old_log_prob",
        ),  # rows are drawn
    ],
)
def test_the_first_mini_batch_is_skipped_where_the_loss_alone_reads_its_old_log_probs(overrides, op):
    assert template_plan(2, *overrides).nodes["actor_old_log_prob"].op == op


@pytest.mark.parametrize(
    ("change", "op"),
    [
        ("none", "later_old_log_prob"),
        ("reader", "old_log_prob"),
        ("filter", "old_log_prob"),
        ("cut", "old_log_prob"),
    ],
)
def test_old_log_probs_of_all_rows_are_there_for_whoever_else_reads_them(change, op):
    """A node of the user's; a filter in between leaves other rows than those of the pass; or another cut."""
    dag, common = DagBuilder("own"), {"agent_group": 0}
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT", **common)
    old = dag.node("old", "MODEL_TRAIN", "ACTOR", dependencies=[rollout], only_forward_compute=True, **common)
    reward = dag.node("reward", "COMPUTE", "REWARD", dependencies=[rollout], **common)
    filtered = {"filter_plugin": "user.code:keep"} if change == "filter" else {}
    advantage = dag.node(
        "advantage", "COMPUTE", "ADVANTAGE", dependencies=[reward, old], **common, **filtered
    )
    cut = {"config": {"actor.shuffle": True}} if change == "cut" else {}
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage], **common, **cut)
    if change == "reader":
        custom(dag, "reader", [old], ["old_log_prob"], [])
    plan = compiled(dag.build(), 2, MINI)
    assert plan.nodes["old"].op == op
    run_symbolically(plan)


def test_where_agents_talk_the_first_mini_batch_is_one_of_episodes():
    dag = load_dag_file(TEMPLATES / "solver_verifier.yaml")
    plan = compiled(dag, 2, MINI)
    run_symbolically(plan)
    for agent, name in enumerate(("old_solver", "old_verifier")):
        assert plan.nodes[name].op == "later_old_log_prob"
        assert FieldKey(agent, "episode_id") in run_of(plan, name).reads


def test_old_log_probs_are_kept_for_a_kl_in_the_reward_even_with_one_optimizer_step():
    plan = template_plan(2, "algorithm.use_kl_in_reward=true")
    assert plan.pruned == {}
    assert {"old_log_prob", "ref_log_prob"} <= names(run_of(plan, "calculate_advantages").reads)
    assert "old_log_prob" not in names(run_of(plan, "actor_train").reads)


def test_what_depends_on_a_pruned_node_waits_for_what_the_pruned_node_waited_for():
    plan = template_plan(2)
    assert plan.nodes["calculate_advantages"].dependencies == ("function_reward", "rollout_actor")


def test_a_chain_of_pruned_nodes_is_skipped_whole():
    dag = DagBuilder("chain")
    ids = add_agent(dag)
    first = custom(dag, "first", [ids["reward"]], ["score"], ["a"])
    custom(dag, "second", [first], ["a"], ["b"])
    plan = compiled(dag.build(), 2)
    assert set(plan.pruned) == {"first", "second"}
    assert plan.pruned["first"] == "nothing reads a"


def test_a_custom_node_that_writes_nothing_is_a_sink_that_runs():
    dag = DagBuilder("sinks")
    ids = add_agent(dag)
    custom(dag, "watch", [ids["reward"]], ["score"], [])
    custom(dag, "log", [ids["reward"]], ["response_length"], [])
    plan = compiled(dag.build(), 2)
    assert set(run_symbolically(plan)) == {*ids.values(), "watch", "log"}


def test_a_fan_out_gives_its_rows_to_every_child():
    dag = DagBuilder("fan_out")
    ids = add_agent(dag)
    for index in range(3):
        custom(dag, f"child_{index}", [ids["rollout"]], ["response_ids", "raw_prompt"], [])
    plan = compiled(dag.build(), 2)
    run_symbolically(plan)
    assert all(names(run_of(plan, f"child_{i}").reads) == {"response_ids", "raw_prompt"} for i in range(3))
    assert "raw_prompt" in names(run_of(plan, ids["rollout"]).writes), (
        "prompt fields are carried to the samples"
    )


def test_a_join_waits_for_all_parents_of_a_diamond_of_unequal_length():
    dag = DagBuilder("diamond")
    ids = add_agent(dag)
    short = custom(dag, "short", [ids["reward"]], ["score"], ["x"])
    long_1 = custom(dag, "long_1", [ids["reward"]], ["score"], ["y"])
    long_2 = custom(dag, "long_2", [long_1], ["y"], ["z"])
    custom(dag, "join", [short, long_2], ["x", "z"], [])
    plan = compiled(dag.build(), 2)
    run_symbolically(plan)
    assert order(plan).index("join") > max(order(plan).index(node) for node in ("short", "long_2"))
    assert names(run_of(plan, "join").reads) == {"x", "z"}


def test_order_is_topological_with_declaration_as_tie_break():
    dag = DagBuilder("order")
    ids = add_agent(dag)
    late = custom(dag, "zz_declared_first", [ids["reward"]], ["score"], [])
    early = custom(dag, "aa_declared_second", [ids["reward"]], ["score"], [])
    plan = compiled(dag.build(), 1)
    assert order(plan) == [ids["rollout"], ids["reward"], ids["advantage"], ids["train"], late, early]


def test_two_agents_on_disjoint_ranks_never_meet():
    dag = DagBuilder("two")
    first, second = add_agent(dag, 0, "0-1"), add_agent(dag, 1, "2-3")
    plan = compiled(dag.build(), 4, BALANCE)
    ran = run_symbolically(plan)
    assert {ran[node] for node in first.values()} == {(0, 1)}
    assert {ran[node] for node in second.values()} == {(2, 3)}
    assert all(set(ins.ranks) in ({0, 1}, {2, 3}) for ins in (*plan.instructions, *plan.validation))
    assert {(0, 1), (2, 3)} <= set(plan.groups)
    assert plan.loaders["agent_1.prompts"].node == second["rollout"]
    nodes_of_rank_3 = [ins.node for ins in plan.of_rank(3) if isinstance(ins, Run)]
    assert nodes_of_rank_3 == list(second.values())


def test_two_agents_on_the_same_ranks_are_serialised_and_share_nothing():
    dag = DagBuilder("two")
    add_agent(dag, 0), add_agent(dag, 1)
    plan = compiled(dag.build(), 2)
    run_symbolically(plan)
    assert set(plan.models) == {"agent_0.rollout", "agent_0.actor", "agent_1.rollout", "agent_1.actor"}
    for ins in plan.instructions:
        if isinstance(ins, Run):
            assert {key.agent for key in (*ins.reads, *ins.writes)} == {plan.nodes[ins.node].agent}


def test_overlapping_placements_reshard_within_the_union_of_their_ranks():
    dag = DagBuilder("overlap")
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT", placement="2-3")
    reward = dag.node("reward", "COMPUTE", "REWARD", dependencies=[rollout])
    advantage = dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=[reward])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage], placement="0-2")
    plan = compiled(dag.build(), 5)
    ran = run_symbolically(plan)
    assert ran == {"rollout": (2, 3), "reward": (2, 3), "advantage": (2, 3), "train": (0, 1, 2)}
    [reshard] = [ins for ins in plan.instructions if isinstance(ins, Reshard)]
    assert reshard.ranks == (0, 1, 2, 3)
    assert plan.links["agent_0.weights"].kind == "broadcast"
    assert plan.links["agent_0.weights"].ranks == (0, 1, 2, 3)
    assert plan.of_rank(4) == []
    assert (0, 1, 2, 3) in plan.groups


def test_a_rollout_inside_the_trainers_ranks_takes_weights_locally():
    dag = DagBuilder("inside")
    ids = add_agent(dag)
    plan = compiled(dag.build(), 2)
    assert plan.links["agent_0.weights"].kind == "local"
    kinds = [type(ins) for ins in plan.instructions if not isinstance(ins, Free)]
    assert kinds[:3] == [Load, SyncWeights, Run]
    assert order(plan)[0] == ids["rollout"]


def test_a_field_is_resharded_once_for_all_readers_of_a_layout():
    plan = template_plan(2, KL, BALANCE, MINI)
    run_symbolically(plan)
    moved = [(key, ins.route) for ins in plan.instructions if isinstance(ins, Reshard) for key in ins.keys]
    assert len(moved) == len(set(moved))
    assert moves(plan)["Reshard"] == 2


def test_rows_are_balanced_by_cost_within_mini_batches_only_if_asked_or_needed():
    assert {layout.split for layout in template_plan(2).layouts.values()} == {"group"}
    asked = template_plan(2, BALANCE)
    assert asked.layouts[run_of(asked, "actor_train").source] == Layout(
        (0, 1), (0, 1), "agent_0.samples", "prompt_cost", 0
    )
    several = template_plan(2, "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    train, old = (several.layouts[run_of(several, n).source] for n in ("actor_train", "actor_old_log_prob"))
    assert (train.split, train.mini_batch_rows) == ("prompt_cost", 16)
    assert train == old, "both passes of the actor share one layout"
    assert several.layouts[run_of(several, "calculate_advantages").source].split == "group"
    alone = template_plan(1, BALANCE)
    assert {layout.split for layout in alone.layouts.values()} == {"group"}


def test_a_frozen_model_of_more_shards_than_a_mini_batch_has_rows_takes_the_whole_batch():
    """Its passes have no mini-batches, so it is no matter how many rows there are in the actor's."""
    actor = "actor_rollout_ref.actor"
    small = (
        *("actor_rollout_ref.rollout.n=2", f"{actor}.ppo_mini_batch_size=1", f"{actor}.strategy=megatron"),
        f"{actor}.megatron.tensor_model_parallel_size=4",
    )
    model = ("reward_model.enable=true", "reward_model.model.path=/models/rm")
    plan = template_plan(4, *small, *model, KL, "actor_rollout_ref.ref.strategy=fsdp")
    for node in ("reward_model", "reference_log_prob"):
        layout = plan.layouts[run_of(plan, node).source]
        assert (layout.num_shards, layout.split, layout.mini_batch_rows) == (4, "prompt_cost", 0)
    run_symbolically(plan)


def test_a_node_waits_for_a_dependency_on_other_ranks_even_without_reading_from_it():
    dag = DagBuilder("order_only")
    ids = add_agent(dag, placement="0-1")
    slow = custom(dag, "slow", [ids["reward"]], ["score"], [], placement="2-3")
    custom(dag, "after", [slow], ["score"], [], placement="0-1")
    plan = compiled(dag.build(), 4)
    run_symbolically(plan)
    waits = [ins for ins in plan.before("after") if isinstance(ins, Reshard)]
    assert [ins.ranks for ins in waits] == [(0, 1, 2, 3)]


def test_no_exchange_is_added_where_ranks_know_already_that_a_dependency_has_run():
    dag = DagBuilder("known")
    ids = add_agent(dag, placement="0-1")
    first = custom(dag, "first", [ids["reward"]], ["score"], ["x"], placement="2-3")
    custom(dag, "second", [first, ids["reward"], ids["rollout"]], ["x"], [], placement="2-3")
    plan = compiled(dag.build(), 4)
    run_symbolically(plan)
    assert [ins for ins in plan.before("second") if isinstance(ins, Reshard)] == []


def test_a_custom_node_on_prompts_runs_before_the_rollout_and_its_field_is_carried():
    dag = DagBuilder("prompts")
    before = custom(dag, "difficulty", [], ["raw_prompt"], ["level"])
    ids = add_agent(dag, dependencies=[before])
    custom(dag, "use", [ids["reward"]], ["level", "score"], [])
    plan = compiled(dag.build(), 2)
    run_symbolically(plan)
    assert order(plan)[0] == "difficulty"
    assert plan.layouts[run_of(plan, "difficulty").source].rowset == "agent_0.prompts"
    assert "level" in names(run_of(plan, ids["rollout"]).writes)


def test_only_columns_that_somebody_reads_are_loaded():
    dag = DagBuilder("columns")
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    score = custom(dag, "score", [rollout], ["response_ids"], ["score"])
    advantage = dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=[score])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage])
    plan = compiled(dag.build(), 1)
    [load] = [ins for ins in plan.instructions if isinstance(ins, Load)]
    assert names(load.keys) == {"row_id", "group_id", "sample_index", "prompt_ids", "prompt_length"}


def test_a_node_of_one_agent_can_read_fields_of_another_whose_rows_pair_up():
    dag = DagBuilder("cross")
    first, second = add_agent(dag, 0, "0-1"), add_agent(dag, 1, "2-3")
    custom(dag, "compare", [first["reward"], second["reward"]], ["score", "agent_1.score"], [])
    plan = compiled(dag.build(), 4)
    ran = run_symbolically(plan)
    assert ran["compare"] == (0, 1)
    assert set(run_of(plan, "compare").reads) == {FieldKey(0, "score"), FieldKey(1, "score")}


APART = {
    "data.train_files": (["/a.parquet"], r"data\.train_files is .*a.parquet.* at node 'rollout_1'"),
    "data.val_files": (["/a.parquet"], "data.val_files is"),
    "data.shuffle": (False, "data.shuffle is True at node 'rollout_0' and False at node 'rollout_1'"),
    "data.seed": (7, "data.seed is"),
    "data.curriculum_key": ("level", "data.curriculum_key is"),
    "data.filter_overlong_prompts": (True, "data.filter_overlong_prompts is"),
}
LENGTHS = {
    "data.max_prompt_length": 64,
    "data.prompt_key": "question",
    "data.tokenizer": "/tokenizer",
    "data.apply_chat_template_kwargs": {"thinking": False},
    "model.path": "/other",
}


def compared(other: dict[str, Any], *overrides: str) -> Plan:
    """The plan of two agents whose scores are compared; other: what agent 1's rollout sets."""
    dag = DagBuilder("cross")
    first, second = add_agent(dag, 0), add_agent(dag, 1, config=other)
    custom(dag, "compare", [first["reward"], second["reward"]], ["score", "agent_1.score"], [])
    return compiled(dag.build(), 2, *overrides)


@pytest.mark.parametrize("key", APART)
def test_rows_of_two_agents_are_joined_only_if_they_come_from_the_same_prompts(key):
    value, words = APART[key]
    with pytest.raises(UserError, match=words):
        compared({key: value})


@pytest.mark.parametrize("key", LENGTHS)
def test_rows_pair_up_only_if_the_same_prompts_are_dropped_for_their_length(key):
    compared({key: LENGTHS[key]})
    with pytest.raises(DagError, match=r"decides what data\.filter_overlong_prompts drops"):
        compared({key: LENGTHS[key]}, "data.filter_overlong_prompts=true")


def test_validation_runs_rollouts_and_rewards_and_what_these_read_but_never_trains():
    dag = DagBuilder("validation")
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    hint = custom(dag, "parse", [rollout], ["response_ids"], ["answer"])
    fields = {"reads": ["answer"], "writes": ["score"]}
    reward = dag.node(
        "reward", "COMPUTE", "REWARD", dependencies=[hint], executable_ref="my.code:fn", **fields
    )
    other = custom(dag, "watch", [reward], ["score"], [])
    advantage = dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=[reward])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage])
    plan = compiled(dag.build(), 2)
    assert set(run_symbolically(plan, "validation")) == {"rollout", "parse", "reward"}
    assert other in run_symbolically(plan)


def test_a_users_function_can_replace_the_code_of_a_built_in_node():
    dag = DagBuilder("replaced")
    ids = add_agent(dag)
    spec = dag.build()
    changed = DagBuilder("replaced")
    for node in spec.nodes:
        extra = {"executable_ref": "mine.py:advantage"} if node.node_id == ids["advantage"] else {}
        changed.node(
            node.node_id, node.node_type, node.node_role, dependencies=list(node.dependencies), **extra
        )
    plan = compiled(changed.build(), 2)
    assert plan.nodes[ids["advantage"]].op == "custom"
    assert plan.nodes[ids["advantage"]].executable == "mine.py:advantage"
    assert run_of(plan, ids["advantage"]).reads == run_of(compiled(spec, 2), ids["advantage"]).reads


@pytest.mark.parametrize("override", ["actor_rollout_ref.actor.fsdp_config.fsdp_size=2"])
def test_hybrid_sharding_creates_the_groups_of_both_mesh_axes(override):
    plan = template_plan(4, override)
    assert plan.models["agent_0.actor"].dims.dp_replicate == 2
    assert plan.groups == ((0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3))
    assert plan.layouts[run_of(plan, "actor_train").source].shards == (0, 1, 2, 3)
    assert sizes(plan.models["agent_0.actor"]) == "dp 4 (2 replicas x 2 shards)"
    assert sizes(plan.models["agent_0.rollout"]) == "dp 4"


PLACEMENTS = st.sampled_from([None, "0", "1-2", "0-2", [1, 3], "50%", "0-3"])


@st.composite
def random_dags(draw) -> DagBuilder:
    """One or two agents with random placements and up to six custom nodes between random nodes."""
    dag = DagBuilder("random")
    nodes: list[tuple[str, int, str | None]] = []  # id, agent, a field that it writes
    for agent in range(draw(st.integers(1, 2))):
        common = {"agent_group": agent}
        rollout = dag.node(f"r{agent}", "MODEL_INFERENCE", "ROLLOUT", placement=draw(PLACEMENTS), **common)
        reward = dag.node(
            f"w{agent}", "COMPUTE", "REWARD", dependencies=[rollout], placement=draw(PLACEMENTS), **common
        )
        reference = dag.node(
            f"f{agent}",
            "MODEL_TRAIN",
            "REFERENCE",
            dependencies=[rollout],
            placement=draw(PLACEMENTS),
            **common,
        )
        advantage = dag.node(
            f"a{agent}", "COMPUTE", "ADVANTAGE", dependencies=[reward], placement=draw(PLACEMENTS), **common
        )
        parents = [advantage, reference]
        dag.node(
            f"t{agent}", "MODEL_TRAIN", "ACTOR", dependencies=parents, placement=draw(PLACEMENTS), **common
        )
        nodes += [
            (rollout, agent, "response_ids"),
            (reward, agent, "score"),
            (reference, agent, "ref_log_prob"),
        ]
    for index in range(draw(st.integers(0, 6))):
        chosen = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique=True))
        own = chosen[0][1]
        reads = [field if agent == own else f"agent_{agent}.{field}" for _, agent, field in chosen if field]
        reads = reads[: draw(st.integers(0, len(reads)))] if draw(st.booleans()) else reads
        writes = [f"x{index}"] if draw(st.booleans()) else []
        name = custom(
            dag, f"c{index}", [node for node, _, _ in chosen], reads, writes,
            agent_group=own, placement=draw(PLACEMENTS),
        )  # fmt: skip
        nodes.append((name, own, f"x{index}" if writes else None))
    return dag


@settings(max_examples=60, deadline=None)
@given(random_dags(), st.booleans(), st.booleans())
@pytest.mark.heavy
def test_every_compiled_plan_can_be_run_on_every_rank(dag, balance, use_kl):
    overrides = (f"trainer.balance_batch={balance}", f"actor_rollout_ref.actor.use_kl_loss={use_kl}")
    try:
        plan = compiled(dag.build(), 4, *overrides)
    except NotSupportedError as error:
        assert "rows lie by compute cost, or" in str(error)
        reject()
    run_symbolically(plan)
    run_symbolically(plan, "validation")
    assert Plan.from_json(plan.to_json()) == plan
    assert not {*order(plan)} & set(plan.pruned)
