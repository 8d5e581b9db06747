"""The first update of a step is the same whichever micro-batches old and reference log-probs came from.

They are those of the weights that are trained, and so equal to the update's own but for float rounding. Each
loss, form of the KL and mask on micro-batches of 1, 2, 5 and all rows, and on 1 and 2 ranks.
"""

import pytest
import torch
from dist_harness import run_workers
from test_loss_invariance import (
    ACTOR,
    KL_TYPE,
    LOSSES,
    SAMPLES,
    case,
    columns,
    exact_log_probs,
    model_dir,
    plain_hidden,
    plain_outputs,
    plain_words,
    scenario,
    updates,
)
from train_engine_cases import NUM_ROWS

from siirl.algorithms.kl import LEAST_SLOPED
from siirl.config.actor import KL_TYPES

WHOLE = {f"{ACTOR}.ppo_mini_batch_size": NUM_ROWS // SAMPLES, "data.train_batch_size": NUM_ROWS}
"""All rows are the first of two mini-batches, so that losses read old log-probs."""
SHARE = f"{ACTOR}.top_entropy_quantile"
NATS = 1e-6
"""By which log-probs of float32 may differ between micro-batches; the kernels of a processor decide."""


def with_kl(name: str, weighted: bool = False) -> tuple[str, dict]:
    kl = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.5, KL_TYPE: name}
    kl |= {f"{ACTOR}.kl_loss_weighted": True} if weighted else {}
    return case("vanilla", "token-mean", f", {name} KL{', weighted' * weighted}", **kl, **WHOLE)


FEW = dict(
    [
        case("kl_cov", "token-mean", **WHOLE),
        with_kl("abs"),
        with_kl("abs", weighted=True),
        case("vanilla", "token-mean", ", high entropy", **{SHARE: 0.5}, **WHOLE),
    ]
)
FORMS = [*KL_TYPES, *(f"{name}+" for name in KL_TYPES), "full", "full+"]
ALL = FEW | dict(case(loss, "seq-mean-token-mean", **WHOLE) for loss in LOSSES)
ALL |= dict(map(with_kl, FORMS)) | dict(with_kl(name, weighted=True) for name in KL_TYPES)
ALL |= dict(case(loss, "token-mean", ", twice", **WHOLE, **{f"{ACTOR}.ppo_epochs": 2}) for loss in LOSSES)
ALL |= dict(
    case("vanilla", "token-mean", f", share {share}", **{SHARE: share}, **WHOLE) for share in (0.2, 0.8, 0.9)
)


def rows_a_micro_batch(number: int) -> tuple[str, ...]:
    return (f"{ACTOR}.ppo_micro_batch_size_per_gpu={number}",)


def on(world: int, *numbers: int):
    return [
        scenario(f"{number} rows on {world}", world, "fsdp", rows_a_micro_batch(number)) for number in numbers
    ]


def check(cases: dict[str, dict], *scenarios: list) -> None:
    log_prob_BT, entropy_BT = (x.detach() for x in plain_outputs())
    given = columns() | {"old_log_prob": log_prob_BT, "ref_log_prob": log_prob_BT, "old_entropy": entropy_BT}
    given["ref_hidden"] = plain_hidden().detach()
    given |= {"hidden": plain_hidden().detach(), "words": plain_words().detach(), "exact": exact_log_probs()}
    found = {}
    for some in scenarios:
        found |= run_workers(updates, some[0].world, some, cases, model_dir(), given, deadline_s=500)[0]
    assert len(found) == sum(map(len, scenarios)) * len(cases)
    wrong = {}
    for name in cases:
        first, *others = (update.grads for key, update in found.items() if key.endswith(f": {name}"))
        norm = float(torch.stack([grad.norm() for grad in first.values()]).norm())
        assert norm > 1e-3 and others, name
        apart = max(
            float(torch.stack([(grad - other[at]).norm() for at, grad in first.items()]).norm()) / norm
            for other in others
        )
        bar = NATS / LEAST_SLOPED if " abs KL" in name else 5e-5  # a log ratio of NATS has this slope
        wrong |= {name: apart} if apart > bar else {}
    assert not wrong


def test_what_jumps_at_a_ratio_of_1_or_ranks_equal_tokens_is_not_decided_by_rounding():
    check(FEW, on(1, 1, NUM_ROWS), on(2, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_loss_and_kl_gives_the_same_gradient_in_all_micro_batches():
    check(ALL, on(1, 1, 2, 5, NUM_ROWS), on(2, 1, 2, 5))
