"""What a reshard costs one rank as the world grows, 8 to 10,000 ranks, in one process.

    python benchmarks/scale.py [--ranks 8 64 512 4096 10000] [--rows 64] [--samples 8] [--mini-batches 1 2]

The rows of a rollout go to the layout that trains them (prompt_cost). One rank runs
siirl's own transport; the other ranks are their headers, which are made beforehand, and what it would send is
counted and not sent. Lengths are equal, or log-normal (mean about 1,000 tokens, cut at 8,192). With two
mini-batches half of the rows move in any case: a rank has sampled prompts that follow one another, all of one
mini-batch. For each:

    header_kb    what the rank receives from all others before rows move
    cpu_ms       processor time of the rank: reading headers, dealing rows, planning its moves
    moved        share of all rows that change their rank
    balance      the costliest shard over the mean
    dealt_anew   the same if all rows were dealt anew, wherever they are

and streams: how many a world has of which two thirds drive episodes and one third answers, and how many of
them the busiest engine has. Writes benchmarks/results/scale.json (--out for another file).
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tensordict import TensorDict

from siirl.algorithms.row_cost import row_cost
from siirl.compiler import serving
from siirl.compiler.plan import RoutePlan
from siirl.data import transport
from siirl.data.assign import row_costs
from siirl.data.balance import deal_groups
from siirl.data.header import Header
from siirl.data.store import FieldStore
from siirl.types import FieldKey, Layout

RESULTS = Path(__file__).resolve().parent / "results"
PROMPT_TOKENS = 128
COLUMNS = ("row_id", "group_id", "prompt_length", "response_length", "advantage", "old_log_prob")
SOURCE, TARGET, AGENT = "rollout", "train", 0


class OneRank(transport.Transport):
    """The transport of a rank whose peers are their headers."""

    def __init__(self, rank: int, headers: list[Header]):
        self.sent_bytes, self._rank, self._row_cost = 0, rank, row_cost
        self._headers = headers
        self.received_bytes = 0
        self.away_s = 0.0
        """Time that the network would take, spent here on making what it brings."""

    def _gather(self, words: np.ndarray, room: int, route: RoutePlan) -> np.ndarray:
        begin = time.process_time()
        gathered = np.zeros((len(route.ranks), room), dtype=np.int64)
        for row, header in zip(gathered, self._headers, strict=True):
            theirs = header.encode(int(words[1]))[:room]
            row[: len(theirs)] = theirs
        self.received_bytes += gathered.nbytes
        self.away_s += time.process_time() - begin
        return gathered

    def _move(self, columns, specs, moves, route):
        self.received = moves.receive
        return [torch.zeros(len(moves.order), *column.shape[1:]) for column in columns]


def main() -> int:
    args = arguments()
    report: dict[str, Any] = {"command": " ".join(sys.argv), "host": host()}
    report["rows_per_rank"], report["samples"] = args.rows, args.samples
    report["reshard"] = []
    for lengths, parts, ranks in itertools.product(("equal", "log-normal"), args.mini_batches, args.ranks):
        found = {"lengths": lengths, "mini_batches": parts, "ranks": ranks}
        found |= reshard(ranks, args.rows, args.samples, lengths, parts)
        report["reshard"].append(found)
        print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    report["streams"] = [streams(ranks) for ranks in args.ranks]
    for found in report["streams"]:
        print(", ".join(f"{name} {value}" for name, value in found.items()))
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096, 10000])
    parser.add_argument("--rows", type=int, default=64, help="of a rank")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--mini-batches", type=int, nargs="+", default=[1, 2], help="of a step")
    parser.add_argument("--out", type=Path, default=RESULTS / "scale.json")
    args = parser.parse_args()
    return args


def reshard(ranks: int, rows: int, samples: int, lengths: str, parts: int) -> dict[str, float]:
    """One reshard as the rank in the middle sees it."""
    total, draw = ranks * rows, np.random.default_rng(0)
    drawn = np.full(total, 1000) if lengths == "equal" else draw.lognormal(6.6, 0.8, total)
    response = drawn.clip(1, 8192).astype(np.int64)
    row_id, group = np.arange(total), np.arange(total) // samples
    weight = np.stack([response + PROMPT_TOKENS, group, np.full(total, PROMPT_TOKENS)], 1)
    everyone, step = tuple(range(ranks)), total // parts
    source = Layout(everyone, everyone, "samples", "group")
    target = Layout(everyone, everyone, "samples", "prompt_cost", step)
    me, mine = ranks // 2, slice(ranks // 2 * rows, (ranks // 2 + 1) * rows)
    columns = {
        "row_id": torch.from_numpy(row_id[mine]),
        "group_id": torch.from_numpy(group[mine]),
        "prompt_length": torch.full((rows,), PROMPT_TOKENS),
        "response_length": torch.from_numpy(response[mine]),
        "advantage": torch.zeros(rows, 8192),
        "old_log_prob": torch.zeros(rows, 8192),
    }
    store = FieldStore(60.0)
    store.put(TensorDict(columns, batch_size=[rows]), AGENT, SOURCE, columns)
    keys = [FieldKey(AGENT, name) for name in COLUMNS]
    route = RoutePlan("rollout>train", SOURCE, TARGET, everyone)
    probe = OneRank(me, [])
    own = probe._header(store, keys, [columns[key.name] for key in keys], route, source, target)
    probe._headers = [
        Header(row_id[part], weight[part], None, own.specs)
        for part in (slice(rank * rows, (rank + 1) * rows) for rank in everyone)
    ]
    wanted: list[np.ndarray] = []

    def watched(*given):
        wanted[:] = transport_assign(*given)
        return wanted

    transport_assign = transport.assign
    begin = time.process_time()
    with patch.object(transport, "assign", watched):
        probe.exchange(store, keys, route, source, target)
    cpu_s = time.process_time() - begin - probe.away_s
    shard = np.empty(total, dtype=np.int64)
    for place, part in enumerate(wanted):
        shard[part] = place
    return {
        "header_kb": round(probe.received_bytes / 1e3, 1),
        "cpu_ms": round(cpu_s * 1e3, 1),
        "moved": round(float((shard != row_id // rows).mean()), 4),
        "balance": balance(shard, row_id, weight, step, ranks),
        "dealt_anew": balance(None, row_id, weight, step, ranks),
    }


def balance(shard: np.ndarray | None, row_id: np.ndarray, weight: np.ndarray, step: int, ranks: int) -> float:
    """The costliest shard over the mean, in the worst mini-batch. shard None: dealt anew."""
    cost, group, shared = row_costs(row_id, weight, "prompt_cost", row_cost)
    worst = 0.0
    for part in (slice(first, first + step) for first in range(0, len(row_id), step)):
        mine = cost[part], group[part], shared[part]
        where = deal_groups(*mine, ranks) if shard is None else shard[part]
        loads = np.bincount(where, mine[0] - mine[2], ranks)
        prompts = np.unique(np.stack([where, mine[1]], 1), axis=0, return_index=True)
        loads += np.bincount(prompts[0][:, 0], mine[2][prompts[1]], ranks)
        worst = max(worst, loads.max() / loads.mean())
    return round(float(worst), 4)


def streams(ranks: int) -> dict[str, int]:
    """Of drivers that ask engines on other ranks."""
    drivers = tuple(range(ranks * 2 // 3))
    heads = tuple(range(len(drivers), ranks))
    found = serving._streams("agent_0", drivers, heads)
    asked = np.bincount([head for one in found for head in one.heads])
    return {
        "ranks": ranks,
        "drivers": len(drivers),
        "engines": len(heads),
        "streams": int(asked.sum()),
        "of_an_engine": int(asked.max()),
    }


def host() -> dict[str, Any]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout
    return {"commit": commit.strip(), "cpu": platform.processor(), "cores": len(os.sched_getaffinity(0))}


if __name__ == "__main__":
    raise SystemExit(main())
