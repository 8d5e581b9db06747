"""Where siiRL and verl define an algorithm otherwise: theirs, written from their definition, beside ours."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from siirl.algorithms.advantages import compute_advantage
from siirl.algorithms.aggregate import aggregate_loss
from siirl.algorithms.policy_losses import compute_policy_loss
from siirl.algorithms.rollout_correction import Correction, correction_weights
from siirl.algorithms.turns import NO_TURNS

PAGE = (Path(__file__).parents[3] / "docs" / "migration_reference.md").read_text()
OPTIONS = {"norm_adv_by_std_in_grpo": True, "gamma": 1.0, "lam": 1.0}
LOSS_OPTIONS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "policy_drift_coeff": 0.0}
ONES = torch.ones(1, 3, dtype=torch.bool)
TOOL = torch.tensor([[True, False, True]])


def close(got: Tensor, want: Tensor) -> bool:
    return bool(torch.allclose(got.double(), want.double(), rtol=1e-5, atol=1e-6))


def ours(name: str, score: list[float], group: list[int], **options: object) -> Tensor:
    """Our advantage of each row, of rows with one token."""
    fields = {
        "reward": torch.tensor(score, dtype=torch.float64)[:, None],
        "response_mask": torch.ones(len(score), 1, dtype=torch.bool),
        "group_id": torch.tensor(group),
    }
    return compute_advantage(name, fields, OPTIONS | options).advantage_BT[:, 0]


def less_mean(score: Tensor, group: Tensor) -> Tensor:
    """Theirs: the score less its group's mean; less 0 in a group of one row."""
    out = score.clone()
    for g in group.unique():
        if int((group == g).sum()) > 1:
            out[group == g] -= score[group == g].mean()
    return out


def one_row_groups() -> None:
    for name in ("grpo", "rloo", "opo", "gpg", "cpgd", "reinforce_plus_plus_baseline"):
        assert ours(name, [0.7], [0], weight_factor_in_cpgd="naive").tolist() == [0.0], name
    theirs = less_mean(torch.tensor([0.7]), torch.tensor([0]))
    assert theirs.tolist() == pytest.approx([0.7])


def alpha_of_gpg() -> None:
    score, group = torch.tensor([0.0, 1, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 2, 2])
    rows, nonzero, signal = 6, 3, 2
    centred = less_mean(score, group)
    theirs, mine = rows / nonzero * centred, ours("gpg", score.tolist(), group.tolist())
    assert close(mine, rows / signal * centred) and not close(mine, theirs)
    assert close(mine * signal / nonzero, theirs)


def weight_of_cpgd() -> None:
    score, group = torch.tensor([0.0, 1, 1, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 1])
    groups_that_vary, rows_with_signal = 1, 3
    centred = less_mean(score, group)
    mine = ours("cpgd", score.tolist(), group.tolist(), weight_factor_in_cpgd="clip_filter_like_weight")
    theirs = centred * min(6 / groups_that_vary, 3.0)
    assert close(mine, centred * 6 / rows_with_signal) and not close(mine, theirs)


def value_of_cpgd() -> None:
    """Theirs clips log pi on the side of A, ours the log ratio: the same gradient, another value."""
    log_prob = torch.tensor([[-1.0, -0.3, -2.0]], requires_grad=True)
    old, advantage = torch.tensor([[-1.1, -1.3, -0.5]]), torch.tensor([[1.0, 1.0, -1.0]])
    held = torch.where(
        advantage > 0,
        torch.minimum(log_prob, old + math.log(1.3)),
        torch.maximum(log_prob, old + math.log(0.8)),
    )
    theirs = -held * advantage
    mine = compute_policy_loss("cpgd", log_prob, old, advantage, ONES, LOSS_OPTIONS).loss_BT
    assert close(mine, theirs + old * advantage)
    grads = [torch.autograd.grad(x.sum(), log_prob)[0] for x in (mine, theirs)]
    assert close(*grads)


def turns_of_gae_marft() -> None:
    """Theirs discounts from token to token through all turns, ours from turn to turn."""
    value, reward = torch.tensor([[0.1, 0.5, 0.2, 0.9]]), torch.tensor([[0.0, 0, 0, 1]])
    gamma, later, theirs = 0.9, 0.0, []
    next_value = 0.0
    for t in (3, 2, 1, 0):
        later = float(reward[0, t]) + gamma * next_value - float(value[0, t]) + gamma * later
        theirs.insert(0, later)
        next_value = float(value[0, t])
    fields = {"reward": reward, "value": value, "turn_id": torch.tensor([[0, 0, 1, 1]])}
    fields |= {"episode_id": torch.zeros(1, dtype=torch.int64), "other_turns": NO_TURNS}
    mask = torch.ones(1, 4, dtype=torch.bool)
    found = compute_advantage("gae_marft", fields | {"response_mask": mask}, OPTIONS | {"gamma": gamma})
    returns = found.return_BT[0]
    assert close(returns, torch.tensor([gamma, gamma, 1.0, 1.0]))
    assert not close(returns, torch.tensor(theirs) + value[0])


def bounds_of_rejection() -> None:
    """verl bounds rollout over trainer by _k1 options, ours trainer over rollout; ours keep the counts."""
    log_ratio = torch.tensor([[0.4, 0.5, 0.3]])
    low, high = 0.9, 5.0
    k1 = float(-log_ratio.mean())
    theirs = math.log(low) <= k1 <= math.log(high)

    def kept(low: float, high: float) -> bool:
        correction = Correction(reject="geometric", reject_low=low, reject_high=high)
        return bool(correction_weights(log_ratio, ONES, correction).all())

    assert kept(low, high) and not theirs and kept(1 / high, 1 / low) == theirs


def rejected_rows() -> None:
    """verl takes rejected rows out of the counts; ours give them weight 0."""
    loss, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    log_ratio = torch.tensor([[0.0, 0, 0], [3, 3, 3]])
    weight = correction_weights(log_ratio, mask, Correction(reject="geometric"))
    mine = aggregate_loss(loss * weight, mask, "token-mean", 6, 2, 3)
    accepted = weight.bool()
    assert mine.item() == 0.5 and (loss * accepted).sum() / accepted.sum() == 1.0


def rejection_by_token() -> None:
    """verl's token_k1 leaves out the token, ours the row; weight=filter is by token."""
    log_ratio = torch.tensor([[0.0, 0, 2]])
    theirs = log_ratio.abs() <= math.log(2)
    mine = correction_weights(log_ratio, ONES, Correction(reject="token"))
    assert mine.tolist() == [[0, 0, 0]] and theirs.tolist() == [[True, True, False]]
    by_token = correction_weights(log_ratio, ONES, Correction(weight="filter", low=0.5, high=2.0))
    assert torch.equal(by_token, theirs.float())


def at_tool_tokens(name: str, theirs: list[float]) -> None:
    """A reward of 1 at a tool token between two tokens of the policy, before whitening."""
    from siirl.algorithms.advantages import ADVANTAGES

    reward = torch.tensor([[0.0, 1.0, 0.0]])
    given = {"reward": reward, "response_mask": TOOL, "value": torch.zeros(1, 3)}
    given["baseline_score"] = torch.zeros(1)
    spec = ADVANTAGES.get(name)
    options = {key: 1.0 for key in spec.options}
    mine = spec.fn(*(given[need] for need in spec.needs), **options).advantage_BT[0]
    assert mine.tolist() == [1.0, 0.0, 0.0]
    assert mine[TOOL[0]].tolist() != theirs


def rewards_at_tool_tokens() -> None:
    reward, mask = [0.0, 1.0, 0.0], [1, 0, 1]
    last, gae = 0.0, [0.0] * 3
    for t in (2, 1, 0):
        last = reward[t] + last if mask[t] else last
        gae[t] = last
    at_tool_tokens("gae", [gae[0], gae[2]])
    running, to_go = 0.0, [0.0] * 3
    for t in (2, 1, 0):
        to_go[t] = reward[t] + running
        running = to_go[t] * mask[t]
    at_tool_tokens("reinforce_plus_plus", [to_go[0], to_go[2]])
    at_tool_tokens("remax", [sum(r * m for r, m in zip(reward[t:], mask[t:], strict=True)) for t in (0, 2)])


def constant_length() -> None:
    """siiRL divides the sums by the width alone, ours and verl by rows, too."""
    loss = torch.ones(4, 3)
    mine = aggregate_loss(loss, torch.ones(4, 3), "seq-mean-token-sum-norm", 12, 4, 3)
    assert mine.item() * 4 == loss.sum().item() / 3


def mean_of_rows() -> None:
    """Theirs takes GSPO's, GMPO's and SAPO's mean over rows, whatever loss_agg_mode says."""
    loss, mask = torch.tensor([[1.0, 1, 1], [4, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    theirs = (loss.sum(-1) / mask.sum(-1)).mean().item()
    modes = {mode: aggregate_loss(loss, mask, mode, 4, 2, 3).item() for mode in ("token-mean", MEAN_OF_ROWS)}
    assert modes == {"token-mean": 7 / 4, MEAN_OF_ROWS: theirs}


MEAN_OF_ROWS = "seq-mean-token-mean"


def weights_of_gmpo() -> None:
    """verl joins a row's weights of correction to their geometric mean, ours weigh the tokens."""
    log_prob = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    weight, options = torch.tensor([[0.25, 1.0, 4.0]]), LOSS_OPTIONS
    columns = (log_prob, log_prob.detach(), torch.ones(1, 3), ONES)
    mine = (compute_policy_loss("gmpo", *columns, options).loss_BT * weight).sum()
    (grad,) = torch.autograd.grad(mine, log_prob)
    assert close(grad, -weight) and not close(grad, -torch.full((1, 3), float(weight.log().mean().exp())))


CASES: dict[str, Callable[[], None]] = {
    "a group of one row": one_row_groups,
    "alpha of GPG": alpha_of_gpg,
    "`clip_filter_like_weight` of CPGD": weight_of_cpgd,
    "value of CPGD's loss": value_of_cpgd,
    "`gae_marft`": turns_of_gae_marft,
    "bounds of rejection": bounds_of_rejection,
    "counts after rejection": rejected_rows,
    "rejection by token": rejection_by_token,
    "rewards at tool tokens": rewards_at_tool_tokens,
    "`seq-mean-token-sum-norm`": constant_length,
    "`loss_agg_mode` of GSPO, GMPO, SAPO": mean_of_rows,
    "weights of rollout correction under GMPO": weights_of_gmpo,
}


def test_the_page_has_each_convention_and_no_other():
    section = PAGE[PAGE.index("## Conventions that differ") :].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[1:]
    assert rows == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_convention_differs_as_the_page_says(name):
    CASES[name]()
