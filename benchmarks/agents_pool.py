"""What several agents on one pool of ranks cost: time of a step per trained token, against a single agent.

    python benchmarks/agents_pool.py [--agents 1 3 2] [--engine hf|vllm] [--blocks 2] [key=value ...]
    python benchmarks/agents_pool.py --gpu [--agents 1 3 2] [--gpu-memory 0.15] [key=value ...]

Agents with policies, trainers and engines of their own speak one after another in each episode. Every one
reads the same prompts and says responses of the same length (ignore_eos), so each trains on as many tokens
as a single agent that runs alone. A step is all of it: interaction, log-probs, rewards, advantages, two
updates of each policy, the sync of its weights. A block is a job of its own, by the command that users type;
blocks of the numbers of agents take turns, their first steps do not count. Goal: within 10% of one agent.

cpu: processor time per trained token, which other programs on the machine hardly change.

CPU: a model of 4 small layers, 2 processes. --gpu: the shape of Qwen3-0.6B with random weights, vLLM, one
GPU; --gpu-memory is the share of each engine. Further keys go to the job. Writes
benchmarks/results/agents_pool_<engine>_<device>.json (--out for another place), after every counted step
(report_file.py); numbers of agents in the order in which they are named.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from grpo_gpu import SHAPES, make_data, make_model
from report_file import Report, Rows, end_by_signals, following, rows_of, run_job

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
WARM_UP_STEPS = 2
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}
ONLY_THE_PROMPT = "def pre_process(messages, episode):\n    return messages[:1]\n"


def main() -> int:
    end_by_signals()
    args = arguments()
    device = "gpu" if args.gpu else "cpu"
    out = args.out or HERE / "results" / f"agents_pool_{args.engine}_{device}.json"
    report = Report(
        out, dict.fromkeys(args.agents, args.blocks * args.steps), engine=args.engine, device=device
    )
    report |= {"load_before": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0)), "keys": args.keys}
    blocks: dict[int, list[dict[str, Any]]] = {number: [] for number in args.agents}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape = SHAPES["B"] if args.gpu else SMALL
        make_model(folder / "model", shape)
        steps = WARM_UP_STEPS + args.steps
        vocabulary = {} if args.gpu else {"vocabulary": SMALL["vocab_size"]}
        make_data(folder / "train.parquet", args.prompts * steps, args.prompt_tokens, **vocabulary)
        (folder / "process.py").write_text(ONLY_THE_PROMPT)
        for block, number in itertools.product(range(args.blocks), args.agents):

            def told(found: dict[str, Any], number: int = number, block: int = block) -> None:
                trained = number * args.prompts * args.samples * args.response_tokens
                blocks[number][block:] = [found | {"trained_tokens": trained}]
                report["agents"] = summary(blocks)
                report.count(number, sum(len(one["step_s"]) for one in blocks[number]))

            run_workflow(args, folder, folder / f"{number}_{block}", workflow(number, folder), told)
            step_s = statistics.median(blocks[number][-1]["step_s"])
            print(f"block {block + 1}, {number} agents: {step_s:.2f} s a step", flush=True)
    report["load_after"] = os.getloadavg()[0]
    for number, one in report["agents"].items():
        ratios = (f"{name} {one[name + '_ratio']:.3f}" for name in ("step_s", "step_s_min", "cpu_s"))
        print(f"{number} agents: {one['step_s']:.3f} s a step; per trained token: {', '.join(ratios)}")
    report.finish()
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 3, 2])
    parser.add_argument("--engine", choices=["hf", "vllm"])
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each block")
    parser.add_argument("--processes", type=int, help="ranks of the pool; by default 2, on a GPU 1")
    parser.add_argument("--prompts", type=int, help="of a step; by default 16, on a GPU 64")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, help="by default 32, on a GPU 128")
    parser.add_argument("--response-tokens", type=int, help="by default 48, on a GPU 256")
    parser.add_argument("--gpu-memory", type=float, default=0.15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("keys", nargs="*")
    args = parser.parse_args()
    sizes = (("engine", "hf", "vllm"), ("blocks", 2, 1), ("processes", 2, 1), ("prompts", 16, 64))
    for name, cpu, gpu in (*sizes, ("prompt_tokens", 32, 128), ("response_tokens", 48, 256)):
        if getattr(args, name) is None:
            setattr(args, name, gpu if args.gpu else cpu)
    return args


def workflow(number: int, folder: Path) -> dict[str, Any]:
    """Agents that speak one after another, each with its own models; one alone needs no interaction."""
    nodes: list[dict[str, Any]] = []
    for agent in range(number):
        spoken, needs = [f"rollout_{agent}"], [f"rollout_{agent - 1}"] if agent else []
        options = {"agent_options": {"process_path": str(folder / "process.py")}} if agent else {}
        for name, kind, role, dependencies, more in (
            ("rollout", "MODEL_INFERENCE", "ROLLOUT", needs, options),
            ("reward", "COMPUTE", "REWARD", spoken, {}),
            ("advantage", "COMPUTE", "ADVANTAGE", [f"reward_{agent}"], {}),
            ("old", "MODEL_TRAIN", "ACTOR", spoken, {"only_forward_compute": True}),
            ("train", "MODEL_TRAIN", "ACTOR", [f"advantage_{agent}", f"old_{agent}"], {}),
        ):
            node = {"node_id": f"{name}_{agent}", "node_type": kind, "node_role": role, "agent_group": agent}
            nodes.append(node | {"dependencies": dependencies} | more)
    return {"dag_id": f"pool_of_{number}", "nodes": nodes}


def job_keys(args: argparse.Namespace, folder: Path, out: Path) -> list[str]:
    """The main job's keys."""
    policy, rollout = "actor_rollout_ref.", "actor_rollout_ref.rollout."
    tokens = args.prompt_tokens + args.response_tokens
    keys = [
        "algorithm.adv_estimator=grpo",
        f"dag.workflow_path={out}.yaml",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        f"data.train_batch_size={args.prompts}",
        f"data.max_prompt_length={args.prompt_tokens}",
        f"data.max_response_length={args.response_tokens}",
        f"{policy}model.path={folder}/model",
        f"{policy}model.enable_gradient_checkpointing=False",
        f"{policy}actor.optim.lr=1e-6",
        f"{policy}actor.ppo_mini_batch_size={args.prompts // 2}",
        f"{policy}actor.use_dynamic_bsz=True",
        f"{policy}actor.ppo_max_token_len_per_gpu={128 * tokens if args.gpu else 32 * tokens}",
        f"{rollout}log_prob_use_dynamic_bsz=True",
        f"{rollout}log_prob_max_token_len_per_gpu={128 * tokens if args.gpu else 32 * tokens}",
        f"{rollout}name={args.engine}",
        f"{rollout}n={args.samples}",
        f"{rollout}ignore_eos=True",
        f"{rollout}max_num_seqs=512",
        f"custom_reward_function.path={HERE}/grpo_gpu_reward.py",
        f"trainer.n_gpus_per_node={args.processes}",
        f"trainer.total_training_steps={WARM_UP_STEPS + args.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.export_hf=False",
        "trainer.resume_mode=disable",
        "trainer.overwrite=true",
        "trainer.logger=[]",
        f"trainer.output_dir={out}",
    ]
    if args.gpu:
        keys += [
            f"{policy}model.use_liger=True",
            f"{rollout}gpu_memory_utilization={args.gpu_memory}",
            f"{rollout}enforce_eager=False",
            f"{rollout}max_num_batched_tokens=16384",
        ]
    else:
        keys += [
            "trainer.device=cpu",
            f"{rollout}dtype=float32",
            f"{policy}actor.fsdp_config.mixed_precision.param_dtype=float32",
        ]
    return [*keys, *args.keys]


def run_workflow(
    args: argparse.Namespace,
    folder: Path,
    out: Path,
    dag: dict[str, Any],
    told: Callable[[dict[str, Any]], None],
) -> None:
    """Run a workflow by the command that users type; told wall and processor time of its counted steps."""
    out.with_suffix(".yaml").write_text(yaml.safe_dump(dag, sort_keys=False))
    env = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
    env |= {} if args.gpu else {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "siirl.main_dag", *job_keys(args, folder, out)]
    begin_s, samples = time.perf_counter(), [(time.time(), 0.0)]
    pids: list[int] = []

    def counted(rows: Rows) -> None:
        if len(rows) > WARM_UP_STEPS:
            told(block_of(rows, samples) | {"whole_run_s": time.perf_counter() - begin_s})

    follow = following(out / "metrics.jsonl", counted)

    def seen() -> None:
        samples.append((time.time(), max(samples[-1][1], tree_cpu_s(pids[0]))))
        follow()

    log = out.with_suffix(".log")
    with log.open("w") as file:
        how: dict[str, Any] = {"cwd": REPOSITORY, "env": env, "stdout": file, "stderr": subprocess.STDOUT}
        status = run_job(command, seen, pids.append, **how)
    if status:
        raise SystemExit(f"the job of {dag['dag_id']} failed:\n{log.read_text()[-6000:]}")
    counted(rows_of(out / "metrics.jsonl"))


def block_of(rows: Rows, samples: list[tuple[float, float]]) -> dict[str, Any]:
    """The counted steps of a job. samples: processor time of its processes, by time of day."""
    ends = [one["time_s"] for one in rows[WARM_UP_STEPS - 1 :]]
    used = np.interp(ends, *zip(*samples, strict=True))
    counted = rows[WARM_UP_STEPS:]
    names = sorted({name for one in counted for name in one if name.startswith("time/")})
    return {
        "step_s": [end - start for start, end in itertools.pairwise(ends)],
        "cpu_s": np.diff(used).tolist(),
        "times_s": {name: statistics.median(one.get(name, 0.0) for one in counted) for name in names},
    }


def summary(blocks: dict[int, list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Medians over the steps of all blocks; ratio: per trained token, to those of the fewest agents."""
    found: dict[int, dict[str, Any]] = {}
    for number, runs in blocks.items():
        if not runs:
            continue
        step_s = [seconds for one in runs for seconds in one["step_s"]]
        found[number] = {
            "step_s": statistics.median(step_s),
            "step_s_min": min(step_s),
            "cpu_s": statistics.mean(seconds for one in runs for seconds in one["cpu_s"]),
            "trained_tokens": runs[0]["trained_tokens"],
            "blocks": runs,
        }
    base = found[min(found)]
    for one in found.values():
        for name in ("step_s", "step_s_min", "cpu_s"):
            one[f"{name}_ratio"] = one[name] / one["trained_tokens"] / (base[name] / base["trained_tokens"])
    return found


def tree_cpu_s(root: int) -> float:
    """Processor time of a process and of all that descend from it."""
    parent, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        pid = int(stat.parent.name)
        parent[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {root}
    while more := {pid for pid, above in parent.items() if above in family} - family:
        family |= more
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
