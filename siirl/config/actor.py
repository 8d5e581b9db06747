"""Groups actor_rollout_ref.actor and actor_rollout_ref.ref."""

from dataclasses import dataclass

from siirl.config.algorithm_table import LOSSES, OWN_LOSS, PolicyLoss, losses_with
from siirl.config.common import (
    STRATEGY,
    ULYSSES,
    ForwardMegatronConfig,
    FSDPConfig,
    ModelConfig,
    SeeingConfig,
)
from siirl.config.keys import group, key
from siirl.config.teacher import SAMPLED, DistillConfig

EMBODIED = "embodied agents"
RATIO_LEVELS = ("token", "sequence", "geometric")
ROW_DIVERGENCES = ("max_k2", "sum_k2", "mean_k2", "max_k3", "sum_k3", "mean_k3")
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k3_exact")


@dataclass(frozen=True)
class PolicyLossConfig:
    """Which policy loss, and what it needs beyond the clip ratios."""

    loss_mode: str = key(
        "vanilla",
        "policy loss, or a function of your own: file.py:name",
        user_code=True,
        choices=tuple(LOSSES),
    )
    clip_cov_ratio: float = key(
        0.0002, "share of tokens that clip_cov takes out", when=losses_with("clip_cov_ratio"), low=0
    )
    clip_cov_lb: float = key(1.0, "least covariance that clip_cov takes out", when=losses_with("clip_cov_lb"))
    clip_cov_ub: float = key(
        5.0, "greatest covariance that clip_cov takes out", when=losses_with("clip_cov_ub")
    )
    kl_cov_ratio: float = key(
        0.0002, "share of tokens that kl_cov penalises", when=losses_with("kl_cov_ratio"), low=0
    )
    ppo_kl_coef: float = key(0.1, "weight of the kl_cov penalty", when=losses_with("ppo_kl_coef"), low=0)
    tau_pos: float = key(
        1.0,
        "temperature of sapo's gate for positive advantages",
        when=losses_with("tau_pos"),
        low=0,
        excluded=0,
    )
    tau_neg: float = key(
        1.05, "temperature of sapo's gate for the others", when=losses_with("tau_neg"), low=0, excluded=0
    )
    clip_divergence: float = key(
        0.15, "trust region of dppo_tv and dppo_kl", when=losses_with("clip_divergence"), low=0
    )
    clip_divergence_low: float = key(
        None, "that of tokens that become less likely", when=losses_with("clip_divergence_low"), low=0
    )
    clip_divergence_high: float = key(
        None, "that of tokens that become more likely", when=losses_with("clip_divergence_high"), low=0
    )
    ratio_cap: float = key(
        20.0, "greatest weight of a token in dppo_tv and dppo_kl", when=losses_with("ratio_cap"), low=1
    )
    dro_beta: float = key(
        0.05, "weight of dro's penalty on the squared log ratio", when=losses_with("dro_beta"), low=0
    )
    dpo_beta: float = key(
        0.1,
        "how close dpo keeps the policy to the reference: the scale of its rewards",
        when=losses_with("dpo_beta"),
        low=0,
        excluded=0,
    )
    vespo_k_pos: float = key(
        2.0,
        "power of the row's ratio in vespo's weight for positive advantages",
        when=losses_with("vespo_k_pos"),
        low=0,
    )
    vespo_k_neg: float = key(3.0, "power for the others", when=losses_with("vespo_k_neg"), low=0)
    vespo_lambda_pos: float = key(
        3.0,
        "rate at which vespo's weight decays in the row's ratio for positive advantages",
        when=losses_with("vespo_lambda_pos"),
        low=0,
        excluded=0,
    )
    vespo_lambda_neg: float = key(
        2.0, "rate for the others", when=losses_with("vespo_lambda_neg"), low=0, excluded=0
    )


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Weights of the policy loss where trainer and rollout engine give a token different probabilities.

    The ratio is the trainer's probability (by the weights that sampled) over the rollout engine's.
    """

    weight: str = key(
        None,
        "multiply the loss by the ratio, at most high (truncate), or by 0 outside low .. high (mask); or by "
        "1 inside low .. high and by 0 outside (filter)",
        choices=("none", "truncate", "mask", "filter"),
    )
    level: str = key(
        "token",
        "the ratio of each token, of the whole row, or the geometric mean over the row",
        when="weight=truncate|mask|filter",
        choices=RATIO_LEVELS,
    )
    low: float = key(0.0, "least ratio of mask and filter", when="weight=mask|filter", low=0)
    high: float = key(2.0, "greatest ratio", when="weight=truncate|mask|filter", low=0)
    reject: str = key(
        "none",
        "leave out rows with a ratio outside reject_low .. reject_high: any token's, the row's, or its mean; "
        "or whose tokens' k2 or k3 has a largest value, a sum or a mean above reject_divergence",
        choices=("none", *RATIO_LEVELS, *ROW_DIVERGENCES),
    )
    reject_low: float = key(0.5, "least ratio", when=f"reject={'|'.join(RATIO_LEVELS)}", low=0)
    reject_high: float = key(2.0, "greatest ratio", when=f"reject={'|'.join(RATIO_LEVELS)}", low=0)
    reject_divergence: float | None = key(
        None, "greatest divergence, in nats", when=f"reject={'|'.join(ROW_DIVERGENCES)}", low=0, excluded=0
    )


@dataclass(frozen=True)
class RouterReplayConfig:
    """Which experts tokens are computed by in the update of a mixture of experts."""

    mode: str = key(
        "disabled",
        "disabled: those that the router chooses; R2: those of the trainer's pass of old log-probs; R3: "
        "those of the rollout engine, in old log-probs too",
        choices=("disabled", "R2", "R3"),
    )


@dataclass(frozen=True)
class ActorConfig(SeeingConfig):
    """The policy in training: batch arithmetic, loss, optimizer, sharding."""

    clip_ratio: float = key(0.2, "PPO clips the probability ratio to 1 - clip_ratio .. 1 + clip_ratio", low=0)
    clip_ratio_low: float = key(None, "lower clip ratio", low=0)
    clip_ratio_high: float = key(None, "upper clip ratio (clip-higher)", low=0)
    clip_ratio_c: float = key(
        3.0, "bound of the loss for negative advantages (dual clip); greater than 1", low=1, excluded=1
    )
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = key(False, "add the KL divergence from the reference model to the loss")
    kl_loss_coef: float = key(0.001, "its weight", when="use_kl_loss")
    kl_loss_type: str = key(
        "low_var_kl",
        "its estimator: kl = k1, mse = k2, low_var_kl = k3, abs; k3_exact: k3 without its bounds; full: over "
        "the whole vocabulary; a trailing + takes the gradient of k2",
        when="use_kl_loss",
        choices=(*KL_TYPES, "full", *(name + "+" for name in (*KL_TYPES, "full"))),
    )
    kl_loss_weighted: bool = key(
        False,
        "multiply the KL of each token by the ratio of the policy to the old one, with its gradient: "
        "unbiased for rows of an older policy, in value and gradient",
        when="use_kl_loss",
    )
    policy_loss: PolicyLossConfig = group(PolicyLossConfig, "policy loss")
    distill: DistillConfig = group(DistillConfig, "learning from teachers")
    tis_imp_ratio_cap: float = key(
        -1, "short for rollout_correction: truncate the ratio of each token at this cap; -1: off"
    )
    rollout_correction: RolloutCorrectionConfig = group(
        RolloutCorrectionConfig,
        "correction for a rollout engine whose probabilities differ from the trainer's",
    )
    router_replay: RouterReplayConfig = group(
        RouterReplayConfig, "experts of a token that are chosen once and used again"
    )
    opsm_delta: float | None = key(
        None,
        "off-policy sequence masking: tokens of negative advantage do not count in the policy loss of a row "
        "that the policy finds less likely than the rollout engine by more nats a token; null: off",
        low=0,
        excluded=0,
    )
    top_entropy_quantile: float = key(
        1.0,
        "share of a mini-batch's tokens, those of the largest entropy before the step, that the policy loss "
        "trains; 1: all",
        low=0,
        high=1,
        excluded=0,
    )
    freeze: bool = key(
        False, "take no optimizer step: the policy keeps its weights, also those of a checkpoint"
    )
    grad_offload: bool = key(False, "keep gradients in host memory between phases", when="strategy=fsdp")
    recompute_old_log_prob: bool = key(
        True, "old log-probs come from the trainer's weights; False: from the rollout engine"
    )
    use_cpgd_loss: bool = key(False, "short for policy_loss.loss_mode=cpgd")
    policy_drift_coeff: float = key(0.0, "weight of the policy drift in the cpgd loss", low=0)

    @property
    def corrects_rollout(self) -> bool:
        """Whether the loss is corrected for the rollout engine's probabilities."""
        correction = self.rollout_correction
        return correction.weight != "none" or correction.reject != "none" or self.tis_imp_ratio_cap > 0

    @property
    def loss_name(self) -> str:
        """The name of the policy loss."""
        return "cpgd" if self.use_cpgd_loss else self.policy_loss.loss_mode

    @property
    def picks_by_entropy(self) -> bool:
        """Whether the policy loss trains only tokens of large entropy."""
        return self.top_entropy_quantile < 1

    @property
    def picks_tokens(self) -> bool:
        """Whether the loss picks tokens of the whole mini-batch by what the policy said before the update."""
        return self.loss.picks_tokens or self.picks_by_entropy

    @property
    def loss(self) -> PolicyLoss:
        """What is known of the policy loss."""
        return LOSSES.get(self.loss_name, OWN_LOSS)

    @property
    def distills(self) -> bool:
        """Whether the loss is, or has in it, the divergence from teachers."""
        return self.distill.enable or self.loss.distills

    @property
    def distribution(self) -> bool:
        """Whether that divergence is one of distributions, not of the sampled tokens."""
        return self.distills and self.distill.top_k != SAMPLED

    @property
    def imitates(self) -> bool:
        """Whether the loss is right of given responses, too: it reads no log-probs of before the step."""
        return self.loss.imitates or (self.loss.distills and self.distribution)

    @property
    def reads_advantage(self) -> bool:
        """Whether the loss is one of advantages."""
        return not (self.loss.imitates or self.loss.distills)


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference model: its log-probs are what the KL divergence is measured against."""

    strategy: str = key(None, "backend of the reference model", **STRATEGY)
    fsdp_config: FSDPConfig = group(FSDPConfig, "sharding and offload under fsdp", when="strategy=fsdp")
    ulysses_sequence_parallel_size: int = key(None, ULYSSES, when="strategy=fsdp", low=1)
    megatron: ForwardMegatronConfig = group(
        ForwardMegatronConfig, "sizes and options under megatron", when="strategy=megatron"
    )
    log_prob_micro_batch_size_per_gpu: int = key(
        1,
        "rows of a micro-batch on each rank, unless log_prob_use_dynamic_bsz",
        when="log_prob_use_dynamic_bsz=false",
        low=1,
    )
    log_prob_use_dynamic_bsz: bool = key(None, "fill micro-batches up to a token budget", auto=True)
    log_prob_max_token_len_per_gpu: int = key(
        None,
        "that budget: tokens of a micro-batch on each rank",
        when="log_prob_use_dynamic_bsz",
        low=1,
        auto=True,
    )


@dataclass(frozen=True)
class CriticModelConfig(ModelConfig):
    """ModelConfig of the value model."""

    path: str = key(
        None, "directory of a Hugging Face model; without a value head (score) it gets a random one"
    )


@dataclass(frozen=True)
class CriticConfig(SeeingConfig):
    """The value model of PPO: used with algorithm.adv_estimator=gae."""

    use_dynamic_bsz: bool = key(None, "fill micro-batches up to a token budget", auto=True)
    ppo_max_token_len_per_gpu: int = key(
        32768, "token budget of a training micro-batch on each rank", when="use_dynamic_bsz", low=1, auto=True
    )
    forward_max_token_len_per_gpu: int = key(
        32768, "token budget of a forward micro-batch on each rank", when="use_dynamic_bsz", low=1, auto=True
    )
    share_instance: int | None = key(
        None, "in the config of a CRITIC node: the agent whose value model it uses and trains; null: its own"
    )
    model: CriticModelConfig = group(CriticModelConfig, "value model")
    cliprange_value: float = key(
        0.5, "how far a value may move from the one before the step without being clipped", low=0
    )
