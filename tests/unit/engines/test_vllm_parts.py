"""The processes of an engine of several ranks: one that is lost is named; all end with it. Without vLLM."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from siirl.engines.rollout.served import engine_parts
from siirl.engines.rollout.served.engine_parts import EngineParts
from siirl.engines.rollout.served.temporary import NAMES, SHARED_MEMORY, TemporaryFolder

NAMED = ("EngineCore", "Worker_TP0", "Worker_TP1")
ENGINE = "; ".join(f"(exec -a VLLM::{name} sleep 300) &" for name in NAMED).replace("&;", "&") + " wait"
STARTS_ONE = """
import os, subprocess, sys
from pathlib import Path
from siirl.engines.rollout.served.temporary import NAMES, TemporaryFolder
folder = TemporaryFolder()
variables, words = folder.environment(), ["sleep", "300"]
if sys.argv[2] == "begins":
    words = ["sh", "-c", f"sleep 0.1; TMPDIR={variables.pop('TMPDIR')} exec sleep 300"]
engine = subprocess.Popen(words, env=os.environ | variables, start_new_session=True)
Path(folder.path, NAMES).write_text(sys.argv[1])
print(folder.path, engine.pid, flush=True)
engine.wait()
"""


@pytest.fixture
def engine(tmp_path):
    """What looks like one of two ranks: its parts, what has been found of them, and its log."""
    process = subprocess.Popen(["bash", "-c", ENGINE])
    log_path = tmp_path / "log"
    log_path.write_text("Worker_TP0 pid=1) ERROR of an engine before\n")
    parts, deadline = EngineParts(process.pid, log_path, log_path.stat().st_size), time.monotonic() + 60
    while len(parts._names) < len(NAMED):
        assert time.monotonic() < deadline
        parts.find()
    try:
        yield {name.removeprefix("VLLM::"): part for part, name in parts._names.items()}, parts, log_path
    finally:
        end(*parts._names)
        process.kill()
        process.wait()


def end(*processes: psutil.Process) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=20)


def await_status(process: psutil.Process, status: str) -> None:
    deadline = time.monotonic() + 20
    while process.status() != status:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_that_was_killed_is_named_also_if_vllm_ends_the_others(engine):
    of, parts, log_path = engine
    assert parts.lost() == "" and parts.trouble() == ""
    end(of["Worker_TP1"])
    named = f"its process VLLM::Worker_TP1 (pid {of['Worker_TP1'].pid}) is gone: killed by signal"
    assert parts.lost() == f"{named}, or it crashed"
    core = f"(EngineCore pid={of['EngineCore'].pid}) ERROR 1 [core.py:1]"
    log_path.write_text(f"{log_path.read_text()}{core} Worker proc died unexpectedly (exit code: -9), ...\n")
    end(of["EngineCore"])
    assert parts.lost() == f"{named} 9"
    end(of["Worker_TP0"])
    assert "VLLM::Worker_TP0" in parts.lost() and " or VLLM::Worker_TP1" in parts.lost()


def test_a_core_that_was_killed_is_named_not_those_that_end_with_it(engine):
    of, parts, _ = engine
    end(*of.values())
    assert parts.lost().startswith(f"its process VLLM::EngineCore (pid {of['EngineCore'].pid}) is gone")


def test_an_engine_whose_worker_said_why_it_ended_lost_none(engine):
    of, parts, log_path = engine
    with log_path.open("a") as log:
        for name in ("Worker_TP1", "EngineCore"):
            log.write(f"({name} pid={of[name].pid}) ERROR 11-24 [x.py:3] out of memory\n")
    end(*of.values())
    assert parts.lost() == ""


def test_a_worker_that_was_killed_is_named_also_if_another_says_that_it_hears_nothing(engine):
    of, parts, log_path = engine
    end(of["Worker_TP0"])
    with log_path.open("a") as log:
        log.write(f"(Worker_TP1 pid={of['Worker_TP1'].pid}) ERROR 11-24 [x.py:3] Connection closed by peer\n")
        log.write(f"(EngineCore pid={of['EngineCore'].pid}) ERROR 11-24 [y.py:9] Worker proc VllmWorker-0 ")
        log.write("died unexpectedly (exit code: -9), shutting down executor.\n")
    end(*of.values())
    killed = f"its process VLLM::Worker_TP0 (pid {of['Worker_TP0'].pid}) is gone: killed by signal 9"
    assert parts.lost() == killed


def test_one_that_is_stopped_or_gone_for_a_while_is_trouble(engine, monkeypatch):
    of, parts, _ = engine
    of["Worker_TP0"].suspend()
    await_status(of["Worker_TP0"], psutil.STATUS_STOPPED)
    assert parts.trouble() == "", "not at once"
    monkeypatch.setattr(engine_parts, "STOPPED_S", -1.0)
    assert parts.trouble().endswith("is there: stopped by signal (state T)")
    of["Worker_TP0"].resume()
    await_status(of["Worker_TP0"], psutil.STATUS_SLEEPING)
    assert parts.trouble() == ""
    end(of["Worker_TP0"])
    assert parts.trouble() == "", "vLLM may say why"
    monkeypatch.setattr(engine_parts, "SILENT_S", -1.0)
    assert parts.trouble().startswith("its process VLLM::Worker_TP0")


@pytest.mark.parametrize("state", ["runs", "begins"])
def test_an_engine_s_processes_end_with_its_folder(state):
    folder = TemporaryFolder()
    variables, words = os.environ | folder.environment(), ["sleep", "300"]
    if state == "begins":
        words = ["sh", "-c", f"sleep 0.1; TMPDIR={variables.pop('TMPDIR')} exec sleep 300"]
    process = subprocess.Popen(words, env=variables, start_new_session=True)
    folder.close()
    assert process.wait(20) == -9 and not Path(folder.path).exists()
    folder.close()


TITLED = """
import time, setproctitle
setproctitle.setproctitle("VLLM::Worker_TP0")
print("titled", flush=True)
time.sleep(60)
"""


def test_processes_with_a_title_of_their_own_end_with_their_folder():
    pytest.importorskip("setproctitle")
    folder = TemporaryFolder()
    variables = {"TMPDIR": "/tmp", "PATH": os.environ["PATH"]} | folder.environment()
    process = subprocess.Popen([sys.executable, "-c", TITLED], env=variables, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"titled\n"
    folder.close()
    assert process.wait(20) == -9
    process.stdout.close()


@pytest.mark.parametrize("state", ["runs", "begins"])
def test_all_of_an_engine_goes_when_its_worker_is_killed(state):
    """Its processes, its folder, and the names that it had in shared memory; also a process that is at its
    beginning, when the system does not know its environment yet."""
    shared = SHARED_MEMORY / f"psm_siirl_test_{time.time_ns()}"
    shared.touch()
    words = [sys.executable, "-c", STARTS_ONE, shared.name + "\n", state]
    worker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    path, pid = worker.stdout.readline().split()
    process = psutil.Process(int(pid))
    assert Path(path, NAMES).exists()
    worker.kill()
    worker.communicate()
    deadline = time.monotonic() + 30
    while (process.is_running() and process.status() != psutil.STATUS_ZOMBIE) or Path(path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not shared.exists()
