"""Where responses may go on from step to step, what the plan says of it, and what is refused."""

from dataclasses import replace

import pytest
from plan_cases import add_agent, compiled, config, custom, run_symbolically

from siirl.compiler.compile import TEMPLATES, compile_plan, load_dag
from siirl.compiler.plan_instructions import Serve
from siirl.config.checks import check_config
from siirl.dag.spec import DagBuilder, dag_spec
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import ConfigError, DagError, NotSupportedError
from siirl.nodes.policy_loss import rollout_correction
from siirl.show.plan_text import report

ROLLOUT = "actor_rollout_ref.rollout"
LAG = (f"{ROLLOUT}.max_lag=2", f"{ROLLOUT}.surplus=1.5")


ACTS = (f"{ROLLOUT}.agent.env_path=[examples.multi_agent.games:Doors]", f"{ROLLOUT}.agent.obs_with_env=true")


def one_agent(**rollout_options):
    dag = DagBuilder("test")
    return dag, add_agent(dag, **rollout_options)


def reader_of_another_agent():
    dag, ids = one_agent()
    others = add_agent(dag, 1)
    custom(dag, "reader", [ids["reward"], others["reward"]], ["score", "agent_1.score"], [])
    return dag


def sampled_again():
    dag, ids = one_agent()
    dag.node("sampling", "COMPUTE", "POSTPROCESS_SAMPLING", dependencies=[ids["reward"]])
    return dag


def lagging_trainer():
    dag, _ = one_agent()
    dag.node("again", "MODEL_INFERENCE", "REFERENCE", dependencies=["rollout_0"], max_lag=1)
    return dag


@pytest.mark.parametrize(
    ("dag", "more", "kind", "words"),
    [
        (lambda: one_agent()[0], [f"{ROLLOUT}.name=replay", f"{ROLLOUT}.replay_dir=x"], DagError, ["replay"]),
        (lambda: one_agent()[0], ["trainer.rollout_only=true"], DagError, ["no weights change"]),
        (
            sampled_again,
            ["algorithm.filter_groups.enable=true", *ACTS],
            NotSupportedError,
            ["in an interaction", "filter_groups.enable=false"],
        ),
        (
            sampled_again,
            ["algorithm.use_pf_ppo=true"],
            NotSupportedError,
            ["draws among the responses", "use_pf_ppo=false"],
        ),
        (reader_of_another_agent, [], NotSupportedError, ["'reader'", "agent 1", "of different prompts"]),
        (lagging_trainer, [], DagError, ["'again'", "max_lag = 1", "at the agent's rollout"]),
    ],
    ids=["replay", "rollout_only", "dynamic_sampling", "pf_ppo", "two_agents", "no_rollout"],
)
def test_what_needs_the_rows_of_a_steps_own_prompts_is_refused(dag, more, kind, words):
    with pytest.raises(kind) as caught:
        compiled(dag().build(), 2, *LAG, *more)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("places", "more", "goes_on"),
    [
        ({"ROLLOUT": "0", "ACTOR": "1", "REFERENCE": "1"}, [], True),
        ({"ROLLOUT": "0", "ACTOR": "1", "REFERENCE": "0-1"}, [], False),
        ({"ROLLOUT": "0-1", "ACTOR": "1", "REFERENCE": "1"}, [], False),
        ({}, [], False),
        ({"ROLLOUT": "0", "ACTOR": "1", "REFERENCE": "1"}, [f"{ROLLOUT}.name=hf"], False),
        ({"ROLLOUT": "0", "ACTOR": "1", "REFERENCE": "1"}, [f"{ROLLOUT}.max_lag=0"], False),
    ],
)
def test_an_engine_goes_on_beside_the_trainer_if_nothing_else_computes_on_its_ranks(places, more, goes_on):
    dag = load_dag_file(TEMPLATES / "grpo.yaml")
    nodes = [replace(node, placement=places.get(node.node_role)) for node in dag.nodes]
    keys = [f"{ROLLOUT}.name=vllm", *LAG, "actor_rollout_ref.actor.use_kl_loss=true", *more]
    plan, configs = compile_plan(dag_spec(dag.dag_id, nodes, ""), config(*keys), 2)
    assert plan.nodes["rollout_actor"].runs_in_background == goes_on
    assert ("go on with them while the trainer trains" in report(plan, configs)) == goes_on


@pytest.mark.parametrize(
    ("trainer", "solver", "verifier", "goes_on"),
    [
        ("2", "0-1", "0-1", True),
        ("2", "0-1", "1", True),
        ("2", "0", "1", True),
        ("1-2", "0-1", "0-1", False),
        ("2", "0", "2", False),
        (None, None, None, False),
    ],
    ids=[
        "apart",
        "one is asked from another rank",
        "each on a rank of its own",
        "the trainer is on a rank that plays",
        "the trainer is on a rank that answers",
        "colocated",
    ],
)
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_episodes_go_on_beside_the_trainer_where_nothing_computes_on_the_ranks_of_their_engines(
    trainer, solver, verifier, goes_on, engine
):
    """Whoever asks or answers has a thread, so that also an engine does that works in its worker."""
    dag = load_dag_file(TEMPLATES / "solver_verifier.yaml")
    places = {"solver": solver, "verifier": verifier}
    nodes = [replace(node, placement=places.get(node.node_id, trainer)) for node in dag.nodes]
    cfg = config(f"{ROLLOUT}.name={engine}", *LAG)
    plan, configs = compile_plan(dag_spec(dag.dag_id, nodes, ""), cfg, 3)
    assert {name for name, node in plan.nodes.items() if node.runs_in_background} == (
        {"solver"} if goes_on else set()
    )
    assert (
        "turns, tools and environments go on while the trainer trains" in report(plan, configs)
    ) == goes_on
    serves = goes_on and (solver, verifier) == ("0", "1")
    assert ("agent_1.rollout to solver, also while others train" in report(plan, configs)) == serves
    meets = goes_on and solver != verifier
    assert not meets or (0, 1) == plan.interactions["solver"].connected in plan.groups


def test_dynamic_sampling_with_a_lag_loads_ahead_in_its_own_batches():
    keys = ("algorithm.filter_groups.enable=true", "data.gen_batch_size=5")
    cfg = config(*LAG, *keys)
    plan, configs = compile_plan(load_dag(cfg), cfg, 2)
    told = report(plan, configs)
    assert "in rounds of as many as it lacks, read 5 at a time" in told and "up to 20 prompts" in told
    assert plan.nodes["rollout_actor"].op == "rollout" and plan.nodes["rollout_actor"].max_lag == 2
    assert [loader.ahead for loader in plan.loaders.values()] == [3], "1.5 x 8 prompts, 5 at once"
    assert "dynamic_sampling" in run_symbolically(plan)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (
            {"ROLLOUT": "0", "ACTOR": "1"},
            "the engines go on with them while the trainer trains, and under its",
        ),
        ({}, "keep their tokens, and no device memory, and go on in the next one"),
    ],
    ids=["disaggregated", "colocated"],
)
def test_the_plan_says_where_responses_go_on(places, words):
    dag = load_dag_file(TEMPLATES / "grpo.yaml")
    nodes = [replace(node, placement=places.get(node.node_role)) for node in dag.nodes]
    keys = config(f"{ROLLOUT}.name=vllm", *LAG, "trainer.device=cuda")
    assert words in report(*compile_plan(dag_spec(dag.dag_id, nodes, ""), keys, 2))


def test_more_in_work_than_the_bound_lets_train_is_refused():
    with pytest.raises(ConfigError, match=r"surplus=2\.5 with actor_rollout_ref\.rollout\.max_lag=2"):
        check_config(config(*LAG[:1], f"{ROLLOUT}.surplus=2.5"))
    check_config(config(*LAG))
    assert config(*LAG[:1]).actor_rollout_ref.rollout.surplus == 2


def talking(**second) -> DagBuilder:
    """Two agents, the second of which answers the first."""
    dag = DagBuilder("talking")
    above = add_agent(dag, 0)["rollout"]
    add_agent(dag, 1, dependencies=[above], **second)
    return dag


@pytest.mark.parametrize("template", ["debate", "solver_verifier", "planner_worker"])
def test_the_episodes_of_an_interaction_go_on_as_a_whole(template):
    plan = compiled(load_dag_file(TEMPLATES / f"{template}.yaml"), 2, *LAG)
    (entry,) = plan.interactions
    assert plan.nodes[entry].op == "interaction" and plan.nodes[entry].max_lag == 2
    assert [loader.ahead for loader in plan.loaders.values()] == [2]
    others = [stage.node for stage in plan.interactions[entry].stages if stage.node != entry]
    assert not any(plan.nodes[name].max_lag for name in others if name in plan.nodes)


@pytest.mark.parametrize(
    ("dag", "kind", "words"),
    [
        (
            lambda: talking(max_lag=1, config={"rollout.surplus": 1}),
            DagError,
            ["'rollout_0'", "max_lag=2", "'rollout_1'", ", 1"],
        ),
        (lambda: talking(config={"rollout.surplus": 1}), DagError, ["surplus=1.5", "'rollout_1'", ", 1"]),
        (
            lambda: talking(config={"rollout.stale": "restart"}),
            DagError,
            ["stale=wait", "'rollout_1'", ", restart"],
        ),
        (
            lambda: talking(config={"rollout.max_lag": 0, "rollout.surplus": 0}),
            DagError,
            ["'rollout_1'", "same for all its agents"],
        ),
    ],
    ids=["lag", "surplus", "stale", "none"],
)
def test_agents_of_an_interaction_that_differ_in_their_lag_are_refused(dag, kind, words):
    with pytest.raises(kind) as caught:
        compiled(dag().build(), 2, *LAG)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_agents_of_one_interaction_may_read_each_others_rows_and_none_of_others():
    dag = talking()
    custom(dag, "reader", ["reward_0", "reward_1"], ["score", "agent_1.score"], [])
    compiled(dag.build(), 2, *LAG)
    others = add_agent(dag, 2)
    custom(dag, "stranger", ["reward_0", others["reward"]], ["score", "agent_2.score"], [])
    with pytest.raises(NotSupportedError, match="'stranger' reads rows of agent 2"):
        compiled(dag.build(), 2, *LAG)


def test_engines_of_other_ranks_speak_in_episodes_that_go_on():
    dag = DagBuilder("apart")
    above = add_agent(dag, 0, "0")["rollout"]
    add_agent(dag, 1, "1", dependencies=[above])
    plan = compiled(dag.build(), 2, *LAG)
    (entry,) = plan.interactions
    assert plan.nodes[entry].op == "interaction"
    assert [(found.policy, found.heads) for found in plan.interactions[entry].streams] == [
        ("agent_1.rollout", (1,))
    ]
    assert [ins.ranks for ins in plan.instructions if isinstance(ins, Serve)] == [(1,)]


def test_an_agent_for_which_a_service_speaks_cannot_be_interrupted():
    service = {"rollout.name": "openai", "rollout.agent.endpoint.url": "http://localhost:1"}
    dag, ids = one_agent()
    dag.node(
        "guest", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=[ids["rollout"]], config=service
    )
    with pytest.raises(NotSupportedError, match=r"'guest', for which a service speaks"):
        compiled(dag.build(), 2, *LAG)


def test_the_plan_says_how_old_rows_are_and_what_is_in_work():
    plan, configs = compile_plan(one_agent()[0].build(), config(*LAG), 2)
    assert plan.loaders["agent_0.prompts"].ahead == 2
    assert plan.nodes["rollout_0"].op == "rollout" and plan.nodes["rollout_0"].max_lag == 2
    text = report(plan, configs)
    for words in (
        "2 batches ahead",
        "rows up to 2 steps old",
        "up to 20 prompts (80 responses) are in flight",
    ):
        assert words in text, text


def test_a_node_of_the_dag_has_a_lag_of_its_own():
    dag, _ = one_agent(max_lag=1)
    add_agent(dag, 1)
    plan, configs = compile_plan(dag.build(), config(), 2)
    assert [plan.nodes[f"rollout_{agent}"].max_lag for agent in (0, 1)] == [1, 0]
    assert [plan.loaders[f"agent_{agent}.prompts"].ahead for agent in (0, 1)] == [1, 0]
    trainers = {node.agent: configs[name] for name, node in plan.nodes.items() if node.spec.trains_policy}
    kinds = {agent: rollout_correction(cfg.actor_rollout_ref.actor).weight for agent, cfg in trainers.items()}
    assert kinds == {0: "truncate", 1: "none"}


def test_without_a_lag_nothing_changes():
    plans = [compiled(one_agent()[0].build(), 2, *more) for more in ([], [f"{ROLLOUT}.max_lag=0"])]
    assert plans[0].to_json() == plans[1].to_json()
    assert {loader.ahead for loader in plans[0].loaders.values()} == {0}


@pytest.mark.parametrize(
    ("more", "weight"),
    [
        ([], "none"),
        (LAG, "truncate"),
        ([*LAG, "actor_rollout_ref.actor.recompute_old_log_prob=false"], "none"),
        ([*LAG, "actor_rollout_ref.actor.rollout_correction.weight=none"], "none"),
        ([*LAG, "actor_rollout_ref.actor.rollout_correction.weight=mask"], "mask"),
    ],
)
def test_tokens_of_older_weights_are_weighted_unless_the_user_says_otherwise(more, weight):
    cfg = config(*more)
    assert rollout_correction(cfg.actor_rollout_ref.actor).weight == weight
