"""Episodes with slow tools: rollout.max_lag against a step that waits for the slowest.

    python benchmarks/agents_async.py [--lags 0 1 2] [--blocks 2] [--mean-s 0.2] [--gpu] [key=value ...]

Episodes have 1 to 12 turns, and after each a tool whose latency is log-normal (agents_async_errands.py): the
same for every lag, by the episode's seed. Two ranks, one plays and one trains; with a lag episodes go on
while it trains, and under new weights within a turn. A turn is --turn-tokens long.

A block is a job of its own, by the command that users type; blocks of the lags take turns. A step is all of
it, from the end of the one before; the first steps of a block, and the last ones, which load nothing, do not
count. CPU: a model of 4 small layers, tools of 0.2 s (their tail 2.6 s). --gpu: the shape of Qwen3-1.7B (A),
or 0.6B (--shape B), vLLM, two GPUs, tools of 2 s (26 s). Further keys go to the job. --block-s ends a block
that takes longer, and counts the steps that it has. Writes
benchmarks/results/agents_async_<engine>_<device>.json (--out for another place), after every counted step.

busy: of each GPU, the share of the counted time in which kernels ran (gpu_use.py); the rollout has GPU 1.
"""

import argparse
import contextlib
import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from agents_pool import REPOSITORY, SMALL
from gpu_use import GpuUse
from grpo_gpu import COMMON, SHAPES, make_data, make_model
from lag_blocks import lag_arguments, read_arguments, run_block
from report_file import Report, Rows, end_by_signals

HERE = Path(__file__).resolve().parent
REPORTED = ("rollout/staleness", "rollout/staleness_max", "rollout/partial", "perf/idle_s_max")


def main() -> int:
    end_by_signals()
    args = arguments()
    out = args.out or HERE / "results" / f"agents_async_{args.engine}_{'gpu' if args.gpu else 'cpu'}.json"
    report = Report(out, dict.fromkeys(args.lags, args.blocks * args.steps), keys=args.keys)
    report |= {"load_before": os.getloadavg()[0], "mean_s": args.mean_s}
    blocks: dict[int, list[dict[str, Any]]] = {lag: [] for lag in args.lags}
    with tempfile.TemporaryDirectory() as temporary, contextlib.closing(GpuUse()) as use:
        folder = Path(temporary)
        shape = SHAPES[args.shape] if args.gpu else SMALL
        make_model(folder / "model", shape)
        vocabulary = shape.get("vocab_size", COMMON["vocab_size"])
        make_data(folder / "train.parquet", args.prompts * 64, 32, vocabulary)
        (folder / "apart.yaml").write_text(yaml.safe_dump(workflow(args.mean_s)))
        for block, lag in itertools.product(range(args.blocks), args.lags):

            def told(found: dict[str, Any], lag: int = lag, block: int = block) -> None:
                times = list(itertools.pairwise(found.pop("ends_s")))
                blocks[lag][block:] = [found | {"busy": use.shares(times)}]
                report["lags"] = summary(blocks)
                report.count(lag, sum(len(one["step_s"]) for one in blocks[lag]))

            run(args, folder, folder / f"{lag}_{block}", lag, told)
            last = blocks[lag][-1] if blocks[lag] else {"rows_per_s": math.nan, "busy": {}}
            print(f"block {block + 1}, lag {lag}: {last['rows_per_s']:.2f} rows/s {last['busy']}", flush=True)
    report["load_after"] = os.getloadavg()[0]
    for lag, one in report.get("lags", {}).items():
        print(f"lag {lag}: {one['rows_per_s']:.2f} rows/s ({one['ratio']:.2f}x), blocks {one['blocks']}")
    report.finish()
    return 0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = lag_arguments(__doc__, steps=6, warm_up=2)
    parser.add_argument("--mean-s", type=float, help="of a tool; by default 0.2, on a GPU 2")
    parser.add_argument("--turn-tokens", type=int, help="by default 8, on a GPU 200")
    parser.add_argument("--shape", choices=SHAPES, default="A", help="with --gpu")
    parser.add_argument("--block-s", type=float, default=math.inf, help="longest time of a block")
    return read_arguments(parser, words, {"mean_s": (0.2, 2.0), "turn_tokens": (8, 200)})


def workflow(mean_s: float) -> dict[str, Any]:
    """GRPO in an environment, played on rank 1 and trained on rank 0."""
    dag = yaml.safe_load((REPOSITORY / "dag_templates" / "grpo.yaml").read_text())
    rollout = next(node for node in dag["nodes"] if node["node_role"] == "ROLLOUT")
    errands = {
        "node_id": "errands",
        "node_type": "ENV_INTERACT",
        "dependencies": [rollout["node_id"]],
        "loop": {"max_turns": 12},
        "config": {
            "env_path": f"{HERE / 'agents_async_errands.py'}:Errands",
            "env_kwargs": {"mean_s": mean_s},
        },
    }
    for node in dag["nodes"]:
        node["placement"] = "1" if node is rollout else "0"
        if node["node_role"] == "REWARD":
            node["dependencies"] = ["errands"]
    return dag | {"nodes": [*dag["nodes"], errands | {"placement": "1"}]}


def run(
    args: argparse.Namespace, folder: Path, out: Path, lag: int, told: Callable[[dict[str, Any]], None]
) -> None:
    """One block, of whose counted steps `told` is told."""

    def counted(rows: Rows) -> None:
        ends_s = [row["time_s"] for row in rows[args.warm_up - 1 : args.warm_up + args.steps]]
        step_s = [end - start for start, end in itertools.pairwise(ends_s)]
        if step_s:
            named = {name: [row[name] for row in rows if name in row] for name in REPORTED}
            rate = args.prompts * args.samples * len(step_s) / sum(step_s)
            told({"step_s": step_s, "rows_per_s": rate, "ends_s": ends_s} | named)

    run_block(job_keys(args, folder, out, lag), out, f"lag {lag}", counted, args.block_s)


def job_keys(args: argparse.Namespace, folder: Path, out: Path, lag: int) -> list[str]:
    """The main job's keys."""
    policy, rollout = "actor_rollout_ref.", "actor_rollout_ref.rollout."
    longest = 12 * (args.turn_tokens + 24)
    keys = [
        "algorithm.adv_estimator=grpo",
        f"dag.workflow_path={folder}/apart.yaml",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        f"data.train_batch_size={args.prompts}",
        "data.max_prompt_length=64",
        f"data.max_response_length={longest}",
        f"{policy}model.path={folder}/model",
        f"{policy}actor.optim.lr=1e-6",
        f"{policy}actor.ppo_mini_batch_size={args.prompts}",
        f"{policy}actor.use_dynamic_bsz=True",
        f"{policy}actor.ppo_max_token_len_per_gpu={40960 if args.gpu else 16384}",
        f"{rollout}name={args.engine}",
        f"{rollout}n={args.samples}",
        f"{rollout}max_lag={lag}",
        f"{rollout}ignore_eos=True",
        f"{rollout}agent.max_turn_tokens={args.turn_tokens}",
        f"custom_reward_function.path={HERE}/grpo_gpu_reward.py",
        f"trainer.device={'cuda' if args.gpu else 'cpu'}",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={args.warm_up + args.steps + lag}",
        "trainer.val_before_train=False",
        "trainer.export_hf=False",
        "trainer.logger=[]",
        f"trainer.output_dir={out}",
    ]
    if args.gpu:
        keys += [f"{rollout}enforce_eager=False", f"{rollout}gpu_memory_utilization=0.6"]
    else:
        keys += [f"{policy}actor.fsdp_config.mixed_precision.param_dtype=float32", f"{rollout}dtype=float32"]
    return [*keys, *args.keys]


def summary(blocks: dict[int, list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """For each lag its rate, of all counted steps, and its ratio to that of the first one."""
    found = {}
    for lag, runs in blocks.items():
        if runs:
            rates = [one["rows_per_s"] for one in runs]
            found[lag] = {"rows_per_s": statistics.median(rates), "blocks": [round(x, 2) for x in rates]}
            found[lag] |= {name: [x for one in runs for x in one[name]] for name in ("step_s", *REPORTED)}
            found[lag]["busy"] = [one["busy"] for one in runs]
    base = next(iter(found.values()))["rows_per_s"]
    return {lag: one | {"ratio": one["rows_per_s"] / base} for lag, one in found.items()}


if __name__ == "__main__":
    raise SystemExit(main())
