"""Language models from a Hugging Face directory: their shape on every rank, their weights on one."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from siirl.compiler.plan import Head
from siirl.config.common import ModelConfig
from siirl.engines.train.attention.attention_kernels import attention_by, state_kernels, take_tuned
from siirl.engines.train.attention.state_layers import pin_state_layers
from siirl.engines.train.experts.hf_experts import GROUPED_EXPERTS
from siirl.engines.train.layer_compiler import compile_layer
from siirl.engines.train.vision.headed import register_headed
from siirl.engines.train.vision.tower import prepare_tower, tower_of
from siirl.errors import ConfigError, DataError, NotSupportedError
from siirl.model_files.directory import check_weight_files, model_dir
from siirl.model_files.hf_config import QUANTISED
from siirl.model_files.weight_slices import SafetensorsFolder, declared_dtype
from siirl.models.config_json import config_json
from siirl.models.families import family_of, known_types
from siirl.models.trained import why_not

MODEL_CLASSES: dict[Head, Any] = {
    "lm": AutoModelForCausalLM,
    "value": AutoModelForTokenClassification,
    "score": AutoModelForTokenClassification,
    "trained_score": AutoModelForSequenceClassification,
}
VALUE_HEAD = "score"
"""The linear layer of a value model; sequence classifiers, as reward models are, have one of that name."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types of weights and of compute. Not float16, whose gradients would need loss scaling."""


def model_class(config: PretrainedConfig, head: Head) -> Any:
    """The class of transformers that builds a model with a head."""
    if family_of(config.model_type).has_states:
        take_tuned()
    if not family_of(config.model_type).sees_images:
        return MODEL_CLASSES[head]
    if head == "lm":
        return AutoModelForImageTextToText
    register_headed(MODEL_CLASSES[head], type(config))
    return MODEL_CLASSES[head]


def torch_dtype(name: str, key: str) -> torch.dtype:
    """The torch type that a config value names. ConfigError for others, naming the key."""
    if name not in DTYPES:
        raise ConfigError(f"{key}={name!r}: engines run in {' or '.join(DTYPES)}. Set one of them.")
    return DTYPES[name]


def build_skeleton(
    config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    head: Head = "lm",
    attention_kernels: str = "torch",
) -> PreTrainedModel:
    """The model on the meta device, with our packed attention and experts; no memory, no communication.

    ConfigError for attention kernels that are not there.
    NotSupportedError for architectures that rows packed into one sequence, or our output head, would compute
    wrongly.
    """
    of_transformers = type(config).__module__.startswith("transformers.")
    if of_transformers and (problem := why_not(config.to_dict(), "fsdp", head)):
        raise NotSupportedError(f"not supported yet: strategy=fsdp: {problem}")
    if head != "lm":
        config.num_labels = 1
    turn_off_noise(config)
    states = state_kernels(attention_kernels)
    with torch.device("meta"):
        model = model_class(config, head).from_config(
            config,
            dtype=dtype,
            attn_implementation=attentions(config, attention_by(attention_kernels)),
            experts_implementation=GROUPED_EXPERTS,
            trust_remote_code=trust_remote_code,
        )
    prepare_tower(model)
    pin_state_layers(model, states)
    keep_float32(model)
    check_architecture(model, head)
    return model


def keep_float32(model: PreTrainedModel) -> None:
    """Have the weights of a model that are computed with in float32 be of it; and as transformers reads them
    from files, buffers too that it reads so. No communication."""
    ends = family_of(model.config.model_type).in_float32
    read_so = set(type(model)._keep_in_fp32_modules_strict or ())
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in read_so:
            buffer.data = buffer.data.float()
    for name, param in model.named_parameters():
        if name.endswith(ends):
            param.data = param.data.float()
    if ends:
        type(model)._keep_in_fp32_modules_strict = list(ends)


def config_changes(architecture: str, head: Head) -> dict[str, Any]:
    """What config.json of an exported model must say differently from that of the model it was made from.

    architecture: name of the class that transformers loads the export with.
    """
    if head not in ("value", "trained_score"):
        return {}
    label = "value" if head == "value" else "score"
    return {"architectures": [architecture], "id2label": {"0": label}, "label2id": {label: 0}}


def check_architecture(model: PreTrainedModel, head: Head = "lm") -> None:
    """NotSupportedError unless the model is one whose log-probs, or values, we compute exactly."""
    problem = None
    layer = getattr(model, VALUE_HEAD, None) if head != "lm" else model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or (head == "lm" and layer.bias is not None):
        problem = "an output head that is not a plain matrix"
    elif not (model._supports_attention_backend or family_of(model.config.model_type).has_states):
        problem = "attention that cannot be replaced"
    if problem:
        raise NotSupportedError(
            f"not supported yet: strategy=fsdp: {model.config.model_type} with {problem}. "
            f"Use a usual model of {', '.join(known_types('fsdp', head))}."
        )


def load_source(
    config: PretrainedConfig, model: ModelConfig, head: Head = "lm", seed: int = 0
) -> PreTrainedModel:
    """The whole model on the CPU in the type of its files: for the one rank that hands out the weights.

    Of quantised files the plain numbers, in the type that config.json declares.

    A value head that is not among the weights is drawn from N(0, initializer_range^2) by `seed`, its bias 0;
    a score head must be among them, only its bias need not.
    DataError if weights are missing or do not fit. No communication.
    """
    path = model_dir(model.path)
    check_weight_files(path)
    verbosity = transformers_logging.get_verbosity()
    if head != "lm":  # that a new head is missing is no news
        transformers_logging.set_verbosity_error()
    given = {"trust_remote_code": model.trust_remote_code}
    try:
        if config_json(model).get(QUANTISED):
            source, report = _read_plain(config, path, head, given)
        else:
            source, report = model_class(config, head).from_pretrained(
                path, config=config, dtype="auto", use_safetensors=True, output_loading_info=True, **given
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"weights of {path} cannot be loaded: {error}. Check the files against its config.json."
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    if head != "lm":
        report["missing_keys"] = _start_head(source, set(report["missing_keys"]), head, seed)
    problems: dict[str, Any] = {
        key: report.get(key) for key in ("missing_keys", "mismatched_keys") if report.get(key)
    }
    if problems:
        raise DataError(
            f"weights of {path} do not fit its config.json: {problems}. Such tensors would stay random. "
            "Check the directory, or override_config."
        )
    return source


def _read_plain(config: PretrainedConfig, path: Path, head: Head, given: dict[str, Any]) -> tuple[Any, Any]:
    """A model of quantised files, and what transformers says of how they fit."""
    with torch.device("meta"):
        kind = type(model_class(config, head).from_config(config, **given))
    with SafetensorsFolder(path) as files:
        return kind.from_pretrained(
            None,
            config=config,
            dtype=declared_dtype(path) or torch.bfloat16,
            state_dict={name: files.tensor_slice(name) for name in files.names()},
            output_loading_info=True,
        )


def empty_source(config: PretrainedConfig, model: ModelConfig, head: Head = "lm") -> PreTrainedModel:
    """A model like load_source's whose weights are memory that nobody has touched; nothing is read."""
    with no_init_weights():
        return model_class(config, head).from_config(
            config, dtype=config.dtype or torch.float32, trust_remote_code=model.trust_remote_code
        )


@torch.no_grad()
def _start_head(source: PreTrainedModel, missing: set[str], head: Head, seed: int) -> set[str]:
    """Fill the tensors of the head that the files may lack and do; the other missing names are returned."""
    fresh = new_head(source.config, head, seed)
    for name in fresh.keys() & missing:
        source.get_parameter(name).copy_(fresh[name])
    return missing - fresh.keys()


def new_head(config: PretrainedConfig, head: Head, seed: int) -> dict[str, Tensor]:
    """The tensors of a head that a model's files may lack, whole and in fp32, by name; no communication.

    A value head may be new, and one of a reward model that is trained; another score head was trained, but
    transformers' sequence classifiers have no bias.
    """
    if head == "lm":
        return {}
    bias = {} if head == "trained_score" else {f"{VALUE_HEAD}.bias": torch.zeros(1)}
    if head == "score":
        return bias
    text = config.get_text_config()
    std = getattr(text, "initializer_range", 0.02)
    drawn = torch.randn(1, text.hidden_size, generator=torch.Generator().manual_seed(seed))
    return {f"{VALUE_HEAD}.weight": drawn * std} | bias


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of the model, in order: the units of sharding. What is named within one is not."""
    kinds = set(model._no_split_modules or ())
    found = {name: module for name, module in model.named_modules() if type(module).__name__ in kinds}
    layers = [module for name, module in found.items() if not _within(name, found)]
    if not layers:
        raise NotSupportedError(
            f"not supported yet: model type {model.config.model_type} names no blocks (_no_split_modules). "
            "Use a model of the Qwen or Llama families."
        )
    return layers


def _within(name: str, others: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in others for end in range(1, len(parts)))


def attentions(config: PretrainedConfig, of_text: str) -> str | dict[str, str]:
    """The attention of a model's text; that of its vision tower, if it has one, see prepare_tower."""
    if not family_of(config.model_type).sees_images:
        return of_text
    return {"": of_text, "text_config": of_text, "vision_config": "sdpa"}


def turn_off_noise(config: PretrainedConfig) -> None:
    """No dropout or noise anywhere: the log-probs of a row must not depend on the pass that computes them."""
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            turn_off_noise(value)
    for name, value in config.to_dict().items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


def recompute_activations(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Recompute the activations of each block in the backward pass; kwargs go to torch.utils.checkpoint."""
    kwargs = {"use_reentrant": False} | kwargs
    if hasattr(model, "activation_checkpointing_enable"):  # transformers 6 drops the older name
        model.activation_checkpointing_enable(kwargs)
    else:
        model.gradient_checkpointing_enable(kwargs)


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each block: what stands between its matrix products becomes few kernels, forward and backward.

    Those of a vision tower stay as they are: they have few of the tokens. Before the model is sharded, as
    what gathers weights stays outside. The attention of packed rows is not compiled: it is an operation of
    its own to the compiler. Numbers of tokens are no constants of the code. Linear layers of one input are
    merged. All layers get inputs with gradients, also the first where only adapters train: with one without
    it would be compiled for itself.
    """
    tower = tower_of(model)
    seeing = set(tower.modules()) if tower is not None else set()
    for layer in filter(lambda layer: layer not in seeing, decoder_layers(model)):
        layer.forward = torch.compile(layer.forward, backend=compile_layer, dynamic=True)
    model.get_input_embeddings().register_forward_hook(
        lambda _, __, states: states.requires_grad_() if torch.is_grad_enabled() else None
    )


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Replace norms, rotary embedding and MLP of this model by Liger kernels; ConfigError if not there."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise ConfigError(
            "actor_rollout_ref.model.use_liger=True: the package liger-kernel is not installed. "
            "Install it (pip install 'siirl[liger]'), or set use_liger=False."
        ) from error
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
