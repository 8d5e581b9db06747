"""Every template on several placements compiles to the plan stored beside this file, in every process.

After a deliberate change of the compiler, `python tests/plan/test_golden_plans.py` rewrites the stored plans:
read the diff.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from plan_cases import add_agent, compiled, config, custom, run_symbolically, template_plan

from siirl.compiler.compile import TEMPLATES, compile_plan
from siirl.compiler.plan import Plan
from siirl.dag.node_config import with_node_config
from siirl.dag.spec import DagBuilder, DagSpec, NodeSpec, dag_spec
from siirl.dag.yaml_file import load_dag_file
from siirl.show.plan_text import report

GOLDEN = Path(__file__).parent / "golden"
KL = "actor_rollout_ref.actor.use_kl_loss=true"
TEACHER = ("teacher.model.path=/models/teacher",)


REWARD_MODEL = ("reward_model.enable=true", "reward_model.model.path=/models/rm")
DAPO = ("algorithm.filter_groups.enable=true", "actor_rollout_ref.actor.ppo_mini_batch_size=4")


GIVEN = (
    *("actor_rollout_ref.rollout.name=dataset", "actor_rollout_ref.rollout.n=1"),
    *("actor_rollout_ref.actor.policy_loss.loss_mode=sft", "trainer.val_before_train=false"),
    "trainer.test_freq=-1",
)


PAIRS = (
    *("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.policy_loss.loss_mode=dpo"),
    *("data.response_keys=[chosen,rejected]", "trainer.balance_batch=true"),
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)


def placed(template: str, placements: dict[str, str]) -> DagSpec:
    """A template with placements by node role."""
    dag = load_dag_file(TEMPLATES / template)
    nodes = [NodeSpec(**{**vars(node), "placement": placements.get(node.node_role)}) for node in dag.nodes]
    return dag_spec(dag.dag_id, nodes, dag.description)


def in_environment(template: str, node: str, game: str) -> DagSpec:
    """A template whose environment is one of the examples' games."""
    path = {node: {"env_path": f"examples.multi_agent.games:{game}"}}
    return with_node_config(load_dag_file(TEMPLATES / template), path)


def two_agents() -> DagSpec:
    dag = DagBuilder("two_agents")
    add_agent(dag, 0, "0-1"), add_agent(dag, 1, "2-3")
    return dag.build()


def apart() -> DagSpec:
    """Solver and verifier with their models on ranks of their own, and one in common."""
    dag = load_dag_file(TEMPLATES / "solver_verifier.yaml")
    places = {0: "0-2", 1: "2-3"}
    nodes = [
        NodeSpec(**{**vars(node), "placement": places[node.agent_group]})
        if node.node_role in ("ROLLOUT", "ACTOR")
        else node
        for node in dag.nodes
    ]
    return dag_spec(dag.dag_id, nodes, dag.description)


SERVICE = (
    *("service.enable=true", "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.name=hf"),
    *("trainer.val_before_train=false", "trainer.test_freq=-1"),
)


CASES = {
    "serve_on_1": lambda: template_plan(1, *SERVICE),
    "grpo_on_1": lambda: template_plan(1),
    "grpo_on_8_all_nodes": lambda: template_plan(
        8,
        KL,
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "trainer.balance_batch=true",
    ),
    "grpo_on_4_hybrid_shards": lambda: template_plan(4, "actor_rollout_ref.actor.fsdp_config.fsdp_size=2"),
    "grpo_split_4_and_4": lambda: compiled(
        placed("grpo.yaml", {"ROLLOUT": "50%-100%", "ACTOR": "0-3", "REFERENCE": "0-3"}), 8, KL
    ),
    "grpo_lag_apart": lambda: compiled(
        placed("grpo.yaml", {"ROLLOUT": "0-1", "ACTOR": "2-3", "REFERENCE": "2-3"}),
        4,
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.max_lag=2",
    ),
    "grpo_overlapping": lambda: compiled(
        placed("grpo.yaml", {"ROLLOUT": "2-5", "ACTOR": "0-3", "REFERENCE": "3-5:2"}), 6, KL
    ),
    "grpo_lag_on_2": lambda: compiled(load_dag_file(TEMPLATES / "grpo_lag.yaml"), 2),
    "ppo_on_2": lambda: template_plan(2, "algorithm.adv_estimator=gae"),
    "ppo_critic_apart": lambda: compiled(
        placed("ppo.yaml", {"ROLLOUT": "0-1", "ACTOR": "0-1", "CRITIC": "2-3"}),
        4,
        "algorithm.adv_estimator=gae",
        "critic.ppo_mini_batch_size=4",
    ),
    "ppo_resampled": lambda: template_plan(
        2, "algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true", "critic.ppo_epochs=2"
    ),
    "grpo_reward_model_on_2": lambda: template_plan(2, *REWARD_MODEL),
    "grpo_reward_model_apart": lambda: compiled(
        placed("grpo_reward_model.yaml", {"ROLLOUT": "0-1", "ACTOR": "0-1", "REWARD": "2-3"}),
        4,
        *REWARD_MODEL,
    ),
    "ppo_reward_model_on_2": lambda: template_plan(2, "algorithm.adv_estimator=gae", *REWARD_MODEL),
    "remax_on_2": lambda: template_plan(2, "algorithm.adv_estimator=remax"),
    "dapo_on_2": lambda: template_plan(2, *DAPO, "data.gen_batch_size=4"),
    "dapo_split": lambda: compiled(
        placed("dapo.yaml", {"ROLLOUT": "0-1", "ACTOR": "2-3", "POSTPROCESS_SAMPLING": "1-2"}), 4, *DAPO
    ),
    "two_agents_on_4": lambda: compiled(two_agents(), 4),
    "solver_verifier_on_2": lambda: compiled(load_dag_file(TEMPLATES / "solver_verifier.yaml"), 2),
    "solver_verifier_apart": lambda: compiled(apart(), 4),
    "planner_worker_on_2": lambda: compiled(load_dag_file(TEMPLATES / "planner_worker.yaml"), 2),
    "reasoner_actor_on_2": lambda: compiled(
        in_environment("reasoner_actor.yaml", "world", "Doors"), 2, "algorithm.adv_estimator=gae_marft"
    ),
    "self_play_on_2": lambda: compiled(in_environment("self_play.yaml", "game", "Nim"), 2),
    "sft_on_2": lambda: compiled(load_dag_file(TEMPLATES / "sft.yaml"), 2, *GIVEN),
    "dpo_on_2": lambda: compiled(load_dag_file(TEMPLATES / "dpo.yaml"), 2, *GIVEN, *PAIRS),
    "reward_training_on_2": lambda: compiled(
        load_dag_file(TEMPLATES / "reward_training.yaml"), 2, *GIVEN, *PAIRS[1:], *PAIRS[:1], *REWARD_MODEL
    ),
    "reward_training_grpo_on_2": lambda: compiled(
        load_dag_file(TEMPLATES / "reward_training_grpo.yaml"), 2, *REWARD_MODEL
    ),
    "distill_on_2": lambda: compiled(load_dag_file(TEMPLATES / "distill.yaml"), 2, *TEACHER),
    "two_teachers_apart": lambda: compiled(
        with_node_config(
            load_dag_file(TEMPLATES.parent / "examples/distillation/two_teachers.yaml"),
            {"larger": {"placement": "2"}, "smaller": {"placement": "3"}},
        ),
        4,
        *TEACHER,
        "actor_rollout_ref.actor.distill.top_k=4",
    ),
    "teacher_by_vllm_apart": lambda: compiled(
        placed("distill.yaml", {"TEACHER": "2-3", "ROLLOUT": "0-1", "ACTOR": "0-1"}),
        4,
        *TEACHER,
        *("teacher.strategy=vllm", "actor_rollout_ref.actor.distill.top_k=64"),
    ),
    "sft_grpo_on_2": lambda: compiled(load_dag_file(TEMPLATES / "sft_grpo.yaml"), 2),
    "league_on_2": lambda: compiled(in_environment("league.yaml", "game", "RockPaperScissors"), 2),
    "population_on_2": lambda: compiled(
        with_node_config(
            load_dag_file(TEMPLATES / "population.yaml"),
            {
                "game": {
                    "env_path": "examples.multi_agent.games:Tournament",
                    "env_kwargs": {"weights": {"0-1": 1.0}},
                }
            },
        ),
        2,
        "actor_rollout_ref.model.lora_rank=8",
    ),
    "tree_on_2": lambda: compiled(in_environment("tree.yaml", "world", "Luck"), 2),
    "debate_on_2": lambda: compiled(load_dag_file(TEMPLATES / "debate.yaml"), 2),
    "debate_rounds_on_2": lambda: compiled(load_dag_file(TEMPLATES / "debate_rounds.yaml"), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_template_compiles_to_the_stored_plan(name):
    plan = CASES[name]()
    run_symbolically(plan)
    run_symbolically(plan, "validation")
    stored = (GOLDEN / f"{name}.json").read_text()
    assert Plan.from_json(stored) == plan
    assert plan.to_json() == stored


def test_plans_of_runs_before_a_rollout_with_a_lag_was_a_rollout_are_read():
    stored = (GOLDEN / "grpo_lag_on_2.json").read_text()
    older = stored.replace('"op": "rollout"', '"op": "partial_rollout"')
    older = older.replace("runs_in_background", "decodes_on")
    assert older != stored and Plan.from_json(older) == Plan.from_json(stored)


def older_stage(stage: dict) -> dict:
    """A stage as plans had it when its kind was a field."""
    stage = dict(stage)
    kind, env = stage.pop("do"), stage.pop("env", None) or {}
    of_env = {"env_path": "path", "env_kwargs": "kwargs", "env_seed": "seed"}
    of_env |= {name: name for name in ("deadline_s", "max_concurrent")}
    options = {older: env[name] for older, name in of_env.items() if env}
    own = ("obs_with_env", "rewards_with_env", "serve", "process_path")
    own += ("pre_process_kwargs", "post_process_kwargs")
    options |= {name: stage.pop(name) for name in own if name in stage}
    shared = {"policy": None, "rows": False} | stage
    return {**shared, "kind": "env" if kind == "EnvStage" else "agent", "options": options}


def test_plans_of_runs_before_stages_had_kinds_are_read():
    serve = "actor_rollout_ref.serve.command=python agent.py"
    played = compiled(load_dag_file(TEMPLATES / "solver_verifier.yaml"), 1, serve).to_json()
    kinds = set()
    for text in (played, *(file.read_text() for file in GOLDEN.glob("*.json"))):
        stored = json.loads(text)
        for talk in stored["interactions"].values():
            kinds |= {stage["do"] for stage in talk["stages"]}
            talk["stages"] = [older_stage(stage) for stage in talk["stages"]]
        assert Plan.from_json(json.dumps(stored)) == Plan.from_json(text)
    assert kinds == {"AgentStage", "EnvStage", "ProgramStage"}


def test_every_template_has_a_stored_plan_and_fits_on_a_screen():
    for template in TEMPLATES.glob("*.yaml"):
        assert any(name.startswith(template.stem) for name in CASES), template
        assert len(template.read_text().splitlines()) <= 40, template


@pytest.mark.heavy
def test_the_plan_and_its_report_are_the_same_for_every_hash_seed():
    digests = set()
    for seed in ("0", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, __file__, "digest"], env=env, capture_output=True, text=True, timeout=100
        )
        assert run.returncode == 0, run.stderr
        digests.add(run.stdout)
    assert len(digests) == 1
    assert digests.pop() == digest()


def digest() -> str:
    """A digest of plan and report of the case with the most nodes and placements."""
    dag = placed("grpo.yaml", {"ROLLOUT": "2-5", "ACTOR": "0-3", "REFERENCE": "3-5:2"})
    cfg = config(KL)
    plan, configs = compile_plan(dag, cfg, 6)
    return hashlib.sha256((plan.to_json() + report(plan, configs)).encode()).hexdigest() + "\n"


def test_200_nodes_on_4096_ranks_compile_in_seconds():
    dag = DagBuilder("large")
    for agent in range(10):
        ids = add_agent(dag, agent, f"{agent * 400}-{agent * 400 + 407}")
        above = [ids["reward"]]
        for index in range(16):
            name = f"custom_{agent}_{index}"
            place = f"{agent * 400 + index % 3}-{agent * 400 + 407}"
            above = [custom(dag, name, above, ["score"], [f"x{index}"], agent_group=agent, placement=place)]
        custom(dag, f"end_{agent}", above, [f"x{index}" for index in range(16)], [], agent_group=agent)
    spec = dag.build()
    assert len(spec.nodes) >= 200
    cfg = config("data.train_batch_size=4096", "actor_rollout_ref.actor.ppo_mini_batch_size=4096")
    start = time.process_time()
    plan, _ = compile_plan(spec, cfg, 4096)
    text = plan.to_json()
    assert time.process_time() - start < 5
    assert len(plan.nodes) == len(spec.nodes)
    assert Plan.from_json(text) == plan


if __name__ == "__main__":
    if sys.argv[1:] == ["digest"]:
        print(digest(), end="")
    else:
        GOLDEN.mkdir(exist_ok=True)
        for case, make in CASES.items():
            (GOLDEN / f"{case}.json").write_text(make().to_json())
