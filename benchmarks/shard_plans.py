"""Plans of a weight sync by shards for large models: how long they take, and how full the fullest link is.

    python benchmarks/shard_plans.py

Nothing is sent. Trainers are laid out as Megatron-Core does (stages, tensor and expert parallel, copies), the
engines as vLLM's tensor parallel ones, each on ranks of its own. For each case: seconds of the plan, GB that
the busiest rank sends and receives, and the least that is possible: the mean of what a stage's ranks must
send, as nobody else has it, or what a receiver keeps. Writes benchmarks/results/shard_plans.json (--out for
another file).
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from report_file import Report, end_by_signals

from siirl.engines.weights.shard_plan import AlikeTensors, Box, Ranks, Transfer, largest_loads, plan_transfers

RESULTS = Path(__file__).resolve().parent / "results"
Shape = tuple[int, int]


class Kind(NamedTuple):
    """Tensors of a layer."""

    name: str
    shape: Shape
    axis: int | None
    """Along which tensor parallelism cuts; None: every rank has it whole."""
    is_expert: bool = False


class Case(NamedTuple):
    """A model, and how its trainer and its engines lie."""

    layers: list[list[Kind]]
    experts: int
    ends: list[Kind]
    """Embedding and head: of the first and the last stage."""
    tp: int
    ep: int
    pp: int
    ranks: int
    engine_tp: int
    engines: int


def moe(hidden: int, inner: int) -> list[Kind]:
    return [
        Kind("gate_proj", (inner, hidden), 0, True),
        Kind("up_proj", (inner, hidden), 0, True),
        Kind("down_proj", (hidden, inner), 1, True),
    ]


def qwen3_30b_a3b() -> Case:
    hidden = 2048
    layer = [
        Kind("q_proj", (4096, hidden), 0),
        Kind("k_proj", (512, hidden), 0),
        Kind("v_proj", (512, hidden), 0),
        Kind("o_proj", (hidden, 4096), 1),
        Kind("router", (128, hidden), None),
        Kind("norm", (1, 2 * hidden), None),
        *moe(hidden, 768),
    ]
    ends = [Kind("embed_tokens", (151936, hidden), 0), Kind("lm_head", (151936, hidden), 0)]
    return Case([layer] * 48, 128, ends, tp=4, ep=8, pp=1, ranks=32, engine_tp=4, engines=8)


def deepseek_671b() -> Case:
    hidden, dense = 7168, 18432
    attention = [
        Kind("q_a_proj", (1536, hidden), None),
        Kind("q_b_proj", (24576, 1536), 0),
        Kind("kv_a_proj", (576, hidden), None),
        Kind("kv_b_proj", (32768, 512), 0),
        Kind("o_proj", (hidden, 16384), 1),
        Kind("norm", (1, 2 * hidden), None),
    ]
    shared = [kind._replace(name=f"shared_{kind.name}", is_expert=False) for kind in moe(hidden, 2048)]
    plain = [kind._replace(is_expert=False) for kind in moe(hidden, dense)]
    sparse = [*attention, Kind("router", (256, hidden), None), *shared, *moe(hidden, 2048)]
    ends = [Kind("embed_tokens", (129280, hidden), 0), Kind("lm_head", (129280, hidden), 0)]
    layers = [[*attention, *plain]] * 3 + [sparse] * 58
    return Case(layers, 256, ends, tp=4, ep=32, pp=8, ranks=256, engine_tp=32, engines=8)


CASES = {"30B-A3B": qwen3_30b_a3b, "671B": deepseek_671b}


def stage_of(case: Case, layer: int) -> int:
    return layer * case.pp // len(case.layers)


def alike(case: Case) -> list[AlikeTensors]:
    """The tensors of a case, in bf16, by where they lie."""
    names: dict[tuple[Kind, int, int], list[str]] = defaultdict(list)
    for number, layer in enumerate(case.layers):
        stage = stage_of(case, number)
        for kind in layer:
            for expert in range(case.experts if kind.is_expert else 1):
                home = expert * case.ep // case.experts if kind.is_expert else -1
                names[kind._replace(name=""), stage, home].append(f"{number}.{kind.name}.{expert}")
    for kind, stage in zip(case.ends, (0, case.pp - 1), strict=True):
        names[kind, stage, -1].append(kind.name)
    return [
        AlikeTensors(tuple(each), 2, dict(held(case, kind, stage, home)), dict(wanted(case, kind)))
        for (kind, stage, home), each in names.items()
    ]


def held(case: Case, kind: Kind, stage: int, home: int) -> Iterator[tuple[Box, Ranks]]:
    """Who has it of the trainer: an expert whole on the ranks of its place, all others by tensor parallel."""
    size = case.ranks // case.pp
    ranks = range(stage * size, (stage + 1) * size)
    if kind.is_expert:
        yield whole(kind.shape), tuple(rank for rank in ranks if (rank - ranks[0]) % case.ep == home)
    elif kind.axis is None:
        yield whole(kind.shape), tuple(ranks)
    else:
        for part, box in enumerate(cut(kind.shape, kind.axis, case.tp)):
            yield box, tuple(rank for rank in ranks if (rank - ranks[0]) % case.tp == part)


def wanted(case: Case, kind: Kind) -> Iterator[tuple[Box, Ranks]]:
    """Who keeps it of the engines, whose ranks come after those of the trainer."""
    heads = [case.ranks + engine * case.engine_tp for engine in range(case.engines)]
    if kind.axis is None:
        yield whole(kind.shape), tuple(head + part for head in heads for part in range(case.engine_tp))
        return
    for part, box in enumerate(cut(kind.shape, kind.axis, case.engine_tp)):
        yield box, tuple(head + part for head in heads)


def whole(shape: Shape) -> Box:
    return tuple((0, size) for size in shape)


def cut(shape: Shape, axis: int, parts: int) -> Iterator[Box]:
    for part in range(parts):
        ends = shape[axis] * part // parts, shape[axis] * (part + 1) // parts
        yield tuple(ends if place == axis else (0, size) for place, size in enumerate(shape))


def least_possible(case: Case, transfers: list[Transfer]) -> int:
    """Bytes: no plan has a fullest link below it."""
    size, received, of_stage = case.ranks // case.pp, defaultdict(int), defaultdict(int)
    for one in transfers:
        received[one.target] += one.num_bytes
        of_stage[one.source // size] += one.num_bytes
    return max(max(received.values()), max(of_stage.values()) // size)


def figures(case: Case) -> dict[str, float]:
    groups = alike(case)
    begin_s = time.process_time()
    transfers = plan_transfers(groups)
    seconds = time.process_time() - begin_s
    sent, received = largest_loads(transfers)
    least = least_possible(case, transfers)
    return {
        "tensors": sum(len(group.names) for group in groups),
        "groups": len(groups),
        "lines": len(transfers),
        "plan_cpu_s": seconds,
        "most_sent_gb": sent / 1e9,
        "most_received_gb": received / 1e9,
        "least_possible_gb": least / 1e9,
        "fullest_over_least": max(sent, received) / least,
    }


def main() -> int:
    end_by_signals()
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=RESULTS / "shard_plans.json")
    args = parser.parse_args()
    report = Report(args.out, dict.fromkeys(CASES, 1), cases={})
    for name, case in CASES.items():
        report["cases"][name] = figures(case())
        report.count(name, 1)
        print(name, {key: round(value, 3) for key, value in report["cases"][name].items()}, flush=True)
    report.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
