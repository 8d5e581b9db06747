"""The learning rate follows transformers' schedules, with a floor, as a function of the step alone."""

import pytest
import torch
from transformers import get_scheduler

from siirl.config import load_config, with_overrides
from siirl.engines.train.schedules import learning_rate
from siirl.errors import ConfigError

TOTAL = 40
OPTIM = "actor_rollout_ref.actor.optim"


@pytest.fixture(scope="module")
def config():
    return load_config([])


def optim(config, **values):
    given = {f"{OPTIM}.{name}": value for name, value in values.items()}
    return with_overrides(config, {f"{OPTIM}.lr": 2.0, **given}).actor_rollout_ref.actor.optim


@pytest.mark.parametrize(
    ("style", "theirs"), [("constant", "constant_with_warmup"), ("linear", "linear"), ("cosine", "cosine")]
)
@pytest.mark.parametrize("warmup", [0, 7])
def test_schedules_equal_those_of_transformers(config, style, theirs, warmup):
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = get_scheduler(theirs, sgd, num_warmup_steps=warmup, num_training_steps=TOTAL)
    ours = optim(config, warmup_style=style, lr_warmup_steps=warmup)
    for step in range(TOTAL + 5):
        if step <= TOTAL:  # beyond the end theirs rises again (cosine); ours stays
            assert learning_rate(ours, step, TOTAL) == pytest.approx(sgd.param_groups[0]["lr"], abs=1e-12)
        sgd.step()
        scheduler.step()


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_ends_at_the_floor_and_stays_there(config, style):
    ours = optim(config, warmup_style=style, min_lr_ratio=0.1)
    assert learning_rate(ours, 0, TOTAL) == pytest.approx(2.0)
    assert learning_rate(ours, TOTAL // 2, TOTAL) == pytest.approx(1.1)
    assert learning_rate(ours, TOTAL, TOTAL) == pytest.approx(0.2)
    assert learning_rate(ours, 10 * TOTAL, TOTAL) == pytest.approx(0.2)


def test_cosine_with_more_cycles_comes_back_up(config):
    ours = optim(config, warmup_style="cosine", num_cycles=1.0)
    assert learning_rate(ours, TOTAL // 2, TOTAL) == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(ours, TOTAL, TOTAL) == pytest.approx(2.0)


def test_warmup_can_be_a_share_of_all_steps(config):
    ours = optim(config, lr_warmup_steps_ratio=0.25)
    assert [learning_rate(ours, step, TOTAL) for step in (0, 5, 10, 39)] == [0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("values", [{"warmup_style": "cosine"}, {"lr_warmup_steps_ratio": 0.1}])
def test_schedules_that_need_the_total_say_so(config, values):
    with pytest.raises(ConfigError, match="number of optimizer steps is unknown"):
        learning_rate(optim(config, **values), 0, 0)
