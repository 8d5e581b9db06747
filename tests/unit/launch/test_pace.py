"""How long a run takes at least, and that processes stand by early where that is long."""

from pathlib import Path

import pytest
from launch_jobs import make_job

from siirl.launch import standbys
from siirl.launch.job import Job
from siirl.launch.standbys import Pace
from siirl.observe.position import PositionFile, record_begin


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def rank_0_at(job: Job, step: int) -> None:
    file = PositionFile(job.position_path(0))
    file.set(step, "rollout")
    file.close()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = make_job(tmp_path, "finish")
    job.output_path.mkdir()
    return job


def test_the_steps_to_come_take_as_long_as_those_before_with_the_one_that_runs(job):
    clock = Clock()
    pace = Pace(job, clock)
    assert pace.left_s() == 0.0, "nothing is known"
    record_begin(job.output_path, "another start", 1000)
    record_begin(job.output_path, job.run_id, 10)
    rank_0_at(job, 0)
    clock.now_s += 50
    assert pace.left_s() == 0.0, "the validation before the first step is none"
    told = []
    for step, passed_s in ((1, 1), (1, 4), (2, 2), (4, 3), (10, 10)):
        clock.now_s += passed_s
        rank_0_at(job, step)
        told.append(pace.left_s())
    assert told == [0.0, 9 * 4.0, 8 * 6.0 / 2, 6 * 9.0 / 4, 0.0]


def test_a_resumed_run_counts_the_steps_that_are_left_and_one_that_trains_none_is_short(job):
    clock = Clock()
    pace = Pace(job, clock)
    record_begin(job.output_path, job.run_id, 100)
    for step in (91, 93):
        rank_0_at(job, step)
        told = pace.left_s()
        clock.now_s += 30
    assert told == 7 * 30.0 / 3
    record_begin(job.output_path, job.run_id, 100)
    (job.output_path / "progress.jsonl").unlink()
    record_begin(job.output_path, job.run_id, None)
    assert pace.left_s() == 0.0


@pytest.mark.parametrize(
    ("steps", "after_s"),
    [(1000, standbys.AGAIN_S), (15, 14.0), (3, standbys.AFTER_S)],
    ids=["long", "known to be long by and by", "short"],
)
def test_processes_stand_by_early_if_the_run_is_known_to_be_long(job, monkeypatch, steps, after_s):
    """A step takes ten seconds, and the first one begins five after the start."""
    clock = Clock()
    monkeypatch.setattr(standbys.time, "monotonic", clock)
    monkeypatch.setattr(standbys, "Pace", lambda job: Pace(job, clock))
    ready = standbys.Standbys(job)
    record_begin(job.output_path, job.run_id, steps)
    ready.begin_attempt()
    for passed_s in range(70):
        clock.now_s = 1000.0 + passed_s
        if passed_s >= 5:
            rank_0_at(job, min(steps, 1 + (passed_s - 5) // 10))
        if ready._is_time():
            break
    assert passed_s == after_s
