"""Another user of the machine attacks a run that serves clients, and `siirl view` of it, while both go on."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_harness import ROOT, Finished, Inputs, overrides
from killed_jobs import wait_until
from outside_cases import Client

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.getuid() != 0, reason="only root becomes other users"),
]
STRANGER = 54322
PLACES = ("/tmp", "/dev/shm", "/var/tmp", "/run")
"""Folders that all users share."""
SECRET = "hunter2-of-the-environment"
MOST_BYTES = 4 << 20
KEYS = (
    *("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    *("trainer.n_gpus_per_node=2", "trainer.save_freq=1"),
    *("trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=-1"),
    *("trainer.memory_checkpoint_freq=1", "trainer.deadline_s=200", "trainer.trace=true"),
)


@dataclass(frozen=True)
class Attacked:
    """What is attacked, as the attacker can find it out, and what must stay secret."""

    folder: Path
    ports: tuple[int, ...]
    """That the run's clients are listened for at."""
    view: int
    """The port of `siirl view`."""
    pids: tuple[int, ...]
    unix: tuple[str, ...]
    """Names of sockets; abstract ones begin with a zero byte."""
    secrets: tuple[str, ...]
    since_s: float


def as_stranger(attack: Callable[[Attacked], list[str]], attacked: Attacked, uid: int = STRANGER) -> Any:
    """What an attack brings another user, who has no right but those that all have."""
    ours, theirs = Pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            theirs.send(attack(attacked))
        finally:
            os._exit(1)
    theirs.close()
    try:
        assert ours.poll(200), "the attack does not end"
        return ours.recv()  # EOFError: the attack itself failed
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def files_of(attacked: Attacked) -> Iterator[Path]:
    """The run folder, and what has come since into folders that all users share, but of other tests."""
    tops = [attacked.folder]
    for place in map(Path, PLACES):
        for top in place.iterdir():
            with suppress(OSError):
                is_new = top.lstat().st_ctime >= attacked.since_s
                tops += [top] * (is_new and not top.name.startswith("pytest-of-"))
    for top in tops:
        yield top
        for folder, folders, names in os.walk(top):
            yield from (Path(folder, name) for name in (*folders, *names))


def secrets_that_can_be_read(attacked: Attacked) -> list[str]:
    """In command lines, environments, and files that are as young as the run."""
    found, secrets = [], [secret.encode() for secret in attacked.secrets]
    of_processes = [Path(f"/proc/{pid}/{name}") for pid in attacked.pids for name in ("cmdline", "environ")]
    for path in (*of_processes, *files_of(attacked)):
        with suppress(OSError):
            about = path.stat()
            if stat.S_ISREG(about.st_mode) and (about.st_ctime >= attacked.since_s or path in of_processes):
                with path.open("rb") as file:
                    text = file.read(MOST_BYTES)
                found += [f"{path}: {secret.decode()}" for secret in secrets if secret in text]
    return found


def what_can_be_written(attacked: Attacked) -> list[str]:
    """Files and folders of the victim's, wherever they lie."""
    found = []
    for path in files_of(attacked):
        with suppress(OSError):
            about = path.lstat()
            if about.st_uid == 0 and not stat.S_ISLNK(about.st_mode) and os.access(path, os.W_OK):
                of_run = str(path).startswith(str(attacked.folder)) or re.search(
                    "siirl|vllm|torch|psm_", path.name
                )
                found += [str(path)] if of_run else []
    return found


def sockets_with_names(attacked: Attacked) -> list[str]:
    """Those of the run that let somebody else connect."""
    found = []
    for name in attacked.unix:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as client:
                client.connect(name)
                found.append(name)
    return found


def taking_their_ports(attacked: Attacked) -> list[str]:
    """Listening where the victims do: clients would show their token."""
    found = []
    for port in (*attacked.ports, attacked.view):
        for host in ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1"):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with suppress(OSError), socket.socket(family) as server:
                for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                    server.setsockopt(socket.SOL_SOCKET, option, 1)
                server.bind((host, port))
                server.listen()
                found.append(f"{host}:{port}")
    return found


def answered(port: int, method: str, path: str, headers: dict[str, str], body: str = "") -> tuple[int, str]:
    """(status, body); (0, "") where the connection is closed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read(MOST_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


WRONG = {"": {}, "a wrong one": {"Authorization": "Bearer siirl-x"}, "an empty one": {"x-api-key": ""}}


def asking_without_the_token(attacked: Attacked) -> list[str]:
    """All paths of the endpoint and of the page, and paths that lead out of it."""
    found = []
    routes = [("GET", "/task"), ("GET", "/v1/models"), ("POST", "/session"), ("POST", "/v1/session")]
    routes += [
        ("POST", f"/v1/{name}") for name in ("chat/completions", "completions", "messages", "responses")
    ]
    routes += [
        ("POST", "/reward"),
        ("POST", "/v1/reward"),
        ("POST", "/end"),
        ("GET", "/metrics"),
        ("GET", "/"),
    ]
    for port in attacked.ports:
        for method, path in routes:
            for name, headers in WRONG.items():
                status, body = answered(port, method, path, headers, "{}" if method == "POST" else "")
                if status not in (401, 404, 405) or any(secret in body for secret in attacked.secrets):
                    found.append(f"{method} {path} with {name or 'no'} token: {status} {body[:80]}")
    pages = ("/", "//", "/x/", "/x/part/0/curves", "/../../etc/passwd", "/%2e%2e/", "/part/0/text")
    for path in pages:
        for host in (f"127.0.0.1:{attacked.view}", "evil.example", ""):
            for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS", "TRACE"):
                status, body = answered(attacked.view, method, path, {"Host": host})
                if status not in (0, 400, 403, 404, 501) or any(
                    secret in body for secret in attacked.secrets
                ):
                    found.append(f"view: {method} {path} for {host}: {status} {body[:80]}")
    return found


def standing_in_the_way(attacked: Attacked) -> list[str]:
    """Connections that say nothing, or a head without end; the victims must be served among them."""
    held = []
    for port in (*attacked.ports, attacked.view):
        for number in range(150):
            with suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                if number % 3:
                    held[-1].sendall(b"POST /session HTTP/1.1\r\nContent-Length: 8000000\r\nX: " + b"a" * 60)
    time.sleep(5)
    return []


ATTACKS = {
    "secrets in command lines, environments, files": secrets_that_can_be_read,
    "writing files and folders": what_can_be_written,
    "sockets with names": sockets_with_names,
    "listening in their place": taking_their_ports,
    "asking without the token": asking_without_the_token,
    "slow connections": standing_in_the_way,
}


def play(file: Path, seen: list[float], gate: threading.Event) -> None:
    """A client of the victim's, to the end of the run; after a few episodes it waits for the gate."""
    client = Client(file)
    while not (answer := client.come())["over"]:
        if answer["session"] is not None:
            began = time.monotonic()
            client.say(model="talker")
            assert client.ask("/reward", {"reward": len(seen) % 3})[0] == 200
            seen.append(time.monotonic() - began)
            if len(seen) >= 4:
                gate.wait()


def facts(folder: Path, job: subprocess.Popen, viewer: subprocess.Popen, url: str) -> Attacked:
    tree = [
        one
        for job in (job, viewer)
        for one in (psutil.Process(job.pid), *psutil.Process(job.pid).children(True))
    ]
    unix = []
    for process in tree:
        with suppress(psutil.Error):
            unix += [one.laddr for one in process.net_connections("unix") if one.laddr]
    doors = [json.loads(path.read_text()) for path in (folder / "out" / "listen").glob("*.json")]
    return Attacked(
        folder,
        tuple(int(door["url"].rpartition(":")[2]) for door in doors),
        int(re.search(r":(\d+)/", url)[1]),
        tuple(process.pid for process in tree),
        tuple(f"\0{name[1:]}" if name.startswith("@") else name for name in unix),
        (*(door["token"] for door in doors), url.split("/")[3], SECRET),
        folder.stat().st_ctime,
    )


@pytest.fixture(scope="module")
def victim(tmp_path_factory) -> Iterator[Path]:
    """A folder that all users may enter, as homes of machines of many users are."""
    folder = Path(tempfile.mkdtemp(prefix="attacked-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_another_user_gets_nothing_and_stops_nothing(victim):
    inputs, output = Inputs.make(victim / "inputs"), victim / "out"
    dag = (ROOT / "examples" / "agents_elsewhere" / "shopper.yaml").read_text().replace("shopper", "talker")
    dag = re.sub(r"config: \{serve.*\}", "config: {serve: {listen: true}}", dag)
    (victim / "dag.yaml").write_text(dag)
    words = overrides(inputs, output, *KEYS, f"dag.workflow_path={victim / 'dag.yaml'}")
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_TOKEN": SECRET}
    command = [sys.executable, "-m", "siirl.cli"]
    with (victim / "console").open("wb") as console:
        job = subprocess.Popen(
            [*command, "run", *words], env=env, stdout=console, stderr=console, umask=0o022
        )
    doors = [output / "listen" / f"talker_rank_{rank}.json" for rank in (0, 1)]
    wait_until(lambda: all(door.exists() for door in doors), job, victim / "console")
    viewer = subprocess.Popen([*command, "view", str(output)], env=env, stdout=subprocess.PIPE, text=True)
    seen: list[float] = []
    gate = threading.Event()
    clients = [threading.Thread(target=play, args=[door, seen, gate], daemon=True) for door in doors]
    try:
        url = viewer.stdout.readline().strip()
        for client in clients:
            client.start()
        wait_until(lambda: len(seen) >= 2, job, victim / "console")
        attacked = facts(victim, job, viewer, url)
        owner = as_stranger(secrets_that_can_be_read, attacked, uid=0)
        assert all(any(one.endswith(secret) for one in owner) for secret in attacked.secrets[:2]), (
            "a blind attack"
        )
        found = {name: as_stranger(attack, attacked) for name, attack in ATTACKS.items()}
        assert {name: one for name, one in found.items() if one} == {}
        status, page = answered(attacked.view, "GET", url.partition(str(attacked.view))[2], {})
        assert status == 200 and "<html" in page
        gate.set()
        assert job.wait(200) == 0, (victim / "console").read_text()
        assert len(seen) == 16 and max(seen) < 30
        assert Finished.read(output).values("interaction/failed") == [0, 0]
    finally:
        for process in (viewer, job):
            process.terminate()
            process.wait(60)
