"""What kills cost a run that starts again by itself: its effective training time ratio (ETTR).

    python benchmarks/ettr.py [--steps 40] [--step-s 20] [--kills 0.1] [--seed 0] [--ranks 2] [key=value ...]

The quickstart's job on CPU, by its script. Nodes that wait stand for a large model: --step-s seconds in each
step, 60% of them after the rollout, 10% after the reward, 30% before the training. In --kills of the steps,
drawn by --seed, a random worker gets SIGKILL at a random moment: of N kills one in each N-th part of a step,
in random order, so that no phase is left out. (What else a run consists of, reward workers above all, costs
no restart; tests/chaos kills it, too.) The run has a checkpoint in memory after each step
(trainer.memory_checkpoint_freq=1), none on disk, and the default number of restarts.

ETTR is the useful time over the total, as in RobustRL (Chen et al., "Role-Based Fault Tolerance System for
LLM RL Post-Training", arXiv 2512.22492), which reports over 80% in RL on 256 GPUs under failures in 10% of
the steps, and 60% for a restart of everything. Useful here: time/step_s of each step, once, of the run of it
that counted; no checkpoint, no report, nothing that was lost. Total: the wall time from the first instruction
of the first step to the end of the last step. `ettr_of_the_command` has all of the command's time below the
line: also its first start and its export, which a run of weeks has once.

A restart's seconds go from the kill to the first instruction of the last rank. The run is then held against
one without kills and waits (they compute nothing): the exported weights must be equal bit for bit, and so
must the metrics of each step.

Writes benchmarks/results/ettr_cpu.json (--out for another place), with every step and every kill; after each
kill what is known then (report_file.py).
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from report_file import Report, end_by_signals, end_job
from safetensors.torch import load_file

from siirl.launch.standby import NAME as STANDBY
from siirl.observe.position import read_position

REPOSITORY = Path(__file__).resolve().parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "ettr_cpu.json"
GOALS = {"ettr": 0.9, "restart_s": 12.0}
WAITS = {
    "rollout_wait": ("rollout_actor", "function_reward", 0.6),
    "reward_wait": ("function_reward", "calculate_advantages", 0.1),
    "train_wait": ("calculate_advantages", "actor_train", 0.3),
}
"""Node that waits: after which node, before which, and its share of the wait."""
WAIT_CODE = '''import time

from tensordict import TensorDict


def wait(ctx, rows):
    """A large model at work."""
    time.sleep(float(ctx.options["wait_s"]))
    return TensorDict({}, batch_size=rows.batch_size)
'''
MEASURED = re.compile(r"time|perf/|memory/|.*_s$")
"""Metrics that differ between two runs of the same command."""
POLL_S = 0.01
PATIENCE_S = 600


@dataclass(frozen=True)
class Kill:
    """One that is planned."""

    step: int
    share: float
    """Of the step's time: when."""
    draw: float
    """From 0 to 1: which rank."""


class Told(Report):
    """A line for each kill and each step."""

    def text(self) -> str:
        return as_text(self)


def main() -> int:
    end_by_signals()
    args = arguments()
    kills = planned(args.steps, args.kills, args.seed)
    report = Told(args.out, {"kills": len(kills)}, cores=len(os.sched_getaffinity(0)))
    report["load_before"] = os.getloadavg()[0]

    def seen(known: list[dict[str, Any]]) -> None:
        report["kills"], report["restart_s"] = known, [kill["restart_s"] for kill in known]
        report.count("kills", len(known))

    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as jobs:
        folder = Path(temporary)
        prepare = [sys.executable, "-m", "examples.quickstart.prepare", "--out", temporary]
        subprocess.run(prepare, cwd=REPOSITORY, check=True, capture_output=True)
        disturbed = jobs.enter_context(contextlib.closing(Run(args, folder, "killed", args.step_s)))
        report |= measured(disturbed, kills, seen)
        report.save()
        undisturbed = jobs.enter_context(contextlib.closing(Run(args, folder, "undisturbed", 0.0)))
        undisturbed.end()
        report["weights_equal"] = same_weights(undisturbed.output, disturbed.output)
        report["metrics_equal"] = comparable(undisturbed.lines()) == comparable(disturbed.lines())
    report["load_after"] = os.getloadavg()[0]
    report.finish()
    print(
        f"ETTR {report['ettr']:.1%} ({report['ettr_of_the_command']:.1%} of the whole command); "
        f"restarts {report['restart_s']} s; the same weights: {report['weights_equal']}, "
        f"the same metrics: {report['metrics_equal']}"
    )
    return 0 if report["weights_equal"] and report["metrics_equal"] else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=20.0, help="seconds that each step waits")
    parser.add_argument("--kills", type=float, default=0.1, help="the share of steps with a kill")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("keys", nargs="*")
    return parser.parse_args()


def planned(steps: int, share: float, seed: int) -> list[Kill]:
    """The kills of a run, in the order of their steps: at most one in each, one in each part of a step."""
    draw = random.Random(seed)
    hit = sorted(draw.sample(range(1, steps + 1), round(share * steps)))
    parts = draw.sample(range(len(hit)), len(hit))
    return [
        Kill(step, (part + draw.random()) / len(hit), draw.random())
        for step, part in zip(hit, parts, strict=True)
    ]


class Run:
    """The quickstart's job, as it runs."""

    def __init__(
        self,
        args: argparse.Namespace,
        folder: Path,
        name: str,
        wait_s: float,
        python: str = sys.executable,
    ):
        self.output, self._console, self._ranks = folder / name, folder / f"{name}.txt", args.ranks
        workflow = write_workflow(folder / f"{name}.yaml", wait_s)
        keys = [
            f"dag.workflow_path={workflow}",
            f"trainer.n_gpus_per_node={args.ranks}",
            f"trainer.total_training_steps={args.steps}",
            *("trainer.test_freq=-1", "trainer.val_before_train=False"),
            *("trainer.save_freq=-1", "trainer.memory_checkpoint_freq=1"),
            *("trainer.logger=[]", f"trainer.output_dir={self.output}"),
        ]
        environment = os.environ | {
            "PYTHON": python,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
            "QUICKSTART_DIR": str(folder),
            **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        }
        command = ["bash", "examples/quickstart/run.sh", *keys, *args.keys]
        self._wait_s, self.began_s = wait_s, time.time()
        with self._console.open("wb") as console:
            self._job = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=console, stderr=console
            )

    def end(self) -> float:
        """Wait for it; how long all of the command took."""
        code = self._job.wait()
        if code:
            raise SystemExit(f"{self.output.name} ended with {code}:\n{self._console.read_text()[-4000:]}")
        return time.time() - self.began_s

    def close(self) -> None:
        """End it, if it has not."""
        end_job(self._job)

    def lines(self) -> list[dict[str, Any]]:
        """The metrics of the steps that count so far."""
        path = self.output / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def attempts(self) -> list[dict[str, Any]]:
        """Those that failed."""
        path = self.output / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def first_instructions(self) -> tuple[float, float]:
        """When the first and the last rank of the attempt that starts now came to an instruction."""
        found: dict[int, float] = {}

        def all_there() -> bool:
            for rank in range(self._ranks):
                position = read_position(self.output / "status" / f"rank_{rank}")
                if position is not None and position.step > 0:
                    found.setdefault(rank, position.time_s)
            return len(found) == self._ranks

        self._wait_until(all_there)
        return min(found.values()), max(found.values())

    def kill(self, kill: Kill, first_s: float) -> dict[str, Any]:
        """Wait for the moment, kill, wait until the run goes on. first_s: when the first step began."""
        self._wait_until(lambda: self._steps_done() >= kill.step - 1)
        time.sleep(kill.share * self._wait_s)
        workers = self._workers()
        rank = sorted(workers)[int(kill.draw * len(workers))]
        position, failed = read_position(self.output / "status" / f"rank_{rank}"), len(self.attempts())
        killed_s = time.time()
        workers[rank].send_signal(signal.SIGKILL)
        self._wait_until(lambda: len(self.attempts()) > failed)
        attempt = self.attempts()[-1]
        kept = re.match(r"global_step_(\d+)", attempt["next"])
        ended_s = {line["step"]: line["time_s"] for line in self.lines()}
        kept_s = ended_s[int(kept[1])] if kept else first_s
        return {
            "step": kill.step,
            "share": round(kill.share, 3),
            "rank": rank,
            "node": position.node if position else None,
            "went_on_from": attempt["next"],
            "noticed_s": round(attempt["ended_s"] - killed_s, 2),
            "restart_s": round(self.first_instructions()[1] - killed_s, 2),
            "lost_s": round(killed_s - kept_s, 2),
        }

    def _steps_done(self) -> int:
        lines = self.lines()
        return lines[-1]["step"] if lines else 0

    def _workers(self) -> dict[int, psutil.Process]:
        """By rank; the launcher's children that have one, and do not stand by for the next attempt. Of a rank
        the older: what will stand by does not say so yet as it starts."""
        found: dict[int, psutil.Process] = {}
        for child in sorted(psutil.Process(self._job.pid).children(), key=psutil.Process.create_time):
            with contextlib.suppress(psutil.Error, KeyError):
                if child.name() != STANDBY:
                    found.setdefault(int(child.environ()["RANK"]), child)
        return found

    def _wait_until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            if self._job.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run did not go on:\n{self._console.read_text()[-4000:]}")
            time.sleep(POLL_S)


def measured(
    run: Run, planned_kills: Sequence[Kill], seen: Callable[[list[dict[str, Any]]], None]
) -> dict[str, Any]:
    """Kill a run as planned; what it took, and what was lost. seen(the kills so far) after each."""
    first_s, _ = run.first_instructions()
    kills: list[dict[str, Any]] = []
    for kill in planned_kills:
        kills.append(run.kill(kill, first_s))
        seen(kills)
    whole_s, lines = run.end(), run.lines()
    useful_s, total_s = sum(line["time/step_s"] for line in lines), lines[-1]["time_s"] - first_s
    restarts = [kill["restart_s"] for kill in kills]
    lost_s = sum(kill["lost_s"] for kill in kills)
    return {
        "goals": GOALS,
        "ettr": round(useful_s / total_s, 4),
        "ettr_of_the_command": round(useful_s / whole_s, 4),
        "useful_s": round(useful_s, 2),
        "total_s": round(total_s, 2),
        "command_s": round(whole_s, 2),
        "restarts_s": round(sum(restarts), 2),
        "lost_s": round(lost_s, 2),
        "saves_and_reports_s": round(total_s - useful_s - sum(restarts) - lost_s, 2),
        "restart_s": restarts,
        "kills": kills,
        "steps": [
            {"step": line["step"], "step_s": round(line["time/step_s"], 3)}
            | {"memory_checkpoint_s": round(line.get("time/memory_checkpoint_s", 0.0), 3)}
            | {"ended_s": round(line["time_s"] - first_s, 2)}
            for line in lines
        ],
    }


def write_workflow(path: Path, wait_s: float) -> Path:
    """GRPO with the nodes that wait."""
    code = path.with_suffix(".py")
    code.write_text(WAIT_CODE)
    dag = yaml.safe_load((REPOSITORY / "dag_templates" / "grpo.yaml").read_text())
    by_name = {node["node_id"]: node for node in dag["nodes"]}
    for name, (after, before, share) in WAITS.items():
        options = {"wait_s": share * wait_s}
        node = {"node_id": name, "node_type": "COMPUTE", "dependencies": [after], "config": options}
        dag["nodes"].append(node | {"executable_ref": f"{code}:wait", "reads": ["group_id"], "writes": []})
        by_name[before]["dependencies"].append(name)
    path.write_text(yaml.safe_dump(dag))
    return path


def comparable(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics that must be equal."""
    return [{name: x for name, x in line.items() if not MEASURED.match(name)} for line in lines]


def same_weights(first: Path, second: Path) -> bool:
    """Whether two runs have exported the same, bit for bit."""
    ours, theirs = (load_file(folder / "hf_model" / "model.safetensors") for folder in (first, second))
    same = [name in theirs and tensor.equal(theirs[name]) for name, tensor in ours.items()]
    return len(same) > 5 and len(ours) == len(theirs) and all(same)


def as_text(report: dict[str, Any]) -> str:
    """JSON with a line for each kill and step."""
    tables = {"kills", "steps"} & report.keys()
    text = json.dumps({name: x for name, x in report.items() if name not in tables}, indent=1)
    for name in sorted(tables):
        rows = ",\n".join(f"  {json.dumps(row)}" for row in report[name])
        text = text.removesuffix("\n}") + f',\n "{name}": [\n{rows}\n ]\n}}'
    return text + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
