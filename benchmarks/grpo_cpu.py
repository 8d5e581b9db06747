"""GRPO on two CPU cores: siirl against TRL's GRPOTrainer, in samples a second.

    python benchmarks/grpo_cpu.py [--steps 6] [--blocks 2] [--processes 2] [key=value ...]

Both train the quickstart's model on the quickstart's prompts: 32 prompts x 16 samples and one optimizer step
a step, temperature 1, top-p 1, no KL, no entropy bonus, constant learning rate, fp32, the same reward
function, two cores. Two response lengths: "short" is the quickstart's 2 tokens; in "long" the end token lies
outside the model's vocabulary, so that every response has all of its 64 tokens.

siirl and TRL take turns, each turn (block) in a fresh process. A step's time is the wall time from its
predecessor's end to its own, with everything that happens in between; the first steps of a block are not
counted. Further keys go to siirl's runs; put them before --cases. Needs the extra `oracles`. Writes
benchmarks/results/grpo_cpu.json.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
WARM_UP_STEPS = 3
CORES = 2
NEVER = "<never>"


@dataclass(frozen=True)
class Settings:
    """What a block runs; TRL's block gets them as JSON."""

    case: str
    model: str
    train_file: str
    val_file: str
    steps: int
    response_tokens: int
    processes: int  # of siirl; each has its share of the cores as threads
    trl_micro_rows: int
    siirl_micro_tokens: int
    prompts: int = 32
    samples: int = 16
    prompt_tokens: int = 16
    lr: float = 1e-4
    threads: int = CORES
    compiled: bool = False
    """Both compile: siirl with model.compile_layers, TRL with torch_compile."""
    keys: list[str] = field(default_factory=list)
    """Further key=value of siirl's runs; they win over those of `run_siirl`."""


@dataclass(frozen=True)
class Block:
    """The counted steps of one block: wall seconds, sampled tokens, reward; and where siirl's time went."""

    step_s: list[float]
    tokens: list[float]
    reward: list[float]
    others: float  # cores that other programs of this machine kept busy meanwhile
    siirl: dict[str, float] | None = None

    def samples_per_s(self, settings: Settings) -> float:
        return settings.prompts * settings.samples * len(self.step_s) / sum(self.step_s)


def main() -> None:
    args = parse_arguments()
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    report = {"machine": machine(len(cores)), "versions": versions(), "keys": args.keys, "cases": {}}
    with tempfile.TemporaryDirectory() as folder:
        for settings in make_cases(args, Path(folder)):
            blocks: dict[str, list[Block]] = {"siirl": [], "trl": []}
            for number in range(args.blocks):
                for system, run in (("siirl", run_siirl), ("trl", run_trl)):
                    out = Path(folder) / f"{settings.case}-{system}-{number}"
                    blocks[system].append(run(settings, out))
                    rate = blocks[system][-1].samples_per_s(settings)
                    print(f"{settings.case} block {number + 1} {system}: {rate:.0f} samples/s", flush=True)
            report["cases"][settings.case] = summary(settings, blocks)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    print(f"written to {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each block")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of each system and case")
    parser.add_argument("--cases", nargs="+", default=["short", "long"], choices=["short", "long"])
    parser.add_argument("--long-tokens", type=int, default=64, help="response length of the long case")
    parser.add_argument("--processes", type=int, default=2, choices=[1, 2], help="of siirl, on two cores")
    parser.add_argument("--trl-micro-rows", type=int, default=128, help="TRL's per_device_train_batch_size")
    parser.add_argument("--siirl-micro-tokens", type=int, default=4096, help="ppo_max_token_len_per_gpu")
    parser.add_argument("--compiled", action="store_true", help="both compile their models; needs g++")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "grpo_cpu.json")
    parser.add_argument("keys", nargs="*", help="key=value of siirl's runs")
    return parser.parse_args()


def make_cases(args: argparse.Namespace, folder: Path) -> list[Settings]:
    """Write model and data below `folder`; the settings of each case."""
    prepare = [sys.executable, REPOSITORY / "examples/quickstart/prepare.py", "--rows", "2048", "--out"]
    call([*prepare, folder / "inputs"], folder / "prepare.log")
    model, data = folder / "inputs/model", folder / "inputs/data"
    endless = folder / "inputs/endless_model"
    make_endless(model, endless)
    common = {
        "train_file": str(data / "train.parquet"),
        "val_file": str(data / "test.parquet"),
        "steps": WARM_UP_STEPS + args.steps,
        "processes": args.processes,
        "trl_micro_rows": args.trl_micro_rows,
        "siirl_micro_tokens": args.siirl_micro_tokens,
        "keys": args.keys,
        "compiled": args.compiled,
    }
    cases = {
        "short": Settings("short", str(model), response_tokens=2, **common),
        "long": Settings("long", str(endless), response_tokens=args.long_tokens, **common),
    }
    return [cases[name] for name in args.cases]


def make_endless(model: Path, out: Path) -> None:
    """Copy a model, with an end token that it cannot sample: its id is the first beyond the vocabulary."""
    from transformers import AutoTokenizer

    shutil.copytree(model, out)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"eos_token": NEVER})
    tokenizer.save_pretrained(out)
    for name in ("config.json", "generation_config.json"):
        path = out / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": tokenizer.eos_token_id}))


def run_siirl(settings: Settings, out: Path) -> Block:
    """One block of siirl, by the command that its users type."""
    overrides = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": settings.train_file,
        "data.val_files": settings.val_file,
        "data.train_batch_size": settings.prompts,
        "data.max_prompt_length": settings.prompt_tokens,
        "data.max_response_length": settings.response_tokens,
        "actor_rollout_ref.model.path": settings.model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.model.compile_layers": settings.compiled,
        "actor_rollout_ref.actor.optim.lr": settings.lr,
        "actor_rollout_ref.actor.ppo_mini_batch_size": settings.prompts,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": settings.siirl_micro_tokens,
        "actor_rollout_ref.actor.entropy_coeff": 0,
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "float32",
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.n": settings.samples,
        "custom_reward_function.path": HERE / "grpo_cpu_reward.py",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": settings.processes,
        "trainer.total_training_steps": settings.steps,
        "trainer.val_before_train": False,
        "trainer.export_hf": False,
        "trainer.resume_mode": "disable",
        "trainer.overwrite": True,
        "trainer.logger": "[]",
        "trainer.output_dir": out,
    }
    arguments = [*(f"{key}={value}" for key, value in overrides.items()), *settings.keys]
    log, threads = out.with_suffix(".log"), CORES // settings.processes
    others = call([sys.executable, "-m", "siirl.main_dag", *arguments], log, threads)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    counted = lines[WARM_UP_STEPS:]
    ends = [line["time_s"] for line in lines[WARM_UP_STEPS - 1 :]]
    return Block(
        step_s=[end - start for start, end in itertools.pairwise(ends)],
        tokens=[line["rollout/tokens"] for line in counted],
        reward=[line["reward/score"] for line in counted],
        others=others,
        siirl=where_time_goes(counted, sum(ends[1:]) - sum(ends[:-1])),
    )


def where_time_goes(lines: list[dict[str, float]], wall_s: float) -> dict[str, float]:
    """Shares of siirl's wall time: each node and instruction (the slowest rank's), and what no span covers.

    engine_overhead: time of a step outside of all spans. between_steps: joining and writing metrics.
    """
    total_s = sum(line["time/step_s"] for line in lines)
    shares = {"engine_overhead": sum(line["time/overhead_s"] for line in lines) / total_s}
    shares["between_steps"] = (wall_s - total_s) / wall_s
    spans = sorted({name for line in lines for name in line if name.startswith("time/")})
    for name in spans:
        if name not in ("time/step_s", "time/overhead_s"):
            shares[name[len("time/") : -len("_s")]] = sum(line.get(name, 0.0) for line in lines) / total_s
    return shares


def run_trl(settings: Settings, out: Path) -> Block:
    """One block of TRL, in a process of its own."""
    out.mkdir()
    given, result = out / "settings.json", out / "result.json"
    given.write_text(json.dumps(asdict(settings) | {"out": str(out / "trainer")}))
    command = [sys.executable, HERE / "grpo_cpu_trl.py", given, result]
    others = call(command, out.with_suffix(".log"), settings.threads)
    steps = json.loads(result.read_text())
    skip = WARM_UP_STEPS - 1  # the first step has no predecessor whose end starts its clock
    return Block(steps["step_s"][skip:], steps["tokens"][skip:], steps["reward"][skip:], others)


def call(command: list, log: Path, threads: int = CORES) -> float:
    """Run a command in the repository, its output in `log`; cores that other programs used meanwhile."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    start_s, others_s = time.perf_counter(), others_cpu_s()
    with log.open("w") as file:
        done = subprocess.run(
            list(map(str, command)), cwd=REPOSITORY, env=env, stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise SystemExit(f"{command[:3]} failed with code {done.returncode}:\n{log.read_text()[-4000:]}")
    return (others_cpu_s() - others_s) / (time.perf_counter() - start_s)


def others_cpu_s() -> float:
    """CPU seconds of all programs of this machine but those that we ran and that have ended."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy_s - ours.ru_utime - ours.ru_stime


def summary(settings: Settings, blocks: dict[str, list[Block]]) -> dict:
    """Rates of each block, medians, spread ((max - min) / median), and the ratio of the medians."""
    systems = {}
    for system, runs in blocks.items():
        rates = [run.samples_per_s(settings) for run in runs]
        rate = statistics.median(rates)
        step_s = [seconds for run in runs for seconds in run.step_s]
        systems[system] = {
            "samples_per_s": rate,
            "spread": (max(rates) - min(rates)) / rate,
            "blocks_samples_per_s": rates,
            "step_s_median": statistics.median(step_s),
            "step_s_min": min(step_s),
            "tokens_per_step": statistics.mean(tokens for run in runs for tokens in run.tokens),
            "others_busy_cores": max(run.others for run in runs),
            "blocks": [asdict(run) for run in runs],
        }
    ours, theirs = systems["siirl"], systems["trl"]
    names = ours["blocks"][0]["siirl"]
    return {
        "settings": asdict(settings),
        "ratio": ours["samples_per_s"] / theirs["samples_per_s"],
        "ratio_of_median_steps": theirs["step_s_median"] / ours["step_s_median"],
        "siirl_time_shares": {
            name: statistics.median(block["siirl"].get(name, 0.0) for block in ours["blocks"])
            for name in names
        },
        "systems": systems,
    }


def table(report: dict) -> str:
    """The numbers of the report, for people."""
    columns = "{:6} {:7} {:>10} {:>7} {:>7} {:>12} {:>7} {:>6}"
    names = ("case", "system", "samples/s", "spread", "step s", "tokens/step", "others", "ratio")
    lines = [columns.format(*names)]
    for case, result in report["cases"].items():
        for name, system in result["systems"].items():
            numbers = (
                f"{system['samples_per_s']:.0f}",
                f"{system['spread']:.1%}",
                f"{system['step_s_median']:.3f}",
                f"{system['tokens_per_step']:.1f}",
                f"{system['others_busy_cores']:.2f}",
                f"{result['ratio']:.2f}" if name == "siirl" else "",
            )
            lines.append(columns.format(case, name, *numbers).rstrip())
        shares = (f"{name} {share:.1%}" for name, share in result["siirl_time_shares"].items())
        lines.append(f"  siirl's time: {', '.join(shares)}")
    if report["keys"]:
        lines.append(f"siirl's further keys: {' '.join(report['keys'])}")
    lines.append("others: cores that other programs kept busy in the worst block; trust a run only near 0")
    return "\n".join(lines)


def machine(cores: int) -> dict[str, str | int]:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {"cpu": names[0] if names else platform.processor(), "cores": cores, "load": os.getloadavg()[0]}


def versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")}
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(describe, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    return {"python": platform.python_version(), **packages, "siirl": commit}


if __name__ == "__main__":
    main()
