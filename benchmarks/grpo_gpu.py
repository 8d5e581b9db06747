"""GRPO on GPUs: the main job on workload A or B, next to verl 0.9.1's figures for the same workload.

    python benchmarks/grpo_gpu.py --workload A [--gpus 1] [--tensor-parallel 1] [--steps 6] [key=value ...]

A: the shape of Qwen3-1.7B, 32 prompts x 8 samples on each GPU. B: that of Qwen3-0.6B, 64 x 8. Random
weights, prompts of 256 tokens, responses of 1,024 (ignore_eos), a reference model, two optimizer steps a
step, bf16 compute with fp32 master weights, FSDP2 and vLLM on the same GPUs. Further keys go to the main job.

--best-flags: with BEST_FLAGS, which are faster and other numbers. --small: two layers and responses of 16
tokens, to try the script, also on a CPU (in bf16 and without Liger kernels there).

The first steps are not counted. Writes benchmarks/results/grpo_gpu_<workload>_<gpus>.json (--out for
another place) after every counted step, as report_file.py says: the median and all counted values of every
time, rates, memory peaks, versions, the command.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from report_file import Report, Rows, end_by_signals, following, run_job

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
PROMPT_TOKENS, RESPONSE_TOKENS, SAMPLES = 256, 1024, 8
WARM_UP_STEPS = 2
SHAPES = {
    "A": {"hidden_size": 2048, "intermediate_size": 6144, "prompts": 32},
    "B": {"hidden_size": 1024, "intermediate_size": 3072, "prompts": 64},
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "prompts": 4,
}
COMMON = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
SMALL_KEYS = ("data.max_response_length=16", "actor_rollout_ref.rollout.max_num_seqs=64")
BEST_FLAGS = (
    "actor_rollout_ref.actor.recompute_old_log_prob=False",
    "actor_rollout_ref.actor.fsdp_config.float8=True",
    "actor_rollout_ref.model.attention_kernels=flash_attn_4",
    "actor_rollout_ref.rollout.quantization=fp8",
    "actor_rollout_ref.rollout.max_log_prob_diff=0.5",  # random weights: a trained model has less
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype=fp8",
)
"""What is faster and no longer the same numbers (docs/tuning.md): the ratio of the loss is to the
probabilities of the rollout engine, which corrects for what FP8 does to them; the run ends where
the two are too far apart.
"""
VERL = {
    "A": {"step_s": 23.19, "rollout_s": 9.53, "old_log_prob_s": 2.99, "ref_log_prob_s": 2.58,
          "update_s": 7.60, "weight_sync_s": 0.34, "tokens_per_s_per_gpu": 14133, "update_mfu": 0.469,
          "peak_gib": 93.8},
    "B": {"step_s": 34.56, "rollout_s": 19.65, "old_log_prob_s": 3.34, "ref_log_prob_s": 2.94,
          "update_s": 7.92, "weight_sync_s": 0.35, "tokens_per_s_per_gpu": 18966, "update_mfu": 0.336,
          "peak_gib": 71.6},
}  # fmt: skip
"""verl 0.9.1, tuned, one H200, vLLM 0.24.0, the same workload."""


def make_model(path: Path, shape: dict) -> None:
    """A model directory with random weights in bf16, and a tokenizer that has a word for every token.

    shape: sizes that are not those of COMMON; with num_experts a Qwen3-MoE, with gated delta nets a Qwen3.5.

    Weights have a standard deviation of 0.64 / sqrt(hidden size). With one of 0.02 for all sizes, bf16 alone
    moves the log-probs of workload A by 0.022 from the fp32 model's, in vLLM as in transformers.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes = COMMON | {key: value for key, value in shape.items() if key != "prompts"}
    spread = 0.64 * sizes["hidden_size"] ** -0.5
    kinds = {"num_experts": "qwen3_moe", "linear_num_value_heads": "qwen3_5_text"}
    kind = next((kind for name, kind in kinds.items() if name in sizes), "qwen3")
    config = AutoConfig.for_model(kind, **sizes, initializer_range=spread, dtype="bfloat16")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # a whole model in fp32 is twice the memory
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(before)
    model.save_pretrained(path)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the run's processes need the memory, and this one stays
    words = ["<pad>", "<eos>", *(f"{chr(97 + i % 26)}{i:x} " for i in range(sizes["vocab_size"] - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(path)


def make_data(
    path: Path, num_prompts: int, num_tokens: int = PROMPT_TOKENS, vocabulary: int = COMMON["vocab_size"]
) -> None:
    """Prompts of exactly `num_tokens` random tokens."""
    import random

    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(0)
    rows = []
    for index in range(num_prompts):
        ids = [rng.randrange(vocabulary - 2) for _ in range(num_tokens)]
        text = "".join(f"{chr(97 + i % 26)}{i:x} " for i in ids)
        rows.append(
            {
                "data_source": "random",
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


def overrides(args: argparse.Namespace, folder: Path, prompts: int) -> list[str]:
    """The main job's keys."""
    policy, rollout = "actor_rollout_ref.", "actor_rollout_ref.rollout."
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={RESPONSE_TOKENS}",
        f"{policy}model.path={folder}/model",
        f"{policy}model.enable_gradient_checkpointing=False",
        f"{policy}model.use_liger=True",
        f"{policy}actor.optim.lr=1e-6",
        f"{policy}actor.ppo_mini_batch_size={prompts // 2}",
        f"{policy}actor.use_dynamic_bsz=True",
        f"{policy}actor.ppo_max_token_len_per_gpu={args.train_tokens}",
        f"{policy}actor.use_kl_loss=True",
        f"{policy}ref.fsdp_config.model_dtype=bfloat16",
        f"{policy}ref.log_prob_use_dynamic_bsz=True",
        f"{policy}ref.log_prob_max_token_len_per_gpu={args.forward_tokens}",
        f"{rollout}name=vllm",
        f"{rollout}n={SAMPLES}",
        f"{rollout}ignore_eos=True",
        f"{rollout}log_prob_use_dynamic_bsz=True",
        f"{rollout}log_prob_max_token_len_per_gpu={args.forward_tokens}",
        f"{rollout}tensor_model_parallel_size={args.tensor_parallel}",
        *([f"{rollout}gpu_memory_utilization={args.gpu_memory}"] if args.gpu_memory else []),
        f"{rollout}enforce_eager=False",
        f"{rollout}max_num_seqs=512",
        f"{rollout}max_num_batched_tokens=16384",
        f"custom_reward_function.path={HERE}/grpo_gpu_reward.py",
        f"trainer.n_gpus_per_node={args.gpus}",
        f"trainer.total_training_steps={args.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.export_hf=False",
        "trainer.balance_batch=False",
        "trainer.trace=True",
        "trainer.resume_mode=disable",
        "trainer.overwrite=true",
        "trainer.logger=[console]",
        f"trainer.output_dir={folder}/out",
        *(BEST_FLAGS if args.best_flags else ()),
        *args.keys,
    ]


def summary(rows: Rows) -> dict:
    """Medians over the counted steps."""
    names = sorted({name for row in rows for name in row if name.startswith(("time/", "memory/", "perf/"))})
    extra = [name for row in rows for name in row if "log_prob_diff" in name or "bytes" in name]
    series = {name: [row[name] for row in rows if name in row] for name in [*names, *dict.fromkeys(extra)]}
    return {name: {"median": statistics.median(values), "all": values} for name, values in series.items()}


def environment() -> dict[str, str]:
    """Of a job that runs this checkout."""
    return os.environ | {"PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}


def keep_logs(out: Path, folder: Path) -> None:
    """Copy the logs of the run in `out`, if it has any."""
    if (out / "logs").is_dir():
        shutil.copytree(out / "logs", folder, dirs_exist_ok=True)


def run_counted(report: Report, name: str, keys: list[str], folder: Path) -> int:
    """Run the main job into folder/out, and put the metrics of its counted steps into the report.

    Gives its exit code. Traces lie beside the report afterwards; the logs, too, unless all went well.
    """

    def counted(rows: Rows) -> None:
        report["metrics"] = summary(rows[WARM_UP_STEPS:])
        if len(rows) > WARM_UP_STEPS:
            report.count(name, len(rows) - WARM_UP_STEPS)

    words = [sys.executable, "-m", "siirl.main_dag", *keys]
    seen, status = following(folder / "out" / "metrics.jsonl", counted), None
    try:
        status = run_job(words, seen, cwd=REPOSITORY, env=environment())
    finally:
        report.path.parent.mkdir(parents=True, exist_ok=True)
        for trace in folder.glob("out/trace.json*"):
            shutil.copy(trace, report.path.with_name(f"{report.path.stem}_{trace.name}"))
        if status != 0:
            keep_logs(folder / "out", report.path.parent / "logs")
    if status == 0:
        report.finish()
        for metric, value in report["metrics"].items():
            print(f"{metric:45s} {value['median']:12.4f}   {' '.join(f'{x:.3g}' for x in value['all'])}")
    return status


def main() -> int:
    import torch

    end_by_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=SHAPES, default="A")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, help="of a step, on each GPU")
    parser.add_argument("--train-tokens", type=int, default=40960)
    parser.add_argument("--forward-tokens", type=int, default=81920)
    parser.add_argument(
        "--gpu-memory", type=float, default=0.6, help="engine's share of the device; 0: as the plan has it"
    )
    parser.add_argument("--best-flags", action="store_true", help="coarser numbers, fewer passes: BEST_FLAGS")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--label", default="")
    parser.add_argument("keys", nargs="*")
    args = parser.parse_args()
    shape = SHAPES[args.workload] | (SMALL if args.small else {})
    prompts = (args.prompts or shape["prompts"]) * args.gpus
    label = f"_{args.label}" if args.label else ""
    out = args.out or HERE / "results" / f"grpo_gpu_{args.workload}_{args.gpus}{label}.json"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        begin_s = time.perf_counter()
        make_model(folder / "model", shape)
        words = shape.get("vocab_size", COMMON["vocab_size"])
        make_data(folder / "train.parquet", prompts * args.steps, vocabulary=words)
        print(f"model and data made in {time.perf_counter() - begin_s:.0f} s", flush=True)
        report = Report(
            out,
            {args.workload: args.steps - WARM_UP_STEPS},
            workload=args.workload,
            gpus=args.gpus,
            tensor_parallel=args.tensor_parallel,
            prompts=prompts,
            best_flags=args.best_flags,
            small=args.small,
            keys=args.keys,
            metrics={},
            machine=machine(),
        )
        report["verl_0.9.1_one_h200"] = VERL[args.workload]
        if args.small:
            args.keys = [
                *SMALL_KEYS,
                f"actor_rollout_ref.model.use_liger={torch.cuda.is_available()}",
                *args.keys,
            ]
        return run_counted(report, args.workload, overrides(args, folder, prompts), folder)


def machine() -> dict:
    import torch

    packages = ("torch", "vllm", "transformers", "megatron-core", "liger-kernel", "triton")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"python": platform.python_version(), "gpus": gpus, **versions}


if __name__ == "__main__":
    sys.exit(main())
