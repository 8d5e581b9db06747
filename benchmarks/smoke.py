"""The guard of speed: a step's parts and one layer of experts, in six minutes on an H200, by commit.

    python benchmarks/smoke.py [--parts experts step] [--steps 5] [--out FILE] [key=value ...]
    python benchmarks/smoke.py --table > docs/evidence/speed_by_commit.md

experts: the experts of one layer of Qwen3-30B-A3B with its router, forward and backward in bf16, 16,384 and
32,768 tokens: milliseconds, the share of the device's peak, and the kernels that took longest. With
--arm NAME=VALUE once more where the modules of experts have another value under a name (expert_kernels=null).
step: workload A of grpo_gpu.py (Qwen3-1.7B's shape, 32 prompts x 8 samples, 256 + 1,024 tokens, two optimizer
steps) by the keys of README and of the workload, none of speed or memory: seconds of each part, the tokens a
second that are decoded, and the weight sync, which is in place from the second one on. --kernels: also what
the device did in training and passes of the second step, which is not counted: milliseconds of the kernels
that took longest, of all of them, and from the first to the last.

Writes benchmarks/results/smoke_<commit>.json after each part and each counted step, and does what is not
there yet of the same commit, so that a call may be cut and the next one goes on. SIIRL_COMMIT names the
commit of a copy of a checkout. --small: sizes for a CPU. --table: the page of all files, in which a number is
bold that is more than 3% worse than the best of earlier commits on the same device.
"""

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from defaults_gpu import Shape, model_folder
from grpo_gpu import HERE, SHAPES, SMALL, VERL, WARM_UP_STEPS, machine, make_data, make_model, run_counted
from report_file import Report, commit, end_by_signals

RESULTS = HERE / "results"
ROUNDS = 10
"""Counted passes of the experts."""
LAYER = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
SMALL_LAYER = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
KERNELS = 12
"""That are told, by their time."""
WORSE = 1.03
POLICY = "actor_rollout_ref"
WORKLOAD = (
    f"{POLICY}.actor.optim.lr=1e-6",
    f"{POLICY}.actor.ppo_mini_batch_size=%d",
    f"{POLICY}.actor.use_kl_loss=True",
    f"{POLICY}.ref.fsdp_config.model_dtype=bfloat16",
)
"""What verl's figures were measured with, besides the sizes."""
PROFILE = (
    "profiler.enable=true",
    f"profiler.profile_steps=[{WARM_UP_STEPS}]",
    "profiler.ranks=[0]",
    "profiler.roles=[actor,ref]",
)
FIGURES = {
    "step, s": ("step_s", 2, 1),
    "rollout, s": ("rollout_s", 2, 1),
    "tokens/s": ("decoded_tokens_per_s", 0, -1),
    "log-probs, s": ("old_log_prob_s", 2, 1),
    "ref, s": ("reference_s", 2, 1),
    "update, s": ("update_s", 2, 1),
    "update MFU": ("update_mfu", 3, -1),
    "sync, ms": ("weight_sync_ms", 1, 1),
    "experts 16k, ms": ("experts_16384_ms", 2, 1),
    "experts 32k, ms": ("experts_32768_ms", 2, 1),
}
"""Columns of the page: name of the figure, decimals, and 1 where less is better."""
OF_VERL = {"reference_s": "ref_log_prob_s"}


def main() -> int:
    end_by_signals()
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=5, help=f"of which {WARM_UP_STEPS} are not counted")
    parser.add_argument("--arm", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("keys", nargs="*")
    args = parser.parse_args()
    if args.table:
        print(page(RESULTS.glob("smoke_*.json")), end="")
        return 0
    out = args.out or RESULTS / f"smoke_{commit()[:12]}.json"
    report = resumed(out, {"experts": ROUNDS, "step": args.steps - WARM_UP_STEPS}, args)
    for part in args.parts:
        if report["counted_steps"][part] < report["asked_steps"][part]:
            begin_s = time.perf_counter()
            if status := PARTS[part](report, args):
                return status
            report["figures"] = figures(report)
            report.save()
            print(f"{part}: {time.perf_counter() - begin_s:.0f} s", flush=True)
    report.finish()
    for name, value in report["figures"].items():
        print(f"{name:24s} {value:12.4f}")
    return 0


def resumed(out: Path, asked: dict[str, int], args: argparse.Namespace) -> Report:
    """The report, with the parts that a call before this one has done of the same commit and sizes."""
    own = {"small": args.small, "keys": args.keys, "machine": machine()}
    date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    report = Report(out, asked, date=date, experts={}, metrics={}, kernels_ms={}, figures={}, **own)
    before = json.loads(out.read_text()) if out.exists() else {}
    same = all(before.get(name) == report[name] for name in ("commit", "asked_steps", *own))
    for part, told in {"experts": "experts", "step": "metrics"}.items() if same else ():
        if before["counted_steps"][part] == asked[part]:
            report["counted_steps"][part], report[told] = asked[part], before[told]
    return report


def experts(report: Report, args: argparse.Namespace) -> int:
    """Forward and backward of a layer's experts, by numbers of tokens."""
    import torch

    sizes = (256, 512) if args.small else (16384, 32768)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arms: dict[str, tuple[str, ...]] = {"": (), **{arm: tuple(arm.split("=", 1)) for arm in args.arm}}
    for tokens in sizes:
        for name, arm in arms.items():
            with changed(*arm):
                told = one_layer(SMALL_LAYER if args.small else LAYER, tokens, device)
            report["experts"][f"{tokens} {name}".strip()] = told
            share = f", {100 * told['share_of_peak']:.1f}% of the peak" if told["share_of_peak"] else ""
            print(f"experts, {tokens} tokens {name}: {told['median_ms']:.2f} ms{share}", flush=True)
            report.save()
    report.count("experts", ROUNDS)
    return 0


@contextmanager
def changed(name: str = "", value: str = "null") -> Iterator[None]:
    """A name of the experts' modules has another (JSON) value."""
    from siirl.engines.train.experts import grouped_product, hf_experts

    new = json.loads(value)
    before = [
        (module, getattr(module, name)) for module in (hf_experts, grouped_product) if hasattr(module, name)
    ]
    for module, _ in before:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module, old in before:
            setattr(module, name, old)


def one_layer(sizes: dict[str, int], tokens: int, device: str) -> dict[str, Any]:
    """Milliseconds of each pass, and of the kernels of one."""
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    from siirl.engines.train.experts.hf_experts import GROUPED_EXPERTS
    from siirl.observe.metrics import mfu

    config = Qwen3MoeConfig(**sizes, dtype="bfloat16", num_hidden_layers=1, norm_topk_prob=True)
    config._experts_implementation = GROUPED_EXPERTS
    torch.manual_seed(0)
    with torch.device(device):
        layer = Qwen3MoeSparseMoeBlock(config).bfloat16()
        for param in layer.parameters():
            torch.nn.init.normal_(param, std=0.02)
        x = torch.randn(1, tokens, sizes["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        along = torch.randn_like(x)

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        out = layer(x)
        (out[0] if isinstance(out, tuple) else out).backward(along)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(3 + ROUNDS):
        wait()
        begin_s = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - begin_s)
    times = [1e3 * each for each in seconds[3:]]
    matrices = 3 * sizes["hidden_size"] * sizes["moe_intermediate_size"] * sizes["num_experts_per_tok"]
    flops = 6 * matrices * tokens
    median = statistics.median(times)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    share = mfu(flops, median / 1e3, 1, name)
    return {"median_ms": median, "all_ms": times, "share_of_peak": share, "kernels_ms": kernels(run, device)}


def kernels(run: Callable[[], None], device: str) -> dict[str, float]:
    """The kernels of a pass that take longest, in ms; none on a CPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if device != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in seen.key_averages():
        found[event.key[:100]] += event.self_device_time_total / 1e3  # templates differ behind that
    return dict(found.most_common(KERNELS))


def step(report: Report, args: argparse.Namespace) -> int:
    """The main job; the exit code."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    sizes = SHAPES["A"] | (SMALL if args.small else {})
    rows = {"prompt": 256, "response": 16 if args.small else 1024, "samples": 8, "engine": "vllm"}
    shape = Shape(sizes | rows)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not (model := model_folder(shape)).exists():
            make_model(model, sizes)
        words = {"vocabulary": sizes["vocab_size"]} if args.small else {}
        make_data(folder / "train.parquet", shape["prompts"] * args.steps, shape["prompt"], **words)
        workload = [key % (shape["prompts"] // 2) if "%" in key else key for key in WORKLOAD]
        keys = [*shape.keys_of_run(folder), *workload, f"trainer.total_training_steps={args.steps}"]
        keys += [*PROFILE, *args.keys] if args.kernels else args.keys
        status = run_counted(report, "step", keys, folder)
        for trace in sorted(folder.glob("out/profile/*.json.gz")):
            report["kernels_ms"][trace.name.split(".")[0]] = kernels_of(trace)
        return status


def kernels_of(trace: Path) -> dict[str, float]:
    """Milliseconds of the kernels that a trace of torch has, by name, the longest first."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    found: defaultdict[str, float] = defaultdict(float)
    begins, ends = [], []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found[event["name"][:100]] += event["dur"] / 1e3
            begins.append(event["ts"])
            ends.append(event["ts"] + event["dur"])
    span = (max(ends) - min(begins)) / 1e3 if ends else 0.0
    return {"all": sum(found.values()), "span": span, **dict(Counter(found).most_common(3 * KERNELS))}


PARTS = {"experts": experts, "step": step}


def figures(report: dict[str, Any]) -> dict[str, float]:
    """What the page shows of a report."""
    names = {
        "step_s": "time/step_s",
        "rollout_s": "time/rollout_actor_s",
        "old_log_prob_s": "time/actor_old_log_prob_s",
        "reference_s": "time/reference_log_prob_s",
        "update_s": "time/actor_train_s",
        "update_mfu": "perf/mfu",
    }
    metrics = {name: told["median"] for name, told in report["metrics"].items()}
    found = {name: metrics[metric] for name, metric in names.items() if metric in metrics}
    if "time/weight_sync_s" in metrics:
        found["weight_sync_ms"] = 1e3 * metrics["time/weight_sync_s"]
    if "time/rollout_actor/generate_s" in metrics:
        small, prompts = report["small"], (SMALL if report["small"] else SHAPES["A"])["prompts"]
        tokens = prompts * 8 * (16 if small else 1024)
        found["decoded_tokens_per_s"] = tokens / metrics["time/rollout_actor/generate_s"]
    for name, told in report["experts"].items():
        if name.isdigit():
            found[f"experts_{name}_ms"] = told["median_ms"]
            if told["share_of_peak"]:
                found[f"experts_{name}_share"] = told["share_of_peak"]
    return found


def page(files: Iterator[Path]) -> str:
    """The table over commits, in the order of their runs."""
    reports = sorted((json.loads(path.read_text()) for path in files), key=lambda report: report["date"])
    lines = [
        "# Speed by commit",
        "",
        "Workload A by default keys, and one layer of Qwen3-30B-A3B's experts: medians of "
        "`python benchmarks/smoke.py`, for one H200 and about six minutes. A",
        f"number is bold that is more than {100 * (WORSE - 1):.0f}% worse than the best of earlier commits "
        "on the same device. `python benchmarks/smoke.py --table`",
        "prints this page from `benchmarks/results/smoke_*.json`; verl's numbers are in `grpo_gpu_A_1.json`.",
        "",
        "| commit | run | device | " + " | ".join(FIGURES) + " |",
        "|---" * (3 + len(FIGURES)) + "|",
    ]
    verl = VERL["A"]
    of_verl = {name: verl.get(OF_VERL.get(name, name)) for name, _, _ in FIGURES.values()}
    of_verl |= {"weight_sync_ms": 1e3 * verl["weight_sync_s"]}
    lines.append(row(["verl 0.9.1", "", "H200"], of_verl, {}))
    best: dict[tuple[str, str], float] = {}
    for report in reports:
        if report["small"] or report["keys"]:
            continue
        device = ", ".join(report["machine"]["gpus"]).removeprefix("NVIDIA ") or "CPU"
        found = report["figures"]
        earlier = {name: best[device, name] for name in found if (device, name) in best}
        lines.append(row([f"`{report['commit'][:8]}`", report["date"], device], found, earlier))
        for name, _, sign in FIGURES.values():
            if name in found:
                known = best.get((device, name), found[name])
                best[device, name] = sign * min(sign * known, sign * found[name])
    return "\n".join(lines) + "\n"


def row(head: list[str], found: dict[str, Any], best: dict[str, float]) -> str:
    cells = []
    for name, decimals, sign in FIGURES.values():
        value = found.get(name)
        text = "" if value is None else f"{value:,.{decimals}f}"
        if share := found.get(name.replace("_ms", "_share")) if name.endswith("_ms") else None:
            text += f" ({100 * share:.0f}%)"
        is_worse = value is not None and name in best and (value / best[name]) ** sign > WORSE
        cells.append(f"**{text}**" if is_worse else text)
    return "| " + " | ".join([*head, *cells]) + " |"


if __name__ == "__main__":
    sys.exit(main())
