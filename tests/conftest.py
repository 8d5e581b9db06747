"""Makes the shared helpers of the test suite importable, and what tests record their results by."""

import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from _pytest.logging import catching_logs

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.append(str(Path(__file__).parents[1] / "tools"))

from cpu_seconds import CpuSeconds
from dist_harness import start_by_forks
from forked_starts import asks, in_the_way

start_by_forks()
SHARED = {
    "sources": "config_keys_are_read field_docs glossary messages_page observe_docs op_table trace_job "
    "waiting",
    "vLLM": "adapter_alone_job kept_tokens moe_main_job native_draws native_places "
    "native_slots native_tokens rollout_engine_contract vllm_heads vllm_job vllm_leftovers vllm_process "
    "vllm_restarts",
    "clients": "outside_choices outside_frameworks outside_round_trips",
    "trl": "algorithms_losses distillation given_responses_job policy_loss_terms reward_training_job",
    "sympy": "rewards_math_table rewards_near_misses",
}
"""Files of `make test` that share what takes seconds: the package's sources, parsed; packages, imported in
their worker or in what it starts."""
SCOPES = {f"test_{name}": scope for scope, names in SHARED.items() for name in names.split()}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers take whole files, and one of them all that share an import of seconds (SHARED)."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByImports(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return SCOPES.get(Path(file).stem, file)

    return ByImports(config, log)


def catch_at_the_root(catching: catching_logs[Any]) -> Any:
    """What pytest does six times a test, without the walk over all loggers to those of packages (vLLM,
    transformers) that tell the root nothing: 1 of the 5 ms that pytest takes of a test."""
    if catching.level is not None:
        catching.handler.setLevel(catching.level)
        catching.orig_level = logging.root.level
        logging.root.setLevel(min(logging.root.level, catching.level))
    logging.root.addHandler(catching.handler)
    catching.attached_loggers.append(logging.root)
    return catching.handler


catching_logs.__enter__ = catch_at_the_root


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """What is set aside below is given back last: after pytest's own two looks for garbage, seconds each."""
    config.add_cleanup(gc.unfreeze)
    if file := os.environ.get("SIIRL_TEST_CPU"):
        config.pluginmanager.register(CpuSeconds(file))


def pytest_sessionstart() -> None:
    """No looking for garbage while everything is imported, and never again in what that leaves."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """With the mark `real_starts`, the commands that a test starts, or a fixture for it, are no forks; with
    SIIRL_TEST_STARTS=real those of tests/e2e are none either."""
    as_a_user = os.environ.get("SIIRL_TEST_STARTS") == "real" and item.path.parent.name == "e2e"
    asks.real = as_a_user or item.get_closest_marker("real_starts") is not None
    try:
        return (yield)
    finally:
        asks.real = False


@pytest.fixture(autouse=True)
def variables_of_a_test_are_set_back() -> Iterator[None]:
    with variables_set_back():
        yield


@pytest.fixture(autouse=True, scope="module")
def variables_of_a_file_are_set_back() -> Iterator[None]:
    with variables_set_back():
        yield


@contextmanager
def variables_set_back() -> Iterator[None]:
    """Those that packages have left as they were imported would stand in the way of forks of later tests."""
    before = dict(os.environ)
    yield
    for name in in_the_way(os.environ, before):
        os.environ.pop(name, None)
        os.environ.update({name: before[name]} if name in before else {})


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A folder that every user of the machine can reach; those above `tmp_path` are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="siirl_test_"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


NEWEST = [""]
"""The module that was imported last when the last test ended: what a test has imported stands behind it."""


@pytest.fixture(autouse=True)
def users_code_is_forgotten() -> Iterator[None]:
    """What files of users have registered while a test ran, the files, and their folders on the path: no test
    knows those of another."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    new = list(takewhile(lambda name: name != NEWEST[0], reversed(sys.modules)))
    for name in [name for name in new if name.startswith("siirl_user_")]:
        del sys.modules[name]
    NEWEST[0] = next(reversed(sys.modules))
    for module, table in (("advantages", "ADVANTAGES"), ("policy_losses", "POLICY_LOSSES")):
        if (loaded := sys.modules.get(f"siirl.algorithms.{module}")) is not None:
            specs = getattr(loaded, table)._specs
            for name in [
                name for name, spec in specs.items() if spec.fn.__module__.startswith("siirl_user_")
            ]:
                del specs[name]
