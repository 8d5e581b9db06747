"""How fast responses are scored: mathematics, one hanging sample among many, and programs in the sandbox.

    python benchmarks/rewards.py [--out rewards.json]

Goals: 10,000 math samples in under 20 s on 2 cores, workers' start included; a hanging sample delays only
itself.
"""

import argparse
import json
import os
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from siirl.rewards.by_data_source import CUSTOM
from siirl.rewards.pool import WorkerPool
from siirl.rewards.sample import Sample

HANGS = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(3600 * (solution_str == "hang"))
    return 1.0
"""
TIMEOUT_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {
        "workers": options.workers,
        "load_before": os.getloadavg()[0],
        "math": math_samples(options.samples, options.workers),
        "hanging": hanging_sample(options.workers),
        "programs": programs(options.workers),
    }
    text = json.dumps(results, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


def math_samples(count: int, num_workers: int) -> dict[str, Any]:
    """Rollouts of mathematics prompts: 8 of each, half of them right, two kinds wrong.

    Their answers are integers (half of them), fractions, decimals, roots, pairs, polynomials, multiples
    of pi and percentages; a right answer is often written in another way than the ground truth.
    """
    rng = random.Random(0)
    samples = [sample for _ in range(count // 8) for sample in _math_prompt(rng)]
    setup = {"kwargs": {"math": {}}, "custom": None, "batch": False}
    return _measure(samples, WorkerPool(num_workers, 30.0, setup))


def _math_prompt(rng: random.Random) -> list[Sample]:
    a, b, c = rng.randint(2, 999), rng.randint(2, 99), rng.randint(2, 9)
    d = a + rng.randint(1, 3)
    others = [
        (rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}", rf"\frac{{{d}}}{{{b}}}"),
        (f"{a / 8}", rf"\frac{{{a}}}{{8}}", f"{d / 8}"),
        (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{b}}}\cdot {a}", rf"{d}\sqrt{{{b}}}"),
        (f"({a}, {b})", rf"\left({a},{b}\right)", f"({d}, {b})"),
        (f"x^{c}+{a}x", f"{a}x+x^{c}", f"{d}x+x^{c}"),
        (rf"{b}\pi", rf"{b}\pi", rf"{b + 1}\pi"),
        (rf"{b}\%", rf"{b}\%", rf"{b + 1}\%"),
    ]
    truth, right, wrong = (str(a), str(a), str(d)) if rng.random() < 0.5 else rng.choice(others)
    answers = [right] * 4 + [wrong] * 2 + [f"{a + 7}", f"{b + 9}+{c}i"]
    text = "Let us think step by step. " + "So it goes. " * 40 + "The answer is $\\boxed{{{}}}$."
    return [Sample((("math", 1.0),), "math", text.format(answer), truth, None) for answer in answers]


def hanging_sample(num_workers: int) -> dict[str, Any]:
    """2,000 quick samples, one of which hangs: the others must be done when its time is over."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reward.py"
        path.write_text(HANGS)
        custom = {"path": str(path), "name": "compute_score", "reward_kwargs": {}}
        samples = [
            Sample(((CUSTOM, 1.0),), "s", "hang" if index == 1000 else "quick", "", None)
            for index in range(2000)
        ]
        pool = WorkerPool(max(2, num_workers), TIMEOUT_S, {"kwargs": {}, "custom": custom, "batch": False})
        return _measure(samples, pool) | {"time_limit_s": TIMEOUT_S}


def programs(num_workers: int) -> dict[str, Any]:
    """200 programs of 5 tests each, in the sandbox; every tenth one is wrong."""
    truth = json.dumps(
        {"inputs": ["1 2", "3 4", "5 6", "7 8", "9 10"], "outputs": ["3", "7", "11", "15", "19"]}
    )
    samples = [
        Sample(
            (("code", 1.0),),
            "taco",
            f"print(sum(map(int, input().split())) + {index % 10 == 0})",
            truth,
            None,
        )
        for index in range(200)
    ]
    return _measure(
        samples, WorkerPool(num_workers, 60.0, {"kwargs": {"code": {}}, "custom": None, "batch": False})
    )


def _measure(samples: list[Sample], pool: WorkerPool) -> dict[str, Any]:
    start, own_s, cpu_s = time.perf_counter(), time.process_time(), _children_cpu_s()
    outcomes = pool.run(samples)
    seconds, own_s = time.perf_counter() - start, time.process_time() - own_s
    pool.close()
    workers_s = _children_cpu_s() - cpu_s
    return {
        "samples": len(samples),
        "seconds": round(seconds, 2),
        "workers_cpu_seconds": round(workers_s, 2),
        "cpu_ms_per_sample": round((workers_s + own_s) / len(samples) * 1000, 3),
        "samples_per_s": round(len(samples) / seconds, 1),
        "mean_score": sum(outcome.score for outcome in outcomes) / len(outcomes),
        "failed": sum(outcome.failure is not None for outcome in outcomes),
    }


def _children_cpu_s() -> float:
    """CPU time of the processes that have ended, those that they waited for included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
