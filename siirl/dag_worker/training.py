"""A run on one rank: steps, validation, checkpoints, reports, export."""

import gc
import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from siirl.checkpoint.export import save_hf
from siirl.checkpoint.files import step_of
from siirl.checkpoint.manager import CheckpointManager
from siirl.checkpoint.state_tree import rng_state, set_rng_state
from siirl.compiler.agent_steps import in_step, takes_part, window_of
from siirl.compiler.choices import Kept
from siirl.compiler.interactions.credit_reads import policy_trains
from siirl.compiler.plan import Plan
from siirl.compiler.resume_settings import settings_of
from siirl.config import Config, to_dict
from siirl.config.batch import batch_of
from siirl.config.roles import EXPORTS, role_model, trained_group
from siirl.dag_worker.boundary import Boundary, RunPlaces, spare_settled_objects
from siirl.dag_worker.observing import finish_trace, make_observer
from siirl.dag_worker.row_ledger import RowLedger
from siirl.dag_worker.saved_models import is_saved, saved_models
from siirl.dag_worker.step import run_step
from siirl.dag_worker.step_report import Report, closing_report
from siirl.dag_worker.worker import DAGWorker
from siirl.data.ledger import attempts_in
from siirl.data.ledger_events import FOLDER
from siirl.errors import CheckpointError, NumericsError
from siirl.model_files.run_inputs import ChangeWatch, RunInputs, began_with
from siirl.nodes.trained_tokens import TrainedTokens
from siirl.observe.curve import METRICS_FILE, duration
from siirl.observe.loggers import make_sinks
from siirl.observe.metrics import Metrics
from siirl.observe.position import record_begin, record_end
from siirl.observe.sinks import RunInfo, last_step
from siirl.observe.spans import observing, waiting
from siirl.observe.step_files import bytes_of

log = logging.getLogger(__name__)
SAMPLES_PER_REPORT = 32
STEPS_BETWEEN_SAMPLES = 10
UNSETTLED_STEPS = 2
"""The first steps of a run, in which engines start, layers are compiled and links are opened."""


@dataclass(frozen=True)
class MemoryCheckpoints:
    """Checkpoints in host memory, which the workers of the next attempt go on from."""

    manager: CheckpointManager
    groups: Mapping[tuple[int, ...], dist.ProcessGroup]
    """For its saves, which are in the background."""


class Training:
    """Drives a worker through the run. Every rank has one and calls the same methods in the same order."""

    def __init__(
        self,
        worker: DAGWorker,
        output_dir: Path,
        memory_dir: str = "",
        local_world_size: int = 0,
        amendments: list[str] | None = None,
    ):
        """memory_dir: where checkpoints stay in host memory; "" for none. local_world_size: ranks that share
        it; 0: all do. amendments: those that the run has had; None: it takes none."""
        self.worker, self.cfg, self.output_dir = worker, worker.cfg, output_dir
        self.amendments = amendments or []
        self.boundary: Boundary | None = None
        if amendments is not None and self._trains_models():
            self.boundary = Boundary(output_dir, worker.rank, worker.groups.world)
        self.steps = worker.plan.of_rank(worker.rank)
        self.validation = worker.plan.of_rank(worker.rank, "validation")
        self._node_cfgs = {name: worker.node_cfg(name) for name in worker.plan.nodes}
        self.windows = {
            node.agent: window_of(self._node_cfgs[name]) for name, node in worker.plan.nodes.items()
        }
        self.total_steps = worker.last_step = self._count_steps()
        self.num_val_batches = self._max_over_ranks(
            max((x.val.steps_per_epoch for x in worker.loaders.values() if x.val), default=0)
        )
        for name, engine in worker.train_engines.items():
            model = worker.plan.models[name]
            if model.trains:
                steps = range(1, self.total_steps + 1)
                each = (
                    batch_of(worker.node_cfg(node), model.role).optimizer_steps
                    * sum(self._trains(node, step) for step in steps)
                    for node in self._trainers(name)
                )
                engine.set_total_steps(sum(each))
        trainer = self.cfg.trainer
        root = Path(trainer.default_local_dir).expanduser()
        self.background_groups = self._make_background_groups() if self._saves_in_background() else {}
        world = tuple(range(worker.plan.world_size))
        self.checkpoints = CheckpointManager(
            root, trainer.max_actor_ckpt_to_keep, worker.groups.world, self.background_groups.get(world)
        )
        self.memory: MemoryCheckpoints | None = None
        if memory_dir:
            groups = self._make_background_groups()
            both = (worker.groups.world, groups.get(world))
            manager = CheckpointManager(Path(memory_dir), 1, *both, local_world_size)
            self.memory = MemoryCheckpoints(manager, groups)
        self.step = 0
        self.last_checkpoint: Path | None = None
        self.reported = Metrics()
        """On rank 0: of the last step that was saved, those of all ranks but what the save took."""

    def _trains_models(self) -> bool:
        return not (self.cfg.trainer.val_only or self.cfg.trainer.rollout_only)

    def run(self) -> bool:
        """Resume if there is something to resume from, train to the end, export.

        False: what is asked for between two steps ends it before, with a checkpoint to go on from.
        """
        trainer, start_s = self.cfg.trainer, time.perf_counter()
        trains = self._trains_models()
        if trains and trainer.save_freq > 0:
            self.checkpoints.require_shared()
        if not trainer.rollout_only:
            self.resume()
        if self.cfg.service.enable:  # clients go on, and so do their steps
            self.step = self._max_over_ranks(last_step(self.output_dir / METRICS_FILE))
        first_step = self.step
        if trainer.ledger != "disable" and not trainer.val_only:
            self.worker.ledger = self._open_ledger()
        versions = {name: engine.version for name, engine in self.worker.train_engines.items()}
        report = Report(self.worker, self._make_sinks() if self.worker.rank == 0 else None)
        if trains:
            report.again(self.step, self.reported)
        changes = ChangeWatch(began_with() if self.worker.rank == 0 else RunInputs())
        if trainer.val_only or (trainer.val_before_train and self.step == 0):
            validated = self.validate()
            report.samples(self.step, "validation", self.samples)
            report.log(self.step, validated, Metrics())
        while self.step < self.total_steps and not trainer.val_only:
            self.step += 1
            if self.step == first_step + UNSETTLED_STEPS + 1:
                spare_settled_objects()
            train_metrics = self.train_step()
            shown = report.samples(self.step, "train", self.samples) if self.worker.sample_limit else []
            report.trained_tokens(self.step, shown)
            metrics = Metrics()
            if self._due(trainer.test_freq):
                metrics = self.validate()
                report.samples(self.step, "validation", self.samples)
            asked = self.boundary is not None and self.step < self.total_steps and self.boundary.is_asked()
            metrics.merge(train_metrics)
            saved = Metrics()
            if trains:
                if self._saves(asked):
                    metrics = self.reported = report.joined(self.step, metrics)
                saved = self.save_if_due(asked)
            for line in changes.look():
                log.warning(line)
            report.log(self.step, metrics, saved)
            if asked:
                report.close()
                if self.worker.ledger is not None:
                    self.worker.ledger.close()
                return False
        if trains:
            self._require_progress(first_step, versions)
        exported = self.export() if trains and trainer.export_hf else []
        report.close()
        if self.worker.ledger is not None:
            self.worker.ledger.close(self.step)
        trace = finish_trace(self.cfg, self.worker.rank, self.output_dir)
        if self.worker.rank == 0:
            total_s = time.perf_counter() - start_s
            dag_id, saved = self.worker.plan.dag_id, self.last_checkpoint
            print(closing_report(self.cfg, dag_id, self.output_dir, saved, exported, trace, total_s))
        return True

    def train_step(self) -> Metrics:
        """One step of the plan; metrics of this rank, times included."""
        self.worker.sample_limit = self._train_samples()
        tells = self._samples_due() and not self.cfg.trainer.rollout_only
        tells = tells and self.step >= self.worker.trained_from
        self.worker.trained = TrainedTokens() if tells else None
        self.worker.observer.begin_step(self.step)
        steps = in_step(self.steps, self.worker.plan, self.windows, self.step)
        record = run_step(steps, self.worker, self.step)
        metrics, self.samples = record.metrics, record.samples
        self.worker.drain_scorers(metrics)
        for pool in self.worker.pools.values():
            metrics.merge(pool.metrics(), f"agent_{pool.plan.agent}/")
        if self.worker.ledger is not None:
            with self.worker.observer.span("ledger", self.step):
                self.worker.ledger.end_step(self.step, self.worker.nodes)
        metrics.merge(self.worker.observer.metrics())
        self.worker.observer.end_step()
        return metrics

    def validate(self) -> Metrics:
        """All validation prompts once, with the weights of now; metrics of this rank."""
        trainer, start_s = self.cfg.trainer, time.perf_counter()
        self.worker.sample_limit = -1 if trainer.validation_data_dir else trainer.log_val_generations
        self.worker.restart_validation()
        metrics, self.samples = Metrics(), []
        with self.worker.observer.span("validation", self.step):
            for _ in range(self.num_val_batches):
                record = run_step(self.validation, self.worker, self.step, validate=True)
                metrics.merge(record.metrics)
                self.samples += record.samples
        kept = Metrics({name: entry for name, entry in metrics.entries.items() if "val/" in name})
        kept.max("time/validation_s", time.perf_counter() - start_s)
        return kept

    def save_if_due(self, asked: bool = False) -> Metrics:
        """Save this step if it is due or asked for, and look after a save in the background; metrics of this
        rank.

        time/checkpoint_stage_s: how long training stood still for one in the background; time/checkpoint_s:
        until a checkpoint became current, reported by the step that finds it so. The last step waits for it,
        and one for which it is asked.
        """
        metrics, start_s = Metrics(), time.perf_counter()
        background = bool(self.background_groups)
        due, ends = asked or self._due(self.cfg.trainer.save_freq), asked or self.step == self.total_steps
        with self.worker.observer.part("checkpoint", self.step):
            finished = [self.checkpoints.wait() if due else self.checkpoints.take_finished()]
            if due:
                self.save(background)
                if background:
                    metrics.max("time/checkpoint_stage_s", time.perf_counter() - start_s)
            if ends or not background:
                finished.append(self.checkpoints.wait())
            if ends or (not due and self._due(self.cfg.trainer.memory_checkpoint_freq)):
                metrics.merge(self.save_in_memory(ends))
        for saved in filter(None, finished):
            self.last_checkpoint = saved.path
            metrics.max("time/checkpoint_s", saved.total_s)
        return metrics

    def save(self, background: bool = False) -> None:
        """A checkpoint of this step: models, loader positions, node states, RNG."""
        with self.worker.all_on_device(), self.worker.observer.span("checkpoint", self.step):
            if self.worker.ledger is not None:
                self.worker.ledger.sync()
            models, rng = saved_models(self.worker, self.background_groups), rng_state(self.worker.device)
            self.checkpoints.save(self.step, models, self._extra(), rng, background)

    def save_in_memory(self, ends: bool = False) -> Metrics:
        """Begin a checkpoint of this step in host memory, in the background; metrics of this rank.

        If there is no room for it, the run goes on without. ends: the run does; only wait for the last one.
        """
        metrics, start_s = Metrics(), time.perf_counter()
        if self.memory is None:
            return metrics
        try:
            self.memory.manager.wait()
            if not ends:
                with self.worker.all_on_device():
                    models, rng = (
                        saved_models(self.worker, self.memory.groups, whole=True),
                        rng_state(self.worker.device),
                    )
                    self.memory.manager.save(self.step, models, self._extra(), rng, background=True)
                metrics.max("time/memory_checkpoint_s", time.perf_counter() - start_s)
        except CheckpointError as error:
            self.memory = None
            if self.worker.rank == 0:
                log.warning("no more checkpoints in memory in this attempt: %s", error)
        return metrics

    def resume(self) -> None:
        """Go on from the checkpoint that trainer.resume_mode finds, if any."""
        trainer = self.cfg.trainer
        found = self.checkpoints.find_resume(trainer.resume_mode, trainer.resume_from_path or None)
        self.last_checkpoint = found
        manager, models = self.checkpoints, saved_models(self.worker, self.background_groups)
        if self.memory is not None:
            newest = self.memory.manager.find_resume("auto", None)
            if newest is not None and (found is None or step_of(found) < step_of(newest)):
                found, manager = newest, self.memory.manager
                models = saved_models(self.worker, self.memory.groups, whole=True)
        if found is None:
            return
        with self.worker.all_on_device():
            restored = manager.load(found, models)
        self.step = restored.step
        if trainer.resume_mode == "auto" or manager is not self.checkpoints:  # it is of this run
            self.reported = Metrics(
                {name: tuple(x) for name, x in restored.extra.get("reported", {}).items()}
            )
        for name, state in restored.extra["loaders"].items():
            if name in self.worker.loaders and self.worker.loaders[name].train:
                self.worker.loaders[name].train.load_state_dict(state)
        for name, state in restored.extra["nodes"].items():
            if name in self.worker.nodes:
                self.worker.nodes[name].state.update(state)
        self.worker.load_buffers(restored.extra.get("buffers", {}))
        if restored.rank_state is not None:
            set_rng_state(restored.rank_state, self.worker.device)
        if self.worker.rank == 0:
            log.info("resumed from %s (step %d of %d)", found, self.step, self.total_steps)
            if self.step >= self.total_steps and not trainer.val_only:
                log.warning(
                    "nothing is left to train: the run ends after step %d. To go on, raise "
                    "trainer.total_training_steps; for another run, name another trainer.output_dir; to "
                    "restart, set trainer.resume_mode=disable trainer.overwrite=true",
                    self.total_steps,
                )

    def export(self) -> list[Path]:
        """Write each trained model as a Hugging Face directory, and return the directories.

        Policies to hf_model/, or hf_model/<model> of several; critics to hf_critic/, reward models to
        hf_reward/ likewise.
        """
        models, paths = self.worker.plan.models, []
        with self.worker.observer.span("export", self.step):
            for role, folder in EXPORTS.items():
                trained = [name for name, model in models.items() if model.trains and model.role == role]
                for name in trained:
                    out = self.output_dir / folder
                    paths.append(out if len(trained) == 1 else out / name)
                    if name in self.worker.train_engines:
                        self._export(name, paths[-1])
            with waiting():
                dist.barrier(group=self.worker.groups.world)
        return paths

    def _export(self, name: str, out: Path) -> None:
        engine, model = self.worker.train_engines[name], self.worker.plan.models[name]
        path = role_model(self.worker.node_cfg(model.node), model.role).path
        first = model.ranks.index(self.worker.rank)
        with self.worker.all_on_device():
            save_hf(engine.export_weights(), path, out, first, engine.hf_config_changes())

    def _extra(self) -> dict[str, Any]:
        """State that is the same wherever it exists; gathered, as not every rank has every loader or node."""
        worker = self.worker
        mine = {
            "loaders": {name: x.train.state_dict() for name, x in worker.loaders.items() if x.train},
            "nodes": {name: node.state for name, node in worker.nodes.items() if node.state},
            "reported": self.reported.entries,
        }
        parts: list[Any] = [None] * dist.get_world_size()
        with waiting():
            dist.all_gather_object(parts, mine, group=worker.groups.world)
        extra = {kind: {name: x for part in parts for name, x in part[kind].items()} for kind in mine}
        settings = settings_of(self.cfg, worker.plan) | began_with().digests
        at_start = {"chosen": Kept.of(worker.plan).to_dict(), "template_date": self.cfg.data.template_date}
        return extra | {"buffers": worker.buffer_states(), "settings": settings, **at_start}

    def _require_progress(self, first_step: int, versions: dict[str, int]) -> None:
        """NumericsError on all ranks if a model that was due to train has taken no step in this run."""
        models = self.worker.plan.models
        steps = range(first_step + 1, self.step + 1)
        due = sorted(
            name
            for name, model in models.items()
            if model.trains and any(self._trains(node, x) for x in steps for node in self._trainers(name))
        )
        engines = self.worker.train_engines
        taken = [engines[name].version - versions[name] if name in engines else 0 for name in due]
        if not due:
            return
        most = torch.tensor(taken, dtype=torch.int64)
        with waiting():
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.worker.groups.world)
        still = [name for name, num_steps in zip(due, most.tolist(), strict=True) if not num_steps]
        if still:
            raise NumericsError(
                f"{', '.join(still)}: every optimizer step of the {len(steps)} training steps was skipped, "
                "so nothing was learnt: no batch had a trained token, or no gradient was finite. Look at "
                "skipped_step, grad_norm, the rewards and response lengths of the steps, and at filters that "
                "leave no rows."
            )

    def _open_ledger(self) -> RowLedger:
        """The ledger of this attempt, whose number is the next one that no rank has written. Collective."""
        attempt = self._max_over_ranks(attempts_in(self.output_dir / FOLDER)) + 1
        began = {"attempt": attempt, "first_step": self.step + 1, "resumed": self.step > 0}
        began |= {"amendments": self.amendments} if self.amendments else {}
        worker, loaders = self.worker, {name: x.train for name, x in self.worker.loaders.items()}
        return RowLedger(self.cfg, worker.plan, worker.rank, began, loaders, self.output_dir)

    def _saves_in_background(self) -> bool:
        """Whether a trained model asks for it."""
        trained = [model for model in self.worker.plan.models.values() if model.trains]
        groups = (trained_group(self.worker.node_cfg(model.node), model.role) for model in trained)
        return any(group.checkpoint.async_save for group in groups)

    def _make_background_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """Groups for the thread of one CheckpointManager; every rank makes them."""
        plan = self.worker.plan
        ranks = {tuple(model.ranks) for model in plan.models.values() if is_saved(plan, model)}
        return self.worker.groups.twins(sorted({tuple(range(plan.world_size)), *ranks}))

    def _trainers(self, model: str) -> list[str]:
        """The nodes that train a model."""
        plan = self.worker.plan
        return [name for name in plan.models[model].nodes if plan.nodes[name].spec.trains]

    def _trains(self, name: str, step: int) -> bool:
        """Whether a node takes optimizer steps in a step: agents may take turns, or be left out."""
        node, cfg = self.worker.plan.nodes[name], self._node_cfgs[name]
        if not takes_part(self.windows[node.agent], step):
            return False
        return not node.spec.trains_policy or policy_trains(cfg, step, node.options)

    def _count_steps(self) -> int:
        trainer = self.cfg.trainer
        if trainer.total_training_steps is not None:
            return trainer.total_training_steps
        loaders = [x.train for x in self.worker.loaders.values() if x.train]
        steps_per_epoch = max((x.steps_per_epoch for x in loaders), default=0)
        return trainer.total_epochs * self._max_over_ranks(steps_per_epoch)

    def _max_over_ranks(self, number: int) -> int:
        value = torch.tensor([number], dtype=torch.int64)
        with waiting():
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.worker.groups.world)
        return int(value)

    def _saves(self, asked: bool) -> bool:
        """Whether this step is saved, on disk or in memory."""
        in_memory = self.memory is not None and self._due(self.cfg.trainer.memory_checkpoint_freq)
        return asked or in_memory or self._due(self.cfg.trainer.save_freq)

    def _due(self, every: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == self.total_steps)

    def _train_samples(self) -> int:
        some = SAMPLES_PER_REPORT if self._samples_due() else 0
        return -1 if self.cfg.trainer.rollout_data_dir else some

    def _samples_due(self) -> bool:
        return self.step % STEPS_BETWEEN_SAMPLES == 1

    def _make_sinks(self):
        trainer = self.cfg.trainer
        folders = {"train": trainer.rollout_data_dir, "validation": trainer.validation_data_dir}
        info = RunInfo(
            output_dir=self.output_dir,
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            total_steps=self.total_steps,
            first_step=self.step,
            config=to_dict(self.cfg),
            sample_dirs={kind: Path(folder) for kind, folder in folders.items() if folder},
            progress=trainer.progress,
            prometheus_address=trainer.prometheus_address,
            prometheus_token_env=trainer.prometheus_token_env,
            samples_bytes=bytes_of(trainer.samples_gib),
            tensorboard_bytes=bytes_of(trainer.tensorboard_gib),
        )
        return make_sinks(trainer.logger, info)


def run_worker(
    cfg: Config, plan: Plan, rank: int, world_size: int, device: torch.device, places: RunPlaces
) -> None:
    """The whole run of one rank, in a process whose torch.distributed is ready: what a launcher calls."""
    assert world_size == plan.world_size, f"{world_size} workers for a plan of {plan.world_size} ranks"
    observer = make_observer(cfg, plan, rank, device, places.output_path, places.position_path(rank))
    with observing(observer), closing(observer):
        start_s = time.perf_counter()
        with observer.span("start", 0):
            worker = DAGWorker(cfg, plan, rank, device, observer)
        log.info("all models of this rank are built after %s", duration(time.perf_counter() - start_s))
        try:
            amendments = places.amendments if places.amendable else None
            share = (places.memory_dir, places.local_world_size)
            training = Training(worker, places.output_path, *share, amendments)
            if rank == 0:
                total_steps = None if cfg.trainer.val_only else training.total_steps
                record_begin(places.output_path, places.run_id, total_steps)
            if training.run() and rank == 0:
                record_end(places.output_path, places.run_id, "ended")
        finally:
            gc.unfreeze()
            worker.close()
