"""`siirl test` passes what siirl ships: its templates, and its examples as their scripts start them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_tiny import ARCHITECTURES, make_arithmetic_parquet, make_tiny_model_dir, make_tiny_reward_model

from siirl.cli import main

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 1.0 if solution_str.startswith(str(ground_truth)) else len(set(solution_str)) / 100
"""
GAME = """
from siirl.agents.environments import Observation, StepResult

class Game:
    replayable = True

    def reset(self, task, seed):
        self.answer, self.tries = str(task["ground_truth"]), 0
        return Observation("")

    def step(self, actions):
        ((agent, said),) = actions.items()
        self.tries += 1
        right = said.strip() == self.answer
        return StepResult("no", {agent: 1.0 if right else len(set(said)) / 100}, right or self.tries == 3)


class AtOnce:
    replayable = True

    def reset(self, task, seed):
        self.answer = str(task["ground_truth"])
        return Observation("")

    def step(self, actions):
        scores = {who: len(set(said)) / 100 + said.startswith(self.answer) for who, said in actions.items()}
        mean = sum(scores.values()) / len(scores)
        return StepResult("", {agent: score - mean for agent, score in scores.items()}, True)
"""
GRPO = ("algorithm.adv_estimator=grpo",)
SCORED = ("reward_model.enable=true", "reward_model.model.path=FOLDER/scores")
TEMPLATES = {
    "grpo": GRPO,
    "grpo_lag": GRPO,
    "dapo": (*GRPO, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score"),
    "remax": ("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1"),
    "ppo": ("algorithm.adv_estimator=gae", "critic.model.path=FOLDER/model"),
    "solver_verifier": GRPO,
    "debate": GRPO,
    "debate_rounds": GRPO,
    "planner_worker": GRPO,
    "league": (*GRPO, "dag.node_config.game.env_path=FOLDER/game.py:AtOnce"),
    "population": (
        *(
            *GRPO,
            "actor_rollout_ref.model.lora_rank=4",
            "dag.node_config.game.env_path=FOLDER/game.py:AtOnce",
        ),
    ),
    "tree": (*GRPO, "dag.node_config.world.env_path=FOLDER/game.py:Game"),
    "distill": (*GRPO, "dag.node_config.teacher.teacher.model.path=FOLDER/model"),
    "grpo_reward_model": (*GRPO, *SCORED),
    "ppo_reward_model": ("algorithm.adv_estimator=gae", "critic.model.path=FOLDER/model", *SCORED),
}
"""Template -> keys."""
OF_SCRIPTS = {
    *("sft", "dpo", "reward_training", "sft_grpo", "reward_training_grpo"),
    *("reasoner_actor", "self_play"),
}
"""Templates that scripts of examples run."""
EXTEND = "quickstart/run.sh actor_rollout_ref.rollout.n=4"
TEAM = "real_model/run.sh team --answers examples/real_model/answers/team.yaml data.max_prompt_length=256"
SCRIPTS = (
    "given_responses/run.sh sft",
    "given_responses/run.sh dpo",
    "given_responses/run.sh reward",
    "given_responses/run.sh sft_grpo",
    "given_responses/run.sh reward_grpo",
    "multi_agent/run.sh solver_verifier",
    "multi_agent/run.sh debate",
    "multi_agent/run.sh planner_worker --answers examples/multi_agent/answers/planner_worker.yaml",
    "multi_agent/run.sh reasoner_actor --answers examples/multi_agent/answers/reasoner_actor.yaml",
    "multi_agent/run.sh self_play --answers examples/multi_agent/answers/self_play.yaml",
    "distillation/run.sh",
    "environments/run.sh reasoning_gym",
    "environments/run.sh lake --answers examples/environments/answers/lake.yaml",
    "environments/run.sh nim --answers examples/environments/answers/nim.yaml",
    "coding/run.sh",
    "environments/run.sh guess",
    "environments/run.sh shop",
    "environments/run.sh verifiers",
    "agents_elsewhere/run.sh",
    "real_model/run.sh sums",
    TEAM,
    "real_model/run.sh products --answers examples/real_model/answers/products.yaml "
    "data.max_prompt_length=256 data.max_response_length=400 "
    "actor_rollout_ref.rollout.agent.max_turn_tokens=160",
    "agents_elsewhere/quickstart.sh openai",
    "vision/run.sh --no-tiny",
    "serve/run.sh job",
    "quickstart/run.sh",
    *(f"quickstart/algorithm.sh {name}" for name in ("gspo", "dapo", "ppo", "rloo", "reinforce++", "remax")),
    f"{EXTEND} algorithm.adv_estimator=examples/extend/advantage.py:centred",
    f"{EXTEND} actor_rollout_ref.actor.policy_loss.loss_mode=examples/extend/policy_loss.py:squashed",
    f"{EXTEND} custom_reward_function={{path:examples/extend/reward.py,name:digit_reward}}",
    f"{EXTEND} dag.custom_pipeline_fn=examples/extend/dag.py:with_bonus",
    f"{EXTEND} dag.custom_pipeline_fn=examples/extend/dag.py:with_fluency",
)
COMMAND = (
    "import sys, siirl.testing.trial as trial; trial.DEADLINE_S = 600.0; "
    "from siirl.cli import main; sys.exit(main(['test', *sys.argv[1:]]))"
)
"""siirl test, with the time that a machine needs on which other tests run."""
WRAPPER = f"""#!/bin/bash
tested() {{ exec {sys.executable} -c "{COMMAND}" "$@"; }}
if [[ "$1 $2" == "-m siirl.main_dag" ]]; then tested "${{@:3}}"; fi
if [[ "$1 $2 $3 $4" == "-m siirl.cli check --elsewhere" ]]; then tested "${{@:5}}"; fi
exec {sys.executable} "$@"
"""
LARGE = {"hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 12288}
QWEN3_8B = ("qwen3", LARGE, 1)
LAUNCHED = {
    "run_qwen3-0.6b-1gpu.sh": ("qwen3", LARGE | {"hidden": 1024, "layers": 28, "heads": 16, "mlp": 3072}, 1),
    "run_qwen3-8b-grpo.sh": QWEN3_8B,
    "run_qwen3-8b-grpo-lag.sh": QWEN3_8B,
    "run_qwen3-8b-grpo-multinode.sh": ("qwen3", LARGE, 2),
    "run_qwen3-8b-megatron.sh": QWEN3_8B,
    "run_qwen3-8b-ppo-megatron.sh": QWEN3_8B,
    "run_qwen2.5-7b-grpo.sh": (
        "qwen2",
        {"hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "mlp": 18944},
        1,
    ),
    "run_qwen3-30b-a3b-megatron.sh": (
        "qwen3_moe",
        LARGE | {"hidden": 2048, "layers": 48, "kv_heads": 4, "mlp": 1536, "experts": 128},
        4,
    ),
    "run_qwen3-235b-a22b-megatron.sh": (
        "qwen3_moe",
        LARGE | {"layers": 94, "heads": 64, "kv_heads": 4, "mlp": 3072, "experts": 128},
        32,
    ),
    "run_llama3.1-70b-megatron.sh": (
        "llama",
        {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "mlp": 28672},
        8,
    ),
    "run_llama3.1-405b-megatron.sh": (
        "llama",
        {"hidden": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "mlp": 53248},
        32,
    ),
}
"""Launch script -> family and sizes of its model, of which no weights are made; machines."""
OTHERWISE = {
    "lib/launch.sh": "a part of the launch scripts",
    "agents_elsewhere/listen.sh": "its episodes come from outside: test_agents_elsewhere.py",
}
"""Script that no test of this file runs -> why."""
NOT_PASSED = {
    "environments/run.sh shop": ["one rank equals two", "resume equals undisturbed"],
    TEAM: ["what an agent says counts"],
}
"""Script -> what it rightly fails: a tool draws a number at each call; only the last to speak is scored."""


def failed(command: list[str], folder: Path, **more: str) -> list[str]:
    """The assertions that a script's job fails, which is tested in the place of being run."""
    python = folder / "python"
    python.write_text(WRAPPER)
    python.chmod(0o755)
    names = ("GIVEN_RESPONSES", "DISTILLATION", "ENVIRONMENTS", "MULTI_AGENT", "QUICKSTART", "VISION")
    names += ("AGENTS_ELSEWHERE", "REAL_MODEL", "CODING", "SERVE")
    places = {f"{name}_DIR": str(folder / "out") for name in names}
    environment = os.environ | places | {"PYTHON": str(python), "PYTHONPATH": str(ROOT)} | more
    done = subprocess.run(
        ["bash", *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800
    )
    assert "assertions failed" in done.stdout, done.stdout + done.stderr
    print(done.stdout)
    lines = done.stdout.splitlines()
    return [
        line.removeprefix("FAIL").partition("   ")[0].strip() for line in lines if line.startswith("FAIL")
    ]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    model = make_tiny_model_dir(folder / "model")
    make_tiny_reward_model(folder / "scores")
    train = make_arithmetic_parquet(folder / "train.parquet", 32)
    (folder / "reward.py").write_text(REWARD)
    (folder / "game.py").write_text(GAME)
    (folder / "answers.yaml").write_text('"*": ["{ground_truth}", "7 or 8", null, "no"]')
    return folder, [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=4",
        f"data.train_files={train}",
        "data.max_prompt_length=48",
        "data.max_response_length=64",
        f"custom_reward_function.path={folder / 'reward.py'}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_passes(name, job, tmp_path):
    """Also where rows of a round wait for the next step, and where nothing compares answers to one prompt."""
    folder, settings = job
    keys = [*settings, *(key.replace("FOLDER", str(folder)) for key in TEMPLATES[name])]
    if "reward_model.enable=true" in keys:
        keys = [key for key in keys if not key.startswith("custom_reward_function")]
    script = tmp_path / "run.sh"
    script.write_text('exec "$PYTHON" -m siirl.main_dag "$@"\n')
    workflow = ROOT / "dag_templates" / f"{name}.yaml"
    words = [str(script), str(workflow), *keys, "--answers", str(folder / "answers.yaml")]
    assert not failed(words, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("words", SCRIPTS)
def test_an_example_passes_as_its_script_starts_it(words, tmp_path):
    """Also an imitation beside a policy that rewards teach, and a player who is not asked in each episode."""
    script, *more = words.split()
    own = {"AGENT": "shell", "MODEL": str(tmp_path / "model")}
    if script.startswith("real_model"):
        make_tiny_model_dir(tmp_path / "model", vocab=128, weights=False, max_positions=4096)
    if more == ["guess"]:
        pytest.importorskip("openenv", reason="pip install openenv-core")
    if more == ["verifiers"] and not (ROOT / ".venv/verifiers").exists():
        pytest.skip("make .venv/.verifiers")
    if script.startswith("quickstart"):
        made = [sys.executable, "examples/quickstart/prepare.py", "--out", str(tmp_path / "out")]
        subprocess.run(made, cwd=ROOT, check=True, timeout=200, capture_output=True)
    assert failed([str(EXAMPLES / script), *more], tmp_path, **own) == NOT_PASSED.get(words, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launch_script_passes_with_a_tiny_model_in_the_place_of_its_own(name, tmp_path, monkeypatch):
    """Its own model is on its own machines in the plan, of which memory and time are told."""
    family, sizes, machines = LAUNCHED[name]
    monkeypatch.setitem(ARCHITECTURES, "qwen3_moe", "Qwen3MoeForCausalLM")
    model = make_tiny_model_dir(
        tmp_path / "model", family, vocab=106, tie=False, weights=False, max_positions=32768, **sizes
    )
    rows = make_arithmetic_parquet(tmp_path / "train.parquet", 64, data_source="openai/gsm8k")
    more = {
        "MODEL_PATH": model,
        "TRAIN_DATA_PATH": rows,
        "TEST_DATA_PATH": rows,
        "OUTPUT_DIR": tmp_path / "o",
    }
    own = {"DRY_RUN": "1", "PET_NNODES": str(machines)} | {key: str(value) for key, value in more.items()}
    assert not failed([str(EXAMPLES / name)], tmp_path, **own)


def test_a_service_is_refused_as_its_clients_decide_what_it_learns(job, capsys):
    _, settings = job
    settings = [*settings[:-1], "actor_rollout_ref.model.lora_rank=8", "service.enable=true"]
    assert main(["test", str(ROOT / "dag_templates" / "serve.yaml"), *settings]) == 2
    assert "it learns from what its clients send" in capsys.readouterr().err


def test_episodes_that_clients_play_are_refused(job, capsys):
    _, settings = job
    keys = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.serve.listen=true")
    workflow = ROOT / "examples" / "agents_elsewhere" / "shopper.yaml"
    off = "dag.node_config.shopper.serve.command=null"
    assert main(["test", str(workflow), *settings, *keys, off]) == 2
    assert "clients play its episodes, and none comes to a test" in capsys.readouterr().err


def test_each_template_and_each_script_is_tested():
    templates = {file.stem for file in (ROOT / "dag_templates").glob("*.yaml")}
    assert templates == {*TEMPLATES, *OF_SCRIPTS, "serve"}
    scripts = {str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*.sh")}
    assert scripts == {words.split()[0] for words in SCRIPTS} | LAUNCHED.keys() | OTHERWISE.keys()
