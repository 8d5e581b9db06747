"""CPU seconds of each test: of its process and of all below it, those that it has waited for among them.

    SIIRL_TEST_CPU=FILE make test    python tests/support/cpu_seconds.py FILE

Wall times say little where others use the machine, and nothing of what a test starts. The first test that
needs the process which imports everything (nursery.py) pays for it.
"""

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_starts import asks

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def seconds_below(root: int) -> float:
    """Of those below a process, and those that any of them has waited for."""
    ticks, left = 0, children(root)
    while left:
        pid = left.pop()
        with contextlib.suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            ticks += sum(map(int, fields[11:15]))
            left += children(pid)
    return ticks / TICKS_PER_S


def children(pid: int) -> list[int]:
    """Of each of its threads. A look at all processes of the machine would take as long as a small test."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # it has ended
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


class CpuSeconds:
    """Adds a line for each test to a file: its name, CPU seconds, seconds, how many commands of siirl it
    started that imported for themselves (forked_starts.py), seconds each, and why."""

    def __init__(self, file: str) -> None:
        self.file = file
        Path(f"/proc/self/task/{os.getpid()}/children").read_text()  # some kernels are built without it

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        below_s, began_s, imported = seconds_below(os.getpid()), time.monotonic(), len(asks.imported)
        own_s = seconds_of_this()  # what the looks at others take is no part of it
        found = yield
        own_s, took_s = seconds_of_this() - own_s, time.monotonic() - began_s
        why = asks.imported[imported:]
        row = (item.nodeid, own_s + seconds_below(os.getpid()) - below_s, took_s, len(why), "; ".join(why))
        with open(self.file, "a") as out:
            out.write("{}\t{:.3f}\t{:.2f}\t{}\t{}\n".format(*row))
        return found


def seconds_of_this() -> float:
    """Of this process and of those that it has waited for."""
    return time.process_time() + sum(os.times()[2:4])


def table(file: str, longest: int = 60) -> str:
    """The files that take the most, with the commands that imported for themselves, and the rooms."""
    files, rooms, imports = defaultdict(float), defaultdict(float), defaultdict(int)
    for line in Path(file).read_text().splitlines():
        name, cpu_s, _, imported = (*line.split("\t"), 0)[:4]
        path = name.split("::")[0]
        files[path] += float(cpu_s)
        rooms["/".join(path.split("/")[:2])] += float(cpu_s)
        imports[path] += int(imported)
    rows = sorted(files.items(), key=lambda row: -row[1])[:longest]
    rows += [*sorted(rooms.items()), ("all", sum(rooms.values()))]
    return "\n".join(f"{cpu_s:8.1f} {imports[name] or '':4}  {name}" for name, cpu_s in rows)


if __name__ == "__main__":
    print(table(sys.argv[1]))
