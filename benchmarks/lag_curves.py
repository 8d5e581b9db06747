"""What a lag costs in learning: an example under rollout.max_lag, steps until a validation reward.

    python benchmarks/lag_curves.py [--task quickstart|debate] [--settings 0 1 2 4 4-none] [--lr 5e-4]
                                    [--seeds 1 2 3] [key=value ...]

A setting is a lag; "4-none" does not correct for it (rollout_correction.weight=none). The quickstart's
responses have two tokens, the debate's turns one, so none goes on from step to step. But all end together:
whenever nothing is left, L + 1 batches (rollout.surplus=L) are sampled under the same weights, and then train
one after the other, 0 to L steps old (rollout/staleness). A run is the example's script on one CPU
process, --together of them at a time. Seeds are of the data's order and of sampling; all begin with the
same model. Validation (all prompts, greedy) is in every step: reward_S[s] is that after s steps; of the
debate it is the share of right answers.

Writes benchmarks/results/lag_curves_cpu.json, of the debate lag_curves_debate_cpu.json (--out for another
file), and a picture of the same name. Runs that the file has already are kept and not repeated, so that a
measurement can be made in pieces.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
POLICY = "actor_rollout_ref"
Run = dict[str, Any]
NAMES = ("lr", "setting", "seed")
"""What sets runs apart."""


@dataclass(frozen=True)
class Task:
    """An example that learns."""

    script: tuple[str, ...]
    prepare: tuple[str, ...]
    """Makes model and data; "FOLDER" is where."""
    variable: str
    """Of the script's environment: the folder."""
    agent: str
    """What its metrics are named under."""
    reward: str
    """The metric that is its reward."""
    lr: float
    """That of the script."""
    result: str


TASKS = {
    "quickstart": Task(
        ("examples/quickstart/run.sh",),
        ("examples.quickstart.prepare", "--out", "FOLDER"),
        "QUICKSTART_DIR",
        "",
        "val/reward/mean",
        5e-4,
        "lag_curves_cpu.json",
    ),
    "debate": Task(
        ("examples/multi_agent/run.sh", "debate"),
        ("examples.multi_agent.prepare", "numbers", "--out", "FOLDER/numbers_0", "--seed", "0"),
        "MULTI_AGENT_DIR",
        "agent_0/",
        "val/numbers/accuracy/mean",
        1e-3,
        "lag_curves_debate_cpu.json",
    ),
}


def main() -> int:
    args = arguments()
    there = {tuple(run[name] for name in NAMES) for run in kept(args)["runs"]}
    wanted = [
        (lr, setting, seed)
        for seed in args.seeds
        for lr in args.lr
        for setting in args.settings
        if (lr, setting, seed) not in there
    ]
    for done in runs(args, wanted):
        report = kept(args)
        report["runs"] = sorted([*report["runs"], done], key=lambda run: [run[name] for name in NAMES])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(as_text(report))
    report = kept(args)
    report["curves"] = summary(report["runs"], args.bar)
    args.out.write_text(as_text(report))
    draw(report["runs"], args.bar, args.out.with_suffix(".png"))
    for curve in report["curves"]:
        print(
            f"lr {curve['lr']:g}, lag {curve['setting']}: {curve['steps_to_bar']} steps to {args.bar} "
            f"({curve['ratio']}x), at the end {curve['reward']}"
        )
    return 0


def kept(args: argparse.Namespace) -> dict[str, Any]:
    """What the file holds, as another piece may have written it meanwhile."""
    asked: dict[str, Any] = {"task": args.task, "steps": args.steps, "keys": args.keys}
    report = asked | {"bar": args.bar, "runs": []}
    if args.out.exists():
        report = json.loads(args.out.read_text()) | {"bar": args.bar}
    if asked != {name: report[name] for name in asked}:
        raise SystemExit(f"{args.out} has runs of another --task, --steps or keys: name another --out")
    return report


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="quickstart")
    parser.add_argument("--settings", nargs="+", default=["0", "1", "2", "4", "4-none"])
    parser.add_argument("--lr", type=float, nargs="+", help="default: the script's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bar", type=float, default=0.9, help="the validation reward to reach")
    parser.add_argument("--together", type=int, default=2, help="runs at a time, a process each")
    parser.add_argument("--out", type=Path)
    parser.add_argument("keys", nargs="*")
    args = parser.parse_args()
    args.lr = args.lr or [TASKS[args.task].lr]
    args.out = args.out or RESULTS / TASKS[args.task].result
    return args


def runs(args: argparse.Namespace, wanted: list[tuple[float, str, int]]) -> Iterator[Run]:
    """The results of the runs, as they end."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.together) as pool:
        words = [word.replace("FOLDER", folder) for word in TASKS[args.task].prepare]
        subprocess.run([sys.executable, "-m", *words], cwd=REPOSITORY, check=True, capture_output=True)
        for done in pool.map(lambda names: run(args, Path(folder), *names), wanted):
            names = f"lr {done['lr']:g}, lag {done['setting']}, seed {done['seed']}"
            print(f"{names}: {done['run_s']} s", flush=True)
            yield done


def run(args: argparse.Namespace, folder: Path, lr: float, setting: str, seed: int) -> Run:
    """One run of the example by its script."""
    task = TASKS[args.task]
    lag, _, weight = setting.partition("-")
    out = folder / f"{lr}_{setting}_{seed}"
    keys = [
        f"{POLICY}.rollout.max_lag={lag}",
        *([f"{POLICY}.actor.rollout_correction.weight={weight}"] if weight else []),
        f"{POLICY}.actor.optim.lr={lr}",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={args.steps}",
        *("trainer.n_gpus_per_node=1", "trainer.test_freq=1", "trainer.save_freq=-1"),
        *("trainer.export_hf=False", "trainer.logger=[]", f"trainer.output_dir={out}"),
    ]
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        task.variable: str(folder),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    begin = time.monotonic()
    command = ["bash", *task.script, *keys, *args.keys]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{setting} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    metric, lag_metric = task.agent + task.reward, f"{task.agent}rollout/staleness"
    reward = {line["step"]: round(line[metric], 3) for line in lines if metric in line}
    lags = [line[lag_metric] for line in lines if lag_metric in line]
    return {
        **dict(zip(NAMES, (lr, setting, seed), strict=True)),
        "reward_S": [reward[step] for step in range(args.steps + 1)],
        "rollout/staleness": [round(lag, 3) for lag in lags],
        "run_s": round(time.monotonic() - begin),
    }


def summary(found: list[Run], bar: float) -> list[dict[str, Any]]:
    """For each learning rate and setting, of its seeds: the steps to the bar (None: not reached), their sum
    over that of lag 0 under the same seeds, and the rewards at the end."""
    groups: dict[tuple[float, str], dict[int, list[float]]] = {}
    for one in found:
        groups.setdefault((one["lr"], one["setting"]), {})[one["seed"]] = one["reward_S"]
    curves = []
    for (lr, setting), rewards in groups.items():
        base = groups.get((lr, "0"), {})
        mine = {seed: steps_to(reward_S, bar) for seed, reward_S in rewards.items()}
        pairs = [(mine[seed], steps_to(base[seed], bar)) for seed in mine.keys() & base.keys()]
        reached = [(steps, base_steps) for steps, base_steps in pairs if steps and base_steps]
        all_steps, all_base_steps = (sum(pair[side] for pair in reached) for side in (0, 1))
        curves.append(
            {
                "lr": lr,
                "setting": setting,
                "seeds": list(mine),
                "steps_to_bar": list(mine.values()),
                "ratio": round(all_steps / all_base_steps, 3) if reached and reached == pairs else None,
                "reward": [reward_S[-1] for reward_S in rewards.values()],
            }
        )
    return curves


def steps_to(reward_S: list[float], bar: float) -> int | None:
    """The first step with a reward of at least `bar`."""
    return next((step for step, reward in enumerate(reward_S) if reward >= bar), None)


def draw(found: list[Run], bar: float, picture: Path) -> None:
    """A panel for each learning rate, a line for each setting: the mean of its seeds, and their range."""
    rates = sorted({one["lr"] for one in found})
    settings = sorted({one["setting"] for one in found})
    figure = Figure(figsize=(6.5 * len(rates), 3.8), layout="constrained")
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axes, lr in zip(panels, rates, strict=True):
        axes.set(xlabel="training step", ylim=(0, 1.03), title=f"learning rate {lr:g}")
        axes.axhline(bar, color="#999999", linewidth=0.8, linestyle=":")
        for index, setting in enumerate(settings):
            rewards = [one["reward_S"] for one in found if (one["lr"], one["setting"]) == (lr, setting)]
            if not rewards:
                continue
            lag, _, weight = setting.partition("-")
            label = f"lag {lag}" + (", not corrected" if weight == "none" else "")
            by_step = list(zip(*rewards, strict=True))
            colour, line = f"C{index}", "--" if weight else "-"
            axes.plot([statistics.mean(x) for x in by_step], line, color=colour, label=label, linewidth=1.3)
            low, high = [min(x) for x in by_step], [max(x) for x in by_step]
            axes.fill_between(range(len(by_step)), low, high, color=colour, alpha=0.12, linewidth=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize="small")
    panels[0].set_ylabel("validation reward")
    with matplotlib.rc_context({"svg.hashsalt": "siirl", "svg.fonttype": "none"}):
        figure.savefig(picture, dpi=110)


def as_text(report: dict[str, Any]) -> str:
    """JSON with a line for each run."""
    lines = (f"  {json.dumps(one)}" for one in report["runs"])
    rest = json.dumps({name: value for name, value in report.items() if name != "runs"}, indent=1)
    return rest.removesuffix("\n}") + ',\n "runs": [\n' + ",\n".join(lines) + "\n ]\n}\n"


if __name__ == "__main__":
    raise SystemExit(main())
