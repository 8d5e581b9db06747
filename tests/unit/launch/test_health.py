"""Who is stopped, silent or stuck, and that nobody is who only waits, computes or has a slow day."""

import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
from launch_jobs import wait_until_dead
from some_cases import some

from siirl.launch.health import (
    FACTOR,
    KNOWN_TIMES,
    SILENT_S,
    STOPPED_S,
    WRITES_FACTOR,
    Health,
    Process,
    Watch,
    look_at,
)
from siirl.launch.process import Worker, end_all
from siirl.observe.heartbeat import Beat, Heartbeat, Place, heartbeat_file, read_beat

PATIENCE_S = 600.0


class Rank:
    """A simulated rank, a second a look: it beats, unless it is told not to, and uses CPU."""

    def __init__(self):
        self.count = self.entered = 0
        self.place = Place()
        self.state, self.cpu_s, self.beats, self.works = "S", 0.0, True, True
        self.stays: dict[str, list[int]] = {}
        self.since_s = 0

    def enter(self, now_s: int, order: tuple[int, ...], name: str, step: int = 1) -> None:
        self.stays.setdefault(self.place.name, []).append(now_s - self.since_s)
        known = self.stays.get(name, [])
        self.place = Place(order, step, name, len(known), float(max(known, default=0)))
        self.entered, self.count, self.since_s = self.entered + 1, self.count + 1, now_s

    def look(self) -> tuple[Beat, Process]:
        self.count += self.beats and self.state != "T"
        self.cpu_s += 0.5 * (self.works and self.state != "T")
        return Beat(self.count, self.entered, self.place), Process(self.state, self.cpu_s)


def looked(health: Health, ranks: dict[int, Rank], now_s: float):
    seen = {rank: each.look() for rank, each in ranks.items()}
    return health.look(
        now_s, {r: beat for r, (beat, _) in seen.items()}, {r: p for r, (_, p) in seen.items()}
    )


def until_trouble(health: Health, ranks: dict[int, Rank], begin_s: int, most_s: int = 20_000):
    """(seconds until a trouble, the trouble); nobody moves meanwhile."""
    for passed_s in range(most_s):
        if (found := looked(health, ranks, begin_s + passed_s)) is not None:
            return passed_s, found
    return most_s, None


def warmed(num_ranks: int = 3, steps: int = 4) -> tuple[Health, dict[int, Rank], int]:
    """Ranks that have gone through some steps together: a rollout of 30 s, a reshard, a training of 20 s."""
    health, ranks, now_s = Health(PATIENCE_S), {rank: Rank() for rank in range(num_ranks)}, 0
    for step in range(1, steps + 1):
        for index, (name, lasts_s) in enumerate((("rollout", 30), ("reshard", 2), ("train", 20))):
            for rank in ranks.values():
                rank.enter(now_s, (step, 0, index), f"step/{name}", step)
            for _ in range(lasts_s):
                assert looked(health, ranks, now_s) is None
                now_s += 1
    for rank in ranks.values():
        rank.enter(now_s, (steps + 1, 0, 0), "step/rollout", steps + 1)
    return health, ranks, now_s


def test_who_waits_for_somebody_outside_of_the_run_is_not_stuck(tmp_path):
    with heartbeat_file(1) as fd:
        heart = Heartbeat(os.dup(fd), 0)
        for step in range(1, 4):
            heart.begin_part(step, "step")
            heart.enter("rollout", (0,))
        health, stays = Health(PATIENCE_S), True
        found = None
        for now_s in range(20 * int(PATIENCE_S)):
            stays = now_s < 15 * PATIENCE_S
            if stays:
                heart.stay()
            found = found or health.look(now_s, {0: read_beat(fd, 0)}, {0: Process("S", float(now_s))})
            assert found is None or not stays
        assert found is not None and "it has been in 'step/rollout'" in found.what


def test_a_stopped_rank_is_named_within_seconds_in_whatever_phase_with_those_ahead_of_it():
    health, ranks, now_s = warmed()
    ranks[1].state = "T"
    for rank in (0, 2):
        ranks[rank].enter(now_s, (5, 0, 1), "step/reshard", 5)
    passed_s, found = until_trouble(health, ranks, now_s)
    assert STOPPED_S - 1 <= passed_s <= STOPPED_S + 2 and found.rank == 1
    assert "stopped by a signal (process state T)" in found.what and found.what.endswith("and waiting: 0,2")
    health, first = Health(PATIENCE_S), Rank()  # before its first beat
    first.state = "T"
    assert until_trouble(health, {0: first}, 0)[0] <= STOPPED_S + 2


def test_a_rank_that_a_debugger_holds_for_a_moment_is_left_alone():
    health, ranks, now_s = warmed()
    for passed_s in range(200):
        ranks[1].state = "T" if passed_s % 10 < 4 else "t"
        assert looked(health, ranks, now_s + passed_s) is None


def test_a_silent_rank_is_named_within_30_s_but_not_one_whose_code_holds_the_interpreter():
    health, ranks, now_s = warmed()
    ranks[2].beats = False
    assert until_trouble(health, ranks, now_s, 300)[1] is None, "it computes"
    ranks[2].works = False
    passed_s, found = until_trouble(health, ranks, now_s + 300)
    assert SILENT_S - 1 <= passed_s <= 30 and found.rank == 2 and "no heartbeat" in found.what


@pytest.mark.parametrize("name", ["start", "checkpoint", "export", "step/compiled for the first time"])
def test_a_silence_while_files_are_written_or_in_a_place_never_seen_is_waited_out(name):
    health, ranks, now_s = warmed()
    for _ in range(KNOWN_TIMES + 1):
        if not name.startswith("step/"):
            ranks[0].enter(now_s, (4, 0, 0), name)
    ranks[0].enter(now_s, (4, 0, 0), name)
    ranks[0].beats = ranks[0].works = False
    passed_s, found = until_trouble(health, ranks, now_s)
    least_s = PATIENCE_S if name.startswith("step/") else WRITES_FACTOR * PATIENCE_S
    assert least_s - 1 <= passed_s <= least_s + 2 and found.rank == 0


def test_the_one_behind_is_stuck_and_not_those_that_wait_longer_than_it():
    health, ranks, now_s = warmed()
    for rank in (0, 2):
        ranks[rank].enter(now_s, (5, 0, 1), "step/reshard", 5)
    for passed_s in range(100):
        assert looked(health, ranks, now_s + passed_s) is None
    ranks[1].enter(now_s + 100, (5, 0, 0, 1), "step/rollout", 5)  # goes on, and hangs later
    passed_s, found = until_trouble(health, ranks, now_s + 100)
    assert FACTOR * 100 - 1 <= passed_s <= FACTOR * 100 + 2 and found.rank == 1
    assert "'step/rollout' for 16 min 40 s; the longest before was 1 min 40 s; ahead" in found.what


def test_of_ranks_that_are_stuck_in_the_same_place_all_are_told():
    health, ranks, now_s = warmed()
    ranks[2].enter(now_s, (5, 0, 1), "step/reshard", 5)
    found = until_trouble(health, ranks, now_s)[1]
    assert found.rank == 0 and found.what.endswith("; in the same place: 1; ahead of it, and waiting: 2")


def test_ten_times_the_longest_stay_counts_where_that_is_more_and_a_first_stay_has_no_end():
    health, ranks, now_s = warmed()
    ranks[0].stays["step/train"] = [20, 200, 150]
    ranks[0].enter(now_s, (5, 0, 2), "step/train", 5)
    one = {0: ranks[0]}
    assert FACTOR * 200 - 1 <= until_trouble(health, one, now_s)[0] <= FACTOR * 200 + 2
    ranks[0].enter(now_s, (5, 1), "validation/rollout", 5)
    assert until_trouble(health, one, now_s)[1] is None


def test_a_rank_that_answers_others_waits_for_them_wherever_it_is():
    health, ranks, now_s = warmed()
    for _ in range(3):
        ranks[2].enter(now_s, (5, 0, 0), "step/serve", 5)
        ranks[0].enter(now_s, (5, 0, 1), "step/rollout", 5)
        ranks[1].enter(now_s, (5, 0, 1), "step/rollout", 5)
    ranks[1].enter(now_s, (5, 0, 2), "step/train", 5)
    assert until_trouble(health, ranks, now_s)[1].rank == 0


def test_while_the_launcher_or_the_machine_stood_still_nobody_was_silent():
    health, ranks, now_s = warmed()
    for each in ranks.values():
        each.beats = each.works = False
    for hour in range(5):
        assert looked(health, ranks, now_s + 3600.0 * hour) is None


@pytest.mark.parametrize("seed", some(range(5), 0, 2))
def test_no_false_alarm_in_a_noisy_run_and_a_hang_anywhere_in_it_is_named(seed):
    """Two hundred steps of four ranks that wait for each other: times with a long tail, beats that come late,
    a validation and a save now and then; then one rank hangs somewhere."""
    rng = random.Random(seed)
    ranks = {rank: Rank() for rank in range(4)}
    health, now_s, victim = Health(PATIENCE_S), 0, rng.randrange(4)
    places = {"step/rollout": 8, "step/reward": 3, "step/reshard": 1, "step/train": 6}
    hang_at = rng.randrange(150, 200), rng.choice(list(places))
    for step in range(1, 201):
        parts = list(places.items())
        parts += [("validation/rollout", 120), ("checkpoint", 60)] if step % 20 == 0 else []
        for index, (name, mean_s) in enumerate(parts):
            tail = 25 if rng.random() < 0.01 else 1  # the slowest 1%
            ends = {rank: now_s + int(mean_s * tail * rng.lognormvariate(0, 0.5)) for rank in ranks}
            if (step, name) == hang_at:
                ends[victim] = 10**9
            for rank in ranks.values():
                rank.enter(now_s, (step, 0, index), name, step)
            while now_s <= max(ends.values()):
                for rank, each in ranks.items():
                    each.beats, each.works = rng.random() > 0.05, now_s <= ends[rank]
                    if now_s == ends[rank]:
                        each.enter(now_s, (step, 0, index, 1), f"after {name}", step)
                found = looked(health, ranks, now_s)
                now_s += 1
                if found is not None:
                    assert (step, name) == hang_at and found.rank == victim, found
                    others = [rank for rank in ranks if rank != victim]
                    assert f"waiting: {min(others)}" in found.what
                    return
    pytest.fail("the hang was not seen")


def beaten(fd: int, entered: int, count: int) -> Beat:
    """The first beat of rank 2 after it has entered so many places and beaten so often."""
    end = time.monotonic() + 30
    while not (beat := read_beat(fd, 2)) or beat.entered < entered or beat.count < count:
        assert time.monotonic() < end, beat
        time.sleep(0.01)
    return beat


@pytest.mark.heavy
def test_the_kernel_tells_of_a_process_and_a_heartbeat_of_its_place(monkeypatch):
    spin = [sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"]
    process = subprocess.Popen(spin, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline()
        first = look_at(process.pid)
        end = time.monotonic() + 30
        while look_at(process.pid).cpu_s <= first.cpu_s:
            assert time.monotonic() < end
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGSTOP)
        end = time.monotonic() + 30
        while look_at(process.pid).state != "T":
            assert time.monotonic() < end
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert look_at(process.pid) is None
    monkeypatch.setattr("siirl.observe.heartbeat.EVERY_S", 0.01)
    with heartbeat_file(3) as fd:
        assert read_beat(fd, 2) is None
        heart = Heartbeat(os.dup(fd), 2)
        heart.begin_part(7, "step")
        for entered, number in enumerate((4, 5, 4), 2):
            heart.enter("rollout" if number == 4 else "train", (number, 0, number))
            time.sleep(0.1)
            beat = beaten(fd, entered, 4 * entered)
        assert beat.entered == 4 and beat.count > 10 and read_beat(fd, 1) is None
        assert (beat.place.order, beat.place.step) == ((7, 0, 4, 0, 4), 7)
        assert (beat.place.name, beat.place.times) == ("step/rollout", 1) and beat.place.longest_s >= 0.1
        heart.begin_part(7, "checkpoint")
        after = beaten(fd, 5, beat.count + 1)
        assert after.place.order == (7, 1) > beat.place.order and after.count > beat.count


GOES_ON = """
import itertools, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGUSR1, lambda *_: Path("stacks").touch())
for step in itertools.count(1):
    aside, name = Path(sys.argv[1]), ("step", "seen")[int(sys.argv[1])]
    if name == "step" or Path("step").exists():
        aside.write_text(str(step) if name == "step" else Path("step").read_text())
        aside.replace(name)
    time.sleep(0.01)
"""


STOPS_AGAIN_AND_AGAIN = """
import faulthandler, functools, os, signal, threading

for _ in range(2):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
faulthandler.register(signal.SIGUSR1, all_threads=True)

def stops():
    os.kill(os.getpid(), signal.SIGSTOP)

while True:
    stops()
    for _ in range(300):  # frames that come and go while the stacks are written
        functools.reduce(lambda a, b: a + b, range(50))
"""


def test_the_thread_that_was_stopped_writes_the_stacks_before_it_goes_on(tmp_path, monkeypatch):
    """Any other one would read its frames while they change."""
    monkeypatch.setattr("siirl.launch.process.STACKS_WRITTEN_S", 0.05)
    with (tmp_path / "log").open("wb") as log:
        words = [sys.executable, "-I", "-S", "-c", STOPS_AGAIN_AND_AGAIN]
        worker = Worker(0, subprocess.Popen(words, stderr=log, start_new_session=True))
    times = 12
    try:
        for _ in range(times):
            deadline = time.monotonic() + 60
            while not look_at(worker.process.pid).is_stopped:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            worker.dump_stacks()
            worker.go_on_for_stacks()
        assert not worker.ended()
    finally:
        end_all([worker], lambda: True)
    stacks = (tmp_path / "log").read_text().split("Current thread")[1:]
    assert [stack.splitlines()[1].endswith("in stops") for stack in stacks] == [True] * times


def test_a_stopped_rank_is_given_the_time_that_it_needs_to_take_the_signal_for_its_stacks(
    tmp_path, monkeypatch
):
    """This one takes no signals for longer than stacks take to write, as on a busy machine."""
    monkeypatch.setattr("siirl.launch.process.STACKS_WRITTEN_S", 0.5)
    code = """
import pathlib, signal, time
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("stacks").touch())
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
pathlib.Path("ready").touch()
while not pathlib.Path("goes_on").exists():
    time.sleep(0.01)
time.sleep(1.5)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
time.sleep(60)
"""
    words = [sys.executable, "-S", "-c", code]
    worker = Worker(0, subprocess.Popen(words, cwd=tmp_path, start_new_session=True))
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker.signal_group(signal.SIGSTOP)
        worker.dump_stacks()
        (tmp_path / "goes_on").touch()
        worker.go_on_for_stacks()
        assert (tmp_path / "stacks").exists()
    finally:
        end_all([worker], lambda: True)


def test_a_stopped_rank_goes_on_for_its_stacks_alone_and_then_no_more(tmp_path):
    """Rank 1 looks at what rank 0 does, and would complete it."""

    def number(name: str) -> int:
        path = tmp_path / name
        return int(path.read_text()) if path.exists() else 0

    words = [sys.executable, "-S", "-c", GOES_ON]
    workers = [
        Worker(rank, subprocess.Popen([*words, str(rank)], cwd=tmp_path, start_new_session=True))
        for rank in (0, 1)
    ]
    deadline = time.monotonic() + 60
    try:
        while number("seen") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        workers[0].signal_group(signal.SIGSTOP)
        while (stopped_at := number("step")) != number("seen"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        Watch(workers, -1, PATIENCE_S).show_stacks(0)
        while not all(worker.ended() for worker in workers):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        end_all(workers, lambda: True)
    assert (tmp_path / "stacks").exists() and number("step") > stopped_at, "it went on"
    assert number("seen") == stopped_at


STAYS = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
name = sys.argv[1]
if name == "worker":
    subprocess.Popen([sys.executable, "-S", "-c", open(sys.argv[2]).read(), "child", sys.argv[2]])
pathlib.Path(name).touch()
time.sleep(60)
"""


def test_who_passes_over_sigterm_is_killed_and_all_that_it_started(tmp_path):
    script = tmp_path / "stays.py"
    script.write_text(STAYS)
    words = [sys.executable, "-S", str(script), "worker", str(script)]
    worker = Worker(0, subprocess.Popen(words, cwd=tmp_path, start_new_session=True))
    deadline = time.monotonic() + 60
    while not ((tmp_path / "worker").exists() and (tmp_path / "child").exists()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (child,) = psutil.Process(worker.process.pid).children()
    end_all([worker], lambda: True)
    assert worker.process.returncode == -signal.SIGKILL
    wait_until_dead([child.pid], 10)
