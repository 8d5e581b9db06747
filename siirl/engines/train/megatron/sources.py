"""Where a Megatron model's weights come from: Hugging Face files, also by mbridge, or a checkpoint.

Each fills the parameters of this rank, without communication. fresh: Hugging Face name -> what a tensor is
that the source may lack, as a new value head is not among the weights of a language model.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from siirl.engines.train.hf_model import VALUE_HEAD, torch_dtype
from siirl.engines.train.megatron.model import LocalParams, read_parameter, read_weights
from siirl.engines.train.megatron.parameter_entries import Entry, hf_shapes
from siirl.engines.train.megatron.state import live_pieces
from siirl.engines.train.megatron.weights import EMBEDDING, has_experts, num_experts
from siirl.engines.train.pieces import PiecewiseTensor
from siirl.engines.train.settings import EngineSettings
from siirl.errors import CheckpointError, ConfigError, DataError
from siirl.model_files.directory import check_weight_files, model_dir
from siirl.model_files.stored_tensors import load_tensors, stored_tensors
from siirl.model_files.weight_slices import SafetensorsFolder
from siirl.models.families import family_of

_PREFIX = "model/"


Fill = Callable[[LocalParams, Mapping[str, Tensor]], None]
"""(parameters, fresh): fills the parameters of this rank. UserError if weights are missing or do not fit."""


def weight_source(hf: PretrainedConfig, settings: EngineSettings) -> Fill:
    """What fills a model's parameters, by its settings. ConfigError if mbridge is asked for and not there.

    Call it outside the model's scope: mbridge compiles functions when it is imported, and the scope's
    stand-ins for CUDA confuse the compiler.
    """
    megatron = settings.megatron
    if megatron.use_dist_checkpointing:
        return partial(read_stored, Path(megatron.dist_checkpointing_path).expanduser())
    if megatron.use_mbridge:
        bridge = _bridge(hf, torch_dtype(megatron.param_dtype, "megatron.param_dtype"))
        return partial(_read_by_mbridge, bridge, num_experts(hf) > 0, settings.model.path)
    return lambda params, fresh: read_weights(params, model_dir(settings.model.path), fresh)


@torch.no_grad()
def read_stored(folder: Path, params: LocalParams, fresh: Mapping[str, Tensor]) -> None:
    """Read the rectangles that this rank holds from a distributed checkpoint, saved in whatever layout."""
    shapes = hf_shapes(params.entries)
    for param, _ in params:
        param.zero_()
    pieces = live_pieces(params)
    try:
        stored = stored_tensors(folder)
        lacking = {name for name in fresh.keys() & pieces.keys() if _PREFIX + name not in stored}
        tensors: dict[str, Tensor] = {
            _PREFIX + name: PiecewiseTensor(shapes[name], found, found[0].local.dtype)
            for name, found in pieces.items()
            if name not in lacking
        }
        load_tensors(tensors, folder, None)
    except (CheckpointError, OSError) as error:
        raise DataError(
            f"megatron.dist_checkpointing_path={folder}: {error} Give a directory that `siirl convert` wrote "
            "of this model, or a model's directory in a checkpoint."
        ) from error
    for name in lacking:
        for piece in pieces[name]:
            ends = zip(piece.offset, piece.local.shape, strict=True)
            piece.local.copy_(fresh[name][tuple(slice(first, first + size) for first, size in ends)])


@torch.no_grad()
def _read_by_mbridge(
    bridge: Any, has_experts: bool, path: str, params: LocalParams, fresh: Mapping[str, Tensor]
) -> None:
    """Read Hugging Face files by mbridge's tables of names and forms, a parameter in memory at a time.

    Uses three private methods of mbridge's bridges, checked with 0.15.1: its public ones build Megatron
    models of Transformer Engine's layers.
    """
    folder = model_dir(path)
    check_weight_files(folder)
    shapes = hf_shapes(params.entries)
    with SafetensorsFolder(folder) as files:
        for param, entry in params:
            if entry.name.startswith(VALUE_HEAD) or entry.adapts:
                read_parameter(params, param, entry, files, shapes, fresh)
                continue
            name = mbridge_name(entry, has_experts)
            sources = bridge._weight_name_mapping_mcore_to_hf(name)
            tensors = [files.read(source, shapes[source], (0, shapes[source][0]), None) for source in sources]
            place, size = params.place(entry)
            whole = bridge._weight_to_mcore_format(name, tensors)
            shard = bridge._weight_split_across_tp(name, whole, param, size)[place]
            param.zero_()
            param[: shard.shape[0]].copy_(shard)


def mbridge_name(entry: Entry, has_experts: bool) -> str:
    """mbridge's name of a parameter: that of Transformer Engine's layers, which hold norms and experts.

    The copy of a tied embedding on the last pipeline stage has the name of the embedding: mbridge knows it by
    its own name for some families only.
    """
    if entry.name == "output_layer.weight" and entry.blocks[0].hf == EMBEDDING:
        return "embedding.word_embeddings.weight"
    name = entry.name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if not has_experts:
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return re.sub(r"\.local_experts\.(\d+)\.(\w+)\.weight$", r".\2.weight\1", name)


def _bridge(hf: PretrainedConfig, dtype: torch.dtype) -> Any:
    """mbridge's tables for a model, without its parallel state: cutting is told the sizes."""
    try:
        from mbridge.core.bridge import _MODEL_REGISTRY
        from mbridge.core.parallel_states import ParallelStates
    except ImportError as error:
        raise ConfigError(
            f"megatron.use_mbridge=true: mbridge cannot be imported: {error}. Install it "
            "(pip install 'siirl[megatron]'), or set it to false: siirl reads the weights itself."
        ) from error
    kind = _MODEL_REGISTRY.get(hf.model_type)
    is_mixed = num_experts(hf) > 0 and not all(has_experts(hf, n) for n in range(hf.num_hidden_layers))
    if kind is None or not family_of(hf.model_type).mbridge or is_mixed:
        raise ConfigError(
            f"megatron.use_mbridge=true: that mbridge reads a {hf.model_type} as siirl does has not been "
            "seen, or not with dense layers among those of experts. Set it to false: siirl reads the weights "
            "itself."
        )
    # a bridge of a tied model changes the table of its class, for all later models: give it one of its own
    own = type(kind.__name__, (kind,), {"_DIRECT_MAPPING": dict(kind._DIRECT_MAPPING)})
    return own(hf, dtype=dtype, parallel_states=ParallelStates(vpp_size=None))
