"""Two agents on ranks of their own: time of a step of both branches at once, against each branch alone.

    python benchmarks/branches.py [--blocks 2] [--steps 6] [key=value ...]

Each branch is an agent with a rollout, a reward, an advantage and an update on one rank, and one core. Both
in one job are held against the sum of the branches alone, each in a job of its own on one rank: the same
work, one after the other. Blocks take turns, their first steps do not count. Goal: at least 1.7x, 2 if
nothing waited for anything. What is trained must not differ: the exported weights of each agent are compared
byte by byte with those of its branch alone.

Further keys go to all jobs. Writes benchmarks/results/branches_cpu.json (--out for another place), after
every counted step (report_file.py).
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents_pool import HERE, SMALL, WARM_UP_STEPS, run_workflow
from grpo_cpu import machine, others_cpu_s, versions
from grpo_gpu import make_data, make_model
from report_file import Report, end_by_signals

BRANCHES = (0, 1)
CASES = {"together": BRANCHES, **{f"alone_{agent}": (agent,) for agent in BRANCHES}}


def main() -> int:
    end_by_signals()
    args = arguments()
    out = args.out or HERE / "results" / "branches_cpu.json"
    report = Report(out, dict.fromkeys(CASES, args.blocks * args.steps), machine=machine(len(BRANCHES)))
    report["versions"] = versions()
    blocks: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model", SMALL)
        num_prompts = args.prompts * (WARM_UP_STEPS + args.steps)
        make_data(folder / "train.parquet", num_prompts, args.prompt_tokens, SMALL["vocab_size"])
        for block, case in itertools.product(range(args.blocks), CASES):

            def told(found: dict[str, Any], case: str = case, block: int = block) -> None:
                blocks[case][block:] = [found]
                report.update(summary(blocks))
                report.count(case, sum(len(one["step_s"]) for one in blocks[case]))

            run(args, folder, folder / f"{case}_{block}", CASES[case], told)
            step_s = statistics.median(blocks[case][-1]["step_s"])
            print(f"block {block + 1}, {case}: {step_s:.3f} s a step", flush=True)
        report["weights_equal"] = {
            str(agent): equal_weights(folder, args.blocks, agent) for agent in BRANCHES
        }
    print(
        f"together {report['step_s']['together']:.3f} s a step, one after the other {report['serial_s']:.3f}"
    )
    print(f"{report['ratio']:.2f}x; weights equal those of each branch alone: {report['weights_equal']}")
    report.finish()
    return 0 if all(report["weights_equal"].values()) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each block")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--response-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    parser.add_argument("keys", nargs="*")
    args = parser.parse_args()
    args.gpu, args.engine = False, "hf"
    args.keys = ["trainer.export_hf=True", "actor_rollout_ref.actor.optim.lr=1e-4", *args.keys]
    return args


def workflow(agents: tuple[int, ...]) -> dict[str, Any]:
    """Agents that know nothing of each other, each on a rank of its own."""
    nodes = []
    for rank, agent in enumerate(agents):
        for name, kind, role, needs in (
            ("rollout", "MODEL_INFERENCE", "ROLLOUT", []),
            ("reward", "COMPUTE", "REWARD", ["rollout"]),
            ("advantage", "COMPUTE", "ADVANTAGE", ["reward"]),
            ("old", "MODEL_TRAIN", "ACTOR", ["rollout"]),
            ("train", "MODEL_TRAIN", "ACTOR", ["advantage", "old"]),
        ):
            nodes.append(
                {
                    "node_id": f"{name}_{agent}",
                    "node_type": kind,
                    "node_role": role,
                    "agent_group": agent,
                    "dependencies": [f"{need}_{agent}" for need in needs],
                    "placement": {"ranks": str(rank)},
                    **({"only_forward_compute": True} if name == "old" else {}),
                }
            )
    return {"dag_id": "branches_" + "_".join(map(str, agents)), "nodes": nodes}


def run(
    args: argparse.Namespace,
    folder: Path,
    out: Path,
    agents: tuple[int, ...],
    told: Callable[[dict[str, Any]], None],
) -> None:
    """One block, and how many cores other programs kept busy meanwhile."""
    args.processes = len(agents)
    before_s = others_cpu_s()

    def told_of(block: dict[str, Any]) -> None:
        told(block | {"others_busy_cores": (others_cpu_s() - before_s) / block["whole_run_s"]})

    run_workflow(args, folder, out, workflow(agents), told_of)


def equal_weights(folder: Path, blocks: int, agent: int) -> bool:
    """Whether every block gave an agent the same weights, byte by byte, with the other beside it or not."""
    found = {
        (exported(folder / f"{case}_{block}", agent, agents) / "model.safetensors").read_bytes()
        for case, agents in CASES.items()
        for block in range(blocks)
        if agent in agents
    }
    return len(found) == 1


def exported(run: Path, agent: int, agents: tuple[int, ...]) -> Path:
    """Where a job has written the trained policy of an agent."""
    return run / "hf_model" / (f"agent_{agent}.actor" if len(agents) > 1 else "")


def summary(blocks: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the steps of all blocks, and the branches one after the other against both at once."""
    there = {case: runs for case, runs in blocks.items() if runs}
    step_s = {
        case: statistics.median(s for one in runs for s in one["step_s"]) for case, runs in there.items()
    }
    found: dict[str, Any] = {"step_s": step_s}
    if len(there) == len(blocks):
        found["serial_s"] = sum(step_s[f"alone_{agent}"] for agent in BRANCHES)
        found["ratio"] = found["serial_s"] / step_s["together"]
    cpu_s = {case: statistics.mean(s for one in runs for s in one["cpu_s"]) for case, runs in there.items()}
    return found | {"cpu_s": cpu_s, "load_after": os.getloadavg()[0], "blocks": blocks}


if __name__ == "__main__":
    sys.exit(main())
