"""Agents of an interaction on any ranks: who plays the episodes, and whose engine answers whom."""

from fractions import Fraction

import pytest
from plan_cases import add_agent, compiled, config, run_symbolically

from siirl.agents.runner import in_turn
from siirl.compiler.compile import compile_plan
from siirl.compiler.memory.phases import engine_rows
from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Serve, SyncWeights
from siirl.compiler.serving import _streams
from siirl.dag.spec import DagBuilder
from siirl.errors import PlacementError
from siirl.show.plan_text import report

VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
)

PLACEMENTS = {  # ranks of each agent -> {driver: heads of agent 1's engines}, ranks that serve only
    "beside": (2, "0-1", "0-1", {0: (0,), 1: (1,)}, ()),
    "apart": (2, "0", "1", {0: (1,)}, (1,)),
    "apart, more to answer": (3, "0", "1-2", {0: (1, 2)}, (1, 2)),
    "apart, fewer to answer": (3, "0-1", "2", {0: (2,), 1: (2,)}, (2,)),
    "apart, dealt": (4, "0-1", "2-3", {0: (2,), 1: (3,)}, (2, 3)),
    "apart, one engine in two": (5, "0-1", "2-4", {0: (2, 3), 1: (3, 4)}, (2, 3, 4)),
    "apart, one driver in two": (5, "0-2", "3-4", {0: (3,), 1: (3, 4), 2: (4,)}, (3, 4)),
    "more": (4, "0-1", "0-3", {0: (0, 2), 1: (1, 3)}, (2, 3)),
    "more, odd": (3, "0-1", "0-2", {0: (0, 2), 1: (1, 2)}, (2,)),
    "fewer": (2, "0-1", "0", {0: (0,), 1: (0,)}, ()),
    "overlapping": (3, "0-1", "1-2", {0: (2,), 1: (1,)}, (2,)),
}


def pair(first: str, second: str) -> DagBuilder:
    dag = DagBuilder("pair")
    above = add_agent(dag, 0, placement=first)["rollout"]
    add_agent(dag, 1, placement=second, dependencies=[above])
    return dag


def answered(plan: Plan, policy: str = "agent_1.rollout") -> dict[int, tuple[int, ...]]:
    """Driver -> the ranks whose engines answer it."""
    return {
        rank: plan.interactions["rollout_0"].heads(policy, rank) for rank in plan.run_of("rollout_0").ranks
    }


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_driver_is_answered_by_the_nearest_engines_in_equal_shares(name):
    world_size, first, second, heads, serving = PLACEMENTS[name]
    plan = compiled(pair(first, second).build(), world_size)
    interaction = plan.interactions["rollout_0"]
    assert answered(plan) == heads
    assert answered(plan, "agent_0.rollout") == {rank: (rank,) for rank in heads}
    for section in ("instructions", "validation"):
        run_symbolically(plan, section)
        serves = [ins for ins in getattr(plan, section) if isinstance(ins, Serve)]
        assert [ins.ranks for ins in serves] == ([serving] if serving else [])
    asked = {head for answering in heads.values() for head in answering}
    assert asked == set(plan.models["agent_1.rollout"].ranks)
    for head in asked:
        clients = tuple(rank for rank, answering in heads.items() if head in answering)
        assert interaction.clients("agent_1.rollout", head) == (() if clients == (head,) else clients)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("drivers", "engines"), [(600, 424), (424, 600), (96, 64), (7, 7), (1, 9), (9, 1)])
def test_streams_do_not_multiply_and_engines_have_equal_loads(drivers, engines):
    heads = tuple(range(drivers, drivers + engines))
    streams = _streams("policy", tuple(range(drivers)), heads)
    assert sum(len(stream.heads) for stream in streams) < drivers + engines
    loads = dict.fromkeys(heads, Fraction(0))
    for stream in streams:
        for head, share in zip(stream.heads, stream.shares, strict=True):
            loads[head] += Fraction(share, sum(stream.shares))
    assert set(loads.values()) == {Fraction(drivers, engines)}


def test_a_driver_whose_own_engine_gets_help_shares_its_episodes_out_evenly():
    streams = _streams("policy", (0, 1), (0, 1, 2))
    assert [(stream.heads, stream.shares) for stream in streams] == [((0, 2), (2, 1)), ((1, 2), (2, 1))]


@pytest.mark.parametrize("shares", [(1,), (1, 1, 1), (3, 2), (53, 22), (1, 40, 12)])
def test_any_run_of_episodes_is_shared_out_as_planned(shares):
    turns = in_turn(shares)
    assert [turns.count(place) for place in range(len(shares))] == list(shares)
    for first in range(len(turns)):
        for length in range(len(turns)):
            run = [turns[(first + i) % len(turns)] for i in range(length)]
            for place, share in enumerate(shares):
                assert abs(run.count(place) - length * share / sum(shares)) < 2


def test_all_weights_have_arrived_before_anybody_answers():
    plan = compiled(pair("0-1", "2-3").build(), 4)
    kinds = [type(ins) for ins in plan.instructions]
    serve = kinds.index(Serve)
    synced = [ins.link for ins in plan.instructions[:serve] if isinstance(ins, SyncWeights)]
    assert synced == ["agent_0.weights", "agent_1.weights"]
    assert plan.instructions[serve + 1] == plan.run_of("rollout_0")


def test_the_first_rank_of_a_shard_speaks_for_it():
    plan = compiled(pair("0-3", "0-3").build(), 4, *VLLM, "trainer.n_gpus_per_node=4")
    assert answered(plan) == {0: (0,), 2: (2,)}
    assert plan.interactions["rollout_0"].streams == ()
    (serve,) = (ins for ins in plan.instructions if isinstance(ins, Serve))
    assert serve.ranks == (1, 3)  # nobody asks them: their engines go to sleep with those of their shards
    run_symbolically(plan)


def test_a_service_is_asked_where_the_episodes_are():
    dag = DagBuilder("service")
    above = add_agent(dag, 0, placement="0-1")["rollout"]
    service = {"rollout.name": "openai", "rollout.agent.endpoint.url": "http://localhost/v1"}
    dag.node("critic", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=[above], config=service)
    plan = compiled(dag.build(), 3)
    assert plan.models["agent_1.rollout"].ranks == (0, 1)
    assert plan.interactions["rollout_0"].streams == ()
    dag = DagBuilder("elsewhere")
    above = add_agent(dag, 0, placement="0-1")["rollout"]
    options = {"agent_group": 1, "dependencies": [above], "config": service, "placement": "2"}
    dag.node("critic", "MODEL_INFERENCE", "ROLLOUT", **options)
    with pytest.raises(PlacementError, match=r"'critic'.*ranks 2.*ranks 0-1.*Remove its placement"):
        compiled(dag.build(), 3)


def reported(dag: DagBuilder, world_size: int) -> list[str]:
    plan, configs = compile_plan(dag.build(), config(), world_size)
    return [" ".join(line.split()) for line in report(plan, configs).splitlines()]


def test_the_report_says_who_plays_who_answers_whom_and_who_serves():
    lines = reported(pair("0-1", "1-2"), 3)
    for expected in (
        "node op agent 0 1 2",
        "1 rollout_0 interaction 0 x x",
        "5 rollout_1 turns 1 x x serves",
        "episodes are played on ranks 0-1",
        "agent_0.rollout: ranks 0-1 ask their own engine",
        "agent_1.rollout: rank 1 asks its own engine, rank 0 asks rank 2",
        "serve 2 agent_1.rollout to rollout_0",
    ):
        assert expected in lines, "\n".join(lines)
    lines = reported(pair("0-1", "0"), 2)
    assert "5 rollout_1 turns 1 x, serves x" in lines
    assert "agent_1.rollout: ranks 0-1 ask rank 0" in lines


def test_an_engine_has_room_for_the_episodes_that_it_answers():
    shares = {}
    for first, second in (("0-3", "0-3"), ("0-3", "0"), ("0-3", "2-5"), ("0", "1-2")):
        plan, configs = compile_plan(pair(first, second).build(), config(), 6)
        shares[first, second] = engine_rows(plan, plan.models["agent_1.rollout"], configs)
    # of 32 episodes: one rank's of four, those of all, half of those of two ranks or its own, half of all
    assert shares == {("0-3", "0-3"): 8, ("0-3", "0"): 32, ("0-3", "2-5"): 8, ("0", "1-2"): 16}
