"""What a run spends on being looked at, as a share of its steps: timers in the workers of the main job.

    python benchmarks/observing.py [--steps 60]

The quickstart's job on two processes of a CPU, with its responses of 2 tokens and with responses of 48. In
every worker the calls of each kind are timed, and added up over the run:

- places: spans and phases of instructions, heartbeats, positions (status/), memory of the process;
- samples: sampled rows as text, gathered and written (rollouts/train);
- tokens: what these rows were trained with, kept, gathered and written (rollouts/tokens);
- metrics: the numbers of the step, joined over the ranks and written (metrics.jsonl).

The first three are what `siirl view` and `watch` read besides the metrics, which every run has. Before a call
that talks to other ranks all ranks meet, so that what is timed is the call, and not a rank that is late.
Writes benchmarks/results/observing_cpu.json.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
WARM_UP_STEPS = 3
CASES = {
    "quickstart": ["data.max_response_length=2"],
    "48 tokens": ["data.max_response_length=48", "actor_rollout_ref.rollout.ignore_eos=True"],
}
KINDS = ("places", "samples", "tokens", "metrics")
OUT = "observing_rank_{}.json"


class Timers:
    """Seconds of each kind in each step, by the clock and of the processor; inner calls are part of outer."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._begin_s, self._depth = 0.0, 0

    def begin_step(self) -> None:
        now_s = time.perf_counter()
        if self.steps:
            self.steps[-1]["step"] = now_s - self._begin_s
        self.steps.append(defaultdict(float))
        self._begin_s = now_s

    def begin(self) -> tuple[float, float]:
        self._depth += 1
        return time.perf_counter(), time.thread_time()

    def end(self, kind: str, begun: tuple[float, float]) -> None:
        cpu_s, wall_s = time.thread_time() - begun[1], time.perf_counter() - begun[0]
        self._depth -= 1
        if not self._depth and self.steps:
            self.steps[-1][kind] += wall_s
            self.steps[-1][f"{kind} cpu"] += cpu_s

    def call(self, kind: str, function: Callable, meet: Callable[[], None] | None = None) -> Callable:
        @functools.wraps(function)
        def run(*args, **kwargs):
            if meet is not None:
                meet()
            begun = self.begin()
            try:
                return function(*args, **kwargs)
            finally:
                self.end(kind, begun)

        return run

    def block(self, kind: str, function: Callable) -> Callable:
        """Of a context manager what it does itself, at its begin and its end."""

        @contextmanager
        def run(*args, **kwargs):
            begun = self.begin()
            manager = function(*args, **kwargs)
            manager.__enter__()
            self.end(kind, begun)
            failure: tuple = (None, None, None)
            try:
                yield
            except BaseException:
                failure = sys.exc_info()
                raise
            finally:
                begun = self.begin()
                manager.__exit__(*failure)
                self.end(kind, begun)

        return run


def run_worker(cfg, plan, rank, world_size, device, places) -> None:
    """The entry of every worker: the run, with timers."""
    import torch.distributed as dist

    from siirl.dag_worker import training
    from siirl.dag_worker.step_report import Report
    from siirl.nodes import function_reward
    from siirl.nodes.trained_tokens import KeptRows, TrainedTokens
    from siirl.observe.spans import Observer

    timers = Timers()
    for name in ("span", "phase", "part"):
        setattr(Observer, name, timers.block("places", getattr(Observer, name)))
    for name in ("note", "add_phase", "metrics", "drain_idle", "begin_step"):
        setattr(Observer, name, timers.call("places", getattr(Observer, name)))
    begin_step = training.Training.train_step

    def train_step(self):
        timers.begin_step()
        return begin_step(self)

    training.Training.train_step = train_step
    function_reward.show = timers.call("samples", function_reward.show)
    TrainedTokens.keep = timers.call("tokens", TrainedTokens.keep)
    KeptRows.__call__ = timers.call("tokens", KeptRows.__call__)
    for name, kind in (("samples", "samples"), ("trained_tokens", "tokens"), ("log", "metrics")):
        setattr(Report, name, timers.call(kind, getattr(Report, name), meet=dist.barrier))
    training.run_worker(cfg, plan, rank, world_size, device, places)
    (places.output_path / OUT.format(rank)).write_text(json.dumps(timers.steps))


def run_job(keys: list[str]) -> int:
    """The main job, whose workers begin here."""
    from siirl import main_dag

    main_dag.Job = functools.partial(main_dag.Job, entry="observing:run_worker")
    return main_dag.main(keys)


def measured(case: str, steps: int, processes: int, folder: Path) -> dict:
    """A run, and what it spent."""
    keys = [*CASES[case], f"trainer.total_training_steps={steps + WARM_UP_STEPS}", "trainer.test_freq=-1",
            "trainer.val_before_train=False", "trainer.save_freq=-1", "trainer.export_hf=False",
            f"trainer.n_gpus_per_node={processes}"]  # fmt: skip
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {HERE}/observing.py --job "$@"\n')
    python.chmod(0o755)  # run.sh starts it with "-m siirl.main_dag" before the keys
    env = {"PYTHON": str(python), "QUICKSTART_DIR": str(folder), "PYTHONPATH": f"{HERE}:{REPOSITORY}"}
    command = ["bash", str(REPOSITORY / "examples/quickstart/run.sh"), *keys]
    subprocess.run(command, env=os.environ | env, check=True, stdout=subprocess.DEVNULL)
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob(OUT.format("*")))]
    counted = [rank[WARM_UP_STEPS:-1] for rank in ranks]
    step_s = statistics.mean(step["step"] for step in counted[0])

    def most(name: str) -> float:
        """Of a step, on the rank where it is most."""
        return max(statistics.mean(step.get(name, 0.0) for step in rank) for rank in counted)

    return {
        "steps": len(counted[0]),
        "step_ms": round(1e3 * step_s, 1),
        "kinds": {
            kind: {
                "wall_ms": round(1e3 * most(kind), 3),
                "cpu_ms": round(1e3 * most(f"{kind} cpu"), 3),
                "cpu_percent": round(100 * most(f"{kind} cpu") / step_s, 3),
            }
            for kind in KINDS
        },
    }


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        sys.exit(run_job(sys.argv[2:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "observing_cpu.json")
    args = parser.parse_args()
    report = json.loads(args.out.read_text()) if args.out.exists() else {}
    for case in args.cases:
        with tempfile.TemporaryDirectory() as name:
            prepare = [sys.executable, REPOSITORY / "examples/quickstart/prepare.py", "--out", name]
            subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
            report[case] = measured(case, args.steps, args.processes, Path(name))
        print(case, json.dumps(report[case], indent=1), flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
