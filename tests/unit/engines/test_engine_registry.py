"""The registry names every backend once, and says what it knows when a name is wrong."""

import dataclasses
import importlib

import pytest

from siirl.compiler.models import ROLLOUT_BACKENDS, TRAIN_BACKENDS
from siirl.compiler.plan import ModelPlan
from siirl.config.actor import STRATEGIES
from siirl.config.root import all_keys
from siirl.engines.engine_registry import (
    ROLLOUT_ENGINES,
    TRAIN_ENGINES,
    make_rollout_engine,
    make_train_engine,
)
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.train.base import TrainEngine
from siirl.errors import ConfigError, NotSupportedError
from siirl.parallel.dims import ParallelDims

PLAN = ModelPlan("agent_0.actor", 0, "actor", "fsdp", "lm", True, (0,), ParallelDims(1), "actor_train", ())


@pytest.mark.parametrize(
    ("path", "base"),
    [(path, TrainEngine) for heads in TRAIN_ENGINES.values() for path in heads.values()]
    + [(path, RolloutEngine) for path in ROLLOUT_ENGINES.values()],
)
def test_each_entry_is_a_complete_engine(path, base):
    module, name = path.split(":")
    engine = getattr(importlib.import_module(module), name)
    assert issubclass(engine, base)
    assert not engine.__abstractmethods__


def test_keys_compiler_and_registry_know_the_same_backends():
    keys = {name: key.rule for name, key in all_keys().items() if name.rpartition(".")[2] == "strategy"}
    assert len(keys) == 4
    for rule in keys.values():
        assert set(rule.choices) == set(TRAIN_ENGINES) == set(TRAIN_BACKENDS) == set(STRATEGIES)
    rule = all_keys()["actor_rollout_ref.rollout.name"].rule
    assert set(rule.choices) - {"replay"} == set(ROLLOUT_ENGINES)  # a replay has no engine
    assert set(ROLLOUT_ENGINES) | set(rule.later_choices) == set(ROLLOUT_BACKENDS)


@pytest.mark.parametrize(
    ("make", "name", "kind", "guess"),
    [
        (make_train_engine, "fspd", "strategy", "'fsdp'"),
        (make_rollout_engine, "hff", "rollout engine", "'hf'"),
    ],
)
def test_an_unknown_backend_lists_the_known_ones_and_the_closest(make, name, kind, guess):
    plan = dataclasses.replace(PLAN, backend=name)
    with pytest.raises(ConfigError) as caught:
        make(plan, None, None, None)
    message = str(caught.value)
    assert all(part in message for part in (kind, repr(name), "agent_0.actor", "known are", guess))


def test_a_head_that_a_strategy_lacks_is_refused(monkeypatch):
    monkeypatch.delitem(TRAIN_ENGINES["fsdp"], "score")
    with pytest.raises(NotSupportedError, match="score head"):
        make_train_engine(dataclasses.replace(PLAN, head="score"), None, None, None)
