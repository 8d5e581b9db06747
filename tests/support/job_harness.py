"""Runs the main job on gloo processes, in a folder of its own: what the end-to-end tests share."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_harness import run_workers
from fixtures_tiny import make_arithmetic_parquet, make_tiny_model_dir
from script_python import script_python

ROOT = Path(__file__).parents[2]
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """A reward that varies between random responses: the share of digits, and a bonus for the right one."""
    digits = sum(character.isdigit() for character in solution_str)
    return digits / 8 + (0.5 if ground_truth in solution_str else 0.0)
'''


@dataclass(frozen=True)
class Inputs:
    """Model, data and reward of a test job."""

    model: Path
    train: Path
    val: Path
    reward: Path

    @classmethod
    def make(cls, folder: Path, rows: int = 32, seed: int = 0) -> "Inputs":
        """Write them below `folder`. init_std 0.2: log-probs are far from uniform."""
        folder.mkdir(parents=True, exist_ok=True)
        reward = folder / "reward.py"
        reward.write_text(REWARD)
        return cls(
            make_tiny_model_dir(folder / "model", init_std=0.2, seed=seed),
            make_arithmetic_parquet(folder / "train.parquet", rows),
            make_arithmetic_parquet(folder / "val.parquet", 6, seed=1),
            reward,
        )


def overrides(inputs: Inputs, output: Path, *more: str) -> list[str]:
    """The command line of a small job, in fp32: 8 prompts x 4 samples, 2 optimizer steps a step."""
    base = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": inputs.train,
        "data.val_files": inputs.val,
        "data.train_batch_size": 8,
        "data.max_prompt_length": 32,
        "data.max_response_length": 8,
        "actor_rollout_ref.model.path": inputs.model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "float32",
        "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": "float32",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": 4,
        "custom_reward_function.path": inputs.reward,
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[]",
        "trainer.total_training_steps": 3,
        "trainer.output_dir": output,
        "trainer.deadline_s": 60,
    }
    return [f"{key}={value}" for key, value in base.items()] + list(more)


@dataclass(frozen=True)
class Finished:
    """A run that has ended: its folder and its metrics, one dict per line."""

    output: Path
    lines: list[dict[str, Any]]

    @classmethod
    def read(cls, output: Path) -> "Finished":
        """The run in a folder."""
        return cls(output, [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()])

    def values(self, name: str) -> list[float]:
        """The metric over the steps that have it."""
        return [line[name] for line in self.lines if name in line]

    def weights(self, model: str = "") -> dict[str, Any]:
        """The exported weights."""
        from safetensors.torch import load_file

        files = sorted((self.output / "hf_model" / model).glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


def audited(run: Finished) -> list[str]:
    """What `siirl audit` says of a run with a ledger: all holds. The page has the life of each sample."""
    from siirl.runs.audit import audit
    from siirl.view.run_parts import RunParts

    lines, holds = audit(run.output)
    assert holds, "\n".join(lines)
    page = RunParts(run.output)
    for sample in page.read("episodes").value:
        lives = page.read(f"lives {sample['step']}").value if "life" in sample else None
        ends = (" trained:", " dropped:", " waiting:")
        assert lives is None or any(end in line for end in ends for line in lives[sample["life"]]), sample
    return lines


def run_job(
    world_size: int, arguments: list[str], deadline_s: float = 100, run: Callable[..., None] | None = None
) -> Finished:
    """Run the main job to its end as torchrun does, checks included; arguments as on the command line, the
    world size is added.

    run: what each worker does, with the arguments of `work`, which it calls. WorkerFailure if it ends badly.
    """
    arguments = [*arguments, f"trainer.n_gpus_per_node={world_size}"]
    output = Path(
        next(text for text in arguments if text.startswith("trainer.output_dir=")).partition("=")[2]
    )
    call = (run or work, world_size, arguments, str(output))
    run_workers(*call, deadline_s=deadline_s, backend=None, starts=True)
    return Finished.read(output)


def run_example(
    folder: Path,
    *arguments: str,
    example: str = "multi_agent",
    python: str = "",
    fails: bool = False,
    timeout_s: float = 870,
    script: str = "run.sh",
) -> str:
    """Run examples/EXAMPLE/SCRIPT, whose files go below `folder`; what it prints.

    python: the program that it calls, if not Python; "echo" prints the command lines. fails: it must, and its
    errors are returned.
    """
    environment = {
        "PYTHON": python or script_python(),
        "PYTHONPATH": str(ROOT),
        f"{example.upper()}_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / example / script), *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        timeout=timeout_s,
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def work(rank: int, world_size: int, arguments: list[str], output: str) -> None:
    """One worker: the command `torchrun -m siirl.main_dag ARGUMENTS` in this process, checks included, and no
    picture in the end.

    A failing worker raises here, where it would end its process.
    """
    from siirl import main_dag
    from siirl.config.load import read_config
    from siirl.dag_worker import step_report
    from siirl.findings import Findings
    from siirl.launch import worker_entry

    def exit_now(code: int) -> None:
        raise RuntimeError(f"the worker ends with exit code {code}")

    worker_entry._exit_now = exit_now
    step_report.reward_curve_png = lambda *run: None  # a tenth of a small job; jobs by the command have it
    found = Findings()
    assert main_dag.run(read_config(arguments, "ppo_dag_trainer", found), found) == 0


def three_steps(rank, world_size, arguments, output):
    """A worker that dies when its fourth step begins."""
    from siirl.dag_worker.training import Training

    train_step = Training.train_step

    def dies(training):
        assert training.step < 4, "killed in step 4"
        return train_step(training)

    Training.train_step = dies
    try:
        work(rank, world_size, arguments, output)
    finally:
        Training.train_step = train_step
