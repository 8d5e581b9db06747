"""The Megatron launch scripts: what they would run passes `siirl check`, on the clusters they are for."""

import os
import subprocess
from pathlib import Path

import pytest
from megatron_cases import write_model

from siirl.cli import main

pytestmark = pytest.mark.heavy

EXAMPLES = Path(__file__).parents[2] / "examples"

SCRIPTS = {
    "run_qwen3-8b-megatron.sh": ("Qwen3-8B", (1, 2, 4)),
    "run_qwen3-30b-a3b-megatron.sh": ("Qwen3-30B-A3B", (4, 8)),
    "run_qwen3-235b-a22b-megatron.sh": ("Qwen3-235B-A22B", (32,)),
    "run_llama3.1-70b-megatron.sh": ("Llama-3.1-70B", (2, 8, 16)),
    "run_llama3.1-405b-megatron.sh": ("Llama-3.1-405B", (32,)),
    "run_qwen3-8b-ppo-megatron.sh": ("Qwen3-8B", (1, 2)),
}

SIIRL_GUIDE_KEYS = {
    "algorithm": "adv_estimator",
    "data": "train_files val_files train_batch_size max_prompt_length max_response_length",
    "actor_rollout_ref.model": "path enable_gradient_checkpointing",
    "actor_rollout_ref.actor": "strategy ppo_mini_batch_size ppo_micro_batch_size_per_gpu grad_clip",
    "actor_rollout_ref.actor.megatron": "tensor_model_parallel_size pipeline_model_parallel_size "
    "context_parallel_size sequence_parallel use_distributed_optimizer param_dtype param_offload",
    "actor_rollout_ref.actor.optim": "lr",
    "actor_rollout_ref.rollout": "tensor_model_parallel_size name gpu_memory_utilization n prompt_length "
    "response_length",
    "trainer": "logger project_name experiment_name n_gpus_per_node nnodes save_freq test_freq total_epochs "
    "resume_mode max_actor_ckpt_to_keep default_local_dir val_before_train",
}
"""The keys of the script in siiRL's own guide to the Megatron backend, by group."""


def run_script(script: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A dry run of a script; what it would call as Python writes its arguments to standard output."""
    python = home / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    fixed = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHON": str(python), "DRY_RUN": "1"}
    command = ["bash", str(EXAMPLES / script), *variables.pop("arguments", "").split()]
    return subprocess.run(command, env=fixed | variables, capture_output=True, text=True, timeout=60)


def settings_of(script: str, home: Path, model: Path, nodes: int, arguments: str = "") -> list[str]:
    """The key=value settings with which a script would start the run on so many machines of 8 devices."""
    done = run_script(
        script, home, MODEL_PATH=str(model), PET_NNODES=str(nodes), N_GPUS_PER_NODE="8", arguments=arguments
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("-m\nsiirl.cli\ncheck\n--elsewhere\n")
    return done.stdout.splitlines()[4:]


def check(settings: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `siirl check` says on stderr of settings that it accepts."""
    code = main(["check", "--elsewhere", *settings])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.err


CASES = [(script, model, nodes) for script, (model, counts) in SCRIPTS.items() for nodes in counts]


@pytest.mark.parametrize(("script", "name", "nodes"), CASES)
def test_every_script_passes_the_check_on_its_cluster(tmp_path, capsys, script, name, nodes):
    model = write_model(tmp_path / "model", name)
    settings = settings_of(script, tmp_path, model, nodes)
    assert f"trainer.nnodes={nodes}" in settings
    warnings = check(settings, capsys)
    assert "no effect" not in warnings
    assert "not checked" not in warnings


def test_every_key_of_the_script_in_siirls_guide_is_set_and_accepted(tmp_path, capsys):
    settings = settings_of("run_qwen3-8b-megatron.sh", tmp_path, write_model(tmp_path / "m", "Qwen3-8B"), 1)
    named = {setting.partition("=")[0] for setting in settings}
    wanted = {f"{group}.{name}" for group, names in SIIRL_GUIDE_KEYS.items() for name in names.split()}
    assert len(wanted) == 38
    assert wanted <= named
    check(settings, capsys)


def test_arguments_of_a_script_are_further_settings(tmp_path):
    model = write_model(tmp_path / "m", "Qwen3-8B")
    settings = settings_of("run_qwen3-8b-megatron.sh", tmp_path, model, 1, "trainer.total_epochs=1")
    assert settings[-1] == "trainer.total_epochs=1"


def test_a_script_refuses_a_cluster_that_it_has_no_sizes_for(tmp_path):
    done = run_script("run_llama3.1-70b-megatron.sh", tmp_path, PET_NNODES="3")
    assert done.returncode == 2
    assert "sizes are known for 2, 8 and 16 machines" in done.stderr
