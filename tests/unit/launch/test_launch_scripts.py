"""The launch scripts of examples/: their settings pass `siirl check`, and machines find each other."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from held_ports import held_port
from launch_jobs import ROOT, environment
from script_python import script_python

pytestmark = pytest.mark.heavy

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(  # the others: test_megatron_plan_scripts.py
    path.name for path in EXAMPLES.glob("run_*.sh") if "megatron" not in path.name
)
QWEN = {"vocab_size": 151936, "num_key_value_heads": 8, "max_position_embeddings": 40960}
MODELS = {
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "qwen3-8b": QWEN
    | {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "head_dim": 128,
    },
    "qwen3-0.6b": QWEN
    | {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
RANKS = {"run_qwen3-0.6b-1gpu.sh": 1, "run_qwen3-8b-grpo-multinode.sh": 16}
PYTHON = """#!{python}
# Stands for a Python with siirl and ray: tells what it was asked, a head listens, a run ends after a second.
import os, socket, sys, time
args = sys.argv[1:]
with open(os.environ["TOLD"], "a") as told:
    told.write(" ".join(args) + "\\n")
if "--head" in args:
    server = socket.create_server(("127.0.0.1", int(os.environ["RAY_PORT"])))
if "ray.scripts.scripts" in args:
    time.sleep(100)
time.sleep(1)
sys.exit(7)
"""


def script_environment(folder: Path, script: str, **more: str) -> dict[str, str]:
    """No GPU, no model, no data: a dry run needs the model's config.json only."""
    name = next(name for name in MODELS if name in script)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODELS[name]))
    keep = {name: value for name, value in environment().items() if not name.startswith(("PET_", "MASTER_"))}
    paths = {
        "MODEL_PATH": str(folder / "model"),
        "OUTPUT_DIR": str(folder / "out"),
        "PYTHON": script_python(),
    }
    return keep | paths | more


def run(script: str, env: dict[str, str], *settings: str) -> subprocess.CompletedProcess:
    command = ["bash", str(EXAMPLES / script), *settings]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)


def test_the_scripts_are_found():
    assert len(SCRIPTS) >= 4
    for script in SCRIPTS:
        assert (
            "lib/launch.sh" in (EXAMPLES / script).read_text()
            or "run_qwen" in (EXAMPLES / script).read_text()
        )


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_settings_of_a_script_pass_the_check(tmp_path, script):
    env = script_environment(tmp_path, script, DRY_RUN="1")
    done = run(script, env)
    assert done.returncode == 0, done.stderr
    assert f"on {RANKS.get(script, 8)} ranks" in done.stdout
    assert "warning" not in done.stderr, "every key that a script sets has an effect"


@pytest.mark.slow
def test_later_settings_of_the_user_count(tmp_path):
    env = script_environment(tmp_path, SCRIPTS[0], DRY_RUN="1", PET_NNODES="2", N_GPUS_PER_NODE="4")
    assert "on 8 ranks" in run(SCRIPTS[0], env).stdout
    assert "on 2 ranks" in run(SCRIPTS[0], env, "trainer.nnodes=1", "trainer.n_gpus_per_node=2").stdout
    wrong = run(SCRIPTS[0], env, "trainer.total_epoch=1")
    assert wrong.returncode == 2 and "trainer.total_epochs" in wrong.stderr


@pytest.fixture
def stub(tmp_path):
    """The environment of a script whose Python only tells what it was asked to do."""
    python = tmp_path / "python3"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    env = script_environment(tmp_path, "qwen3-8b", PYTHON=str(python), TOLD=str(tmp_path / "told"))
    with held_port() as port:
        yield env | {"PET_NNODES": "2", "MASTER_ADDR": "localhost", "RAY_PORT": str(port)}


def told(env: dict[str, str]) -> list[str]:
    return Path(env["TOLD"]).read_text().splitlines()


def start(env: dict[str, str], rank: int) -> subprocess.Popen:
    command = ["bash", str(EXAMPLES / "run_qwen3-8b-grpo.sh"), "trainer.seed=3"]
    env = env | {"PET_NODE_RANK": str(rank)}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)


def session_is_empty(leader: int, within_s: float = 10) -> bool:
    """Whether all processes of a session have ended."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    os.killpg(leader, signal.SIGKILL)
    return False


def test_a_worker_waits_for_the_head_joins_it_and_ends_with_it(stub):
    worker = start(stub, 1)
    time.sleep(0.5)
    head = start(stub, 0)
    assert head.wait(60) == 7, "the exit code of the run"
    assert worker.wait(30) == 0, worker.stderr.read()
    assert session_is_empty(head.pid) and session_is_empty(worker.pid)
    port = stub["RAY_PORT"]
    assert any(f"start --head --port={port}" in line and "--num-gpus=8" in line for line in told(stub))
    assert any(f"start --address=localhost:{port}" in line for line in told(stub))
    (main,) = (line for line in told(stub) if line.startswith("-m siirl.main_dag"))
    assert f"trainer.launcher=ray ray_init.address=localhost:{port} ray_init.wait_s=600" in main
    assert "trainer.nnodes=2" in main and "data.train_batch_size=256" in main
    assert main.endswith("trainer.seed=3")


def test_a_worker_without_a_head_gives_up_in_time(stub):
    worker = start(stub | {"NODE_WAIT_S": "1"}, 1)
    _, errors = worker.communicate(timeout=30)
    assert worker.returncode == 1
    assert f"no Ray head answered at localhost:{stub['RAY_PORT']} within 1 s" in errors


def test_one_machine_needs_no_ray(stub):
    done = run("run_qwen3-8b-grpo.sh", stub | {"PET_NNODES": "1"})
    assert done.returncode == 7
    (main,) = told(stub)
    assert main.startswith("-m siirl.main_dag") and "trainer.nnodes=1 " in main
    assert "launcher=ray" not in main
