"""Groups of frozen models that nodes have of their own.

teacher: one that the policy learns from, in a node of node_role TEACHER. frozen: one that an op asks.
"""

from dataclasses import dataclass

from siirl.config.common import (
    STRATEGIES,
    STRATEGY,
    ULYSSES,
    ForwardMegatronConfig,
    FSDPConfig,
    ModelConfig,
    ServiceConfig,
)
from siirl.config.keys import group, key
from siirl.findings import is_broken

SAMPLED, WHOLE = 0, -1
"""Values of top_k that count no tokens."""
SCORING = "vllm"
"""The strategy of a teacher that no training engine runs."""
TOP_K = (
    "0: its log-prob of the sampled token; K: those of its K likeliest tokens; -1: of the whole vocabulary"
)


@dataclass(frozen=True)
class FrozenModelConfig(ModelConfig):
    """ModelConfig of a frozen model of a node's own."""

    path: str = key("", "directory of a Hugging Face model with the policy's tokenizer, or its name on a hub")


@dataclass(frozen=True)
class FrozenConfig:
    """A frozen model of a node's own, and how it computes."""

    strategy: str = key("fsdp", "backend of the model", **STRATEGY)
    model: FrozenModelConfig = group(FrozenModelConfig, "model")
    fsdp_config: FSDPConfig = group(FSDPConfig, "sharding and offload under fsdp", when="strategy=fsdp")
    ulysses_sequence_parallel_size: int = key(1, ULYSSES, when="strategy=fsdp", low=1)
    megatron: ForwardMegatronConfig = group(
        ForwardMegatronConfig, "sizes and options under megatron", when="strategy=megatron"
    )
    log_prob_micro_batch_size_per_gpu: int = key(
        1,
        "rows of a micro-batch on each rank, unless log_prob_use_dynamic_bsz",
        when="log_prob_use_dynamic_bsz=false",
        low=1,
    )
    log_prob_use_dynamic_bsz: bool = key(False, "fill micro-batches up to a token budget", auto=True)
    log_prob_max_token_len_per_gpu: int = key(
        16384,
        "that budget: tokens of a micro-batch on each rank",
        when="log_prob_use_dynamic_bsz",
        low=1,
        auto=True,
    )


@dataclass(frozen=True)
class TeacherEndpointConfig(ServiceConfig):
    """A service that has the teacher's model: nothing of it is loaded here."""

    url: str | None = key(
        None,
        "OpenAI-compatible address that gives log-probs of prompts, as vLLM's .../v1/completions: the "
        "teacher is there, and strategy and sizes say nothing",
    )
    away_s: float = key(
        300.0, "how long one that has answered before may be away, whatever max_tries says", low=0
    )


@dataclass(frozen=True)
class TeacherConfig(FrozenConfig):
    """A teacher: its model, which rows it takes, and what it says of them."""

    strategy: str = key(
        "fsdp",
        "backend of the teacher; vllm: an engine like that of rollouts, with the settings of "
        "actor_rollout_ref.rollout",
        **{**STRATEGY, "choices": (*STRATEGIES, SCORING)},
    )
    model: FrozenModelConfig = group(FrozenModelConfig, "teacher")
    endpoint: TeacherEndpointConfig = group(TeacherEndpointConfig, "a teacher behind a service")
    tokenizer: str = key(
        "policy",
        "which tokens it reads: policy: those of the rows; own: it has another tokenizer and chat template, "
        "reads the text of the rows in its own tokens, and is compared span by span",
        choices=("policy", "own"),
    )
    policy: int | None = key(
        None,
        "agent whose policy it is, in the place of a model of its own: that of its own agent, older, or that "
        "of another agent in training",
        low=0,
    )
    sync_steps: int = key(1, "with policy: it takes the policy's weights before every such step", low=1)
    update_rate: float = key(
        1.0,
        "with policy: what it then is, update_rate policy + (1 - update_rate) teacher; 1: a copy, less: an "
        "exponential moving average",
        low=0,
        high=1,
        excluded=0,
    )
    by: str = key(
        "data_source", "field of the row that says which teachers take it: data_source, or extra_info.NAME"
    )
    takes: tuple[str, ...] = key((), "values of that field: the rows that this teacher takes; empty: all")
    weight: float = key(
        1.0, "its share of a mixture, where several teachers take a row: they are mixed", low=0, excluded=0
    )
    top_k: int = key(None, f"what it says of each token, as the policy's loss needs it: {TOP_K}", low=-1)

    @property
    def is_aligned(self) -> bool:
        """Whether it reads rows in tokens of its own."""
        return not is_broken(self.tokenizer) and self.tokenizer == "own"

    @property
    def is_remote(self) -> bool:
        """Whether a service says it, and no model here."""
        return self.endpoint.url is not None

    @property
    def is_scored(self) -> bool:
        """Whether a rollout engine says it, here or behind a service, and no training engine."""
        return self.is_remote or (not is_broken(self.strategy) and self.strategy == SCORING)


@dataclass(frozen=True)
class DistillConfig:
    """The divergence between the policy and its teachers in the loss."""

    enable: bool = key(
        False, "add the divergence to the policy loss; policy_loss.loss_mode=distill: it is the whole loss"
    )
    coef: float = key(1.0, "its weight", low=0)
    divergence: str = key(
        "reverse_kl",
        "reverse_kl: KL(policy, teacher), forward_kl: KL(teacher, policy), jsd: beta KL(teacher, m) + "
        "(1 - beta) KL(policy, m) of the mixture m = beta teacher + (1 - beta) policy",
        choices=("reverse_kl", "forward_kl", "jsd"),
    )
    beta: float = key(
        0.5,
        "share of the teacher in jsd",
        when="divergence=jsd",
        low=0,
        high=1,
    )
    top_k: int = key(
        SAMPLED,
        f"what teachers say of each token. {TOP_K}. All other tokens but the K count as one; of the sampled "
        "token alone there is reverse_kl",
        low=-1,
    )
    unshared_coef: float = key(
        1.0,
        "with teacher.tokenizer=own: weight of the L1 distance between the sorted probabilities of tokens "
        "that only one of both has, beside the divergence over those that both have",
        when="top_k=-1",
        low=0,
    )
