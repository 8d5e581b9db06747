"""What benchmarks of rollout.max_lag share: their arguments, and a block: a job by the command of users."""

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agents_pool import REPOSITORY
from report_file import Rows, following, run_job

DEFAULTS = {"engine": ("hf", "vllm"), "prompts": (4, 32), "samples": (4, 8)}
"""Argument -> its value on a CPU and on a GPU, where it is not given."""


def lag_arguments(doc: str | None, steps: int, warm_up: int) -> argparse.ArgumentParser:
    """steps, warm_up: the defaults, steps of a block."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--engine", choices=["hf", "vllm"])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=steps, help="counted steps of each block")
    parser.add_argument("--warm-up", type=int, default=warm_up, help="first steps of a block, not counted")
    parser.add_argument("--prompts", type=int, help="of a step; by default 4, on a GPU 32")
    parser.add_argument("--samples", type=int, help="by default 4, on a GPU 8")
    parser.add_argument("--out", type=Path)
    parser.add_argument("keys", nargs="*")
    return parser


def read_arguments(
    parser: argparse.ArgumentParser, words: Sequence[str] | None, more: Mapping[str, tuple[float, float]]
) -> argparse.Namespace:
    """The arguments, where those that are not given have the value of the device. more: see DEFAULTS."""
    args = parser.parse_args(words)
    for name, (cpu, gpu) in {**DEFAULTS, **more}.items():
        if getattr(args, name) is None:
            setattr(args, name, gpu if args.gpu else cpu)
    return args


def run_block(
    keys: Sequence[str], out: Path, who: str, counted: Callable[[Rows], None], longest_s: float = math.inf
) -> None:
    """One job, of whose metrics `counted` is told, and which is ended after so many seconds.

    SystemExit with the end of its log if it fails.
    """
    command = [sys.executable, "-m", "siirl.main_dag", *keys]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    log, seen = out.with_suffix(".log"), following(out / "metrics.jsonl", counted)
    with log.open("w") as file:
        how: dict[str, Any] = {"env": environment, "stdout": file, "stderr": subprocess.STDOUT}
        status = run_job(command, seen, longest_s=longest_s, **how)
    if status:
        raise SystemExit(f"{who} ended with {status}:\n{log.read_text()[-4000:]}")
