"""profiler.*: which nodes it records, and what of it `siirl check` refuses or warns of."""

import pytest
from plan_cases import config

from siirl.compiler.compile import TEMPLATES, compile_plan
from siirl.compiler.plan_warnings import plan_warnings
from siirl.compiler.profiled_nodes import PHASES, profiled_nodes
from siirl.config.checks import contradictions
from siirl.dag.ops import OPS
from siirl.dag.yaml_file import load_dag_file
from siirl.errors import ConfigError, NotSupportedError
from siirl.migrate.translate import translate


def planned(*keys, template="ppo.yaml"):
    cfg = config("algorithm.adv_estimator=gae", "profiler.enable=True", *keys)
    dag = load_dag_file(TEMPLATES / template)
    return cfg, *compile_plan(dag, cfg, 2)


def nodes(*keys):
    cfg, plan, _ = planned("actor_rollout_ref.actor.use_kl_loss=True", "data.train_batch_size=512", *keys)
    return profiled_nodes(cfg.profiler, plan), plan


def test_each_phase_of_siirl_is_a_node_of_its_workflow():
    _, plan = nodes()
    by_phase = {phase: nodes(f"profiler.roles=[{phase}]")[0] for phase in PHASES}
    assert set().union(*by_phase.values()) == set(plan.nodes)
    for phase, found in by_phase.items():
        assert len(found) == 1, (phase, found)
        assert {PHASES[phase](plan.nodes[name].spec) for name in found} == {True}


def test_a_name_is_that_of_a_role_or_of_a_node_as_well():
    found, plan = nodes("profiler.roles=[critic]")
    assert found == {name for name, node in plan.nodes.items() if node.spec.on_critic} and len(found) == 2
    assert nodes("profiler.roles=[function_reward,ref]")[0] == {"function_reward", "reference_log_prob"}
    assert nodes()[0] is None, "the whole step"
    assert nodes("profiler.discrete=True")[0] == set(plan.nodes)


def test_no_op_is_of_two_phases():
    for name, op in OPS.items():
        phases = [phase for phase, is_of in PHASES.items() if is_of(op)]
        assert len(phases) <= 1, (name, phases)


def test_a_name_of_nothing_is_refused_and_one_of_nothing_here_is_warned_of():
    with pytest.raises(ConfigError, match=r"'actor_trian' is no node of the plan.*'actor_train'"):
        planned("profiler.roles=[actor_trian]")
    cfg, plan, node_cfgs = planned("profiler.roles=[teacher,actor]", "actor_rollout_ref.rollout.name=hf")
    said = [line for line in plan_warnings(cfg, plan, node_cfgs) if "profiler" in line]
    assert said == ["profiler.roles: teacher has no effect: no node of the plan is of it."]


def test_an_engine_in_another_process_is_said_not_to_be_recorded():
    cfg, plan, node_cfgs = planned("profiler.roles=[generate]", "actor_rollout_ref.rollout.name=vllm")
    said = [line for line in plan_warnings(cfg, plan, node_cfgs) if "profiler" in line]
    assert len(said) == 1 and "records the worker's part of node" in said[0] and "vllm" in said[0]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["profiler.profile_steps=[]"], ["no step would be recorded"]),
        (["profiler.profile_steps=[4,9]", "trainer.total_training_steps=3"], ["profile_steps=[4,9]", "=3"]),
        (["profiler.ranks=[]"], ["no rank would be recorded", "all_ranks=true"]),
        (["profiler.ranks=[1,16]", "trainer.nnodes=2"], ["the ranks 0 to 15", "Leave out 16"]),
        (["profiler.tool=torch_memory", "trainer.device=cpu"], ["Set profiler.tool=torch"]),
    ],
)
def test_what_would_record_nothing_is_refused_where_it_is_on(keys, words):
    (problem,) = contradictions(config("profiler.enable=True", *keys))
    assert all(word in str(problem) for word in words), problem
    assert not contradictions(config(*keys)), "without profiler.enable"


@pytest.mark.parametrize("tool", ["nsys", "npu"])
def test_tools_that_there_are_not_are_refused_with_those_that_there_are(tool):
    with pytest.raises(NotSupportedError, match=rf"profiler.tool={tool}: .*Available now: torch, torch_"):
        config(f"profiler.tool={tool}")
    with pytest.raises(ConfigError, match=r"profile_steps.*must be above 0"):
        config("profiler.profile_steps=[0]")


def test_the_profiler_of_verl_becomes_siirls():
    result = translate(
        "verl",
        [
            "global_profiler.tool=torch",
            "global_profiler.steps=[1,5]",
            "global_profiler.save_path=prof",
            "actor_rollout_ref.actor.profiler.enable=True",
            "actor_rollout_ref.actor.profiler.all_ranks=True",
            "actor_rollout_ref.actor.profiler.tool_config.torch.contents=[cuda,cpu]",
            "actor_rollout_ref.rollout.profiler.enable=False",
            "actor_rollout_ref.ref.profiler.enable=True",
            "actor_rollout_ref.ref.profiler.ranks=[]",
            "critic.profiler.enable=null",
        ],
    )
    written = {setting.name: setting.value for setting in result.written() if "profiler" in setting.name}
    assert written == {
        "profiler.tool": "torch",
        "profiler.profile_steps": "[1,5]",
        "profiler.save_path": "prof",
        "profiler.enable": "True",
        "profiler.all_ranks": "True",
        "profiler.roles": "[actor,ref]",
    }
    assert not result.of("impossible")
    assert [s.there for s in translate("verl", ["global_profiler.tool=nsys"]).of("impossible")]
