"""DAGWorker: one process on one device. It owns the model workers of its rank and runs nodes on them."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from siirl.algorithms.row_cost import row_cost
from siirl.compiler.ledger_fields import LEDGER_ID
from siirl.compiler.plan import LinkPlan, NodePlan, Plan
from siirl.compiler.plan_instructions import Collect, Instruction, Load, Reshard, Run, Serve, SyncWeights
from siirl.config import Config, with_overrides
from siirl.config.roles import ROLES, role_model
from siirl.dag_worker.cached_memory import cached_after, give_back
from siirl.dag_worker.row_ledger import RowLedger, fit_ledger
from siirl.data.buffer import require_none
from siirl.data.chat import load_tokenizer
from siirl.data.loader import PromptLoader, make_loader
from siirl.data.rows import take_rows
from siirl.data.store import FieldStore
from siirl.data.transport import Transport
from siirl.engines.engine_registry import make_rollout_engine, make_train_engine
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.train.base import TrainEngine
from siirl.engines.weights.link import WeightLink, make_link
from siirl.engines.weights.opponent_pool import OpponentPool
from siirl.engines.weights.target import FollowedWeights
from siirl.model_files.local_models import on_hub
from siirl.nodes.context import DataGroup, LocalNode, Op, OpContext, Samples, StepInfo
from siirl.nodes.interaction import Interaction, build_interaction
from siirl.nodes.services import SERVICES, OnRank, built_in, find_op
from siirl.nodes.streams import Streams
from siirl.nodes.taken_rows import TakenRows
from siirl.nodes.trained_tokens import TrainedTokens
from siirl.observe.columns import ENGINE_RESTARTS, moved_metric, rows_metric
from siirl.observe.metrics import Metrics
from siirl.observe.spans import Observer, note, waiting
from siirl.parallel.process_groups import ProcessGroupManager
from siirl.rewards.scorer import RewardScorer

log = logging.getLogger(__name__)


@dataclass
class StepRecord:
    """What one pass over the instructions leaves behind on this rank: numbers, and rows shown as text."""

    step: int
    validate: bool
    round: int = 0
    wanted: int | None = None
    """In a round, the groups that the node which repeats still lacks."""
    metrics: Metrics = field(default_factory=Metrics)
    samples: list[dict[str, Any]] = field(default_factory=list)
    later: list[Callable[[], None]] = field(default_factory=list)
    """As Samples.later."""


@dataclass
class LocalLoader:
    """The prompts of one agent on this rank; `val` gives one pass over the validation prompts."""

    train: PromptLoader | None
    val: PromptLoader | None
    num_val_batches_given: int = 0


class DAGWorker:
    """Builds what the plan puts on this rank. Every rank constructs one: it communicates."""

    def __init__(self, cfg: Config, plan: Plan, rank: int, device: torch.device, observer: Observer):
        self.cfg, self.plan, self.rank, self.device, self.observer = cfg, plan, rank, device, observer
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self.groups = ProcessGroupManager(plan.groups, backend, cfg.trainer.deadline_s)
        self.transport = Transport(self.groups, torch.device("cpu"), row_cost)
        self._node_cfgs = {name: with_overrides(cfg, node.overrides) for name, node in plan.nodes.items()}
        self.last_step = 0  # of the run
        sections = (plan.instructions, plan.validation)
        self._numbers = {id(ins): index for section in sections for index, ins in enumerate(section)}
        self.sample_limit = 0  # rows of each reward node to keep as text this step; -1: all
        self.trained: TrainedTokens | None = None  # what ops say of this step's tokens, if it is written
        self.ledger: RowLedger | None = None  # what becomes of rows is written there
        self.trained_from = 0  # the first step in which that may be; the same on all ranks
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        self.train_engines: dict[str, TrainEngine] = {}
        self.rollout_engines: dict[str, RolloutEngine] = {}
        self._in_turn = True  # others take memory of the device in turn: engines that start, now
        for name, model in plan.models.items():
            if rank in model.ranks:
                make = self.make_rollout if model.generates else make_train_engine
                engines = self.rollout_engines if model.generates else self.train_engines
                node_cfg = self.node_cfg(model.node)
                cfg_of_model = ROLES[model.role].engine_cfg(node_cfg)
                base = engines[model.base] if model.base not in (None, name) else None
                path = role_model(node_cfg, model.role).path
                folder = path if on_hub(path) else os.path.abspath(Path(path).expanduser())
                log.info("building %s (%s): %s", name, model.backend, folder)
                engines[name] = make(model, cfg_of_model, self.groups, device, base)
                self._offload(name)
        self.pools = {
            name: OpponentPool(link.pool, self.train_engines[link.source], cfg.trainer.seed)
            for name, link in plan.links.items()
            if link.pool is not None and rank in link.ranks
        }
        self._in_turn = any(self._wakes(name) for name in self.rollout_engines)
        self._told = {False: _told(plan, plan.instructions), True: _told(plan, plan.validation)}
        sections = (plan.of_rank(rank), plan.of_rank(rank, "validation"))
        self._cached_after = set().union(
            *(cached_after(section, plan.nodes, self.train_engines) for section in sections)
        )
        self.streams = {
            entry: self._build_streams(entry, self.rollout_engines) for entry in plan.interactions
        }
        self.interactions = {
            entry: self._build_interaction(entry) for entry in plan.interactions if self._runs(entry)
        }
        self.ops: dict[str, Op] = {}
        self.nodes = {name: self._build_node(node) for name, node in plan.nodes.items() if self._runs(name)}
        self.links: dict[str, WeightLink] = {
            name: make_link(
                link,
                self.pools.get(name) or self.train_engines.get(link.source),
                self._target(link),
                self.groups,
                Path(cfg.trainer.output_dir).expanduser() / "weights" / name,
            )
            for name, link in plan.links.items()
            if rank in link.ranks
        }
        self.loaders = {
            name: self._build_loader(loader.node, loader.layout)
            for name, loader in plan.loaders.items()
            if rank in plan.layouts[loader.layout].ranks
        }

    def make_rollout(self, *build: Any) -> RolloutEngine:
        """A rollout engine of this rank, by the arguments of make_rollout_engine. A test has its own."""
        return make_rollout_engine(*build)

    @property
    def num_agents(self) -> int:
        return len({node.agent for node in self.plan.nodes.values()})

    def number_of(self, ins: Instruction) -> int:
        """The place of an instruction in the one order of all ranks."""
        return self._numbers[id(ins)]

    def new_store(self) -> FieldStore:
        return FieldStore(self.cfg.trainer.deadline_s)

    def restart_validation(self) -> None:
        """Give the validation prompts from the first one on again."""
        for loader in self.loaders.values():
            if loader.val is not None:
                loader.val.load_state_dict(loader.val.state_dict() | {"epoch": 0, "position": 0})
            loader.num_val_batches_given = 0

    def load(self, ins: Load, record: StepRecord) -> TensorDict:
        """The next training or validation batch; no rows once the validation prompts are used up.

        For an asynchronous rollout, as many training batches as it needs now.
        """
        loader, plan = self.loaders[ins.loader], self.plan.loaders[ins.loader]
        if not record.validate:
            reader = self.nodes.get(plan.node)
            if reader is None or not reader.plan.max_lag:
                loaded = loader.train.next_batch()
            else:
                in_flight = reader.services["in_flight"]
                missing = in_flight.num_missing(loader.train, record.step, self.last_step, record.wanted)
                loaded = in_flight.load(loader.train, self._most(missing, plan.layout))
            if self.ledger is not None:
                self.ledger.loaded(ins, loaded, record.step, loader.train)
            counts = loader.train.dataset.drain_counts()
            if self.plan.layouts[plan.layout].is_shard_leader(self.rank):
                for name, count in counts.items():
                    add = record.metrics.max if name.endswith("/dropped") else record.metrics.sum
                    add(f"data/{name}", count)
            return loaded
        rows = loader.val.next_batch()
        loader.num_val_batches_given += 1
        return take_rows(rows, []) if loader.num_val_batches_given > loader.val.steps_per_epoch else rows

    def _most(self, number: int, layout: str) -> int:
        """The largest of these numbers. Collective over the ranks of a layout."""
        found = torch.tensor([number])
        with waiting():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.groups.get(self.plan.layouts[layout].ranks))
        return int(found)

    def exchange(self, store: FieldStore, ins: Reshard) -> Metrics:
        """Move rows to another layout; what this rank sent of them."""
        route = self.plan.routes[ins.route]
        layouts = self.plan.layouts
        sent_bytes = self.transport.sent_bytes
        self.transport.exchange(store, ins.keys, route, layouts[route.source], layouts[route.target])
        moved, metrics = self.transport.sent_bytes - sent_bytes, Metrics()
        note(bytes=moved)
        metrics.sum(moved_metric(ins.route), moved)
        return metrics

    def sync_weights(self, ins: SyncWeights, step: int, validate: bool = False) -> Metrics:
        """Push the trainer's weights, or of an opponent the version that plays, into the rollout engine,
        unless it has them already; or into a teacher, in the steps in which it takes some."""
        link, pool = self.plan.links[ins.link], self.pools.get(ins.link)
        if link.every_steps is not None and (step == 1 or (step - 1) % link.every_steps):
            return Metrics()
        if link.target in self.rollout_engines:
            self.rollout_engines[link.target].wake()
        with self._on_device(link.source, optimizer=False), self._on_device(link.target, optimizer=False):
            push = self.links[ins.link].push
            return push() if pool is None else pool.bring(push, step, validate)

    def _target(self, link: LinkPlan) -> RolloutEngine | FollowedWeights | None:
        """What takes the weights of a link on this rank."""
        if link.share is None:
            return self.rollout_engines.get(link.target)
        engine = self.train_engines.get(link.target)
        return None if engine is None else FollowedWeights(engine, link.share)

    def run_node(
        self, ins: Run, rows: TensorDict, record: StepRecord, others: dict[int, TensorDict]
    ) -> TensorDict | Future[TensorDict]:
        """Run a node's op on this rank's rows; with several agents its metrics go under "agent_N/"."""
        node = self.nodes[ins.node]
        context = self._context(ins, record)
        context.others = others
        if self.ledger is not None and node.plan.spec.trains and LEDGER_ID in rows.keys():
            engine = self.train_engines[str(node.plan.model)]
            context.taken = TakenRows(rows, engine, self.ledger.keeps_tokens)
        caches = id(ins) in self._cached_after
        with self._on_device(node.plan.model, optimizer=node.plan.spec.trains, caches=caches):
            result = self.ops[ins.node](context, rows, **node.services)
        if self.ledger is not None and not record.validate:
            self.ledger.ran(ins, context, rows, result)
        note(rows=len(rows), **_token_count(rows if isinstance(result, Future) else result, rows))
        self.observer.sample_memory()  # before the engine sleeps: its memory is not in our own peak
        self._sleep(node.plan.name)
        self._count(ins, context, record)
        if self.plan.layouts[ins.source].is_shard_leader(self.rank):
            record.metrics.sum(rows_metric(ins.node), len(rows))
        return result

    def serve(self, ins: Serve) -> Metrics:
        """Answer turns of an interaction that other ranks play, until they are done."""
        metrics = Metrics()
        self.streams[ins.node].serve()
        self.observer.sample_memory()
        for name in self.plan.interactions[ins.node].policies:
            if name in self.rollout_engines:
                prefix = f"agent_{self.plan.models[name].agent}/"
                metrics.merge(self.rollout_engines[name].drain_metrics(), prefix)
        self._sleep(ins.node)
        return metrics

    def _sleep(self, node: str) -> None:
        """Have the rollout engines that a node has used give their memory back, if they share the device."""
        shared, plan = self.plan.interactions.get(node), self.plan.nodes[node]
        names = [] if plan.spec.is_handed else [plan.model]
        for name in shared.policies if shared else names:
            if name in self.rollout_engines and self._shares_device():
                cfg = self.node_cfg(self.plan.models[name].node)
                if cfg.actor_rollout_ref.rollout.free_cache_engine:
                    self.rollout_engines[name].sleep()

    def _wakes(self, name: str) -> bool:
        """Whether a rollout engine takes memory again while the run goes on: after it slept, or when it is
        started again, for which only the first of its ranks gives back what it keeps.
        """
        model = self.plan.models[name]
        rollout = self.node_cfg(model.node).actor_rollout_ref.rollout
        return rollout.free_cache_engine or model.dims.model_parallel > 1

    def _shares_device(self) -> bool:
        """Whether others need the device between the rollouts of a step; a teacher alone on it needs not."""
        others = len(self.rollout_engines) > 1
        teaches = any(self.plan.models[name].is_teacher for name in self.rollout_engines)
        return bool(self.train_engines) or (others and teaches)

    def collect(self, ins: Collect, rows: TensorDict, record: StepRecord) -> None:
        """Give a node that repeats the rows of one round."""
        node = self.nodes[ins.node]
        context = self._context(ins, record)
        built_in(node.plan.spec.collects)(context, rows, **node.services)
        if self.ledger is not None:
            self.ledger.collected(ins, context, rows)
        self._count(ins, context, record)

    def _count(self, ins: Run | Collect, context: OpContext, record: StepRecord) -> None:
        """Keep a node's metrics; of ranks that hold the same rows, only the first one's."""
        if self.plan.layouts[ins.source].is_shard_leader(self.rank):
            record.metrics.merge(context.metrics, self._prefix(self.nodes[ins.node]))

    def _context(self, ins: Run | Collect, record: StepRecord) -> OpContext:
        layout = self.plan.layouts[ins.source]
        is_shard_leader = layout.is_shard_leader(self.rank)
        told_later = self.nodes[ins.node].plan.agent in self._told[record.validate]
        return OpContext(
            self.nodes[ins.node],
            StepInfo(record.step, record.validate, record.round),
            DataGroup(self.groups.get(layout.ranks), is_shard_leader, layout.split == "group"),
            Metrics(),
            Samples(record.samples if is_shard_leader else [], self.sample_limit, record.later, told_later),
            tuple(key.name for key in ins.writes) if isinstance(ins, Run) else (),
            trained=None if record.validate else self.trained,
        )

    def buffer_states(self) -> dict[str, list[dict[str, Any]]]:
        """The rows that nodes keep between steps: node -> JSON of each shard. Collective over all ranks."""
        mine = {}
        for name, node in self.nodes.items():
            layout = self.plan.layouts[self.plan.run_of(name).source] if node.plan.keeps_rows else None
            if layout is not None and layout.is_shard_leader(self.rank):
                mine[name] = (layout.shard_of(self.rank), node.buffer.state())
        parts: list[Any] = [None] * self.plan.world_size
        with waiting():
            dist.all_gather_object(parts, mine, group=self.groups.world)
        names = dict.fromkeys(name for part in parts for name in part)
        by_shard = {name: dict(part[name] for part in parts if name in part) for name in names}
        return {name: [state for _, state in sorted(found.items())] for name, found in by_shard.items()}

    def load_buffers(self, states: dict[str, list[dict[str, Any]]]) -> None:
        """Give this rank its share of the rows that nodes kept when `buffer_states` was called."""
        for name in self.nodes.keys() & states.keys():
            if not self.nodes[name].plan.keeps_rows:
                require_none(name, states[name])
                continue
            layout = self.plan.layouts[self.plan.run_of(name).source]
            shard = layout.shard_of(self.rank)
            buffer = self.nodes[name].buffer
            buffer.load_state(states[name], shard, layout.num_shards)
            if buffer.rows is not None:
                reads = [
                    ins
                    for ins in self.plan.instructions
                    if isinstance(ins, Run | Collect) and ins.node == name
                ]
                numbered = any(key.name == LEDGER_ID for ins in reads for key in ins.reads)
                buffer.rows = fit_ledger(buffer.rows, numbered, shard)

    @contextmanager
    def all_on_device(self) -> Iterator[None]:
        """Have every training engine whole on its device, for a checkpoint or an export."""
        with ExitStack() as stack:
            for name in self.train_engines:
                stack.enter_context(self._on_device(name))
            yield

    def close(self) -> None:
        """Release engines and reward processes. The process groups stay until the process ends."""
        for engine in self.rollout_engines.values():
            engine.let_go()
        for node in self.nodes.values():
            node.buffer.close()
            if "service" in node.services:
                node.services["service"].close()
        for played in self.interactions.values():
            played.close()
        for streams in self.streams.values():
            streams.close()
        for engine in self.rollout_engines.values():
            engine.close()
        for _, scorer in self._scorers():
            scorer.close()

    def drain_scorers(self, metrics: Metrics) -> None:
        """Add what the reward scorers counted since the last call."""
        for node, scorer in self._scorers():
            counted = scorer.drain_metrics()
            if self._counts_rows(node.plan.name):
                metrics.merge(counted, self._prefix(node))

    def drain_restarts(self, metrics: Metrics) -> None:
        """Add how often this rank's rollout engines were started again since the last call."""
        for engine in self.rollout_engines.values():
            if (count := engine.drain_restarts()) is not None:
                metrics.sum(ENGINE_RESTARTS, count)

    def _scorers(self) -> Iterator[tuple[LocalNode, RewardScorer]]:
        for node in self.nodes.values():
            yield from ((node, x) for x in node.services.values() if isinstance(x, RewardScorer))

    def _prefix(self, node: LocalNode) -> str:
        return f"agent_{node.plan.agent}/" if self.num_agents > 1 else ""

    def _counts_rows(self, name: str) -> bool:
        """Whether this rank counts its rows of a node; peers of a shard hold the same rows."""
        both = (*self.plan.instructions, *self.plan.validation)
        run = next(ins for ins in both if isinstance(ins, Run) and ins.node == name)
        return self.plan.layouts[run.source].is_shard_leader(self.rank)

    def _runs(self, name: str) -> bool:
        both = (*self.plan.instructions, *self.plan.validation)
        return any(isinstance(ins, Run) and ins.node == name and self.rank in ins.ranks for ins in both)

    def node_cfg(self, name: str) -> Config:
        """The resolved configuration of a node."""
        return self._node_cfgs[name]

    def _tokenizer(self, cfg: Config) -> PreTrainedTokenizerBase:
        data, rollout = cfg.data, cfg.actor_rollout_ref.rollout
        source = data.tokenizer or cfg.actor_rollout_ref.model.path
        key = repr((source, data.chat_template, data.tokenizer_kwargs, rollout.multi_turn.enable))
        if key not in self._tokenizers:
            self._tokenizers[key] = load_tokenizer(cfg)
        return self._tokenizers[key]

    def _build_streams(self, entry: str, engines: dict[str, RolloutEngine]) -> Streams:
        plan, goes_on = self.plan.interactions[entry], self.plan.nodes[entry].runs_in_background
        meets = goes_on and self.rank in plan.connected
        peers = self.groups.get(plan.connected) if meets else None
        return Streams(plan, self.rank, engines, self.groups.world, self.cfg.trainer.deadline_s, peers)

    def _build_interaction(self, entry: str) -> Interaction:
        plan = self.plan.interactions[entry]
        policies = {
            name: self._tokenizer(self.node_cfg(self.plan.models[name].node)) for name in plan.policies
        }
        return build_interaction(
            plan,
            {stage.node: self.node_cfg(stage.node) for stage in plan.speaking},
            {stage.node: policies[stage.model] for stage in plan.speaking},
            self.rollout_engines,
            self.streams[entry],
            self.rank,
            [pool for name, pool in self.pools.items() if self.plan.links[name].target in plan.policies],
        )

    def _build_node(self, plan: NodePlan) -> LocalNode:
        cfg = self.node_cfg(plan.name)
        talks = [talk for talk in self.plan.interactions.values() if plan.agent in talk.homes]
        node = LocalNode(plan, cfg, self._tokenizer(cfg), env_rewards=any(x.gives_rewards for x in talks))
        shared = OnRank({**self.train_engines, **self.rollout_engines}, self.interactions)
        node.services = {name: SERVICES[name](node, shared) for name in plan.needs}
        self.ops[plan.name] = find_op(plan)
        return node

    def _build_loader(self, node: str, layout_id: str) -> LocalLoader:
        cfg, layout = self.node_cfg(node), self.plan.layouts[layout_id]
        tokenizer, shard, trainer = self._tokenizer(cfg), layout.shard_of(self.rank), cfg.trainer
        validates = trainer.val_only or trainer.val_before_train or trainer.test_freq > 0
        validates = validates and not cfg.actor_rollout_ref.rollout.gives_data
        shared = next((one.tools for one in self.interactions.values() if node in one.tools), {})
        told = shared[node].toolbox.schemas if shared else ()
        options = (tokenizer, shard, layout.num_shards, told)
        return LocalLoader(
            None if trainer.val_only else make_loader(cfg, "train", *options),
            make_loader(cfg, "val", *options) if validates else None,
        )

    @contextmanager
    def _on_device(self, name: str | None, optimizer: bool = True, caches: bool = False) -> Iterator[None]:
        """Have a training engine on the device; afterwards move back what its config keeps on the host.

        caches: torch keeps what memory is free then: nobody but training engines computes next.
        """
        engine = self.train_engines.get(name)
        if engine is not None:
            trains = optimizer and self.plan.models[name].trains
            engine.onload(params=True, grads=trains, optimizer=trains)
        yield
        self._offload(name, caches)

    def _offload(self, name: str | None, caches: bool = False) -> None:
        if name in self.train_engines:
            engine = self.train_engines[name]
            idle = not self.plan.models[name].nodes  # it serves a rollout only
            engine.offload(**engine.host_parts | {"params": engine.host_parts["params"] or idle})
            if not caches:
                give_back(self.device, self._in_turn)


def _told(plan: Plan, instructions: Iterable[Instruction]) -> set[int]:
    """The agents whose rewards are told by what adds them up (siirl/compiler/interactions/totals.py)."""
    runs = (ins for ins in instructions if isinstance(ins, Run) and plan.nodes[ins.node].spec.credits)
    return {plan.nodes[run.node].agent for run in runs if "raw_prompt" in {key.name for key in run.reads}}


def _token_count(*tables: TensorDict) -> dict[str, int]:
    """What the trace says of a node's rows: the tokens of the first table that has lengths, if any."""
    for rows in tables:
        lengths = [rows[name] for name in ("prompt_length", "response_length") if name in rows.keys()]
        if lengths:
            return {"tokens": int(sum(length.sum() for length in lengths))}
    return {}
