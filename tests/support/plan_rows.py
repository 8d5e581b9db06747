"""Runs a plan row by row on every rank, without tensors: which original row does each cell come from?

A column is the origins of its cells, and the numbers by which rows are dealt, if any. An origin tells rows
apart without their ids: (place of the prompt in the dataset, sample, then what was drawn or said). It
does not name the agent, so that rows of two agents that pair up have equal origins.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from zlib import crc32

import numpy as np

from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Collect, Free, Instruction, Load, Repeat, Reshard, Run, Until
from siirl.config import Config
from siirl.config.batch import batch_of
from siirl.data.assign import assign, split_weights, tabulate
from siirl.data.loader import assignment_order
from siirl.types import FieldKey, Layout

Origin = tuple[int, ...]
Rows = dict[FieldKey, "Column"]
MANY = 1 << 20
NUMBERS = ("row_id", "group_id", "prompt_length", "response_length")
GROUPED = ("advantage", "dynamic_sampling", "filter", "pf_ppo")
"""Ops that need all rows of a prompt on one shard."""


@dataclass(frozen=True)
class Column:
    """Origins of the cells, and their numbers where rows are dealt by them."""

    origins: tuple[Origin, ...]
    numbers: tuple[int, ...] = ()

    def take(self, places: Iterable[int]) -> "Column":
        chosen = list(places)
        numbers = tuple(self.numbers[i] for i in chosen) if self.numbers else ()
        return Column(tuple(self.origins[i] for i in chosen), numbers)


def draw(*parts: object) -> int:
    """A number that follows from what it is drawn for, the same on every rank."""
    return crc32(repr(parts).encode())


@dataclass
class Kept:
    """What a node that repeats keeps on one rank: its rows, and the order of the group of each."""

    rows: Rows = field(default_factory=dict)
    orders: tuple[int, ...] = ()
    num_rounds: int = 0


class Interpreter:
    """All ranks of a plan. AssertionError, with the instruction, where rows are wrong or a node starts early.

    Checked at every instruction: all live columns of a layout have the same rows in the same order; ranks of
    a shard have the same rows; shards together have each row once; nobody deals rows into a layout that has
    some; groups are whole where the op needs them; every node waits for all ranks of its parents.
    """

    def __init__(self, plan: Plan, configs: Mapping[str, Config], seed: int = 0) -> None:
        self.plan, self.configs, self.seed = plan, configs, seed
        self.kept: dict[tuple[str, int], Kept] = {}
        self.loaded: dict[tuple[str, str], int] = {}  # (section, loader) -> prompts given out
        self.rounds = 0

    def step(self, section: str = "instructions") -> None:
        """One training step, or one batch of validation."""
        self.section = section
        self.store: dict[int, dict[str, Rows]] = {rank: {} for rank in range(self.plan.world_size)}
        self.done: dict[int, set[tuple[str, int]]] = {rank: set() for rank in range(self.plan.world_size)}
        self.spoken: dict[tuple[str, int, int], tuple[Rows, ...]] = {}
        self._run(getattr(self.plan, section))
        assert not any(rows for layouts in self.store.values() for rows in layouts.values()), "rows are left"

    def _run(self, instructions: tuple[Instruction, ...]) -> None:
        position = 0
        while position < len(instructions):
            ins = instructions[position]
            position += 1
            match ins:
                case Repeat(node, ranks):
                    end = instructions.index(Until(node, ranks), position)
                    self._meet(ranks)
                    for _ in itertools.takewhile(lambda _: self._needs_round(node), itertools.count()):
                        before = {rank: repr(self._live(rank)) for rank in ranks}
                        self._run(instructions[position:end])
                        assert before == {rank: repr(self._live(rank)) for rank in ranks}, "rows left a round"
                        self._meet(ranks)
                    position = end + 1
                case Load():
                    self._load(ins)
                case Reshard():
                    self._reshard(ins)
                case Collect(node, reads, source, ranks):
                    self._check_rows(ins, source)
                    for rank in ranks:
                        self._collect(node, rank, self._view(ins, rank, reads, source))
                case Run():
                    self._run_node(ins)
                case Free(keys, ranks):
                    for rank, (key, layout) in itertools.product(ranks, keys):
                        assert self._rows(rank, layout).pop(key, None) is not None, f"{ins}: no {key}"

    def _rows(self, rank: int, layout: str) -> Rows:
        return self.store[rank].setdefault(layout, {})

    def _live(self, rank: int) -> dict[str, list[FieldKey]]:
        return {layout: sorted(rows) for layout, rows in sorted(self.store[rank].items()) if rows}

    def _put(self, ins: Instruction, rank: int, layout: str, rows: Rows) -> None:
        there = self._rows(rank, layout)
        assert not there.keys() & rows.keys(), f"{ins}: written twice: {there.keys() & rows.keys()}"
        there |= rows
        origins = {key: column.origins for key, column in there.items()}
        first = next(iter(origins.values()), ())
        bad = [str(key) for key, own in origins.items() if own != first]
        assert not bad, f"rank {rank}, after {ins}: {', '.join(bad)} have other rows than {next(iter(there))}"

    def _load(self, ins: Load) -> None:
        plan = self.plan.loaders[ins.loader]
        layout = self.plan.layouts[ins.layout]
        batch = batch_of(self.configs[plan.node])
        size = batch.generated if self.section == "instructions" else 7
        mini = size if batch.in_rounds else batch.mini_prompts
        first = self.loaded.get((self.section, ins.loader), 0)
        self.loaded[self.section, ins.loader] = first + size
        for rank in ins.ranks:
            shard = layout.shard_of(rank)
            first_of, last_of = (size * of // layout.num_shards for of in (shard, shard + 1))
            mine = sorted(assignment_order(size, mini)[first_of:last_of].tolist())
            origins = tuple((first + place,) for place in mine)
            numbers = {
                "row_id": tuple(mine),
                "group_id": tuple(mine),
                "prompt_length": tuple(1 + draw(self.seed, origin) % 9 for origin in origins),
            }
            rows = {key: Column(origins, numbers.get(key.name, ())) for key in ins.keys}
            self._put(ins, rank, ins.layout, rows)

    def _reshard(self, ins: Reshard) -> None:
        route = self.plan.routes[ins.route]
        source, target = self.plan.layouts[route.source], self.plan.layouts[route.target]
        agent = ins.keys[0].agent
        views = {rank: self._view(ins, rank, ins.keys, route.source) for rank in source.ranks}
        ids = {rank: self._numbers(rank, agent, route.source, "row_id") for rank in source.ranks}
        assert all(numbers is not None for numbers in ids.values()), f"{ins}: no row_id in the source"
        weight = {
            rank: split_weights(target.split, ids[rank], partial(self._numbers, rank, agent, route.source))
            for rank in source.ranks
        }
        held = {rank: self._held(ins, rank, agent, route.target) for rank in target.ranks}
        rows = tabulate(ids, weight, source)
        wanted = assign(rows, source, target, held, lambda tokens: tokens**2 + 10 * tokens)
        whole = self._whole(source, views)
        for rank in target.ranks:
            chosen = [(int(rows.shard[i]), int(rows.position[i])) for i in wanted[target.shard_of(rank)]]
            mine = {key: _gathered([(whole[shard][key], at) for shard, at in chosen]) for key in ins.keys}
            self._put(ins, rank, route.target, mine)
        self._meet(ins.ranks)

    def _held(self, ins: Reshard, rank: int, agent: int, layout: str) -> np.ndarray | None:
        """The row ids by which rows that arrive are laid; None for a layout that is empty."""
        there = self._rows(rank, layout)
        keys = sorted((key for key in there if key.name == "row_id"), key=lambda key: key.agent != agent)
        assert keys or not there, f"{ins}: dealt anew, though {layout} has {', '.join(map(str, there))}"
        return np.array(there[keys[0]].numbers, dtype=np.int64) if keys else None

    def _numbers(self, rank: int, agent: int, layout: str, name: str) -> np.ndarray | None:
        column = self._rows(rank, layout).get(FieldKey(agent, name))
        return None if column is None else np.array(column.numbers, dtype=np.int64)

    def _whole(self, layout: Layout, views: dict[int, Rows]) -> dict[int, Rows]:
        """Shard -> its rows, which are the same on all of its ranks."""
        shards: dict[int, Rows] = {}
        for rank, shard in zip(layout.ranks, layout.shards, strict=True):
            assert shards.setdefault(shard, views[rank]) == views[rank], f"shard {shard} of {layout} differs"
        return shards

    def _view(self, ins: Instruction, rank: int, keys: Iterable[FieldKey], layout: str) -> Rows:
        there = self._rows(rank, layout)
        missing = [str(key) for key in keys if key not in there]
        assert not missing, f"{ins}: rank {rank} misses {', '.join(missing)}"
        return {key: there[key] for key in keys}

    def _meet(self, ranks: Iterable[int]) -> None:
        """An exchange: whoever takes part knows what the others had done before."""
        everything = set().union(*(self.done[rank] for rank in ranks))
        for rank in ranks:
            self.done[rank] |= everything

    def _check_rows(self, ins: Run | Collect, layout_id: str) -> None:
        """Shards of a layout have each row once; whole groups if the op compares the rows of a prompt."""
        layout, op = self.plan.layouts[layout_id], self.plan.nodes[ins.node].op
        views = {rank: self._rows(rank, layout_id) for rank in layout.ranks}
        shards = self._whole(layout, views)
        origins = [next(iter(rows.values())).origins if rows else () for _, rows in sorted(shards.items())]
        assert len({row for part in origins for row in part}) == sum(map(len, origins)), f"{ins}: rows twice"
        if op in GROUPED and (op != "advantage" or layout.num_shards > 1):
            groups = [{row[0] for row in part} for part in origins]
            assert len(set().union(*groups)) == sum(map(len, groups)), f"{ins}: a group on two shards"

    def _run_node(self, ins: Run) -> None:
        node = self.plan.nodes[ins.node]
        nodes = {other.node for other in getattr(self.plan, self.section) if isinstance(other, Run)}
        for parent in nodes.intersection(node.dependencies):
            ranks = self._ranks_of(parent)
            for rank in ins.ranks:
                late = [r for r in ranks if (parent, r) not in self.done[rank] and rank not in ranks]
                assert not late, f"{ins.node} starts on rank {rank} before {parent} is done on ranks {late}"
        self._check_rows(ins, ins.source)
        views = {rank: self._view(ins, rank, ins.reads, ins.source) for rank in ins.ranks}
        outputs = self._op(ins, node.op, views)
        for rank, rows in outputs.items():
            for _, joined in itertools.groupby(ins.joins, lambda join: join[1]):
                self._check_joined(ins, rank, [*joined])
            self._put(ins, rank, ins.target, {key: rows[key] for key in ins.writes})
            self.done[rank].add((ins.node, rank))

    def _ranks_of(self, node: str) -> tuple[int, ...]:
        return next(
            ins.ranks for ins in getattr(self.plan, self.section) if isinstance(ins, Run) and ins.node == node
        )

    def _check_joined(self, ins: Run, rank: int, joins: list[tuple[FieldKey, str]]) -> None:
        """What is read of another agent is of the prompts that the rank has rows of, or may have."""
        rows = self._view(ins, rank, [key for key, _ in joins], joins[0][1])
        of_others = {origin[:2] for column in rows.values() for origin in column.origins}
        layout = self.plan.layouts[ins.source]
        elsewhere = {
            origin[:2]
            for other in layout.ranks
            if layout.shard_of(other) != layout.shard_of(rank)
            for column in self._rows(other, ins.source).values()
            for origin in column.origins
        }
        assert not of_others & elsewhere, f"{ins}: an episode on two shards"

    def _op(self, ins: Run, op: str, views: dict[int, Rows]) -> dict[int, Rows]:
        match op:
            case "rollout" | "replay":
                return {rank: self._sampled(ins, rows) for rank, rows in views.items()}
            case "interaction" | "turns":
                return {rank: self._spoken(ins, rank, rows) for rank, rows in views.items()}
            case "dynamic_sampling" if self._is_region(ins.node):
                return self._taken(ins)
            case "filter":
                return {rank: self._filtered(ins, rows) for rank, rows in views.items()}
            case "pf_ppo":
                return self._drawn(ins, views)
        return {rank: self._same(ins, rank, rows) for rank, rows in views.items()}

    def _is_region(self, node: str) -> bool:
        return any(isinstance(ins, Repeat) and ins.node == node for ins in self.plan.instructions)

    def _same(self, ins: Run, rank: int, rows: Rows) -> Rows:
        """An op that writes a cell for each row that it reads."""
        column = next(iter(rows.values()), None) or next(iter(self._rows(rank, ins.source).values()))
        return {key: Column(column.origins) for key in ins.writes}

    def _sampled(self, ins: Run, rows: Rows) -> Rows:
        agent, cfg = self.plan.nodes[ins.node].agent, self.configs[ins.node].actor_rollout_ref.rollout
        n = cfg.n if self.section == "instructions" else cfg.val_kwargs.n
        group_id = rows[FieldKey(agent, "group_id")]
        made = [(place, sample) for place in range(len(group_id.origins)) for sample in range(n)]
        origins = tuple((*group_id.origins[place], sample) for place, sample in made)
        numbers = {
            "row_id": tuple(group_id.numbers[place] * n + sample for place, sample in made),
            "response_length": tuple(1 + draw(self.seed, origin, "r") % 30 for origin in origins),
        }
        out = {}
        for key in ins.writes:
            own = (
                tuple(rows[key].numbers[place] for place, _ in made)
                if key in rows and rows[key].numbers
                else ()
            )
            out[key] = Column(origins, numbers.get(key.name, own))
        return out

    def _spoken(self, ins: Run, rank: int, prompts: Rows) -> Rows:
        """The rows of one agent; the entry plays, and knows how many rows each has in each episode."""
        plan = next(p for p in self.plan.interactions.values() if ins.node in [s.node for s in p.stages])
        agent = self.plan.nodes[ins.node].agent
        entry = self.plan.nodes[plan.entry].agent
        cfg = self.configs[plan.entry].actor_rollout_ref.rollout
        n = cfg.n if self.section == "instructions" else cfg.val_kwargs.n
        if ins.node == plan.entry:
            self.spoken[plan.entry, rank, 0] = (prompts,)
        (prompts,) = self.spoken[plan.entry, rank, 0]
        group_id = prompts[FieldKey(entry, "group_id")]
        origins, groups, ids = [], [], []
        for origin, group in zip(group_id.origins, group_id.numbers, strict=True):
            for sample in range(n):
                for number in range(draw(self.seed, origin, sample, agent) % 3):
                    origins.append((*origin, sample, agent, number))
                    groups.append(group)
                    ids.append((group * n + sample) * 3 + number)
        numbers = {
            "row_id": tuple(ids),
            "group_id": tuple(groups),
            "prompt_length": tuple(1 + draw(self.seed, origin, "p") % 30 for origin in origins),
            "response_length": tuple(1 + draw(self.seed, origin, "r") % 30 for origin in origins),
        }
        return {key: Column(tuple(origins), numbers.get(key.name, ())) for key in ins.writes}

    def _filtered(self, ins: Run, rows: Rows) -> Rows:
        """Drops groups, rows, or all rows of a rank."""
        first = next(iter(rows.values()))
        unit = 1 + draw(self.seed, ins.node) % 2
        keep = [draw(self.seed, ins.node, row[:unit]) % 3 > 0 for row in first.origins]
        return {key: column.take(i for i, kept in enumerate(keep) if kept) for key, column in rows.items()}

    def _drawn(self, ins: Run, views: dict[int, Rows]) -> dict[int, Rows]:
        """Episodes (samples) drawn with replacement; each draw is one of its own."""
        all_units = sorted({o[:2] for rows in views.values() for c in rows.values() for o in c.origins})
        drawn = sorted(
            all_units[draw(self.seed, ins.node, i) % len(all_units)] for i in range(len(all_units))
        )
        out = {}
        for rank, rows in views.items():
            origins = next(iter(rows.values())).origins
            taken = [
                (place, at)
                for place, unit in enumerate(drawn)
                for at, row in enumerate(origins)
                if row[:2] == unit
            ]
            of_rank = {}
            for key, column in rows.items():
                moved = column.take(at for _, at in taken)
                new = tuple((*row, place) for row, (place, _) in zip(moved.origins, taken, strict=True))
                numbers = moved.numbers
                if key.name == "row_id":
                    numbers = tuple(place * MANY + at for place, at in taken)
                of_rank[key] = Column(new, numbers)
            out[rank] = of_rank
        return out

    def _collect(self, node: str, rank: int, rows: Rows) -> None:
        kept = self.kept.setdefault((node, rank), Kept())
        groups = next(column for key, column in rows.items() if key.name == "group_id")
        places = [i for i, row in enumerate(groups.origins) if draw(self.seed, node, row[0]) % 5 > 1]
        kept.orders += tuple(groups.numbers[i] + kept.num_rounds * MANY**2 for i in places)
        kept.num_rounds += 1
        for key, column in rows.items():
            old, new = kept.rows.get(key, Column(())), column.take(places)
            kept.rows[key] = Column(old.origins + new.origins, old.numbers + new.numbers)

    def _orders(self, node: str) -> list[int]:
        ranks = self.plan.layouts[self.plan.run_of(node).source].ranks
        return sorted({order for rank in ranks for order in self.kept.get((node, rank), Kept()).orders})

    def _needs_round(self, node: str) -> bool:
        return len(self._orders(node)) < self.configs[node].data.train_batch_size

    def _taken(self, ins: Run) -> dict[int, Rows]:
        """The first groups of a batch, numbered anew; the others stay."""
        chosen = self._orders(ins.node)[: self.configs[ins.node].data.train_batch_size]
        out = {}
        for rank in ins.ranks:
            kept = self.kept[ins.node, rank]
            places = [i for i, order in enumerate(kept.orders) if order in chosen]
            others = [i for i, order in enumerate(kept.orders) if order not in chosen]
            groups = [chosen.index(kept.orders[i]) for i in places]
            rows = {key: column.take(places) for key, column in kept.rows.items()}
            for key, column in rows.items():
                if key.name == "group_id":
                    rows[key] = Column(column.origins, tuple(groups))
                if key.name == "row_id":
                    ids = [
                        group * MANY + old % MANY for group, old in zip(groups, column.numbers, strict=True)
                    ]
                    rows[key] = Column(column.origins, tuple(ids))
            kept.rows = {key: column.take(others) for key, column in kept.rows.items()}
            kept.orders = tuple(kept.orders[i] for i in others)
            out[rank] = rows
        return out


def _gathered(cells: list[tuple[Column, int]]) -> Column:
    numbers = tuple(column.numbers[at] for column, at in cells if column.numbers)
    return Column(tuple(column.origins[at] for column, at in cells), numbers)
