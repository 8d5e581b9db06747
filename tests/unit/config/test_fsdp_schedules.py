"""The learning rate follows transformers' and Megatron's schedules as a function of the step alone."""

import pytest
import torch
from transformers import get_scheduler

from siirl.config import load_config, with_overrides
from siirl.config.checks import check_config
from siirl.engines.train.optimizer import learning_rate
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


MEGATRON = [
    {"lr_decay_style": "constant"},
    {"lr_decay_style": "linear", "lr_decay_steps": 30},
    {"lr_decay_style": "cosine"},
    {"lr_decay_style": "inverse-square-root"},
    *(
        {"lr_decay_style": "WSD", "lr_wsd_decay_steps": 12, "lr_wsd_decay_style": style}
        for style in ("exponential", "linear", "cosine", "minus_sqrt")
    ),
]


@pytest.mark.parametrize("values", MEGATRON, ids=lambda values: "-".join(map(str, values.values())))
@pytest.mark.parametrize("warmup", [0, 7])
def test_schedules_by_megatrons_names_equal_megatrons(config, values, warmup):
    from types import SimpleNamespace

    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    ours = optim(config, lr_warmup_steps=warmup, lr_warmup_init=0.25, min_lr=0.5, **values)
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]),
        init_lr=0.25,
        max_lr=2.0,
        min_lr=0.5,
        lr_warmup_steps=warmup,
        lr_decay_steps=values.get("lr_decay_steps", TOTAL),
        lr_decay_style=values["lr_decay_style"],
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=values.get("lr_wsd_decay_steps"),
        lr_wsd_decay_style=values.get("lr_wsd_decay_style"),
    )
    for step in range(TOTAL + 5):
        theirs.num_steps = step
        expected = theirs.get_lr({"max_lr": 2.0, "min_lr": 0.5})
        assert learning_rate(ours, step, TOTAL) == pytest.approx(expected, abs=1e-12), step


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"min_lr": 3.0}, "min_lr=3 is more than"),
        ({"min_lr": 0.5, "min_lr_ratio": 0.1}, "both name the final learning rate"),
        ({"lr_decay_style": "linear", "warmup_style": "cosine"}, "both name the schedule"),
        ({"lr_decay_style": "WSD"}, "Set {}.lr_wsd_decay_steps"),
    ],
)
@pytest.mark.parametrize("group", [OPTIM, "critic.optim"])
def test_schedules_that_contradict_themselves_are_refused(config, group, values, problem):
    given = {f"{group}.{name}": value for name, value in values.items()}
    gae = {"algorithm.adv_estimator": "gae"}
    with pytest.raises(ConfigError) as caught:
        check_config(with_overrides(config, {f"{group}.lr": 2.0, **given, **gae}))
    assert problem.format(group) in str(caught.value)


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
