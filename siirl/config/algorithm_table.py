"""The table of advantage estimators and policy losses: all that is known of one besides its code.

Keys, checks, warnings, ops and nodes ask it; the functions in siirl/algorithms are registered under its
names. A new estimator or loss is its function and its row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator."""

    reads: tuple[str, ...]
    """Fields of the rows that its function takes, by position."""
    keys: tuple[str, ...] = ()
    """Keys of the group algorithm that its function takes, by keyword."""
    form: Literal["row", "reward to go", "token"] = "row"
    """A row's tokens have the same advantage; that of the rewards after them; one of their own."""
    by_turn: bool = False
    """Its step is a turn: an episode's score is shared out to the turns."""

    @property
    def compares_groups(self) -> bool:
        """Whether a response is compared with the others of its prompt."""
        return "group_id" in self.reads

    @property
    def uses_critic(self) -> bool:
        """Whether it reads the values of a critic, which learns its returns."""
        return "value" in self.reads

    @property
    def compares_parts(self) -> bool:
        """Whether it compares each of several rewards of a row, not their sum."""
        return "reward_part" in self.reads

    @property
    def uses_greedy(self) -> bool:
        """Whether a prompt's greedy response is scored, too."""
        return "baseline_score" in self.reads


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss."""

    keys: tuple[str, ...] = ()
    """Keys of actor and actor.policy_loss that it takes; of a bound with _low and _high those two."""
    paper_mode: str = "token-mean"
    """The aggregation (loss_agg_mode) of its paper."""
    row_advantage: bool = False
    """It takes one advantage for a row, the mean over its tokens."""
    picks_tokens: bool = False
    """It picks tokens of the whole mini-batch by their log-probs before the update."""
    kinked: bool = False
    """Its slope jumps where the ratio is 1, which it then exactly is in the first mini-batch."""
    imitates: bool = False
    """It makes responses of the data likelier: it reads no advantage, and no log-probs of before the step."""
    distills: bool = False
    """It is the divergence from teachers alone (actor.distill), and reads no advantage."""
    pairs: bool = False
    """It compares the two responses of a prompt, and their log-probs with the reference's."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Keys of the actor that do not go with it, and the keys of policy_loss that say the same."""

    def takes(self, key: str) -> bool:
        """Whether a key of actor or actor.policy_loss, or a bound that stands for two, has a part in it."""
        return key in self.keys or f"{key}_low" in self.keys


AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)
"""How token losses become one number."""

_GROUP = ("reward", "response_mask", "group_id")
ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(("reward", "value", "response_mask"), keys=("gamma", "lam"), form="token"),
    "gae_marft": Estimator(
        ("reward", "value", "turn_id", "episode_id", "other_turns"),
        keys=("gamma", "lam"),
        form="token",
        by_turn=True,
    ),
    "remax": Estimator(("reward", "response_mask", "baseline_score"), form="reward to go"),
    "grpo": Estimator(_GROUP, keys=("norm_adv_by_std_in_grpo",)),
    "rloo": Estimator(_GROUP),
    "opo": Estimator(_GROUP),
    "optimal_token_baseline": Estimator((*_GROUP, "old_log_prob", "old_prob_square"), form="token"),
    "gpg": Estimator(_GROUP),
    "maxrl": Estimator(_GROUP),
    "gdpo": Estimator(("reward_part", "response_mask", "group_id"), keys=("gdpo_rewards",)),
    "grpo_passk": Estimator(_GROUP, keys=("norm_adv_by_std_in_grpo",)),
    "cpgd": Estimator(_GROUP, keys=("weight_factor_in_cpgd",)),
    "reinforce_plus_plus": Estimator(("reward", "response_mask"), keys=("gamma",), form="reward to go"),
    "reinforce_plus_plus_baseline": Estimator(_GROUP),
}
OWN_ESTIMATOR = Estimator(())
"""What is known of an estimator of the user's own: nothing."""

_CLIP = ("clip_ratio_low", "clip_ratio_high")
_ROW = "seq-mean-token-mean"
_GEOMETRIC = PolicyLoss(_CLIP, paper_mode=_ROW, row_advantage=True)
_TRUST_REGION = PolicyLoss(
    ("clip_divergence_low", "clip_divergence_high", "ratio_cap"),
    instead={
        "clip_ratio": "clip_divergence",
        "clip_ratio_low": "clip_divergence_low",
        "clip_ratio_high": "clip_divergence_high",
        "clip_ratio_c": "ratio_cap",
    },
)
LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss((*_CLIP, "clip_ratio_c")),
    "gspo": PolicyLoss(_CLIP, paper_mode=_ROW),
    "gmpo": _GEOMETRIC,
    "geo_mean": _GEOMETRIC,
    "cispo": PolicyLoss(_CLIP),
    "sapo": PolicyLoss(("tau_pos", "tau_neg"), paper_mode=_ROW),
    "gpg": PolicyLoss(),
    "clip_cov": PolicyLoss((*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), picks_tokens=True),
    "kl_cov": PolicyLoss(("kl_cov_ratio", "ppo_kl_coef"), picks_tokens=True, kinked=True),
    "cpgd": PolicyLoss((*_CLIP, "policy_drift_coeff")),
    "dppo_tv": _TRUST_REGION,
    "dppo_kl": _TRUST_REGION,
    "dro": PolicyLoss(("dro_beta",)),
    "vespo": PolicyLoss(("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg")),
    "sft": PolicyLoss(imitates=True),
    "dpo": PolicyLoss(("dpo_beta",), imitates=True, pairs=True),
    "distill": PolicyLoss(distills=True),
}
OWN_LOSS = PolicyLoss()
"""What is known of a policy loss of the user's own: nothing."""

GROUPED = tuple(name for name, row in ESTIMATORS.items() if row.compares_groups)
"""Estimators that compare a response with the others of its prompt."""
WITH_CRITIC = tuple(name for name, row in ESTIMATORS.items() if row.uses_critic)


def row_of(table: Mapping[str, Row], name: str) -> Row:
    """The row of a function of siirl/algorithms. LookupError for one that has none."""
    if name not in table:
        raise LookupError(
            f"{name!r} is a function of siirl/algorithms without a row in siirl/config/algorithm_table.py: "
            f"keys, checks and ops would not know it. Add one, as those of {', '.join(list(table)[:3])}."
        )
    return table[name]


def estimators_with(key: str) -> str:
    """The condition under which a key of the group algorithm acts: the estimators that take it."""
    return f"adv_estimator={'|'.join(name for name, row in ESTIMATORS.items() if key in row.keys)}"


def losses_with(key: str) -> str:
    """The condition under which a key of the group policy_loss acts: the losses that take it."""
    return f"loss_mode={'|'.join(name for name, row in LOSSES.items() if row.takes(key))}"
