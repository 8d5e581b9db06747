"""Whether a role's model is one that its engines compute exactly, as it is asked for. No torch.

What is known of a model type is its row (siirl/models/families.py); here the configuration meets it.
MODEL_CHECKS are asked in their order of models of a type that is trained.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from siirl.compiler.checks.other_engines import another_engine, whole_weights_fit
from siirl.compiler.memory.estimate import read_shape
from siirl.compiler.resolved_node import ResolvedNode
from siirl.config import Config
from siirl.config.common import FLA, ModelConfig, TrainedConfig
from siirl.config.resolve import COMPUTE_DTYPE, get
from siirl.config.roles import ROLE_GROUPS, ROLES, Role, role_group, role_model, sequence_ranks
from siirl.errors import ConfigError, NotSupportedError, UserError
from siirl.models.adapter_targets import why_not_adapted
from siirl.models.config_json import as_built, config_json, of_decoder
from siirl.models.config_values import as_read, why_not_built
from siirl.models.families import Family, family_of, types_with
from siirl.models.overridden import overridden
from siirl.models.sampled import why_not_in_vllm
from siirl.models.sizes import head_size, num_experts, num_heads
from siirl.models.trained import TRAINABLE, why_not, why_not_so_long

FLOAT8_MULTIPLE = 16
"""What the sides of a linear layer are multiples of, for its products to be in FP8."""
MOST_KEY_FEATURES = 256
"""Of a head of a gated delta net in the kernels of fla-core."""
SIDES = ("hidden_size", "intermediate_size", "ffn_dim", "n_inner")
"""What a config.json calls sides of linear layers."""


@dataclass(frozen=True)
class ModelOfRole:
    """What the checks are given: the model of a role, and what its config.json says."""

    cfg: Config
    role: str
    who: str
    """What messages call it."""
    whole: Mapping[str, Any]
    """config.json with override_config."""
    written: Mapping[str, Any]
    """What it says of the decoder."""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The same as transformers reads it."""
        return as_read(self.written)

    @property
    def type(self) -> str:
        return self.whole["model_type"]

    @property
    def family(self) -> Family:
        return family_of(self.type)

    @property
    def spec(self) -> Role:
        return ROLES[self.role]

    @property
    def model(self) -> ModelConfig:
        return role_model(self.cfg, self.role)

    @property
    def keys(self) -> str:
        """The group of the model's keys."""
        return self.spec.model

    @property
    def group(self) -> str:
        """The group of its engine's keys."""
        return ROLE_GROUPS[self.role]

    @property
    def strategy(self) -> str:
        return role_group(self.cfg, self.role).strategy

    @property
    def rules(self) -> str:
        """The strategy that has to know its type: teachers in a rollout engine are of types that fsdp knows,
        and so were seen in both."""
        return "fsdp" if self.spec.generates else self.strategy

    def refused(self, problem: str) -> NotSupportedError:
        """The error of what is wrong with it, why, and the fix."""
        return NotSupportedError(
            f"not supported yet: {self.who}, {self.group}.strategy={self.strategy}: {problem}"
        )


def check_model_of_node(cfg: Config, role: str, node: ResolvedNode) -> Iterator[UserError]:
    """The same of a model that a node asks for."""
    return check_trained_model(cfg, role, str(node))


def check_trained_model(cfg: Config, role: str, who: str) -> Iterator[UserError]:
    """Why a role's strategy cannot train its model, as far as config.json tells.

    A config.json that cannot be read is left to others, a model of code of its own to its engine, and what a
    rollout engine runs, to that, but for teachers.
    """
    spec, model = ROLES[role], role_model(cfg, role)
    if spec.generates and not spec.is_teacher:
        return
    raw = config_json(model)
    if "model_type" not in raw or not (spec.generates or role_group(cfg, role).strategy in TRAINABLE):
        return
    whole = overridden(raw, model.override_config)
    one = ModelOfRole(cfg, role, who, whole, of_decoder(whole))
    own_code = model.external_lib or (model.trust_remote_code and "auto_map" in raw)
    if own_code and TRAINABLE[one.rules].own_code:
        return
    if problem := why_not(one.whole, one.rules, one.spec.head):
        yield one.refused(problem)
        yield from _is_sampled_by_vllm(one) if one.family.strategies else ()
        return
    for check in MODEL_CHECKS:
        if one.strategy in OF_STRATEGIES.get(check, (one.strategy,)):
            yield from check(one)


def check_attention_kernels(
    cfg: Config, role: str, node: ResolvedNode, others: str = ""
) -> Iterator[UserError]:
    """ConfigError for attention kernels that would not be used by a role's model.

    others: why its backend has others, if it has.
    """
    model, strategy = role_model(cfg, role), role_group(cfg, role).strategy
    kernels = model.attention_kernels
    if kernels == "torch":
        return
    key = f"{ROLE_GROUPS[role]}.{COMPUTE_DTYPE[strategy]}"
    if cfg.trainer.device == "cpu":
        problem = "trainer.device=cpu: it is for GPUs."
    elif (dtype := get(cfg, key)) != "bfloat16":
        products = ", or in float32 by products of TensorFloat-32" if kernels == FLA else ""
        problem = f"{key}={dtype}: it computes in bfloat16{products}."
    else:
        problem = others
    if problem:
        yield ConfigError(
            f"{node}: {ROLES[role].model}.attention_kernels={kernels}: {problem} Set it to torch."
        )


def attention_heads(cfg: Config, role: str) -> int:
    """Of queries in a layer of a role's model; 0 where config.json does not tell."""
    return num_heads(as_built(role_model(cfg, role)))


def _has_its_images(one: ModelOfRole) -> Iterator[UserError]:
    """A model that sees images goes with a dataset that may have some, and no other does."""
    model, data = one.model, one.cfg.data
    if not one.family.sees_images:
        known = ", ".join(types_with(lambda row: row.sees_images))
        if data.has_images:
            yield one.refused(
                f"data.dataset_type=vlm with a {one.type}, which sees no images. Use a model of {known}, or "
                "set data.dataset_type=llm."
            )
        return
    if not data.has_images:
        yield one.refused(
            f"a {one.type} with data.dataset_type={data.dataset_type}: a vision model is trained on prompts "
            "that may have images. Set data.dataset_type=vlm; rows without images have null in their column."
        )
    rollout, of_images = one.cfg.actor_rollout_ref.rollout, "adapters alone go to no engine with images"
    adapted = model.lora_rank and one.spec.gives_weights
    if adapted and rollout.agent.share_instance is not None:
        yield one.refused(
            f"rollout.agent.share_instance with a {one.type}: {of_images}. Remove it: the agent then has a "
            "model of its own."
        )
    elif adapted and not rollout.merge_lora:
        yield one.refused(
            f"rollout.merge_lora=false with a {one.type}: {of_images}. Set "
            "actor_rollout_ref.rollout.merge_lora=true."
        )
    if model.use_liger:
        yield one.refused(f"Liger kernels in a {one.type}. Set {one.keys}.use_liger=false.")
    yield from _has_its_kernels(one)


def _has_its_kernels(one: ModelOfRole) -> Iterator[UserError]:
    kernels = one.model.attention_kernels
    if kernels != "torch":
        yield one.refused(
            f"attention_kernels={kernels} in a {one.type}. Set {one.keys}.attention_kernels=torch."
        )


def _adds_no_loss_of_micro_batches(one: ModelOfRole) -> Iterator[UserError]:
    coefficient = one.model.override_config.get("router_aux_loss_coef")
    if coefficient:
        yield one.refused(
            f"override_config.router_aux_loss_coef={coefficient}: transformers' loss of the router is that "
            "of a micro-batch by itself, and is not added. Remove it; the loss over a mini-batch is weighed "
            "by fsdp_config.moe_aux_loss_coeff, or megatron.override_transformer_config.moe_aux_loss_coeff."
        )


def _is_sampled_by_vllm(one: ModelOfRole) -> Iterator[UserError]:
    """vLLM samples, or scores with, a model as asked."""
    sampled = one.role == "actor" and one.cfg.actor_rollout_ref.rollout.name == "vllm"
    if not (sampled or one.spec.generates):
        return
    problem = why_not_in_vllm(
        one.config, on_cpu=one.cfg.trainer.device == "cpu", dtype=one.cfg.actor_rollout_ref.rollout.dtype
    )
    if not problem:
        return
    ranks = one.cfg.trainer.nnodes * one.cfg.trainer.n_gpus_per_node
    if sampled:
        fix = another_engine(one.cfg, "vllm")
    elif whole_weights_fit(one.cfg, read_shape(one.cfg, one.role), ranks):
        fix = "Set teacher.strategy=fsdp."
    else:
        fix = f"Its weights do not fit {ranks} devices under fsdp, either: take a smaller teacher."
    yield one.refused(f"a {one.type} in vLLM: {problem}. {fix}")


def _has_kernels_of_its_heads(one: ModelOfRole) -> Iterator[UserError]:
    if one.rules == "fsdp" and one.family.latent is not None:
        yield from _has_its_kernels(one)


def _has_kernels_of_its_logits(one: ModelOfRole) -> Iterator[UserError]:
    kernels, capped = one.model.attention_kernels, one.config.get("attn_logit_softcapping")
    what = "attention sinks" if one.family.sinks else f"attn_logit_softcapping={capped}" if capped else ""
    if one.rules in TRAINABLE and what and kernels != "torch":
        yield one.refused(
            f"attention_kernels={kernels} for {what} ({one.type}). Set {one.keys}.attention_kernels=torch."
        )


def _has_experts_as_asked(one: ModelOfRole) -> Iterator[UserError]:
    group, row = role_group(one.cfg, one.role), one.family.experts
    coefficient = group.fsdp_config.moe_aux_loss_coeff if isinstance(group, TrainedConfig) else 0.0
    if not num_experts(one.config):
        problem = f"fsdp_config.moe_aux_loss_coeff={coefficient}: this model has no experts. Set it to 0."
        yield from (one.refused(problem),) if coefficient else ()
        return
    if coefficient and row is not None and row.groups:
        yield one.refused(
            f"fsdp_config.moe_aux_loss_coeff={coefficient} for a {one.type}: its router does not "
            "choose by its logits alone, which the loss would balance. Set it to 0."
        )
    if one.model.use_liger:
        yield one.refused(
            f"{one.keys}.use_liger=True for a mixture of experts: its kernels take the place of each expert, "
            "and transformers has all in one tensor. Set it to false."
        )


def _divides_its_experts(one: ModelOfRole) -> Iterator[UserError]:
    """Ranks can have some of the experts each."""
    ranks, experts = role_group(one.cfg, one.role).fsdp_config.expert_parallel_size, num_experts(one.config)
    key = f"{one.group}.fsdp_config.expert_parallel_size={ranks}"
    if ranks > 1 and not experts:
        yield one.refused(f"{key}: this model has no experts. Set it to 1.")
    elif isinstance(experts, int) and experts % ranks:
        yield one.refused(
            f"{key} does not divide the {experts} experts of a layer: each rank has whole ones. Set it to 1."
        )


def _divides_its_heads(one: ModelOfRole) -> Iterator[UserError]:
    """Ranks can share the sequences as asked."""
    ranks, key = sequence_ranks(one.cfg, one.role), f"{one.group}.ulysses_sequence_parallel_size"
    heads = num_heads(one.config)
    if ranks > 1 and one.family.sees_images:
        yield one.refused(f"{key}={ranks} for a {one.type}, a vision model. Set it to 1.")
    elif heads % ranks:
        fits = [size for size in range(1, ranks) if heads % size == ranks % size == 0]
        yield one.refused(
            f"{key}={ranks} does not divide the model's {heads} attention heads: in attention each rank has "
            f"whole heads. Set it to {' or '.join(map(str, fits))}."
        )


def _why_not_by_fla(family: Family, config: Mapping[str, Any]) -> str:
    if not family.has_states:
        return "it has no gated delta nets, and no Mamba-2"
    if config["hidden_act"] not in ("silu", "swish"):
        return f"of activations it has SiLU, not {config['hidden_act']}"
    if config.get("linear_key_head_dim", 0) > MOST_KEY_FEATURES:
        return f"linear_key_head_dim={config['linear_key_head_dim']} is more than {MOST_KEY_FEATURES}"
    return ""


def _has_its_states(one: ModelOfRole) -> Iterator[UserError]:
    """Layers that have states are computed as asked."""
    if one.model.attention_kernels == FLA and (problem := _why_not_by_fla(one.family, one.config)):
        yield one.refused(
            f"attention_kernels={FLA} in a {one.type}: {problem}. Set {one.keys}.attention_kernels=torch."
        )
    if not one.family.has_states:
        return
    if one.model.use_liger:
        yield one.refused(f"Liger kernels in a {one.type}. Set {one.keys}.use_liger=false.")
    ranks, key = sequence_ranks(one.cfg, one.role), f"{one.group}.ulysses_sequence_parallel_size"
    if one.family.mamba2:
        if ranks > 1:
            yield one.refused(
                f"{key}={ranks} for a {one.type}: the heads of its layers of Mamba-2 share keys and queries, "
                "which ranks with some heads each would have to add up. Set it to 1."
            )
        return
    values = one.config["linear_num_value_heads"]
    keys = 2 * one.config["linear_num_key_heads"] * one.config["linear_key_head_dim"]
    if values % ranks or keys % ranks:
        yield one.refused(
            f"{key}={ranks} does not divide the {values} value heads of "
            f"its gated delta nets, and the {keys} channels of their queries and keys. Set it to 1."
        )


def _multiplies_in_float8(one: ModelOfRole) -> Iterator[UserError]:
    fsdp, key = role_group(one.cfg, one.role).fsdp_config, f"{one.group}.fsdp_config.float8"
    if not fsdp.float8:
        return
    dtype, config = fsdp.mixed_precision.param_dtype, one.config
    if dtype != "bfloat16" and (one.cfg.trainer.device != "cpu" or dtype == "float16"):
        yield one.refused(
            f"{key}=True with mixed_precision.param_dtype={dtype}: FP8 products come in 16 bits. Set "
            f"{one.group}.fsdp_config.mixed_precision.param_dtype=bfloat16."
        )
    if not one.family.float8:
        yield one.refused(
            f"{key}=True for a {one.type}, whose matmuls in FP8 were compared with nothing (mixtures of "
            f"experts have theirs in kernels of their own). Set {key}=false, or use a usual model of "
            f"{', '.join(types_with(lambda row: row.float8))}."
        )
        return
    sides = {name: config[name] for name in SIDES if isinstance(config.get(name), int)}
    heads, width = num_heads(config), head_size(config)
    if heads and width:
        sides |= {"num_attention_heads * head_dim": heads * width}
        kv_heads = config.get("num_key_value_heads")
        sides |= {"num_key_value_heads * head_dim": kv_heads * width} if isinstance(kv_heads, int) else {}
    for name, side in sides.items():
        if side % FLOAT8_MULTIPLE:
            yield one.refused(
                f"{key}=True with {name}={side}: FP8 products are of linear layers whose sides are multiples "
                f"of {FLOAT8_MULTIPLE}. Set {key}=false."
            )
            return


def _is_compiled_as_asked(one: ModelOfRole) -> Iterator[UserError]:
    what, fix = f"{one.keys}.compile_layers=True", f"Set {one.keys}.compile_layers=false"
    if not one.model.compile_layers:
        return
    if one.strategy != "fsdp":
        yield one.refused(
            f"{what}: only layers under fsdp are compiled (parts of megatron's always are). {fix}."
        )
        return
    if not one.family.compiled:
        usual = ", ".join(types_with(lambda row: row.compiled))
        yield one.refused(
            f"{what} for a {one.type}, which was compared with nothing when compiled. {fix}, "
            f"or use a model of {usual}."
        )
    if one.model.use_liger:
        yield one.refused(
            f"{what} with use_liger=True: the compiler does not look into Liger's kernels, and makes its own "
            f"in their place. {fix}, or {one.keys}.use_liger=false."
        )
    if role_group(one.cfg, one.role).fsdp_config.float8:
        yield one.refused(f"{what} with {one.group}.fsdp_config.float8=True: not seen together. {fix}.")


def _is_adapted_as_asked(one: ModelOfRole) -> Iterator[UserError]:
    if not one.model.lora_rank:
        return
    if one.family.latent is not None:
        yield one.refused(
            f"LoRA adapters on compressed keys and values ({one.type}). Set {one.keys}.lora_rank=0."
        )
    elif problem := why_not_adapted(one.config, one.model.target_modules, one.keys):
        yield one.refused(problem)


def _is_built(one: ModelOfRole) -> Iterator[UserError]:
    if problem := why_not_built(one.written):
        yield one.refused(problem)


def _turns_rows_alike(one: ModelOfRole) -> Iterator[UserError]:
    rollout = one.cfg.actor_rollout_ref.rollout
    longest = max(rollout.prompt_length + rollout.response_length, rollout.max_model_len or 0)
    if problem := why_not_so_long(one.config, longest):
        yield one.refused(problem)


MODEL_CHECKS = (
    *(_has_its_images, _adds_no_loss_of_micro_batches, _is_sampled_by_vllm),
    *(_has_kernels_of_its_heads, _has_kernels_of_its_logits, _has_experts_as_asked, _divides_its_experts),
    *(_divides_its_heads, _has_its_states, _multiplies_in_float8, _is_compiled_as_asked),
    *(_is_adapted_as_asked, _is_built, _turns_rows_alike),
)
OF_STRATEGIES: dict[Callable[[ModelOfRole], Iterator[UserError]], tuple[str, ...]] = {
    check: ("fsdp",)
    for check in (_has_experts_as_asked, _divides_its_experts, _divides_its_heads, _multiplies_in_float8)
}
"""The checks of keys that only some strategies read -> those strategies."""
