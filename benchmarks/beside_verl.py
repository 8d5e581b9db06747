"""The steps of a verl run put beside those of grpo_gpu.py: one file, one ratio.

    python benchmarks/beside_verl.py RESULT.json VERL.log --out benchmarks/results/beside_verl_gpu_A_1.json

RESULT.json is what grpo_gpu.py wrote, VERL.log the console of verl (trainer.logger=[console]) for the same
workload on the same machine; both ran one after another. --settings: words of verl's command that tell how
it was set. Steps that are warm-up to grpo_gpu.py are left out of both; a log that ends early has fewer steps,
which the file says.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

from report_file import write

WARM_UP_STEPS = 2
PARTS = {
    "step": "timing_s/step",
    "rollout": "timing_s/gen",
    "old_log_prob": "timing_s/old_log_prob",
    "reference": "timing_s/ref",
    "update": "timing_s/update_actor",
    "weight_sync": "timing_s/update_weights",
    "tokens_per_s_per_gpu": "perf/throughput",
    "trainer_peak_gib": "actor/perf/max_memory_allocated_gb",
}
"""What a step is told by here, and what verl calls it."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
STEP = re.compile(r"step:(\d+) - (.*)")


def verl_steps(log: str) -> dict[int, dict[str, float]]:
    """Step -> PARTS of it, from a console log of verl."""
    steps = {}
    for line in log.splitlines():
        found = STEP.search(COLOURS.sub("", line))
        if found is None:
            continue
        told = dict(word.rsplit(":", 1) for word in found[2].split(" - ") if ":" in word)
        if PARTS["step"] in told:
            steps[int(found[1])] = {name: number(told[key]) for name, key in PARTS.items() if key in told}
    return steps


def number(text: str) -> float:
    """A value as verl prints it: 1.5, or np.float64(1.5)."""
    return float(re.sub(r"^np\.\w+\((.*)\)$", r"\1", text.strip()))


def beside(result: dict, steps: dict[int, dict[str, float]], settings: str) -> dict:
    """The result with verl's counted steps, and how many times as long verl's mean step is."""
    counted = {step: parts for step, parts in sorted(steps.items()) if step > WARM_UP_STEPS}
    if not counted:
        raise SystemExit(
            f"the log has {len(steps)} steps, and the first {WARM_UP_STEPS} are warm-up: none left"
        )
    names = [name for name in PARTS if all(name in parts for parts in counted.values())]
    ours = result["metrics"]["time/step_s"]["all"]
    told = {name: [parts[name] for parts in counted.values()] for name in names}
    verl = {"settings": settings, "steps": list(counted), "all": told}
    verl["mean"] = {name: statistics.mean(values) for name, values in told.items()}
    ratio = verl["mean"]["step"] / statistics.mean(ours)
    return result | {"verl": verl, "mean_step_s": statistics.mean(ours), "verl_step_over_ours": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--settings", default="")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    steps = verl_steps(args.log.read_text(errors="replace"))
    report = beside(json.loads(args.result.read_text()), steps, args.settings)
    write(args.out, json.dumps(report, indent=1) + "\n")
    verl, ours = report["verl"], report["metrics"]["time/step_s"]["all"]
    for name, steps_s in (("siirl", ours), ("verl", verl["all"]["step"])):
        print(f"{name}: mean {statistics.mean(steps_s):.2f} s of {' '.join(f'{x:.2f}' for x in steps_s)}")
    print(f"{report['verl_step_over_ours']:.2f}x")


if __name__ == "__main__":
    main()
