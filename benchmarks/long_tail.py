"""Responses whose lengths have a long tail: rollout.max_lag against a step that waits for the longest.

    python benchmarks/long_tail.py [--lags 0 1 2] [--blocks 2] [--engine hf|vllm] [--gpu] [keys]

A model with random weights ends each response with about the same chance at every token, so lengths are
geometric: mean --mean-tokens, cut at --response-tokens, and fixed by (seed, prompt, sample), the same for
every lag as long as the weights hardly change (the learning rate is 1e-7). --equal lets every response have
--mean-tokens instead. --apart: the rollout on one device, the trainer on another; the engine goes on while
the trainer trains.

A block is a job of its own, by the command that users type; blocks of the lags take turns. A step is all of
it, from the end of the one before; the first steps of a block, and the last ones, which load nothing, do not
count. CPU: a model of 4 small layers, one process. --gpu: the shape of Qwen3-1.7B, vLLM, one GPU. Further
keys go to the job. Writes benchmarks/results/long_tail_<engine>_<device>.json (--out for another place),
after every counted step (report_file.py).
"""

import argparse
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from agents_pool import REPOSITORY, SMALL
from grpo_gpu import COMMON, SHAPES, make_data, make_model
from lag_blocks import lag_arguments, read_arguments, run_block
from report_file import Report, Rows, end_by_signals

RESULTS = Path(__file__).resolve().parent / "results"
REPORTED = (
    *("rollout/response_length", "rollout/response_length_max", "rollout/staleness", "rollout/partial"),
    *("rollout/reread_tokens", "actor/rollout_log_prob_diff"),
)


def main() -> int:
    end_by_signals()
    args = arguments()
    device = "gpu" if args.gpu else "cpu"
    which = "_apart" * args.apart + "_equal" * args.equal
    out = args.out or RESULTS / f"long_tail_{args.engine}_{device}{which}.json"
    report = Report(out, dict.fromkeys(map(str, args.lags), args.blocks * args.steps), keys=args.keys)
    report |= {"cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}
    blocks: dict[str, list[dict[str, Any]]] = {str(lag): [] for lag in args.lags}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape = SHAPES["A"] if args.gpu else SMALL
        make_model(folder / "model", shape)
        vocabulary = shape.get("vocab_size", COMMON["vocab_size"])
        make_data(folder / "train.parquet", args.prompts * 64, args.prompt_tokens, vocabulary)
        for block, lag in itertools.product(range(args.blocks), blocks):

            def told(found: dict[str, Any], lag: str = lag, block: int = block) -> None:
                blocks[lag][block:] = [found]
                report["lags"] = summary(blocks)
                report.count(lag, sum(len(one["step_s"]) for one in blocks[lag]))

            run(args, folder, folder / f"{lag}_{block}", lag, vocabulary, told)
            rate = blocks[lag][-1]["tokens_per_s"]
            print(f"block {block + 1}, lag {lag}: {rate:.0f} tokens/s", flush=True)
    report["load_after"] = os.getloadavg()[0]
    for lag, one in report["lags"].items():
        print(
            f"lag {lag}: {one['steps_per_s']:.3f} steps/s ({one['ratio']:.2f}x), "
            f"{one['tokens_per_s']:.0f} tokens/s ({one['tokens_ratio']:.2f}x), "
            f"blocks {[round(x, 3) for x in one['blocks_steps_per_s']]}"
        )
    report.finish()
    return 0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = lag_arguments(__doc__, steps=8, warm_up=3)
    parser.add_argument("--prompt-tokens", type=int, help="by default 32, on a GPU 128")
    parser.add_argument("--mean-tokens", type=int, help="by default 128, on a GPU 1000")
    parser.add_argument("--response-tokens", type=int, help="the longest; by default 1024, on a GPU 8192")
    parser.add_argument("--equal", action="store_true", help="every response has --mean-tokens")
    parser.add_argument("--apart", action="store_true", help="two devices: one samples, one trains")
    tokens = {"prompt_tokens": (32, 128), "mean_tokens": (128, 1000), "response_tokens": (1024, 8192)}
    return read_arguments(parser, words, tokens)


def run(
    args: argparse.Namespace,
    folder: Path,
    out: Path,
    lag: str,
    vocabulary: int,
    told: Callable[[dict[str, Any]], None],
) -> None:
    """One block: the counted steps' seconds and what they sampled."""

    def counted(rows: Rows) -> None:
        if len(rows) > args.warm_up:
            told(block_of(args, rows))

    run_block(job_keys(args, folder, out, lag, vocabulary), out, f"lag {lag}", counted)


def job_keys(args: argparse.Namespace, folder: Path, out: Path, lag: str, vocabulary: int) -> list[str]:
    """The main job's keys."""
    policy, rollout = "actor_rollout_ref.", "actor_rollout_ref.rollout."
    longest = args.mean_tokens if args.equal else args.response_tokens
    ends = range(2, 2 + round(vocabulary / args.mean_tokens))
    steps = args.warm_up + args.steps + int(lag)
    keys = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        f"data.train_batch_size={args.prompts}",
        f"data.max_prompt_length={args.prompt_tokens}",
        f"data.max_response_length={longest}",
        f"{policy}model.path={folder}/model",
        f"{policy}model.enable_gradient_checkpointing=False",
        f"{policy}actor.optim.lr=1e-7",
        f"{policy}actor.ppo_mini_batch_size={args.prompts}",
        f"{policy}actor.use_dynamic_bsz=True",
        f"{rollout}name={args.engine}",
        f"{rollout}n={args.samples}",
        f"{rollout}max_lag={lag}",
        f"custom_reward_function.path={REPOSITORY}/benchmarks/grpo_gpu_reward.py",
        f"trainer.device={'cuda' if args.gpu else 'cpu'}",
        f"trainer.n_gpus_per_node={1 + args.apart}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=False",
        "trainer.export_hf=False",
        "trainer.logger=[]",
        f"trainer.output_dir={out}",
    ]
    if args.apart:
        keys.append(f"dag.workflow_path={apart_dag(folder)}")
    if args.equal:
        keys.append(f"{rollout}ignore_eos=True")
    else:
        keys.append(f"{rollout}stop_token_ids=[{','.join(map(str, ends))}]")
    if args.gpu:  # as grpo_gpu.py has it
        keys += [
            f"{policy}model.use_liger=True",
            f"{policy}actor.ppo_max_token_len_per_gpu=40960",
            f"{rollout}log_prob_use_dynamic_bsz=True",
            f"{rollout}log_prob_max_token_len_per_gpu=81920",
            f"{rollout}enforce_eager=False",
            f"{rollout}gpu_memory_utilization=0.6",
            f"{rollout}max_num_seqs=512",
            f"{rollout}max_num_batched_tokens=16384",
        ]
    else:
        keys += [
            f"{policy}actor.ppo_max_token_len_per_gpu={max(16384, args.prompt_tokens + longest)}",
            f"{policy}actor.fsdp_config.mixed_precision.param_dtype=float32",
            f"{rollout}dtype=float32",
        ]
    return [*keys, *args.keys]


def block_of(args: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """The counted steps of a job."""
    counted = rows[args.warm_up : args.warm_up + args.steps]
    ends_s = [row["time_s"] for row in rows[args.warm_up - 1 : args.warm_up + args.steps]]
    step_s = [end - start for start, end in itertools.pairwise(ends_s)]
    return {
        "step_s": step_s,
        "rollout_s": [row["time/rollout_actor_s"] for row in counted],
        "tokens_per_s": sum(row["rollout/tokens"] for row in counted) / sum(step_s),
        "steps_per_s": len(step_s) / sum(step_s),
    } | {name: [row[name] for row in counted if name in row] for name in REPORTED}


def apart_dag(folder: Path) -> Path:
    """GRPO with the rollout on the first device and everything else on the second."""
    dag = yaml.safe_load((REPOSITORY / "dag_templates" / "grpo.yaml").read_text())
    for node in dag["nodes"]:
        node["placement"] = "0" if node["node_role"] == "ROLLOUT" else "1"
    path = folder / "apart.yaml"
    path.write_text(yaml.safe_dump(dag))
    return path


def summary(blocks: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """For each lag its rates, and their ratios to those of the first one."""
    blocks = {lag: runs for lag, runs in blocks.items() if runs}
    rates = {
        lag: {name: statistics.median(x[name] for x in runs) for name in ("steps_per_s", "tokens_per_s")}
        for lag, runs in blocks.items()
    }
    base = next(iter(rates.values()))
    return {
        lag: rates[lag]
        | {
            "ratio": rates[lag]["steps_per_s"] / base["steps_per_s"],
            "tokens_ratio": rates[lag]["tokens_per_s"] / base["tokens_per_s"],
            "blocks_steps_per_s": [x["steps_per_s"] for x in runs],
            "blocks": runs,
        }
        for lag, runs in blocks.items()
    }


if __name__ == "__main__":
    raise SystemExit(main())
