"""Groups that several parts of the configuration share: model, FSDP, Megatron, optimizer, checkpoint."""

import re
from dataclasses import dataclass
from typing import Any

from siirl.config.algorithm_table import AGGREGATIONS
from siirl.config.keys import group, key, seed_key

VISION = "data.dataset_type=vlm says that prompts have images, and config.json that a model sees them"
STRATEGIES = ("fsdp", "megatron")
STRATEGY: dict[str, Any] = {"choices": STRATEGIES, "synonyms": {"fsdp2": "fsdp"}}
"""The rule of a key that picks the backend of a model."""
ULYSSES = "ranks that share each sequence under fsdp: its tokens everywhere, its heads in attention"

FLOATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short names of number types."""


def _float_key(default: str, doc: str, choices: tuple[str, ...] = ("float32", "bfloat16")) -> Any:
    """A field that holds a number type, under its own name or a short one."""
    synonyms = {short: name for short, name in FLOATS.items() if name in choices}
    return key(default, doc, choices=choices, synonyms=synonyms)


@dataclass(frozen=True)
class ServiceConfig:
    """A service of OpenAI's interface, and the bounds on what it is asked."""

    url: str | None = key(None, "OpenAI-compatible address")
    served_model: str = key("default", "name of the model there")
    timeout_s: float = key(120.0, "longest wait for one answer", low=0, excluded=0)
    max_tries: int = key(5, "tries of a request before it has failed", low=1)
    max_concurrent: int = key(16, "requests at once, on each rank", low=1)
    max_per_s: float = key(0.0, "requests per second, on each rank; 0: any number", low=0)
    token_env: str | None = key(None, "environment variable with the bearer token")


@dataclass(frozen=True)
class MixedPrecisionConfig:
    """Number types of FSDP compute and communication; master weights stay in fsdp_config.model_dtype."""

    param_dtype: str = _float_key(
        "bfloat16", "type of gathered parameters and of compute", (*FLOATS.values(),)
    )
    reduce_dtype: str = _float_key("float32", "type in which gradients are reduced", (*FLOATS.values(),))


@dataclass(frozen=True)
class FSDPConfig:
    """How FSDP2 shards and offloads one model."""

    param_offload: bool = key(False, "keep parameters in host memory between phases")
    optimizer_offload: bool = key(False, "keep optimizer states in host memory between phases")
    fsdp_size: int = key(
        -1, "ranks that share one copy of the weights; fewer than all is HSDP; -1: all", low=-1, excluded=0
    )
    expert_parallel_size: int = key(
        1, "ranks that have some of the experts each, all that share one copy of the weights; 1: none", low=1
    )
    reshard_after_forward: bool = key(
        True,
        "free the weights of each layer when it has run; false: they stay gathered on every rank for a whole "
        "mini-batch, or pass without gradient, and gradients are added up whole and reduced once for an "
        "optimizer step, as those of models up to 2 GiB in fp32 are anyway",
        auto=True,
    )
    model_dtype: str = _float_key("float32", "type of the master weights")
    float8: bool = key(
        False,
        "the linear layers of the blocks multiply in FP8 (e4m3), with a scale for each token and feature",
    )
    mixed_precision: MixedPrecisionConfig = group(MixedPrecisionConfig, "types of compute and communication")


@dataclass(frozen=True)
class TrainedFSDPConfig(FSDPConfig):
    """How FSDP2 shards and offloads one model that is trained, and what the loss of its routers weighs."""

    moe_aux_loss_coeff: float = key(
        0.0, "weight of the load-balancing loss of the routers of experts, over a mini-batch", low=0
    )


@dataclass(frozen=True)
class MegatronConfig:
    """Parallel sizes and options of a Megatron-Core model."""

    tensor_model_parallel_size: int = key(1, "tensor parallel size", low=1)
    pipeline_model_parallel_size: int = key(1, "pipeline parallel size", low=1)
    context_parallel_size: int = key(1, "context parallel size", low=1)
    expert_model_parallel_size: int = key(1, "expert parallel size", low=1)
    expert_tensor_parallel_size: int = key(1, "tensor parallel size within experts", low=1)
    virtual_pipeline_model_parallel_size: int | None = key(None, "model chunks on each pipeline rank", low=1)
    sequence_parallel: bool = key(False, "split activations over the tensor parallel ranks")
    use_distributed_optimizer: bool = key(True, "shard optimizer states over data parallel ranks (ZeRO-1)")
    param_dtype: str = _float_key("bfloat16", "type of parameters in compute", ("bfloat16", "float32"))
    seed: int = seed_key(1, "seed of Megatron's generators")
    param_offload: bool = key(True, "keep parameters in host memory between phases")
    grad_offload: bool = key(False, "keep gradients in host memory between phases")
    optimizer_offload: bool = key(False, "keep optimizer states in host memory between phases")
    override_transformer_config: dict[str, Any] = key({}, "options of megatron.core TransformerConfig")
    use_dist_checkpointing: bool = key(False, "read a checkpoint that `siirl convert` wrote, not HF files")
    dist_checkpointing_path: str = key("", "directory of that checkpoint", when="use_dist_checkpointing")
    override_ddp_config: dict[str, Any] = key({}, "options of megatron.core DistributedDataParallelConfig")
    use_mbridge: bool = key(False, "read HF weights by the tables of mbridge, not by ours")

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of so many tokens: CP cuts each in 2 cp pieces, SP over tp ranks."""
        cut = 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1
        return cut * (self.tensor_model_parallel_size if self.sequence_parallel else 1)


@dataclass(frozen=True)
class ForwardMegatronConfig(MegatronConfig):
    """MegatronConfig of a model that is never trained.

    The sizes and override_transformer_config are the actor's, unless one of the sizes is set.
    """


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = key(
        "adamw",
        "optimizer; muon: of the matrices in a decoder's layers, with AdamW for all else; under fsdp",
        choices=("adamw", "muon"),
    )
    lr: float = key(1e-6, "peak learning rate", low=0)
    lr_warmup_steps_ratio: float = key(0.0, "warmup length as a share of all optimizer steps", low=0, high=1)
    min_lr: float = key(0.0, "final learning rate; or set min_lr_ratio", low=0)
    min_lr_ratio: float = key(0.0, "final learning rate as a share of lr", low=0, high=1)
    warmup_style: str = key(
        "constant",
        "schedule after the warmup: hold, or decay to min_lr or min_lr_ratio",
        choices=("constant", "linear", "cosine"),
    )
    lr_warmup_init: float = key(0.0, "learning rate at the first step of a warmup", low=0)
    lr_decay_steps: int | None = key(
        None, "optimizer step at which the decay ends; null: total_training_steps", low=1
    )
    lr_decay_style: str | None = key(
        None,
        "schedule after the warmup, by Megatron's names; null: warmup_style decides",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_wsd_decay_style: str = key(
        "exponential",
        "decay at the end of a warmup-stable-decay schedule",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        when="lr_decay_style=WSD",
    )
    lr_wsd_decay_steps: int | None = key(
        None, "optimizer steps of that decay", when="lr_decay_style=WSD", low=1
    )
    total_training_steps: int = key(0, "optimizer steps of the schedule; 0: all steps of the run", low=0)
    betas: tuple[float, float] = key((0.9, 0.999), "AdamW betas", low=0, high=1, excluded=1)
    weight_decay: float = key(0.01, "AdamW weight decay", low=0)
    lr_warmup_steps: int = key(
        -1, "warmup length in optimizer steps; negative: lr_warmup_steps_ratio decides"
    )
    num_cycles: float = key(0.5, "cosine waves of the cosine schedule", when="warmup_style=cosine", low=0)
    override_optimizer_config: dict[str, Any] | None = key(
        None, "further arguments of torch.optim.AdamW; of Muon momentum, nesterov, ns_steps and ns_dtype"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """What checkpoints of a model hold."""

    save_contents: tuple[str, ...] = key(
        ("model", "optimizer", "extra"), "what is saved", choices=("model", "optimizer", "extra", "hf_model")
    )
    load_contents: tuple[str, ...] = key(
        ("model", "optimizer", "extra"),
        "what is restored",
        choices=("model", "optimizer", "extra", "hf_model"),
    )
    async_save: bool = key(False, "save in the background, from a copy of the state in host memory")


@dataclass(frozen=True)
class TrainedConfig:
    """A model in training: batch arithmetic, optimizer, sharding."""

    strategy: str = key("fsdp", "training backend", **STRATEGY)
    ppo_mini_batch_size: int = key(None, "prompts of one optimizer step, over all ranks", low=1)
    ppo_micro_batch_size_per_gpu: int = key(
        1, "rows of a micro-batch on each rank, unless use_dynamic_bsz", when="use_dynamic_bsz=false", low=1
    )
    use_dynamic_bsz: bool = key(False, "fill micro-batches up to a token budget", auto=True)
    ppo_max_token_len_per_gpu: int = key(
        16384, "that budget: tokens of a micro-batch on each rank", when="use_dynamic_bsz", low=1, auto=True
    )
    ppo_epochs: int = key(1, "passes over each rollout batch", low=1)
    shuffle: bool = key(False, "shuffle the rows of a rollout batch before it is cut into mini-batches")
    data_loader_seed: int = seed_key(None, "seed of shuffle", when="shuffle")
    loss_agg_mode: str = key("token-mean", "how token losses become one number", choices=AGGREGATIONS)
    grad_clip: float = key(1.0, "largest gradient norm; larger ones are scaled down", low=0)
    optim: OptimConfig = group(OptimConfig, "optimizer and schedule")
    fsdp_config: TrainedFSDPConfig = group(
        TrainedFSDPConfig, "sharding and offload under fsdp", when="strategy=fsdp"
    )
    ulysses_sequence_parallel_size: int = key(1, ULYSSES, when="strategy=fsdp", low=1)
    megatron: MegatronConfig = group(
        MegatronConfig, "sizes and options under megatron", when="strategy=megatron"
    )
    checkpoint: CheckpointConfig = group(CheckpointConfig, "contents of checkpoints")


@dataclass(frozen=True)
class SeeingConfig(TrainedConfig):
    """A model in training that may see images."""

    freeze_vision_tower: bool = key(
        False, "leave the part of the model that sees images as it is", when="data.dataset_type=vlm"
    )


FLASH_4, FLA = "flash_attn_4", "fla"
FLA_TRITON = ((3, 4, 0), (3, 7, 1))
"""Triton from the one on and before the other compiles gradients of fla-core wrongly for Hopper GPUs; it
refuses to compute them."""


def why_not_fla(capability: tuple[int, int], triton: str) -> str:
    """Why fla-core cannot train on GPUs of a CUDA capability with a version of Triton ("3.6.0"; "": not
    known); "" if it can."""
    version = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    if capability[0] == 9 and version and FLA_TRITON[0] <= version < FLA_TRITON[1]:
        needed = ".".join(map(str, FLA_TRITON[1]))
        return f"on Hopper GPUs fla-core needs Triton {needed} or later, here is {triton}"
    return ""


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained and how it is built."""

    path: str = key(
        "",
        "directory of a Hugging Face model and its tokenizer, or ORG/NAME on the hub; a run needs one",
    )
    external_lib: str | None = key(None, "Python module imported before the model is built")
    override_config: dict[str, Any] = key({}, "values that replace those of the model's config.json")
    enable_gradient_checkpointing: bool = key(True, "recompute activations in the backward pass", auto=True)
    gradient_checkpointing_kwargs: dict[str, Any] = key(
        {}, "arguments of gradient checkpointing", when="enable_gradient_checkpointing"
    )
    cache_dir: str | None = key(None, "cache of downloaded models; null: the hub's own (HF_HOME)")
    model_revision: str = key("main", "branch, tag or commit of a model on the hub")
    trust_remote_code: bool = key(False, "run Python code that comes with the model")
    hf_hub_token: str | None = key(None, "access token of the hub; null: HF_TOKEN, or a login")
    use_liger: bool = key(False, "use Liger kernels (package liger-kernel)", auto=True)
    compile_layers: bool = key(
        False,
        "fsdp: compile each layer (torch.compile), so that operations between matrix products are few;"
        " megatron's always are",
        auto=True,
    )
    attention_kernels: str = key(
        "torch",
        "attention of the trainer in bf16 on a GPU: torch's kernels, flash_attn_4 (package flash-attn-4), or "
        "fla (package fla-core), which computes gated delta nets and Mamba-2, and torch's kernels all else",
        choices=("torch", FLASH_4, FLA),
        auto=True,
    )
    lora_rank: int = key(0, "rank of LoRA adapters; 0: train all weights", low=0)
    lora_alpha: int = key(16, "scale of LoRA adapters", when="lora_rank", low=1)
    target_modules: str | tuple[str, ...] = key(
        "all-linear", "modules that get LoRA adapters: all-linear, or a list of names", when="lora_rank"
    )
    model_type: str = key(
        "llm",
        "kind of model",
        choices=("llm",),
        later_choices={"vlm": VISION, "embodied": "embodied agents"},
    )

    @property
    def fuses_layers(self) -> bool:
        """Whether norms, rotary embedding and MLP run in few kernels: Liger's, or the compiler's."""
        return self.use_liger or self.compile_layers
