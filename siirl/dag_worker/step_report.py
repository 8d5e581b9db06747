"""What a run tells its user: metrics of all ranks joined on rank 0, sampled rollouts, the closing summary."""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from siirl.config import Config
from siirl.config.root import all_keys
from siirl.dag_worker.observing import profile_folder
from siirl.dag_worker.worker import DAGWorker
from siirl.errors import NumericsError
from siirl.nodes.trained_tokens import MOST_ROWS, Found, sample_records
from siirl.observe.curve import METRICS_FILE, closing_summary, reward_curve_png
from siirl.observe.loggers import tensorboard_dir
from siirl.observe.metrics import Metrics, derived_metrics, mfu
from siirl.observe.sinks import Sinks, last_step, write_json_lines
from siirl.observe.spans import waiting
from siirl.observe.step_files import StepFiles, bytes_of
from siirl.show.conversation_page import write_page
from siirl.show.conversation_text import CHAT, WANTED, split_episodes

FAN_IN = 8
"""From how many ranks one receives."""


def join_on_first(mine: Any, add: Callable[[Any, Any], Any], group: dist.ProcessGroup) -> Any:
    """What the ranks of a group have, joined by `add`; None on all but its first rank.

    add(mine, theirs) -> both. Up to 9 ranks are added in the order of the ranks; beyond these, each with
    those that it has received before. Values are pickled. Collective over the group.
    """
    place, size = dist.get_rank(group), dist.get_world_size(group)
    for child in range(FAN_IN * place + 1, min(FAN_IN * (place + 1) + 1, size)):
        mine = add(mine, _receive(child, group))
    if not place:
        return mine
    dist.send_object_list([mine], group=group, device=torch.device("cpu"), group_dst=(place - 1) // FAN_IN)
    return None


def _receive(child: int, group: dist.ProcessGroup) -> Any:
    box: list[Any] = [None]
    dist.recv_object_list(box, group=group, device=torch.device("cpu"), group_src=child)
    return box[0]


MOST_SAMPLES = 64
"""That are shown of a step, where not all are kept."""

MOST_SHARE = 0.001
"""Of the run's time, for what tokens were trained with."""

DISTANCE = "actor/rollout_log_prob_diff"
"""The metric that rollout.max_log_prob_diff bounds."""

PAGES = "conversations"
"""Folder of the pages in a run's output."""

TOKENS = "rollouts/tokens"
"""Folder of what sampled rows were trained with."""


class TokenPace:
    """How often trained tokens may be written, at most MOST_SHARE of the run's time."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._each_s: list[float] = []

    def next_step(self, step: int, now_s: float) -> int:
        """The next step after this one, of which they are written, too, in which that is so again.

        What the first time took is part of the start; from the steps since then it is known how long one is.
        """
        if self._first is None:
            self._first = (step, now_s)
            return step + 1
        first, begin_s = self._first
        step_s = (now_s - begin_s) / max(1, step - first)
        budgeted_s = self._each_s[1:]
        spent_s = sum(budgeted_s) + (budgeted_s[-1] if budgeted_s else 0.0)  # this time is like the last
        ahead_s = spent_s / MOST_SHARE - (now_s - begin_s)
        return step + max(1, math.ceil(ahead_s / max(step_s, 1e-6)))

    def count(self, seconds: float) -> None:
        """Say what this time took."""
        self._each_s.append(seconds)


class Report:
    """Joins the metrics of all ranks. All ranks call its methods; rank 0 alone has sinks."""

    def __init__(self, worker: DAGWorker, sinks: Sinks | None):
        self._worker, self._sinks, self._pace = worker, sinks, TokenPace()
        self._files = StepFiles(bytes_of(worker.cfg.trainer.samples_gib))

    def log(self, step: int, *parts: Metrics) -> None:
        """Join the parts of this rank, then those of all ranks, and give the numbers to the sinks."""
        mine = Metrics()
        for part in parts:
            mine.merge(part)
        self._worker.drain_restarts(mine)
        self._worker.observer.drain_idle(mine)
        joined = self.joined(step, mine)
        with self._worker.observer.span("report", step):
            if self._sinks is not None:
                self._check_log_probs(step, self._tell(step, joined))

    def joined(self, step: int, mine: Metrics) -> Metrics:
        """Those of all ranks, on rank 0; elsewhere none, as they are counted there. Collective."""
        with self._worker.observer.span("report", step):
            return self._join(mine, _merged) or Metrics()

    def again(self, step: int, known: Metrics) -> None:
        """Tell a step that was saved, but not told, as its run ended in between. known: its saved numbers."""
        path = Path(self._worker.cfg.trainer.output_dir).expanduser() / METRICS_FILE
        if self._sinks is not None and known.entries and last_step(path) == step - 1:
            self._tell(step, known)

    def _tell(self, step: int, joined: Metrics) -> dict[str, float]:
        """Give the numbers of a step to the sinks; those that do not follow from others."""
        assert self._sinks is not None
        values = joined.values()
        self._sinks.log(step, values | derived_metrics(values) | self._rates(values))
        return values

    def samples(self, step: int, kind: str, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Give sampled rollouts to the sinks, and draw the conversations of a validation.

        Those of all ranks where all are kept, else of the first ranks that have MOST_SAMPLES. Returns their
        rows to rank 0.
        """
        worker, parts = self._worker, {self._worker.rank: samples} if samples else {}
        limit = worker.sample_limit
        most = math.inf if limit < 0 else max(MOST_SAMPLES, limit)
        parts = self._join(parts, partial(_first_parts, most=most)) or {}
        sampled = [row for part in parts.values() for row in part]
        if self._sinks is not None and parts:
            rows, episodes = split_episodes(sampled)
            self._sinks.text(step, kind, rows)
            if episodes and kind == "validation":
                cfg = self._worker.cfg
                path = Path(cfg.trainer.output_dir).expanduser() / PAGES / f"step_{step}.html"
                title = run_title(cfg, self._worker.plan.dag_id)
                write_page(path, episodes, f"{title}: {kind}, step {step}")
                self._files.added(path)
        return sampled

    def trained_tokens(self, step: int, sampled: list[dict[str, Any]]) -> None:
        """Write what the sampled rows of a step were trained with, in the steps in which ops keep that.

        sampled: what `samples` gave. Rank 0 tells all which rows they are, about 100 bytes each, and from
        which step on this may be done again.
        """
        worker, kept, world = self._worker, self._worker.trained, self._worker.groups.world
        if kept is None:
            return
        start_s, idle_s, slowest_s = time.perf_counter(), worker.observer.idle_s, 0.0
        with worker.observer.span("report", step):
            asked = [row[CHAT][WANTED] for row in sampled if WANTED in row.get(CHAT, {})][:MOST_ROWS]
            told = [asked, self._pace.next_step(step, start_s)]
            with waiting():
                dist.broadcast_object_list(told, group=world, device=torch.device("cpu"), group_src=0)
            wanted, worker.trained_from = told
            found = self._join(kept.found(wanted), Found.and_those) if wanted else None
            if found is not None:
                slowest_s = found.seconds
                if found.records:
                    output_dir = Path(worker.cfg.trainer.output_dir).expanduser()
                    path = output_dir / TOKENS / f"step_{step}.jsonl"
                    write_json_lines(path, sample_records(wanted, found))
                    self._files.added(path)
        worker.trained = None
        own_s = time.perf_counter() - start_s - (worker.observer.idle_s - idle_s)
        self._pace.count(own_s + slowest_s)

    def close(self) -> None:
        if self._sinks is not None:
            self._sinks.close()

    def _check_log_probs(self, step: int, values: dict[str, float]) -> None:
        """NumericsError if a policy's log-probs are further from its rollout engine's than it allows."""
        plan = self._worker.plan
        for name, node in plan.nodes.items():
            bound = self._worker.node_cfg(name).actor_rollout_ref.rollout.max_log_prob_diff
            if bound is None or not node.spec.trains_policy:
                continue
            prefix = f"agent_{node.agent}/" if self._worker.num_agents > 1 else ""
            found = values.get(f"{prefix}{DISTANCE}")
            if found is not None and not found <= bound:
                raise NumericsError(
                    f"{prefix}{DISTANCE} of step {step} is {found:.3g} nats a token, more than "
                    f"actor_rollout_ref.rollout.max_log_prob_diff={bound:g}: the rollout engine samples from "
                    "another policy than the one that is trained. Use finer numbers there (quantization, "
                    "engine_kwargs.vllm.kv_cache_dtype, dtype), or in the trainer (fsdp_config.float8); or "
                    "raise the bound, if rollout correction makes up for it. See docs/troubleshooting.md."
                )

    def _join(self, mine: Any, add: Callable[[Any, Any], Any]) -> Any:
        with waiting():
            return join_on_first(mine, add, self._worker.groups.world)

    def _rates(self, values: dict[str, float]) -> dict[str, float]:
        """Rates of a training step: tokens per second, and the update's share of the devices' peak."""
        step_s = values.get("time/step_s")
        if not step_s:
            return {}
        world_size = self._worker.plan.world_size
        tokens = sum(value for name, value in values.items() if name.endswith("perf/tokens"))
        rates = {
            "perf/tokens_per_s": tokens / step_s,
            "perf/tokens_per_s_per_device": tokens / step_s / world_size,
        }
        trainers = [name for name, node in self._worker.plan.nodes.items() if node.spec.trains_policy]
        train_s = sum(values.get(f"time/{name}_s", 0.0) for name in trainers)
        flops = sum(value for name, value in values.items() if name.endswith("flops/train"))
        device = self._worker.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        share = mfu(flops, train_s, world_size, name)
        return rates if share is None else rates | {"perf/mfu": share}


def _merged(mine: Metrics, theirs: Metrics) -> Metrics:
    mine.merge(theirs)
    return mine


def _first_parts(mine: dict[int, list], theirs: dict[int, list], most: float) -> dict[int, list]:
    """Rank -> its samples, of as many ranks, the first ones, as have `most` together."""
    kept: dict[int, list] = {}
    for rank, samples in sorted((mine | theirs).items()):
        if sum(map(len, kept.values())) >= most:
            break
        kept[rank] = samples
    return kept


def run_title(cfg: Config, dag_id: str) -> str:
    """What pages and pictures call the run: its experiment, or the DAG where nobody has named one."""
    key, name = "trainer.experiment_name", cfg.trainer.experiment_name
    return name if key in cfg.explicit or name != all_keys()[key].default else dag_id


def closing_report(
    cfg: Config,
    dag_id: str,
    output_dir: Path,
    checkpoint: Path | None,
    exported: list[Path],
    trace: Path | None,
    total_s: float,
) -> str:
    """The closing summary; draws the reward curve that it names, of a run that trains and has rewards."""
    metrics_file, trains = output_dir / METRICS_FILE, not cfg.trainer.val_only
    picture = output_dir / "reward_curve.png"
    curve = reward_curve_png(metrics_file, picture, run_title(cfg, dag_id)) if trains else None
    profiles = profile_folder(cfg, output_dir)
    pages = sorted((output_dir / PAGES).glob("step_*.html"), key=lambda page: int(page.stem[len("step_") :]))
    places = {
        "TensorBoard": tensorboard_dir(output_dir) if "tensorboard" in cfg.trainer.logger else None,
        "metrics": metrics_file,
        "reward curve": curve,
        "conversations": pages[-1] if pages else None,
        "trace": trace,
        "profiles": profiles if cfg.profiler.enable and any(profiles.glob("step_*")) else None,
        "checkpoint": checkpoint if trains else None,
    }
    places |= {f"HF model{f' {path.name}' if len(exported) > 1 else ''}": path for path in exported}
    return closing_summary(metrics_file, total_s, places)
