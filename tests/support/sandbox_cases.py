"""Hostile programs for the sandbox: code, what must come of it. Also run by a plain user, as a script."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from siirl.sandbox.box import Box
from siirl.sandbox.limits import MIB, Limits, Result

LIMITS = Limits(time_s=0.5, memory_bytes=256 * MIB, file_bytes=4 * MIB, processes=6, output_bytes=100_000)
SECRET = "the-crown-jewels"


@dataclass(frozen=True)
class Hostile:
    """code: {outside} is a folder outside that everybody may write to, {victim} a process id outside."""

    code: str
    holds: Callable[[Result], bool]


def refused(result: Result) -> bool:
    return result.status in ("failed", "timeout") and "DONE" not in result.stdout


def timed_out(result: Result) -> bool:
    return result.status == "timeout" and result.time_s < LIMITS.time_s + 3


def survived(result: Result) -> bool:
    """It may do as it likes, within its own walls."""
    return result.status != "output" and SECRET not in result.stdout


HOSTILE = {
    "infinite loop": Hostile("while True: pass", timed_out),
    "sleep": Hostile("import time; time.sleep(1000)", timed_out),
    "fork bomb": Hostile(
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        timed_out,
    ),
    "thread bomb": Hostile(
        """
import threading, time
for _ in range(10000):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print("DONE")
""",
        refused,
    ),
    "10 GB": Hostile("x = bytearray(10 << 30); print('DONE')", refused),
    "10 GB by and by": Hostile(
        "x = []\nfor _ in range(10240): x.append(b'x' * (1 << 20))\nprint('DONE')", refused
    ),
    "huge output": Hostile(
        "while True: print('x' * 10000)",
        lambda result: result.status == "output" and len(result.stdout) == LIMITS.output_bytes,
    ),
    "huge stderr": Hostile(
        "import sys\nwhile True: sys.stderr.write('x' * 10000)",
        lambda result: result.status == "output" and len(result.stderr) == LIMITS.output_bytes,
    ),
    "huge file": Hostile("open('f', 'wb').write(b'x' * (64 << 20)); print('DONE')", refused),
    "environment": Hostile(
        """
import glob, os
print(dict(os.environ))
for file in glob.glob("/proc/*/environ"):
    try:
        print(open(file).read())
    except OSError:
        pass
""",
        survived,
    ),
    "reading outside": Hostile("print(open('{outside}/secret').read(), 'DONE')", refused),
    "listing outside": Hostile("import os; print(os.listdir('{outside}'), 'DONE')", refused),
    "reading accounts": Hostile("print(open('/etc/passwd').read(), 'DONE')", refused),
    "writing outside": Hostile("open('{outside}/written', 'w').write('x'); print('DONE')", refused),
    "truncating outside": Hostile("import os; os.truncate('{outside}/secret', 0); print('DONE')", refused),
    "removing outside": Hostile("import os; os.unlink('{outside}/secret'); print('DONE')", refused),
    "changing rights outside": Hostile("import os; os.chmod('{outside}/secret', 0); print('DONE')", refused),
    "writing to libraries": Hostile("import os; open(os.__file__, 'a').write('x'); print('DONE')", refused),
    "symlink to a file": Hostile(
        "import os; os.symlink('{outside}/secret', 's'); print(open('s').read(), 'DONE')", refused
    ),
    "symlink to a folder": Hostile(
        "import os; os.symlink('{outside}', 'd'); open('d/written', 'w').write('x'); print('DONE')", refused
    ),
    "climbing": Hostile("open('../../../../../../../../{outside}/written', 'w'); print('DONE')", refused),
    "internet socket": Hostile("import socket; socket.socket(); print('DONE')", refused),
    "unix socket": Hostile("import socket; socket.socket(socket.AF_UNIX); print('DONE')", refused),
    "datagram pair": Hostile(
        "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); print('DONE')", refused
    ),
    "name lookup": Hostile(
        "import socket; socket.create_connection(('localhost', 80), timeout=1); print('DONE')", refused
    ),
    "kill the parent": Hostile("import os; os.kill(os.getppid() or 1, 9)", survived),
    "kill a victim": Hostile("import os; os.kill({victim}, 9); print('DONE')", refused),
    "kill everybody": Hostile("import os; os.kill(-1, 9)", survived),
    "kill the group": Hostile("import os, signal; os.killpg(0, 9)", survived),
    "trace a victim": Hostile(
        """
import ctypes
libc = ctypes.CDLL(None)
assert libc.ptrace(16, {victim}, 0, 0) == 0
print("DONE")
""",
        refused,
    ),
    "become root": Hostile(
        "import os; os.setuid(0); print('DONE' if os.getuid() else os.chroot('/'))", survived
    ),
    "new namespace": Hostile(
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0; print('DONE')", refused
    ),
    "io_uring": Hostile(
        "import ctypes; assert ctypes.CDLL(None).syscall(425, 8, 0) >= 0; print('DONE')", refused
    ),
    "more memory by another limit": Hostile(
        """
import resource
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("DONE")
""",
        refused,
    ),
    "a limit of another process": Hostile(
        "import resource; resource.prlimit({victim}, resource.RLIMIT_CPU, (1, 1)); print('DONE')", refused
    ),
    "daemon": Hostile(
        """
import os, time
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(1000)
        os._exit(0)
except OSError:
    pass
""",
        survived,
    ),
    "outlives its sandbox": Hostile(
        "import ctypes; assert ctypes.CDLL(None).prctl(1, 0) == 0; print('DONE')", refused
    ),
    "messages to the launcher": Hostile(
        """
import os
for descriptor in range(3, 1000):
    try:
        os.write(descriptor, b"\\0\\0\\0\\x02{}")
        print("DONE")
    except OSError:
        pass
""",
        lambda result: result.status == "ok" and not result.stdout,
    ),
    "unreadable folders": Hostile(
        "import os; os.makedirs('a/b'); os.mkdir('c', 0); open('a/b/f', 'w')", survived
    ),
    "deep folders": Hostile(
        """
import os
try:
    for _ in range(600):
        os.mkdir("d")
        os.chdir("d")
except OSError:
    pass
""",
        survived,
    ),
    "abort": Hostile("import os; os.abort()", lambda result: result.status == "failed" and result.exit < 0),
    "segmentation fault": Hostile(
        "import ctypes; ctypes.string_at(0)", lambda result: result.status == "failed" and result.exit < 0
    ),
}


def run_all(mode: str, outside: Path, victim: int) -> dict[str, str]:
    """Run every hostile program in one box; name -> what went wrong, for those that were not held."""
    secret = outside / "secret"
    wrong = {}
    with Box(mode) as box:
        for name, hostile in HOSTILE.items():
            code = hostile.code.replace("{outside}", str(outside)).replace("{victim}", str(victim))
            result = box.run(code, limits=LIMITS)
            if not hostile.holds(result) or SECRET in result.stdout + result.stderr:
                wrong[name] = str(result)[:2000]
            if secret.read_text() != SECRET or (outside / "written").exists():
                wrong[name] = "it changed a file outside"
            os.kill(victim, 0)
        assert box.run("print(input())", "still here").stdout == "still here\n"
    return wrong


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "secret").write_text(SECRET)
        print(json.dumps(run_all(sys.argv[1], Path(folder), os.getpid())))
