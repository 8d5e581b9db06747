"""Megatron-Core against FSDP2 in the main job: the same weights, the same rows, each strategy in its turn.

    python benchmarks/backends_gpu.py speed  --shape 1.7B --gpus 4 --layout tp2pp2 --out DIR
    python benchmarks/backends_gpu.py curves --shape 1.7B --gpus 1 --out DIR
    python benchmarks/backends_gpu.py vllm   --shape 1.7B --gpus 4 --layout tp4 --out DIR
    python benchmarks/backends_gpu.py plot   DIR/curves_....json [more.json] --png FILE

speed: time of update, old log-probs and reference, MFU of the update, peak memory. Rows are random tokens,
written once as a recorded rollout, so that no rollout engine takes part (rollout.name=replay).
curves: such rows, 30 steps of two epochs; loss, gradient norm, KL and entropy of each step. A third run,
FSDP2 in fp32, says what bf16 alone does: the curves overlap if Megatron's is nowhere further from FSDP2's
than twice the largest distance between FSDP2's curves in bf16 and fp32.
vllm: a few steps with vLLM: time of the weight sync, distance of trainer's and rollout's log-probs.
plot: the curves of one or several files as a picture.

Shapes are those of Qwen3 with random weights; tiny and tiny-moe run on a CPU (gloo). 30B-A3B-8 is
Qwen3-30B-A3B with 8 of its 48 layers; 4B-128k has rows of 131,072 tokens. A layout names the sizes of the
Megatron actor and reference, as tp2pp2, tp2cp2 or ep4; the rest is data parallel (dp4 alone: nothing else).
The run fsdp_dealt has the experts of a layer dealt over all ranks, where fsdp gathers them; in fsdp_shared
all ranks share each row.
Further keys go to both runs (key=value), and to one of them as megatron:key=value or fsdp:key=value. Every
subcommand writes OUT/<subcommand>_<shape>_<gpus>_<layout>.json after each counted step (report_file.py), so
that a call which is cut leaves what it has. `--runs` says which runs, in their order; files of several calls
are joined by `plot`.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend_curves import join_and_plot, overlap, plot
from grpo_gpu import COMMON, HERE, REPOSITORY, machine, make_data, make_model
from report_file import Report, Rows, end_by_signals, following, run_job, write

WARM_UP_STEPS = 2
SAMPLES = 8
RUNS = ("fsdp", "fsdp_dealt", "fsdp_shared", "fsdp_fp32", "megatron")
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
CURVES = ("actor/loss", "actor/grad_norm", "actor/ref_kl", "actor/entropy")
SPEED = (
    "time/step_s",
    "time/actor_train_s",
    "time/actor_old_log_prob_s",
    "time/reference_log_prob_s",
    "perf/mfu",
    "memory/peak_gib",
    "memory/actor_train_peak_gib",
    "memory/device_gib",
    "memory/host_peak_gib",
)
VLLM = (
    "time/weight_sync_s",
    "weight_sync/bytes",
    "actor/rollout_log_prob_diff",
    "actor/rollout_log_prob_diff_max",
    "time/rollout_actor_s",
    "time/step_s",
    "memory/device_gib",
)


@dataclass(frozen=True)
class Shape:
    """A model, and how much of it a subcommand runs: tokens of a row, prompts on each GPU, micro-batch."""

    sizes: dict[str, Any]
    prompt_tokens: int
    response_tokens: int
    prompts: int
    train_tokens: int
    forward_tokens: int
    samples: int = SAMPLES


TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
LARGE = {"num_hidden_layers": 36, "num_attention_heads": 32}
SHAPES = {
    "1.7B": Shape({"hidden_size": 2048, "intermediate_size": 6144}, 256, 1024, 32, 16384, 40960),
    "4B": Shape(LARGE | {"hidden_size": 2560, "intermediate_size": 9728}, 256, 1024, 16, 8192, 32768),
    "30B-A3B-8": Shape(
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        *(256, 1024, 16, 16384, 32768),
    ),
    "4B-128k": Shape(
        LARGE | {"hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 131072},
        *(1024, 130048, 1, 32768, 32768),
        samples=2,
    ),
    "tiny": Shape(TINY, 16, 32, 4, 512, 1024),
    "tiny-moe": Shape(
        TINY | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        *(16, 32, 4, 512, 1024),
    ),
}
ON_CPU = ("tiny", "tiny-moe")
CURVE_ROWS = {"prompt_tokens": 64, "response_tokens": 192, "prompts": 8}
"""Of a curves run, on all GPUs together: small, as the run in fp32 is slow."""


@dataclass
class Job:
    """What all runs of a call have in common. folder: of model, data and rows."""

    args: argparse.Namespace
    folder: Path
    shape: Shape
    prompts: int
    on_gpu: bool
    megatron_sizes: dict[str, int]
    result: Report


def parse_layout(text: str, gpus: int) -> dict[str, int]:
    """tp2pp2 -> {"tp": 2, "pp": 2}; SystemExit for what it does not know or what does not fill the GPUs."""
    if not re.fullmatch(r"((vpp|tp|pp|cp|ep|dp)\d+)+", text):
        raise SystemExit(f"--layout {text}: name sizes of tp, pp, vpp, cp, ep and dp, as in tp2pp2.")
    sizes = {name: int(size) for name, size in re.findall(r"(vpp|tp|pp|cp|ep|dp)(\d+)", text)}
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    data = sizes.pop("dp", gpus // ranks)
    if ranks * data != gpus:
        raise SystemExit(f"--layout {text} is for {ranks * data} GPUs, and --gpus says {gpus}.")
    return sizes


def budgets(job: Job) -> dict[str, int]:
    """Key -> tokens of a micro-batch."""
    forward = job.args.forward_tokens or job.shape.forward_tokens
    return {
        f"{ACTOR}.ppo_max_token_len_per_gpu": job.args.train_tokens or job.shape.train_tokens,
        f"{REF}.log_prob_max_token_len_per_gpu": forward,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": forward,
    }


def common_keys(job: Job) -> list[str]:
    """What every run is told, whatever its strategy."""
    args, shape, folder = job.args, job.shape, job.folder
    values = {
        "algorithm.adv_estimator": "grpo" if shape.samples > 1 else "reinforce_plus_plus",
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": job.prompts,
        "data.max_prompt_length": shape.prompt_tokens,
        "data.max_response_length": shape.response_tokens,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.enable_gradient_checkpointing": args.checkpointing,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.ppo_mini_batch_size": max(1, job.prompts // 2),
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.use_kl_loss": True,
        f"{REF}.log_prob_use_dynamic_bsz": True,
        f"{ROLLOUT}.n": shape.samples,
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
        **budgets(job),
        "custom_reward_function.path": "benchmarks/grpo_gpu_reward.py",
        "trainer.device": "cuda" if job.on_gpu else "cpu",
        "trainer.n_gpus_per_node": args.gpus,
        "trainer.total_training_steps": args.steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.export_hf": False,
        "trainer.balance_batch": False,
        "trainer.resume_mode": "disable",
        "trainer.overwrite": True,
        "trainer.logger": "[console]",
        "trainer.deadline_s": 300,
    }
    return [f"{key}={value}" for key, value in values.items()]


def replay_keys(job: Job) -> list[str]:
    return [f"{ROLLOUT}.name=replay", f"{ROLLOUT}.replay_dir={job.folder}/rows"]


def vllm_keys(job: Job) -> list[str]:
    values = {
        "name": "vllm",
        "ignore_eos": True,
        "gpu_memory_utilization": job.args.gpu_memory,
        "enforce_eager": False,
        "max_num_seqs": 512 if job.on_gpu else 64,
    }
    if job.on_gpu:
        values["max_num_batched_tokens"] = 16384
    return [f"{ROLLOUT}.{key}={value}" for key, value in values.items()]


def curve_keys(job: Job) -> list[str]:
    """A learning rate that moves the policy, and a second epoch, in which the ratio is not 1."""
    return [*replay_keys(job), f"{ACTOR}.optim.lr={job.args.lr}", f"{ACTOR}.ppo_epochs=2"]


def strategy_keys(job: Job, run: str) -> list[str]:
    """The keys of one run: one of RUNS."""
    if run == "megatron":
        sizes = {SIZES[name]: size for name, size in job.megatron_sizes.items()}
        values = sizes | {"param_dtype": "bfloat16", "param_offload": False}
        values["sequence_parallel"] = job.megatron_sizes.get("tp", 1) > 1
        # Of a row that several ranks share, Megatron's micro-batches count all tokens.
        row = job.shape.prompt_tokens + job.shape.response_tokens
        return [
            *(f"{key}={max(budget, row)}" for key, budget in budgets(job).items()),
            *(f"{role}.strategy=megatron" for role in (ACTOR, REF)),
            *(f"{role}.megatron.{key}={value}" for role in (ACTOR, REF) for key, value in values.items()),
        ]
    liger = job.on_gpu and importlib.util.find_spec("liger_kernel") is not None
    keys = [f"actor_rollout_ref.model.use_liger={liger and 'num_experts' not in job.shape.sizes}"]
    if run == "fsdp_dealt":
        keys.append(f"{ACTOR}.fsdp_config.expert_parallel_size={job.args.gpus}")
    if run == "fsdp_shared":
        keys.append(f"{ACTOR}.ulysses_sequence_parallel_size={job.args.gpus}")
    if run == "fsdp_fp32":
        return keys + [f"{role}.fsdp_config.mixed_precision.param_dtype=float32" for role in (ACTOR, REF)]
    return [*keys, f"{REF}.fsdp_config.model_dtype=bfloat16"]


def run_main_job(job: Job, run: str, keys: list[str], seen: Callable[[Rows], None]) -> None:
    """Run the main job; seen(metrics of its steps) after each. SystemExit if it fails: logs in OUT."""
    output = job.folder / run
    own = [key.partition(":")[2] for key in job.args.keys if key.startswith(f"{run.split('_')[0]}:")]
    both = [key for key in job.args.keys if ":" not in key.partition("=")[0]]
    arguments = [*common_keys(job), *keys, *strategy_keys(job, run), *both, *own]
    env = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
    begin_s = time.perf_counter()
    command = [sys.executable, "-m", "siirl.main_dag", *arguments, f"trainer.output_dir={output}"]
    job.result["keys"][run] = arguments
    status = run_job(command, following(output / "metrics.jsonl", seen), cwd=REPOSITORY, env=env)
    print(f"{run}: {time.perf_counter() - begin_s:.0f} s with its start", flush=True)
    if status:
        for log in sorted((output / "logs").glob("rank_*.log")):
            write(job.args.out / f"failed_{run}_{log.name}", log.read_text()[-100_000:])
        raise SystemExit(f"the run {run} failed with status {status}: see OUT/failed_{run}_*.log")


def counted(rows: list[dict[str, Any]], names: tuple[str, ...], warm_up: int) -> dict[str, Any]:
    """Median and all values of the counted steps."""
    series = {name: [row[name] for row in rows[warm_up:] if name in row] for name in names}
    return {name: {"median": statistics.median(x), "all": x} for name, x in series.items() if x}


def compare(job: Job, keys: list[str], names: tuple[str, ...]) -> None:
    """Run each strategy, and divide Megatron's medians by FSDP2's."""
    runs = job.result["runs"]
    for run in job.args.runs:

        def seen(rows: Rows, run: str = run) -> None:
            if len(rows) > job.args.warm_up:
                runs[run] = counted(rows, names, job.args.warm_up)
                if {"fsdp", "megatron"} <= runs.keys():
                    job.result["megatron_over_fsdp"] = ratios(runs["megatron"], runs["fsdp"])
                job.result.count(run, len(rows) - job.args.warm_up)

        run_main_job(job, run, keys, seen)
    print(f"{'':42s}" + "".join(f"{run:>14s}" for run in runs) + "   megatron/fsdp")
    for name in filter(lambda name: any(name in run for run in runs.values()), names):
        cells = "".join(f"{runs[run].get(name, {}).get('median', float('nan')):14.4f}" for run in runs)
        print(f"{name:42s}{cells}   {job.result.get('megatron_over_fsdp', {}).get(name, float('nan')):.3f}")


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Of the medians that both have."""
    names = [name for name in ours if name in theirs and theirs[name]["median"]]
    return {name: ours[name]["median"] / theirs[name]["median"] for name in names}


def draw_curves(job: Job, keys: list[str], names: tuple[str, ...]) -> None:
    """Run each strategy and keep its curves."""
    runs = job.result["runs"]
    for run in job.args.runs:

        def seen(rows: Rows, run: str = run) -> None:
            runs[run] = {name: [row[name] for row in rows] for name in names if name in rows[0]}
            job.result["overlap"] = overlap(runs)
            job.result.count(run, len(rows))

        run_main_job(job, run, keys, seen)
    print(json.dumps(job.result["overlap"], indent=1))
    if importlib.util.find_spec("matplotlib"):
        plot(job.result, job.result.path.with_suffix(".png"))


def make_rows(job: Job) -> None:
    """Record a rollout of random tokens, as trainer.dump_rollouts_dir would: every run replays it."""
    import torch

    from siirl.config import load_config
    from siirl.data.chat import load_tokenizer
    from siirl.data.loader import make_loader
    from siirl.data.recorded_rollouts import step_folder
    from siirl.data.replayed_rows import conditions, record
    from siirl.nodes.generate import samples_of
    from siirl.types import FINISH_LENGTH

    cfg = load_config([*common_keys(job), *replay_keys(job), f"trainer.output_dir={job.folder}"])
    tokenizer = load_tokenizer(cfg)
    samples = job.shape.samples
    loader, draw = make_loader(cfg, "train", tokenizer), torch.Generator().manual_seed(0)
    made_under = conditions(tokenizer, samples, cfg.actor_rollout_ref.rollout.temperature)
    num_rows, width = job.prompts * samples, job.shape.response_tokens
    words = job.shape.sizes.get("vocab_size", COMMON["vocab_size"])
    for step in range(1, job.args.steps + 1):
        columns = {
            "response_ids": torch.randint(2, words, (num_rows, width), generator=draw),
            "response_length": torch.full((num_rows,), width),
            "response_mask": torch.ones(num_rows, width, dtype=torch.bool),
            "finish_reason": torch.full((num_rows,), FINISH_LENGTH, dtype=torch.int8),
            "weight_version": torch.zeros(num_rows, width, dtype=torch.int64),
            "rollout_log_prob": torch.full((num_rows, width), -torch.tensor(float(words)).log().item()),
        }
        rows = samples_of(loader.next_batch(), samples, columns)
        record(step_folder(job.folder / "rows", 0, step), rows, made_under)


COMMANDS = {"speed": (compare, SPEED), "curves": (draw_curves, CURVES), "vllm": (compare, VLLM)}
KEYS = {"speed": replay_keys, "curves": curve_keys, "vllm": vllm_keys}


def run(args: argparse.Namespace, folder: Path) -> None:
    """One subcommand, from model and data to the JSON file."""
    import torch

    shape, prompts = SHAPES[args.shape], SHAPES[args.shape].prompts * args.gpus
    if args.command == "curves":
        if args.shape in ON_CPU:
            prompts = shape.prompts
        else:
            prompts = CURVE_ROWS["prompts"]
            shape = Shape(
                shape.sizes,
                CURVE_ROWS["prompt_tokens"],
                CURVE_ROWS["response_tokens"],
                prompts,
                shape.train_tokens,
                shape.forward_tokens,
            )
    elif args.command == "vllm":
        prompts = prompts // 2
    shape = dataclasses.replace(shape, samples=args.samples or shape.samples)
    on_gpu = torch.cuda.is_available() and args.shape not in ON_CPU
    prompts, warm_up = args.prompts or prompts, 0 if args.command == "curves" else args.warm_up
    settings = {
        name: getattr(args, name) for name in ("command", "shape", "gpus", "layout", "steps", "warm_up")
    }
    settings |= {"prompts": prompts, "samples": shape.samples}
    settings |= {"prompt_tokens": shape.prompt_tokens, "response_tokens": shape.response_tokens}
    report = Report(
        args.out / f"{args.command}_{args.shape}_{args.gpus}_{args.layout}.json",
        dict.fromkeys(args.runs, args.steps - warm_up),
        settings=settings,
        machine=machine(),
        keys={},
        runs={},
    )
    job = Job(args, folder, shape, prompts, on_gpu, parse_layout(args.layout, args.gpus), report)
    begin_s = time.perf_counter()
    make_model(folder / "model", shape.sizes)
    words = shape.sizes.get("vocab_size", COMMON["vocab_size"])
    make_data(folder / "train.parquet", job.prompts * args.steps, shape.prompt_tokens, words)
    if args.command != "vllm":
        make_rows(job)
    print(f"model, data and rows made in {time.perf_counter() - begin_s:.0f} s", flush=True)
    command, names = COMMANDS[args.command]
    command(job, KEYS[args.command](job), names)
    report.finish()


def named_runs(text: str) -> list[str]:
    """fsdp,megatron -> ["fsdp", "megatron"]; an error of the command line for what is no run."""
    runs = text.split(",")
    if strange := [run for run in runs if run not in RUNS]:
        raise argparse.ArgumentTypeError(f"{', '.join(strange)}: choose from {', '.join(RUNS)}")
    return runs


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, steps in (("speed", 5), ("curves", 30), ("vllm", 5)):
        sub = commands.add_parser(name)
        runs = ["fsdp", "megatron", *(["fsdp_fp32"] if name == "curves" else [])]
        sub.add_argument("--shape", choices=SHAPES, default="1.7B")
        sub.add_argument("--gpus", type=int, default=1)
        sub.add_argument("--layout", default="tp1", help="sizes of the Megatron model: tp2pp2, tp4, dp4")
        sub.add_argument("--runs", default=runs, type=named_runs, help=",".join(runs))
        sub.add_argument("--steps", type=int, default=steps)
        sub.add_argument("--warm-up", type=int, default=WARM_UP_STEPS, help="steps that are not counted")
        sub.add_argument("--prompts", type=int, help="of a step, on all GPUs together")
        sub.add_argument("--samples", type=int, help="of a prompt")
        sub.add_argument("--train-tokens", type=int, help="budget of a micro-batch in the update")
        sub.add_argument("--forward-tokens", type=int, help="and in passes without gradient")
        sub.add_argument("--checkpointing", action="store_true", help="recompute activations")
        sub.add_argument("--gpu-memory", type=float, default=0.4, help="share of the device for vLLM")
        sub.add_argument("--lr", type=float, default=1e-5, help="of the curves")
        sub.add_argument("--out", type=Path, default=HERE / "results")
        sub.add_argument("keys", nargs="*", help="key=value, megatron:key=value, fsdp:key=value")
    sub = commands.add_parser("plot")
    sub.add_argument("files", nargs="+", type=Path)
    sub.add_argument("--png", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    end_by_signals()
    args = arguments()
    if args.command == "plot":
        join_and_plot(args.files, args.png)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
