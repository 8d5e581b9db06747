"""A rollout against plain vLLM: what seeds, log-probs and the way through siirl cost.

    python benchmarks/rollout_gpu.py [--workload A] [--rounds 3] [--kinds ...] [--out FILE] [key=value ...]

Two engines with equal arguments stay on one GPU and take turns: vLLM's own, asked for tokens alone, and then
for the log-prob of each sampled token; and siirl's rollout engine, which gives tokens by seeds and their
log-probs. --kinds says which of these, in the order of their turns. In B, whose keys and values fill half
of a device, engines sleep while others have their turn; that, and waking, is not timed.

Workloads as in grpo_gpu.py: A 32 prompts x 8 samples of Qwen3-1.7B's shape, B 64 x 8 of Qwen3-0.6B's; 256 +
1,024 tokens, each round other prompts. Writes all seconds to benchmarks/results/rollout_gpu_<workload>.json
(--out for another place), after every round (report_file.py).
"""

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_gpu import COMMON, HERE, PROMPT_TOKENS, RESPONSE_TOKENS, SAMPLES, SHAPES, machine, make_model
from report_file import Report, end_by_signals

PLAIN, SCORED, OURS = "vllm", "vllm_log_probs", "siirl"


@dataclass
class Kind:
    """One way to sample."""

    sample: Callable[[list], int]
    """What it samples of some prompts: the number of tokens."""
    wake: Callable[[], object]
    sleep: Callable[[], object]


def main() -> int:
    end_by_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=SHAPES, default="A")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[PLAIN, SCORED, OURS])
    parser.add_argument("--gpu-memory", type=float, help="share of the device; 0.42, or 0.6 of sleepers")
    parser.add_argument("--out", type=Path)
    parser.add_argument("keys", nargs="*")
    args = parser.parse_args()
    args.sleeps = args.workload == "B"
    args.gpu_memory = args.gpu_memory or (0.6 if args.sleeps else 0.42)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with tempfile.TemporaryDirectory() as temporary:
        make_model(Path(temporary) / "model", SHAPES[args.workload])
        gc.collect()
        out = args.out or HERE / "results" / f"rollout_gpu_{args.workload}.json"
        asked = dict.fromkeys(args.kinds, args.rounds)
        report = Report(out, asked, workload=args.workload, machine=machine(), keys=args.keys)
        measure(args, Path(temporary), report)
    for name, values in report["seconds"].items():
        ratio = report["ratios"][name]
        print(f"{name}: {[round(value, 2) for value in values]} s, {ratio:.3f}x {args.kinds[0]}")
    report.finish()
    return 0


def measure(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Seconds of each round, after one that does not count."""
    kinds = {}
    for name in sorted(args.kinds, key=[OURS, PLAIN, SCORED].index):  # vLLM's own is of this process
        begin_s = time.perf_counter()
        kinds[name] = KINDS[name](args, folder)
        if args.sleeps:
            kinds[name].sleep()
        print(f"{name}: started in {time.perf_counter() - begin_s:.0f} s", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in args.kinds}
    for round_number in range(args.rounds + 1):
        for place, name in enumerate(args.kinds):
            if args.sleeps:
                kinds[name].wake()
            dealt = random.Random(1000 * round_number + place)
            count = SHAPES[args.workload]["prompts"]
            words = range(2, COMMON["vocab_size"])
            prompts = [dealt.choices(words, k=PROMPT_TOKENS) for _ in range(count)]
            begin_s = time.perf_counter()
            tokens = kinds[name].sample(prompts)
            took_s = time.perf_counter() - begin_s
            if args.sleeps:
                kinds[name].sleep()
            assert tokens == count * SAMPLES * RESPONSE_TOKENS, (name, tokens)
            print(f"round {round_number}, {name}: {took_s:.2f} s", flush=True)
            if round_number:
                seconds[name].append(took_s)
        if round_number:
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            report |= {"seconds": seconds, "medians": medians}
            first = medians[args.kinds[0]]
            report["ratios"] = {name: round(value / first, 3) for name, value in medians.items()}
            for name in args.kinds:
                report.count(name, round_number)


def configuration(args: argparse.Namespace, folder: Path, *keys: str):
    """The keys of grpo_gpu.py that an engine takes."""
    from siirl.config import load_config

    rollout = "actor_rollout_ref.rollout"
    return load_config(
        [
            f"actor_rollout_ref.model.path={folder}/model",
            f"data.max_prompt_length={PROMPT_TOKENS}",
            f"data.max_response_length={RESPONSE_TOKENS}",
            f"{rollout}.name=vllm",
            f"{rollout}.ignore_eos=True",
            f"{rollout}.free_cache_engine={args.sleeps}",
            f"{rollout}.gpu_memory_utilization={args.gpu_memory}",
            f"{rollout}.enforce_eager=False",
            f"{rollout}.max_num_seqs=512",
            f"{rollout}.max_num_batched_tokens=16384",
            f"trainer.output_dir={folder}/out",
            *args.keys,
            *keys,
        ]
    )


def ours(args: argparse.Namespace, folder: Path, *keys: str) -> Kind:
    """siirl's engine, with weights."""
    import torch
    from safetensors.torch import load_file

    from siirl.compiler.plan import ModelPlan
    from siirl.data.completions import SamplingParams
    from siirl.engines.engine_registry import make_rollout_engine
    from siirl.parallel.dims import ParallelDims

    plan = ModelPlan(
        "agent_0.rollout", 0, "rollout", "vllm", "lm", False, (0,), ParallelDims(1), "rollout", ()
    )
    engine = make_rollout_engine(plan, configuration(args, folder, *keys), None, torch.device("cuda", 0))
    weights = load_file(folder / "model" / "model.safetensors")

    def wake() -> None:
        engine.wake()
        engine.load_weights(((name, weights[name].cuda()) for name in engine.weight_specs()), version=0)
        torch.cuda.empty_cache()
        engine.generate([[2, 3]], SamplingParams(max_tokens=1), [0])  # also wakes the KV cache

    wake()
    params = SamplingParams(n=SAMPLES, max_tokens=RESPONSE_TOKENS, ignore_eos=True)

    def sample(prompts: list) -> int:
        rows = engine.generate(prompts, params, list(range(len(prompts))))
        return sum(len(one.token_ids) for row in rows for one in row)

    return Kind(sample, wake, engine.sleep)


def plain(args: argparse.Namespace, folder: Path, log_probs: int | None = None) -> Kind:
    """vLLM's engine in this process; one for both ways of asking."""
    import torch
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    from siirl.engines.rollout.vllm.arguments import engine_arguments
    from siirl.model_files.hf_config import load_hf_config

    if not ENGINES:
        cfg = configuration(args, folder)
        model = cfg.actor_rollout_ref.model
        arguments = engine_arguments(
            cfg, str(folder / "model"), load_hf_config(model), 1, torch.device("cuda", 0)
        )
        ENGINES.append(LLMEngine.from_engine_args(EngineArgs(**arguments | {"load_format": "auto"})))
    (engine,) = ENGINES
    params = SamplingParams(
        n=SAMPLES,
        max_tokens=RESPONSE_TOKENS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        logprobs=log_probs,
        flat_logprobs=log_probs is not None,
    )

    def sample(prompts: list) -> int:
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        tokens = 0
        while engine.has_unfinished_requests():
            tokens += sum(
                len(one.token_ids) for output in engine.step() if output.finished for one in output.outputs
            )
        return tokens

    def wake() -> None:
        if engine.is_sleeping():
            engine.wake_up()

    def sleep() -> None:
        if not engine.is_sleeping():
            engine.sleep(level=1)

    return Kind(sample, wake, sleep)


ENGINES: list = []
"""vLLM's own, when it has been started."""
KINDS = {
    PLAIN: plain,
    SCORED: lambda args, folder: plain(args, folder, 0),
    OURS: ours,
}

if __name__ == "__main__":
    raise SystemExit(main())
