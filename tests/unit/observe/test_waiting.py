"""Wherever the loop's ranks meet outside a model's own passes, the time is counted as waiting."""

import ast
import threading

import pytest
from package_sources import PACKAGE, package_nodes

from siirl.observe.metrics import Metrics
from siirl.observe.spans import Observer, observing, waiting

ROOMS = (
    *("nodes", "data", "dag_worker", "checkpoint"),
    *("engines/weights/link.py", "engines/weights/shard_sync.py", "engines/train/stepping.py"),
)
FILES = sorted(
    file for room in ROOMS for file in [PACKAGE / room, *(PACKAGE / room).rglob("*.py")] if file.is_file()
)
COUNTED = ("waiting()", "self.named(")  # the second is RouteTalk's, which counts and names the route
OUTSIDE = ("common_zero_s", "_ask", "join_on_first", "_receive")
"""The clocks' comparison before the first step, and the joining of what a step has counted."""
NO_MEETINGS = ("get_", "is_", "new_group", "init_", "destroy_")


def meetings(tree: ast.AST, waits: bool = False):
    """(line, whether it is counted) of each call of a collective of torch.distributed."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name in OUTSIDE:
            continue
        called = node.func if isinstance(node, ast.Call) else None
        meets = isinstance(called, ast.Attribute) and ast.unparse(called.value) == "dist"
        if meets and not called.attr.startswith(NO_MEETINGS) and called.attr.islower():
            yield node.lineno, waits
        inside = isinstance(node, ast.With) and any(
            ast.unparse(item.context_expr).startswith(COUNTED) for item in node.items
        )
        yield from meetings(node, waits or inside)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_collective_counts_as_waiting(file):
    assert [line for line, waits in meetings(package_nodes()[file][0]) if not waits] == []


def test_the_rooms_have_collectives():
    assert sum(len(list(meetings(package_nodes()[file][0]))) for file in FILES) > 20


def test_what_another_thread_waits_for_does_not_hold_up_the_loop():
    observer = Observer()

    def wait():
        with waiting():
            pass

    with observing(observer):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        observer.drain_idle(apart := Metrics())
        wait()
        observer.drain_idle(own := Metrics())
    assert apart.values()["perf/idle_s"] == 0 < own.values()["perf/idle_s"]
    with waiting():
        pass
