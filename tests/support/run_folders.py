"""Run folders as a run writes them, by its own writers, without training anything."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

from siirl.config import Config, load_config, to_dict
from siirl.launch.failure import describe_exception, write_failure
from siirl.launch.job import Job
from siirl.launch.run_record import write_record
from siirl.observe.position import How, Position, PositionFile, record_begin, record_end
from siirl.observe.sinks import JsonlSink

COMMAND = (
    "python",
    "-m",
    "siirl.main_dag",
    "algorithm.adv_estimator=grpo",
    "trainer.total_training_steps=40",
)


@dataclass
class Written:
    """A run folder in the making. Times are seconds since the epoch."""

    folder: Path
    cfg: Config
    num_ranks: int = 2
    run_id: str = "id"
    began_s: float = field(default_factory=lambda: int(time.time()) - 1000)

    @cached_property
    def job(self) -> Job:
        return Job(to_dict(self.cfg), "{}", str(self.folder), self.num_ranks, self.num_ranks)

    def start(
        self, at_s: float | None = None, command: Sequence[str] = COMMAND, run_id: str = "id"
    ) -> "Written":
        """One start: its record, its job, empty errors and positions."""
        at_s = self.began_s if at_s is None else at_s
        started = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(at_s))
        with patch("siirl.launch.run_record.time.strftime", lambda _form: started):
            write_record(self.folder, self.cfg, command, run_id)
        self.run_id = run_id
        self.job.prepare()
        return self

    def steps(
        self, values: Mapping[int, Mapping[str, float]], step_s: float = 10.0, begin_s=None
    ) -> "Written":
        """Lines of metrics, step_s apart."""
        sink = JsonlSink(self.folder / "metrics.jsonl")
        begin_s = self.began_s if begin_s is None else begin_s
        for index, (step, numbers) in enumerate(values.items()):
            with patch("siirl.observe.sinks.time.time", lambda at_s=begin_s + (index + 1) * step_s: at_s):
                sink.log(step, numbers)
        sink.close()
        return self

    def positions(self, each: Mapping[int, tuple[int, str, float]]) -> "Written":
        """Rank -> (step, node, since)."""
        for rank, (step, node, since_s) in each.items():
            file = PositionFile(self.job.position_path(rank))
            with patch("siirl.observe.position.time.time", lambda since_s=since_s: since_s):
                file.set(step, node)
            file.close()
        return self

    def failure(self, rank: int, error: Exception, step: int = 3, node: str = "rollout") -> "Written":
        write_failure(self.job.error_path(rank), describe_exception(error, rank, Position(step, node, 0.0)))
        return self

    def begin(self, total_steps: int | None) -> "Written":
        """What rank 0 records when it knows its data."""
        record_begin(self.folder, self.run_id, total_steps)
        return self

    def end(self, how: How = "ended", cause: str = "") -> "Written":
        """What a run records last."""
        record_end(self.folder, self.run_id, how, cause)
        return self


def written(folder: Path, *keys: str, **more) -> Written:
    """A run folder with a configuration, and nothing in it yet."""
    return Written(folder, load_config([*COMMAND[3:], f"trainer.output_dir={folder}", *keys]), **more)


def rewards(steps: Sequence[int], scale: float = 0.01, every: int = 5) -> dict[int, dict[str, float]]:
    """Metrics of steps: a training reward that grows by `scale` a step, a validation every few of them."""
    return {
        step: {"reward/score": scale * step, "actor/entropy": 2.0, "time/step_s": 10.0}
        | ({"val/reward/mean": 2 * scale * step} if step % every == 0 else {})
        for step in steps
    }
