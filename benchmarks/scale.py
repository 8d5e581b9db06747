"""What a reshard costs one rank as the world grows, 8 to 10,000 ranks, in one process.

    python benchmarks/scale.py [--ranks 8 64 512 4096 10000] [--rows 64] [--samples 8] [--mini-batches 1 2]

The rows of a rollout go to the layout that trains them (prompt_cost). One rank runs siirl's own transport;
what the others would tell it is made beforehand by the same functions, and what it would send is not sent.
Lengths are equal, or log-normal (mean about 1,000 tokens, cut at 8,192). Prompts lie on ranks as the loader
deals them. For each:

    header_kb    what the rank receives from all others before rows move
    told_by      ranks that tell it about their rows
    cpu_ms       processor time of the rank: reading headers, dealing rows, planning its moves
    moved        share of all rows that change their rank
    partners     ranks that send it rows
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from siirl.algorithms.row_cost import row_cost
from siirl.compiler import serving
from siirl.compiler.plan import RoutePlan
from siirl.data import teams
from siirl.data.assign import first_ranks, homes, row_costs
from siirl.data.balance import assign_groups
from siirl.data.header import Header
from siirl.data.loader import assignment_order
from siirl.data.parcels import Parcel
from siirl.data.route_comm import RouteComm
from siirl.data.store import FieldStore
from siirl.data.transfer_plan import Agreed
from siirl.data.transport import Transport
from siirl.types import FieldKey, Layout

RESULTS = Path(__file__).resolve().parent / "results"
PROMPT_TOKENS = 128
COLUMNS = ("row_id", "group_id", "prompt_length", "response_length", "advantage", "old_log_prob")
SOURCE, TARGET, AGENT = "rollout", "train", 0


class World:
    """All ranks of a reshard into an empty layout, dealt as they would deal it."""

    def __init__(self, source: Layout, target: Layout, headers: list[Header]):
        """headers: by rank, of 0, 1, ..."""
        self.source, self.target, self.headers = source, target, headers
        filled = [header.row_id for header in headers if len(header.row_id)]
        most_rows = max(map(len, filled))
        ids = np.concatenate([headers[rank].row_id for rank in first_ranks(source)])
        self.num_words = max(len(header.words) for header in headers)
        span = int(min(map(np.min, filled))), int(max(map(np.max, filled)))
        self.agreed = Agreed(False, False, most_rows, self.num_words, *span, 0)
        self.every = teams.make_teams(source, target, teams.num_teams(most_rows, source, target))
        self.total = len(ids)
        step = target.mini_batch_rows or self.total
        self.firsts = teams.first_ids(ids, step, self.total, span, lambda counts: counts)
        near = homes(source, target)
        self.rows = [
            teams.team_rows(team, dict(enumerate(headers)), near, target.split, self.firsts, row_cost)
            for team in self.every
        ]
        self.sums = np.stack([rows.sums(len(self.firsts) + 1) for rows in self.rows], 1)
        shards = np.array([len(team.target_shards) for team in self.every])
        found = [teams.trades(of_batch, shards) for of_batch in self.sums]
        given = [
            teams.given(rows, team.number, found) for rows, team in zip(self.rows, self.every, strict=True)
        ]
        self.letters = {
            (giver, taker): self.rows[giver].letter(part)
            for giver, parts in enumerate(given)
            for taker, part in parts.items()
        }
        self.dealt = []
        for team, rows in zip(self.every, self.rows, strict=True):
            come = [letter for pair, letter in sorted(self.letters.items()) if pair[1] == team.number]
            gone = given[team.number]
            self.dealt.append(teams.assign_rows(team, rows, gone, come, target, self.firsts, row_cost))
        self.answers = {
            (taker, giver): self.dealt[taker].answer(letter)
            for (giver, taker), letter in self.letters.items()
        }

    def there(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all rows, ascending, and the target shard of each."""
        ids, there = (
            np.concatenate([getattr(one, name) for one in self.dealt]) for name in ("row_id", "there")
        )
        order = np.argsort(ids)
        return ids[order], there[order]


class OneTalk(RouteComm):
    """What a rank hears."""

    def __init__(self, rank: int, route: RoutePlan, world: World):
        self.rank, self.route, self._world = rank, route, world
        self.told_by: set[int] = set()
        self.received_bytes = 0
        self.away_s = 0.0
        """Time that the network would take, spent here on making what it brings."""
        self._mail = iter((world.letters, world.answers))

    @contextmanager
    def _away(self) -> Iterator[None]:
        begin = time.process_time()
        yield
        self.away_s += time.process_time() - begin

    def reduce(self, words: np.ndarray, how: dist.ReduceOp.RedOpType) -> np.ndarray:
        with self._away():
            self.received_bytes += words.nbytes
            if how == dist.ReduceOp.SUM:
                return np.array([self._world.total]) if words.ndim == 1 else self._world.sums
            agreed = self._world.agreed
            words[6:10] = agreed.most_rows, agreed.num_words, agreed.last_id, -agreed.first_id
            return words

    def gather(self, mine: np.ndarray) -> np.ndarray:
        return np.stack([*self.exchange(mine, (), self.route.ranks).values()])

    def exchange(self, words: np.ndarray, to: Sequence[int], senders: Sequence[int]) -> dict[int, np.ndarray]:
        with self._away():
            found = {rank: self._world.headers[rank].padded(self._world.num_words) for rank in senders}
            self.told_by |= found.keys() - {self.rank}
            self.received_bytes += sum(theirs.nbytes for theirs in found.values())
        return found

    def swap(self, outgoing, senders, *_) -> dict[int, torch.Tensor]:
        with self._away():
            found: dict[int, list[np.ndarray]] = {rank: [] for rank in senders}
            for pair, letter in next(self._mail).items():
                ranks, others = self._world.every[pair[0]].ranks, self._world.every[pair[1]].ranks
                if self.rank in others:
                    sender = ranks[others.index(self.rank) % len(ranks)]
                    found[sender].append(np.concatenate([[*pair, len(letter)], letter]))
            blobs = {rank: np.concatenate(parts).view(np.uint8) for rank, parts in found.items()}
            self.told_by |= found.keys()
            self.received_bytes += sum(blob.nbytes for blob in blobs.values())
            return {rank: torch.from_numpy(blob) for rank, blob in blobs.items()}


class OneTransport(Transport):
    """That of a rank which sends nothing, and keeps what stays."""

    def __init__(self, talk: OneTalk):
        self.talk, self._row_cost, self._device = talk, row_cost, torch.device("cpu")

    def _talk(self, route: RoutePlan) -> RouteComm:
        return self.talk

    def _bring(self, columns, specs, row_id, transfer, sides, talk) -> dict[int, Parcel]:
        self.partners = len({*transfer.coming} - {sides.source_shard})
        own = transfer.leaving.get(sides.target_shard, np.empty(0, dtype=np.int64))
        return {sides.source_shard: Parcel(row_id[own], specs, columns, own)}


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
    row_id, group, step = np.arange(total), np.arange(total) // samples, total // parts
    weight = np.stack([response + PROMPT_TOKENS, group, np.full(total, PROMPT_TOKENS)], 1)
    everyone = tuple(range(ranks))
    source = Layout(everyone, everyone, "samples", "group")
    target = Layout(everyone, everyone, "samples", "prompt_cost", step if parts > 1 else 0)
    prompts = assignment_order(total // samples, step // samples)
    owner = np.empty(total, dtype=np.int64)
    owner[(prompts[:, None] * samples + np.arange(samples)).ravel()] = row_id // rows
    held = np.split(np.argsort(owner, kind="stable"), ranks)
    world = World(source, target, [Header(mine, weight[mine], None) for mine in held])
    route = RoutePlan("rollout>train", SOURCE, TARGET, everyone)
    me = ranks // 2
    mine = held[me]
    columns = {
        "row_id": torch.from_numpy(mine),
        "group_id": torch.from_numpy(group[mine]),
        "prompt_length": torch.full((rows,), PROMPT_TOKENS),
        "response_length": torch.from_numpy(response[mine]),
        "advantage": torch.zeros(rows, 8),
        "old_log_prob": torch.zeros(rows, 8),
    }
    keys = [FieldKey(AGENT, name) for name in COLUMNS]
    for _ in range(2):  # what follows from the layouts is computed in the first
        store, talk = FieldStore(60.0), OneTalk(me, route, world)
        store.put(TensorDict(columns, batch_size=[rows]), AGENT, SOURCE, columns)
        rank = OneTransport(talk)
        begin = time.process_time()
        rank.exchange(store, keys, route, source, target)
        cpu_s = time.process_time() - begin - talk.away_s
    ids, shard = world.there()
    assert np.array_equal(ids, row_id), "every row is on one rank"
    return {
        "header_kb": round(talk.received_bytes / 1e3, 1),
        "told_by": len(talk.told_by),
        "cpu_ms": round(cpu_s * 1e3, 1),
        "moved": round(float((shard != owner).mean()), 4),
        "partners": rank.partners,
        "balance": balance(shard, row_id, weight, step, ranks),
        "dealt_anew": balance(None, row_id, weight, step, ranks),
    }


def balance(shard: np.ndarray | None, row_id: np.ndarray, weight: np.ndarray, step: int, ranks: int) -> float:
    """The costliest shard over the mean, in the worst mini-batch. shard None: dealt anew."""
    cost, group, shared = row_costs(row_id, weight, "prompt_cost", row_cost)
    worst = 0.0
    for part in (slice(first, first + step) for first in range(0, len(row_id), step)):
        mine = cost[part], group[part], shared[part]
        where = assign_groups(*mine, ranks) if shard is None else shard[part]
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
