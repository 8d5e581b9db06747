"""What FP8 costs in learning: the quickstart's task with numbers of 16 bits, and of 8.

    python benchmarks/fp8_curves.py [--device cuda] [--steps 60] [--settings best rollout bf16]

bf16: trainer and vLLM compute in it. rollout: vLLM has weights and KV cache in FP8, and what it samples is
weighted (rollout correction). best: the trainer multiplies in FP8, too, and the ratio of the loss is to the
engine's probabilities (recompute_old_log_prob=False). Two optimizer steps a step, so that old log-probs are
read. --device cpu: the HF engine in fp32 instead, without FP8 of the rollout, to try the script.

Settings run in the order in which they are named. Ends with 1 unless every one reaches a validation reward of
0.8. Writes benchmarks/results/fp8_curves_<device>.json (--out for another file), after every step
(report_file.py).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from report_file import Report, Rows, end_by_signals, following, run_job

REPOSITORY = Path(__file__).resolve().parents[1]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
IN_FP8 = (
    f"{ROLLOUT}.quantization=fp8",
    f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8",
    f"{ROLLOUT}.max_log_prob_diff=0.5",
)
TO_ENGINE = (f"{ACTOR}.recompute_old_log_prob=False", f"{ACTOR}.fsdp_config.float8=True")
SETTINGS = {"best": (*IN_FP8, *TO_ENGINE), "rollout": IN_FP8, "bf16": ()}
"""What is least known comes first: it is there when a call is cut."""
ON_GPU = (
    *("trainer.device=cuda", "trainer.n_gpus_per_node=1", f"{ROLLOUT}.name=vllm"),
    *(f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.gpu_memory_utilization=0.2", f"{ROLLOUT}.max_num_seqs=512"),
    f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bfloat16",
)
ON_CPU = ("trainer.device=cpu", "trainer.n_gpus_per_node=1")
HEADS = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Of a size that vLLM's kernels for FP8 caches have; as wide together as the quickstart's."""
DISTANCE = "actor/rollout_log_prob_diff"


def prepare(folder: Path) -> None:
    """The quickstart's data, and its model with other heads."""
    sys.path.insert(0, str(REPOSITORY / "examples" / "quickstart"))
    import prepare as quickstart
    import torch
    from transformers import Qwen3ForCausalLM

    with patch.object(sys, "argv", ["prepare.py", "--out", str(folder)]):
        quickstart.main()
    tokenizer = quickstart.make_tokenizer(quickstart.WORDS, quickstart.CHAT_TEMPLATE, max_length=64)
    config = quickstart.make_model(tokenizer).config
    for name, value in HEADS.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")


def run(folder: Path, setting: str, args: argparse.Namespace, report: Report) -> None:
    """Put the curves of one setting into the report."""
    keys = SETTINGS[setting]
    if args.device == "cpu":
        keys = tuple(key for key in keys if key not in IN_FP8)
    output = folder / f"out_{setting}"
    words = [
        *(ON_GPU if args.device == "cuda" else ON_CPU),
        *(f"{ACTOR}.ppo_mini_batch_size=16", f"trainer.total_training_steps={args.steps}"),
        *("trainer.save_freq=-1", "trainer.export_hf=False", "trainer.logger=[console]"),
        *(f"trainer.output_dir={output}", *keys, *args.keys),
    ]
    env = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}",
        "QUICKSTART_DIR": str(folder),
    }
    begin_s = time.perf_counter()
    script = ["bash", str(REPOSITORY / "examples" / "quickstart" / "run.sh"), *words]
    kept_words = [word for word in words if not word.startswith("trainer.output_dir=")]
    found: dict[str, Any] = {"keys": kept_words, "exit_code": None}

    def seen(lines: Rows) -> None:
        apart = [line[DISTANCE] for line in lines if DISTANCE in line]
        rewards = {line["step"]: line["val/reward/mean"] for line in lines if "val/reward/mean" in line}
        found["seconds"] = time.perf_counter() - begin_s
        found["validation_reward"] = {str(step): reward for step, reward in rewards.items()}
        found["log_prob_distance"] = {"mean": statistics.fmean(apart), "max": max(apart)} if apart else None
        report["runs"][setting] = found
        report.count(setting, sum(line["step"] > 0 for line in lines))

    seen_file = following(output / "metrics.jsonl", seen)
    found["exit_code"] = run_job(script, seen_file, cwd=REPOSITORY, env=env)
    print(f"\n== {setting}: {json.dumps({k: v for k, v in found.items() if k != 'keys'})}", flush=True)


def main() -> int:
    end_by_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("keys", nargs="*")
    args = parser.parse_args()
    out = args.out or REPOSITORY / "benchmarks" / "results" / f"fp8_curves_{args.device}.json"
    with tempfile.TemporaryDirectory() as temporary:
        prepare(Path(temporary))
        report = Report(out, dict.fromkeys(args.settings, args.steps), device=args.device, runs={})
        for setting in args.settings:
            run(Path(temporary), setting, args, report)
    report.finish()
    return 0 if all(learned(report["runs"].get(setting)) for setting in args.settings) else 1


def learned(found: dict[str, Any] | None) -> bool:
    """Whether a setting ran to its end and reached the reward."""
    rewards = list(found["validation_reward"].values()) if found and found["exit_code"] == 0 else []
    return bool(rewards) and rewards[-1] > 0.8


if __name__ == "__main__":
    sys.exit(main())
