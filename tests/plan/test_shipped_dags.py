"""Every workflow that comes with siirl compiles on 1, 2, 8 and 16 ranks with the keys that it asks for."""

import ast
import functools
import json
from pathlib import Path

import pytest
import yaml
from plan_cases import run_symbolically
from plan_rows import Interpreter

from siirl.compiler.choices import Machine
from siirl.compiler.choose import PACKAGES, choose
from siirl.compiler.compile import TEMPLATES, compile_plan, load_dag
from siirl.config import Config, load_config, with_overrides

ROOT = Path(__file__).parents[2]
GAMES = "examples/multi_agent/games.py"
GROUPS = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8")
REWARD_MODEL = ("reward_model.enable=true", "reward_model.model.path=/models/reward")
TEACHER = ("teacher.model.path=/models/teacher",)
GIVEN = ("trainer.val_before_train=false", "trainer.test_freq=-1")
H200 = Machine("cuda", 139.8, (9, 0), frozenset(PACKAGES))
DENSE = {
    **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
}
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
PAIRS = (
    *("actor_rollout_ref.rollout.name=dataset", "actor_rollout_ref.rollout.n=2"),
    "data.response_keys=[chosen,rejected]",
)
ASKS_FOR = {
    "dpo": (*GIVEN, *PAIRS, f"{LOSS}=dpo"),
    "dapo": (*GROUPS, "algorithm.filter_groups.enable=true"),
    "debate": GROUPS,
    "debate_rounds": GROUPS,
    "distill": TEACHER,
    "grpo": GROUPS,
    "grpo_lag": GROUPS,
    "grpo_reward_model": (*GROUPS, *REWARD_MODEL),
    "guess": GROUPS,
    "lake": GROUPS,
    "league": (*GROUPS, f"dag.node_config.game.env_path={GAMES}:RockPaperScissors"),
    "nim": GROUPS,
    "planner_worker": GROUPS,
    "population": (
        *(
            *GROUPS,
            "actor_rollout_ref.model.lora_rank=8",
            f"dag.node_config.game.env_path={GAMES}:Tournament",
        ),
        "dag.node_config.game.env_kwargs={weights:{0-1:1.0}}",
    ),
    "ppo": (),
    "ppo_reward_model": REWARD_MODEL,
    "reasoner_actor": (
        "algorithm.adv_estimator=gae_marft",
        f"dag.node_config.world.env_path={GAMES}:Doors",
    ),
    "remax": ("algorithm.adv_estimator=remax",),
    "reward_training": (*GIVEN, *PAIRS, *REWARD_MODEL),
    "reward_training_grpo": (*GROUPS, *REWARD_MODEL),
    "self_play": (*GROUPS, f"dag.node_config.game.env_path={GAMES}:Nim"),
    "serve": (
        *("service.enable=true", "actor_rollout_ref.model.lora_rank=8"),
        "actor_rollout_ref.rollout.name=hf",
    ),
    "sft": (*GIVEN, "actor_rollout_ref.rollout.name=dataset", f"{LOSS}=sft"),
    "sft_grpo": GROUPS,
    "tree": (*GROUPS, f"dag.node_config.world.env_path={GAMES}:Luck"),
    "two_teachers": TEACHER,
    "coder": GROUPS,
    "shell": GROUPS,
    "shop": GROUPS,
    "shopper": GROUPS,
    "solver_verifier": GROUPS,
    "verifiers": GROUPS,
    "dag.py:with_bonus": GROUPS,
    "dag.py:with_fluency": GROUPS,
}
"""What a workflow cannot be run without: algorithm, samples to compare, reward model, environment."""


@functools.cache
def shipped() -> dict[str, str]:
    """Name -> the key that chooses it: templates, and DAG files and functions among the examples."""
    files = [*TEMPLATES.glob("*.yaml"), *ROOT.glob("examples/**/*.yaml")]
    found = {path.stem: f"dag.workflow_path={path}" for path in files if "node_id:" in path.read_text()}
    for path in ROOT.glob("examples/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.returns and ast.unparse(node.returns) == "DagSpec":
                name = f"{path.name}:{node.name}"
                found[name] = f"dag.custom_pipeline_fn={path}:{node.name}"
    return dict(sorted(found.items()))


@pytest.fixture(scope="module")
def defaults() -> Config:
    return load_config([])


def configured(name: str, defaults: Config, *keys: str) -> Config:
    pairs = (key.split("=", 1) for key in (shipped()[name], *ASKS_FOR[name], *keys))
    return with_overrides(defaults, {key: yaml.safe_load(value) for key, value in pairs})


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_workflow_compiles_on_any_number_of_ranks(name, defaults, monkeypatch):
    monkeypatch.chdir(ROOT)
    for world_size in (1,) if name == "serve" else (1, 2, 8, 16):
        cluster = (
            f"trainer.n_gpus_per_node={min(world_size, 8)}",
            f"trainer.nnodes={max(1, world_size // 8)}",
        )
        cfg = configured(name, defaults, *cluster)
        plan, configs = compile_plan(load_dag(cfg), cfg, world_size)
        for section in ("instructions", "validation"):
            run_symbolically(plan, section)
        if world_size == 2:
            Interpreter(plan, configs).step("validation")


@pytest.mark.parametrize("name", shipped())
def test_what_is_chosen_on_a_gpu_for_a_shipped_workflow_could_have_been_set(
    name, defaults, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    named = [key.split("=")[0] for key in ASKS_FOR[name] if ".path=/models" in key]
    paths = (f"{key}={tmp_path}" for key in ("actor_rollout_ref.model.path", *named))
    cfg = configured(name, defaults, *paths)
    plan, _ = choose(*compile_plan(load_dag(cfg), cfg, 1), H200)
    assert plan.choices
    chosen = with_overrides(
        cfg, {key: value for choice in plan.choices for key, value in choice.keys.items()}
    )
    compile_plan(load_dag(chosen), chosen, 1)  # or it is refused
