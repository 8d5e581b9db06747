"""Logs that are full: what they held is beside them, and who writes them goes on."""

import os
import subprocess
import sys
import threading
import time

from siirl.launch import ray_actor, torchrun
from siirl.launch.job import Job
from siirl.launch.log_sizes import LogSizes
from siirl.observe.logs import last_lines


def test_a_full_log_is_moved_aside_and_its_writer_goes_on_in_it(tmp_path):
    log, other = tmp_path / "rank_1.log", tmp_path / "rank_2.log"
    other.write_text("short\n")
    with log.open("ab", buffering=0) as writer:
        for number in range(3):
            writer.write(f"line {number}\n".encode())
        began_at = log.stat().st_size
        LogSizes(tmp_path, most_bytes=20).look()
        writer.write(b"line 3\n")
    assert log.read_text() == "line 3\n" and other.read_text() == "short\n"
    assert (tmp_path / "rank_1.log.1").read_text() == "line 1\nline 2\n"
    assert last_lines(log, began_at) == ["line 3"], "where an attempt began is no more"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_1.log", "rank_1.log.1", "rank_2.log"]


def test_logs_take_twice_their_bound_at_most(tmp_path):
    log = tmp_path / "rank_0.log"
    for _ in range(30):
        with log.open("ab") as writer:
            writer.write(b"x" * 50)
        LogSizes(tmp_path, most_bytes=100).look()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 300


def test_a_log_that_grew_by_gigabytes_since_the_last_look_keeps_its_end(tmp_path):
    log = tmp_path / "rank_0.log"
    with log.open("wb") as file:
        file.truncate(5000)
        file.seek(0, os.SEEK_END)
        file.write(b"\nfirst\nlast\n")
    LogSizes(tmp_path, most_bytes=100).look()
    assert log.stat().st_size == 0
    assert (tmp_path / "rank_0.log.1").read_bytes() == b"first\nlast\n"


def test_a_log_that_somebody_named_elsewhere_is_bounded_too(tmp_path, monkeypatch):
    log = tmp_path / "elsewhere" / "all.txt"
    log.parent.mkdir()
    log.write_bytes(b"x" * 40 + b"\n" + b"x" * 9)
    monkeypatch.setenv("SIIRL_LOGGING_FILENAME", str(log))
    LogSizes(tmp_path, most_bytes=20).look()
    assert log.stat().st_size == 0 and log.with_name("all.txt.1").stat().st_size == 9


def test_of_several_that_look_one_moves_a_log(tmp_path):
    """Whoever comes second must not copy the empty log over what the first one kept."""
    log = tmp_path / "rank_0.log"
    for number in range(20):
        log.write_bytes(b"%02d\n" % number * 50)
        looks = [LogSizes(tmp_path, most_bytes=20) for _ in range(8)]
        threads = [threading.Thread(target=look.look) for look in looks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (tmp_path / "rank_0.log.1").read_bytes() == b"%02d\n" % number * 6


def test_the_first_worker_of_a_machine_under_torchrun_looks_at_its_logs(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(LogSizes, "look_on", lambda sizes: looked.append(sizes._folder))
    monkeypatch.setattr(torchrun, "end_with_parent", lambda: None)
    monkeypatch.setattr(torchrun, "run_rank", lambda job, place: 0)
    job = Job({}, "", str(tmp_path), world_size=4, local_world_size=2)
    for rank in range(4):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        assert torchrun.run_torchrun(job, env) == 0
    assert looked == [tmp_path / "logs"] * 2


LOOKS_ON = """
import sys
from pathlib import Path
from siirl.launch.log_sizes import LogSizes
LogSizes(Path(sys.argv[1]), most_bytes=20).look_on()
sys.stdin.read()
"""


def test_who_looks_on_does_so_beside_its_work(tmp_path):
    log = tmp_path / "rank_0.log"
    log.write_bytes(b"x" * 50)
    words = [sys.executable, "-c", LOOKS_ON, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while log.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert log.stat().st_size == 0


def test_an_actor_forgets_output_that_the_driver_has(monkeypatch):
    monkeypatch.setattr(ray_actor, "MOST_BYTES", 20)
    monkeypatch.setattr(ray_actor, "end_with_parent", lambda: None)
    actor, fetched, seen = ray_actor.RankActor(), 0, b""
    for number in range(10):
        actor._output.write(b"line %d\n" % number)
        actor._forget(fetched)
        new = os.pread(actor._output.fileno(), 100, fetched - actor._forgotten)
        fetched, seen = fetched + len(new), seen + new
        actor._forget(fetched)
        assert os.fstat(actor._output.fileno()).st_size <= 30
    assert seen == b"".join(b"line %d\n" % number for number in range(10)) and actor._forgotten > 40
