"""A Python for the scripts that tests run: what a script starts with it is a fork where one is the same.

A script is bash, and cannot ask the nursery (forked_starts.py). The program at `script_python()` hands its
command line, variables, folder and standard files to the process of the test, which starts the command as
its own, and ends as that does. It imports nothing of siirl.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import forked_starts

PROGRAM = """#!{python} -IS
import json, os, signal, socket, struct, sys
door = socket.socket(socket.AF_UNIX)
door.connect({place!r})
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(door, [struct.pack("<q", len(asked))], [0, 1, 2])
door.sendall(asked)
code = int(door.recv(64))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def script_python() -> str:
    """Where it is; Python itself where nothing is forked."""
    return _door() if forked_starts.may_fork() else sys.executable


@functools.cache
def _door() -> str:
    folder = Path(tempfile.mkdtemp(prefix="siirl_door_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program, place = folder / "python", str(folder / "door")
    program.write_text(PROGRAM.format(python=sys.executable, place=place))
    program.chmod(0o755)
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return str(program)


def _serve(server: socket.socket) -> None:
    while True:
        threading.Thread(target=_start, args=(server.accept()[0],), daemon=True).start()


def _start(asker: socket.socket) -> None:
    """Start what is asked for, and say how it ended. Whoever goes away meanwhile takes it along."""
    with asker:
        size, fds, _, _ = socket.recv_fds(asker, 8, 3)
        with asker.makefile("rb") as stream:
            words, variables, folder = json.loads(stream.read(*struct.unpack("<q", size)))
        command = [sys.executable, *words]
        process = subprocess.Popen(
            command, env=variables, cwd=folder, stdin=fds[0], stdout=fds[1], stderr=fds[2]
        )
        for fd in fds:
            os.close(fd)
        ended = os.pidfd_open(process.pid)
        if ended not in select.select([asker, ended], [], [])[0]:
            process.terminate()
        os.close(ended)
        with contextlib.suppress(OSError):
            asker.sendall(str(process.wait()).encode())
