"""`siirl plan --from` against runs that did what it was asked of: pairs of recorded runs.

    python benchmarks/what_if.py [--blocks 3]
    python benchmarks/what_if.py --pairs

Runs small jobs on a CPU that differ in a few keys (VARIANTS), in turns, and writes what their steps took to
benchmarks/results/what_if_cpu.json. --pairs asks the command, of one run of each pair, for the keys of the
other one, compares its step with the measured one, and prints the table of docs/evidence/predictions.md; then
the constants of the cost model's CPU (device_kinds.py), which are fitted to FITTED alone. Runs on GPUs are in
the files that fit_costs.py reads.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fit_costs
import long_tail
import numpy as np
from agents_pool import REPOSITORY, SMALL
from grpo_gpu import COMMON, HERE, make_data, make_model
from report_file import Report, end_by_signals, run_job

from siirl.cli import main as siirl
from siirl.compiler.choose import choose
from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.cost.calibration import Calibration, step_means
from siirl.compiler.cost.device_kinds import CPU, H200
from siirl.compiler.cost.step_time import StepTime, step_time
from siirl.compiler.plan import Plan
from siirl.config import Config, load_config
from siirl.config.tree import print_config, to_dict
from siirl.launch.devices import named_machine
from siirl.observe.curve import read_series

RESULT = HERE / "results" / "what_if_cpu.json"
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MODEL = "actor_rollout_ref.model."
BASE = [f"{ACTOR}use_dynamic_bsz=False", f"{ACTOR}ppo_micro_batch_size_per_gpu=8"]
KL = [f"{ACTOR}use_kl_loss=True", f"{ROLLOUT}log_prob_micro_batch_size_per_gpu=8",
      "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8"]  # fmt: skip
TWO = ["trainer.n_gpus_per_node=2"]
VARIANTS: dict[str, tuple[str, int, list[str]]] = {
    "base": ("equal", 0, []),
    "micro_2": ("equal", 0, [f"{ACTOR}ppo_micro_batch_size_per_gpu=2"]),
    "micro_32": ("equal", 0, [f"{ACTOR}ppo_micro_batch_size_per_gpu=32"]),
    "response_32": ("equal", 0, ["data.max_response_length=32"]),
    "response_128": ("equal", 0, ["data.max_response_length=128"]),
    "prompts_16": ("equal", 0, ["data.train_batch_size=16", f"{ACTOR}ppo_mini_batch_size=16"]),
    "samples_8": ("equal", 0, [f"{ROLLOUT}n=8"]),
    "mini_4": ("equal", 0, [f"{ACTOR}ppo_mini_batch_size=4"]),
    "kl": ("equal", 0, KL),
    "recompute": ("equal", 0, [f"{MODEL}enable_gradient_checkpointing=True"]),
    "two_ranks": ("equal", 0, TWO),
    "apart": ("equal", 0, [*TWO, "dag.workflow_path=apart.yaml"]),
    "apart_lag_1": ("equal", 1, [*TWO, "dag.workflow_path=apart.yaml"]),
    "tail": ("tail", 0, []),
    "tail_lag_1": ("tail", 1, []),
    "tail_lag_2": ("tail", 2, []),
}
"""Name -> lengths of responses, max_lag, further keys."""
FITTED = ("base", "micro_2", "response_128", "samples_8")
"""The runs that the CPU's constants are fitted to."""
STEPS, LAGGING = 9, 18
"""That count, of which those with asynchronous rollouts differ."""
PAIRS = {
    **{
        f"base -> {name}": ("base", name)
        for name in VARIANTS
        if VARIANTS[name][0] == "equal" and name != "base"
    },
    "tail -> tail_lag_1": ("tail", "tail_lag_1"),
    "tail -> tail_lag_2": ("tail", "tail_lag_2"),
    "tail_lag_2 -> tail_lag_1": ("tail_lag_2", "tail_lag_1"),
    "two_ranks -> apart": ("two_ranks", "apart"),
    "micro_2 -> micro_32": ("micro_2", "micro_32"),
}
GPU_PAIRS = {
    "one GPU -> four": ("grpo_gpu_A_1", "grpo_gpu_A_4"),
    "four GPUs -> engines of two": ("grpo_gpu_A_4", "grpo_gpu_A_4_tp2"),
    "two GPUs -> engines of two": ("grpo_gpu_A_2", "grpo_gpu_A_2_tp2"),
    "four GPUs -> two": ("grpo_gpu_A_4", "grpo_gpu_A_2"),
    "another model": ("grpo_gpu_A_1", "grpo_gpu_B_1"),
    "Megatron: DP 4 -> TP 4": (
        "backends_gpu_speed_1.7B_4_dp4 megatron", "backends_gpu_speed_1.7B_4_tp4 megatron",
    ),
    "Megatron: DP 4 -> TP 2, PP 2": (
        "backends_gpu_speed_1.7B_4_dp4 megatron", "backends_gpu_speed_1.7B_4_tp2pp2 megatron",
    ),
    "FSDP2 -> Megatron": (
        "backends_gpu_speed_1.7B_4_tp2pp2 fsdp", "backends_gpu_speed_1.7B_4_tp2pp2 megatron",
    ),
    "staleness 0 -> 1": ("long_tail_vllm_gpu lag 0", "long_tail_vllm_gpu lag 1"),
    "disaggregated, staleness 0 -> 2": ("long_tail_vllm_gpu_apart lag 0", "long_tail_vllm_gpu_apart lag 2"),
}  # fmt: skip
"""What is asked -> the run that is asked of, and the one that did it."""
SHARED = "two processes shared two cores with other load"
DISTURBED = "the run was disturbed: its updates took 36% longer than those of tail, for 5% more tokens"
STALENESS = "rollout/staleness"
TABLES = {"step_s": "s", "gib": "GiB", "staleness": "steps"}
"""Fields of Pair -> unit."""
FURTHER_OFF = {
    "base -> two_ranks": SHARED,
    "two_ranks -> apart": SHARED,
    "tail -> tail_lag_2": DISTURBED,
    "tail_lag_2 -> tail_lag_1": DISTURBED,
}
"""Pairs that are not predicted within 20%, and why."""


@dataclass(frozen=True)
class Run:
    """A run as its folder tells of it."""

    keys: tuple[str, ...]
    world: int
    means: Mapping[str, float]
    sampled: tuple[int, ...] = ()
    """Tokens of some of its responses."""

    def planned(self) -> tuple[Config, Plan, dict[str, Config]]:
        cfg = load_config(self.keys)
        plan, configs = compile_plan(load_dag(cfg), cfg, self.world)
        kind = CPU if cfg.trainer.device == "cpu" else H200
        return cfg, *choose(plan, configs, named_machine(cfg, kind))

    def write(self, folder: Path) -> None:
        """The folder of such a run, as far as the command reads it."""
        cfg, plan, _ = self.planned()
        (folder / "rollouts" / "train").mkdir(parents=True)
        (folder / "run_config.yaml").write_text(print_config(cfg))
        (folder / "run.yaml").write_text("---\ndevice: NVIDIA H200\n")
        (folder / "job.json").write_text(json.dumps({"config": to_dict(cfg), "plan": plan.to_json()}))
        lines = [json.dumps({"step": step, "time_s": step, **self.means}) for step in range(1, 8)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        rows = [json.dumps({"response_length": length}) for length in self.sampled]
        (folder / "rollouts" / "train" / "step_1.jsonl").write_text("".join(f"{row}\n" for row in rows))


@dataclass(frozen=True)
class Answer:
    """A number of a run that is asked of, as predicted for the other one, and as measured of that."""

    recorded: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Pair:
    """What the command says of a pair of runs, if both have recorded it."""

    title: str
    step_s: Answer
    gib: Answer | None
    staleness: Answer | None


def asked(folder: Path, keys: tuple[str, ...]) -> str:
    """What the command prints for a run and further keys."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = siirl(["plan", "--from", str(folder), *keys])
    assert code == 0, said.getvalue()
    return said.getvalue()


def pairs(folder: Path) -> Iterator[Pair]:
    """Each pair, asked of the one run for the keys of the other one."""
    cpu, gpu = cpu_runs(folder), gpu_runs(folder)
    for title, (one, other) in (*PAIRS.items(), *GPU_PAIRS.items()):
        runs = cpu if one in cpu else gpu
        place = folder / title.replace(" ", "_")
        runs[one].write(place)
        said, measured = asked(place, runs[other].keys), runs[other].means

        def answer(pattern: str, of: float | None, said: str = said) -> Answer | None:
            found = re.search(pattern, said, re.M)
            return Answer(float(found[1]), float(found[2]), of) if found and of else None

        step = answer(r"^  step +([\d.]+) +([\d.]+) ", measured["time/step_s"])
        assert step is not None, said
        gib = answer(r"memory: ([\d.]+) GiB.* recorded, ([\d.]+) ", most_gib(measured))
        stale = answer(r"staleness of .*: ([\d.]+) steps recorded, ([\d.]+) ", measured.get(STALENESS))
        yield Pair(title, step, gib, stale)


def most_gib(means: Mapping[str, float]) -> float | None:
    """Of the fullest device, as it and its allocator were looked at; of runs without one, of a process."""
    held = re.compile(r"memory/(\w+_)?(device|reserved|peak)_gib")
    found = [value for name, value in means.items() if held.fullmatch(name) and "host" not in name]
    return max(found, default=means.get("memory/host_peak_gib"))


def cpu_runs(folder: Path) -> dict[str, Run]:
    """Those of the result, with a model of their sizes in a folder."""
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **COMMON, **SMALL}
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    long_tail.apart_dag(folder)
    result = json.loads(RESULT.read_text())
    return {
        name: Run(tuple(job_keys(folder, name)), 2 if any(key in TWO for key in VARIANTS[name][2]) else 1,
                  found["means"], tuple(found["sampled"]))
        for name, found in result["runs"].items()
    }  # fmt: skip


def gpu_runs(folder: Path) -> dict[str, Run]:
    found = {}
    for run in fit_costs.measured_runs(folder):
        means = dict(run.seconds)
        if run.lengths is not None:
            response, prompt = run.lengths.response, run.lengths.prompt
            means |= {"rollout/response_length": response, "rollout/tokens": response}
            means |= {"perf/tokens": response + prompt}
        found[run.name] = Run(run.keys, run.plan.world_size, means)
    return found


def job_keys(folder: Path, name: str) -> list[str]:
    lengths, lag, more = VARIANTS[name]
    steps = LAGGING if lag or lengths == "tail" else STEPS
    words = ["--prompts", "8", "--mean-tokens", "64", "--response-tokens", "512", "--steps", str(steps)]
    args = long_tail.arguments([*words, *(["--equal"] if lengths == "equal" else [])])
    keys = long_tail.job_keys(args, folder, folder / name, str(lag), SMALL["vocab_size"])
    return [*keys, *BASE, *(key.replace("=apart.yaml", f"={folder}/apart.yaml") for key in more)]


def run(folder: Path, name: str, out: Path) -> None:
    """One block of a job."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "siirl.main_dag", *job_keys(folder, name), f"trainer.output_dir={out}"]
    log = out.with_suffix(".log")
    with log.open("w") as file:
        status = run_job(command, lambda: None, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if status:
        raise SystemExit(f"{name} ended with {status}:\n{log.read_text()[-3000:]}")


def told_by(outs: Sequence[Path]) -> dict[str, Any]:
    """What the steps of a job took on average, in the block that other load disturbed least, and the lengths
    of responses that it kept."""
    found = {out: step_means(read_series(out / "metrics.jsonl")) for out in outs}
    out = min(found, key=lambda out: found[out]["time/step_s"])
    kept = ("time/", "rollout/", "memory/", "perf/tokens")
    means = {name: float(f"{value:.6g}") for name, value in found[out].items() if name.startswith(kept)}
    lengths = sorted(
        json.loads(line)["response_length"]
        for file in (out / "rollouts" / "train").glob("step_*.jsonl")
        for line in file.read_text().splitlines()
    )
    return {"means": means, "sampled": lengths}


def fit(runs: Mapping[str, Run]) -> dict[str, float]:
    """Constant -> the value that predicts the fitted runs best, by least squares of relative errors."""
    names = {
        constant.what: name for name, constant in CPU.constants.items() if constant.source == RESULT.stem
    }
    values = {name: CPU.constants[name].value for name in names.values()}
    for _ in range(fit_costs.ROUNDS):
        constants = {
            name: replace(one, value=values.get(name, one.value)) for name, one in CPU.constants.items()
        }
        kind = replace(CPU, constants=constants)
        observed = []
        for one in (runs[name] for name in FITTED):
            _, plan, configs = one.planned()
            found = step_time(plan, configs, kind, recorded=Calibration())
            assert isinstance(found, StepTime), found
            for phase in found.phases:
                metric = fit_costs.TIMES.get(phase.name)
                if metric in one.means:
                    observed.append([phase.parts.get(what, 0.0) / one.means[metric] for what in names])
        factors = fit_costs._not_negative(np.array(observed), np.ones(len(observed)))
        for name, factor in zip(names.values(), factors, strict=True):
            rate = constants[name].unit.endswith("/s")
            values[name] = float(values[name] / factor if rate else values[name] * factor)
    return values


def table(found: Sequence[Pair], what: str = "step_s", unit: str = "s") -> list[str]:
    """Lines of Markdown. what: a field of Pair."""
    heads = [f"{name}, {unit}" for name in ("recorded", "predicted", "measured")]
    lines = [f"| what is asked | {' | '.join(heads)} | error |", "|---|---|---|---|---|"]
    for pair in found:
        if (answer := getattr(pair, what)) is not None:
            numbers = (answer.recorded, answer.predicted, answer.measured)
            texts = " | ".join(f"{number:.3g}" for number in numbers)
            lines.append(f"| {pair.title} | {texts} | {round(100 * answer.error):+d}% |")
    return lines


def main() -> None:
    end_by_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=3, help="of each job, in turns")
    parser.add_argument("--pairs", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.pairs:
            found = list(pairs(folder))
            for what, unit in TABLES.items():
                print("\n".join(table(found, what, unit)), end="\n\n")
            for name, value in fit(cpu_runs(folder)).items():
                print(f"{name:16s} {value:.3g} {CPU.constants[name].unit}")
            return
        report = Report(RESULT, dict.fromkeys(VARIANTS, args.blocks), runs={})
        make_model(folder / "model", SMALL)
        make_data(folder / "train.parquet", 16 * 64, 32, SMALL["vocab_size"])
        long_tail.apart_dag(folder)
        outs: dict[str, list[Path]] = {name: [] for name in VARIANTS}
        for block, name in itertools.product(range(args.blocks), VARIANTS):
            out = folder / f"{name}_{block}"
            run(folder, name, out)
            outs[name].append(out)
            report["runs"][name] = told_by(outs[name])
            report.count(name, block + 1)
            print(f"{name}: {report['runs'][name]['means']['time/step_s']:.3g} s", flush=True)
        report.finish()


if __name__ == "__main__":
    main()
