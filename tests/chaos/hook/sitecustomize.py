"""Imported by every Python process of a run under chaos: holds it where a case strikes, until that is done.

CHAOS_DIR/strike.json says which process in which phase is wanted. The first that comes there leaves its pid
in `reached_N`, and waits for `struck_N` (or for its end).
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(os.environ["CHAOS_DIR"])
PATIENCE_S = 120


def reach(phase: str, step: int = 0) -> None:
    """This process comes to a phase; it may be the one that a case waits for."""
    try:
        wanted = json.loads((FOLDER / "strike.json").read_text())
    except (OSError, ValueError):  # there is none yet, or no more
        return
    number, rank = wanted["number"], int(os.environ.get("RANK", 0))
    reached, struck = (FOLDER / f"{word}_{number}" for word in ("reached", "struck"))
    if (phase, rank) != (wanted["phase"], wanted["rank"]) or step < wanted["step"] or struck.exists():
        return
    # Of this thread: another one that came here would empty the file that is linked.
    aside = FOLDER / f"aside_{os.getpid()}_{threading.get_ident()}"
    aside.write_text(json.dumps({"pid": os.getpid(), "step": step}))
    with contextlib.suppress(FileExistsError):
        os.link(aside, reached)
        deadline = time.monotonic() + PATIENCE_S
        while not struck.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    aside.unlink()


def hold_in_spans(module) -> None:
    """Every span of the loop is a phase, from its beginning."""
    span = module.Observer.span

    @functools.wraps(span)
    @contextlib.contextmanager
    def held(observer, name, step, *args, **named):
        with span(observer, name, step, *args, **named):
            reach(name, step)
            yield

    module.Observer.span = held


def hold_before_publishing(module) -> None:
    """A checkpoint whose files are written, but not its manifest."""
    write_manifest = module.write_manifest

    @functools.wraps(write_manifest)
    def held(checkpoint, step, *args):
        reach("write in memory" if checkpoint.is_relative_to("/dev/shm") else "write", step)
        write_manifest(checkpoint, step, *args)

    module.write_manifest = held


def hold_half_a_sync(module) -> None:
    """An engine has begun to replace its weights, and no tensor is there."""
    update = module.EngineWeights._update

    @functools.wraps(update)
    def held(*args):
        reach("half a sync")
        update(*args)

    module.EngineWeights._update = held


def start_standbys_at_once(module) -> None:
    """Not only after a minute, if the case asks for it."""
    if "CHAOS_STANDBYS" in os.environ:
        module.AFTER_S = 0.0


CHANGED = {
    "siirl.observe.spans": hold_in_spans,
    "siirl.checkpoint.files": hold_before_publishing,
    "siirl.launch.standbys": start_standbys_at_once,
    "siirl.engines.weights.engine_loader": hold_half_a_sync,
}


class Loader(importlib.abc.Loader):
    """Loads a module as ever, then changes it."""

    def __init__(self, loader, change):
        self.loader, self.change = loader, change

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.change(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in CHANGED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = Loader(spec.loader, CHANGED[fullname])
        return spec


for name in CHANGED.keys() & sys.modules.keys():  # this process is a fork of one that has imported them
    CHANGED[name](sys.modules[name])
sys.meta_path.insert(0, Finder())
