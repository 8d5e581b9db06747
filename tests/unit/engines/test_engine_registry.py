"""Every row of the table of backends names a complete engine, and the keys' choices are its rows."""

import importlib

import pytest

from siirl.compiler.backends import ROLLOUT_BACKENDS, TRAIN_BACKENDS
from siirl.config.common import STRATEGIES
from siirl.config.root import all_keys
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.train.base import TrainEngine
from siirl.models.trained import TRAINABLE

ROWS = [(TRAIN_BACKENDS, TrainEngine), (ROLLOUT_BACKENDS, RolloutEngine)]


@pytest.mark.parametrize(
    ("path", "base"),
    [(row.engine, base) for table, base in ROWS for row in table.values()],
)
def test_each_entry_is_a_complete_engine(path, base):
    module, name = path.split(":")
    engine = getattr(importlib.import_module(module), name)
    assert issubclass(engine, base)
    assert not engine.__abstractmethods__


def test_keys_have_the_rows_as_choices():
    keys = {name: key.rule for name, key in all_keys().items() if name.rpartition(".")[2] == "strategy"}
    assert len(keys) == 6
    for name, rule in keys.items():
        others = {"vllm"} if name == "teacher.strategy" else set()  # it scores, and trains nothing
        assert set(rule.choices) - others == set(TRAIN_BACKENDS) == set(TRAINABLE) == set(STRATEGIES)
        assert others <= set(rule.choices)
    rule = all_keys()["actor_rollout_ref.rollout.name"].rule
    assert set(rule.choices) - {"replay", "dataset"} == set(ROLLOUT_BACKENDS)  # these have no engine
    assert not rule.later_choices
