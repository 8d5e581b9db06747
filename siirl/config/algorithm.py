"""Group algorithm."""

from dataclasses import dataclass
from typing import Any

from siirl.config.actor import EMBODIED, KL_TYPES
from siirl.config.algorithm_table import ESTIMATORS, GROUPED, OWN_ESTIMATOR, Estimator, estimators_with
from siirl.config.keys import group, key


@dataclass(frozen=True)
class KLControlConfig:
    """Weight of the KL penalty in the reward."""

    type: str = key("fixed", "fixed, or adapted towards target_kl", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "weight, at the start if adaptive", when="algorithm.use_kl_in_reward", low=0)
    target_kl: float = key(0.1, "KL that the adaptive weight aims at", when="type=adaptive", low=0)
    horizon: int = key(10000, "samples over which it adapts", when="type=adaptive", low=1)


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling: drop prompts whose samples all score alike."""

    enable: bool = key(False, "drop such prompts and sample further ones until the batch is full")
    metric: str = key(
        "acc",
        "value that must vary: score, or a name that the reward function returns (acc: else the score)",
        when="enable",
    )
    max_num_gen_batches: int = key(10, "most batches sampled for one step; 0: no limit", when="enable", low=0)


WITH_GROUPS = f"algorithm.adv_estimator={'|'.join(GROUPED)}"


@dataclass(frozen=True)
class CreditConfig:
    """Whose rewards count for whom in an interaction of agents, and what an advantage is compared with."""

    own: float = key(1.0, "weight of the agent's own score")
    turn: float = key(1.0, "weight of the environment's rewards, at the end of each turn")
    team: float = key(0.0, "weight of the mean score of the other agents of the episode")
    group_by: tuple[str, ...] = key(
        ("task",),
        "what rows that are compared have in common: any of task, agent, turn (then turns are compared, not "
        "rows), branch (the turn where their episodes branch), and a function of your own: file.py:name",
        when=WITH_GROUPS,
    )
    turn_gamma: float = key(
        1.0,
        "discount per turn of later rewards where turns are compared; 0: each turn's own reward",
        when=WITH_GROUPS,
        low=0,
    )
    normalize: str = key(
        "none",
        "agent: advantages of each agent get mean 0 and deviation 1 over the batch",
        choices=("none", "agent"),
    )
    equal_weight: str = key(
        "none",
        "what has the same share of the policy loss, however long it is: each turn, row or episode; none: as "
        "loss_agg_mode has it",
        choices=("none", "turn", "row", "episode"),
    )


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages and what goes into the reward."""

    gamma: float = key(
        1.0,
        "discount per token (gae_marft: per turn)",
        when=estimators_with("gamma"),
        low=0,
    )
    lam: float = key(
        1.0,
        "lambda of GAE: 1 is the whole return, 0 one step of the critic",
        when=estimators_with("lam"),
        low=0,
    )
    adv_estimator: str = key(
        "gae",
        "advantage estimator, or a function of your own: file.py:name",
        choices=tuple(ESTIMATORS),
        user_code=True,
    )
    kl_penalty: str = key(
        "kl",
        "estimator of the KL in the reward",
        when="use_kl_in_reward",
        choices=KL_TYPES,
        later_choices={"full": "KL over the whole vocabulary in the reward; use actor.kl_loss_type=full"},
    )
    kl_ctrl: KLControlConfig = group(KLControlConfig, "weight of the KL in the reward")
    use_kl_in_reward: bool = key(
        False, "subtract the KL from the reference model from the reward of each token"
    )
    share_reward_in_agent: bool = key(
        True,
        "an agent of an interaction without a reward node of its own gets the scores of the others; False: "
        "agents see no score but their own",
    )
    credit: CreditConfig = group(CreditConfig, "rewards and advantages in an interaction of agents")
    norm_adv_by_std_in_grpo: bool = key(
        True,
        "divide group-relative advantages by the group's standard deviation (False: Dr.GRPO)",
        when=estimators_with("norm_adv_by_std_in_grpo"),
    )
    weight_factor_in_cpgd: str = key(
        "STD_weight",
        "weight of cpgd's advantages: 1 / deviation of the group, the share of rows with signal, or 1",
        when=estimators_with("weight_factor_in_cpgd"),
        choices=("STD_weight", "clip_filter_like_weight", "naive"),
    )
    gdpo_rewards: dict[str, Any] = key(
        {},
        "rewards that gdpo compares one by one, and their weights: reward nodes by name, numbers that the "
        "reward function returns, or score",
        when=estimators_with("gdpo_rewards"),
    )
    workflow_type: str = key(
        "default",
        "kind of workflow",
        choices=("default", "dapo"),
        later_choices={"embodied": EMBODIED},
    )
    filter_groups: FilterGroupsConfig = group(FilterGroupsConfig, "dynamic sampling (DAPO)")
    use_pf_ppo: bool = key(False, "resample the rows of a batch by reward before training (PF-PPO)")
    pf_ppo: dict[str, Any] = key(
        {},
        "how: reweight_method (pow, max_min, max_random) and, for pow, weight_pow",
        when="use_pf_ppo",
    )

    @property
    def estimator(self) -> Estimator:
        """What is known of the advantage estimator."""
        return ESTIMATORS.get(self.adv_estimator, OWN_ESTIMATOR)

    @property
    def may_use_critic(self) -> bool:
        """Whether the estimator uses a critic; an estimator of the user's own may."""
        return self.estimator.uses_critic or ":" in self.adv_estimator
