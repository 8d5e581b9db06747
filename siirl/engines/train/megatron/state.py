"""The training state of a Megatron model as rectangles of Hugging Face tensors, and AdamW's state itself."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from siirl.engines.train.megatron.adamw import PlacedAdamW, StatePlace
from siirl.engines.train.megatron.model import LocalParams
from siirl.engines.train.megatron.parameter_entries import Entry, hf_shapes, runs
from siirl.engines.train.optimizer import MOMENTS
from siirl.engines.train.pieces import Piece, PiecewiseTensor, rectangles
from siirl.errors import CheckpointError


class OwnedShards:
    """For each parameter the optimizer's own copy of it, or of a part of it, and its moments."""

    def __init__(self, params: LocalParams, optimizer: MegatronOptimizer | None):
        self._params = params
        self._owner = {
            id(param): part
            for part in getattr(optimizer, "chained_optimizers", [])
            for param in _model_params(part)
        }

    def allocate(self, place: StatePlace) -> None:
        """Give every moment its memory: it is known, and a checkpoint can be read, before the first step.

        The optimizer is AdamW by torch, or ours where `place` asks for more, also where Megatron would take
        that of Transformer Engine or Apex: checkpoints know only these.
        """
        storages = {param.untyped_storage()._cdata for param, _ in self._params}
        for part in self._parts():
            groups = part.optimizer.param_groups
            if not place.is_plain:
                part.optimizer = PlacedAdamW(groups, place, storages)
                continue
            inner = part.optimizer = torch.optim.AdamW([torch.empty(0)])
            inner.param_groups = groups  # among them views of parameters, which the constructor refuses
            for group in groups:
                for name, value in inner.defaults.items():
                    group.setdefault(name, value)
                for param in group["params"]:
                    step = torch.zeros((), dtype=torch.float32, device=param.device)
                    inner.state[param] = {"step": step} | {name: torch.zeros_like(param) for name in MOMENTS}
                group["fused"], group["foreach"] = True, False

    def set_step(self, step: int) -> None:
        """Tell AdamW how many steps were taken."""
        for part in self._parts():
            for state in part.optimizer.state.values():
                state["step"].fill_(float(step))

    def publish(self, modules: list[Any]) -> None:
        """Bring the model's parameters to the optimizer's copies, after these were loaded. Collective."""
        for part in self._parts():
            if isinstance(part.optimizer, PlacedAdamW):
                part.optimizer.fill()
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        self.release()
        for module in modules:
            if getattr(getattr(module, "ddp_config", None), "use_distributed_optimizer", False):
                module.start_param_sync(force_sync=True)

    def release(self) -> None:
        """After a step: what the host keeps need not be on the device any more."""
        for part in self._parts():
            if isinstance(part.optimizer, PlacedAdamW):
                part.optimizer.release()

    def _parts(self) -> Iterable[MegatronOptimizer]:
        """The optimizers that own something; Megatron has one for experts and one for the rest."""
        return {id(part): part for part in self._owner.values()}.values()

    def tensors(self, param: Tensor) -> tuple[dict[str, Tensor], int]:
        """({"param", *MOMENTS: flat tensors}, where in the parameter they begin); {} if nothing is owned."""
        part = self._owner.get(id(param))
        if part is None:
            return {"param": param.detach().view(-1)}, 0
        main, start = param, 0
        if isinstance(part, DistributedOptimizer):
            if param not in part.model_param_group_index_map:
                return {}, 0
            group, order = part.model_param_group_index_map[param]
            main = part.optimizer.param_groups[group]["params"][order]
            start = part._get_model_param_range_map(param)["param"].start
        elif getattr(param, "main_param", None) is not None:
            main = param.main_param
        state = part.optimizer.state[main]
        weight = part.optimizer.weight(main) if isinstance(part.optimizer, PlacedAdamW) else main
        found = {"param": weight, **{name: state[name] for name in MOMENTS}}
        return {name: tensor.detach().view(-1) for name, tensor in found.items()}, start


def _model_params(part: MegatronOptimizer) -> Iterator[nn.Parameter]:
    """The model's parameters that an optimizer updates, in full or in part."""
    if isinstance(part, DistributedOptimizer):
        for buffer in getattr(part, "buffers", []):
            yield from buffer.params
    elif hasattr(part, "float16_groups"):
        for groups in (part.float16_groups, part.fp32_from_fp32_groups):
            for group in groups:
                yield from group
    else:
        yield from part.get_parameters()


def training_state(params: LocalParams, shards: OwnedShards) -> dict[str, dict[str, Tensor]]:
    """{"model": name -> weights, "optimizer": moment.name -> moments}: views of the live tensors.

    Of a model with adapters it has what trains; the rest are its base's.

    The weights are the optimizer's fp32 copies where it has some. A rank has the names of which it holds a
    part; together the ranks have all. No communication.
    """
    shapes = hf_shapes(params.entries)
    pieces: dict[tuple[str, str], list[Piece]] = {}
    dtypes: dict[tuple[str, str], torch.dtype] = {}
    frozen = set(params.frozen_names)
    for param, entry in params:
        if any(block.hf in frozen for block in entry.blocks):
            continue
        tensors, start = shards.tensors(param)
        for kind, flat in tensors.items():
            for name, piece in pieces_of(params, entry, flat, start):
                pieces.setdefault((kind, name), []).append(piece)
                dtypes[kind, name] = flat.dtype
    state: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for (kind, name), found in pieces.items():
        part, key = ("model", name) if kind == "param" else ("optimizer", f"{kind}.{name}")
        distinct = list({piece.offset: piece for piece in found}.values())
        state[part][key] = PiecewiseTensor(shapes[name], distinct, dtypes[kind, name])
    return state


def live_pieces(params: LocalParams) -> dict[str, list[Piece]]:
    """Hugging Face name -> what this rank holds of a weight, in all its parameters. No communication."""
    found: dict[str, list[Piece]] = {}
    for param, entry in params:
        for name, piece in pieces_of(params, entry, param.detach().view(-1), 0):
            found.setdefault(name, []).append(piece)
    return found


def pieces_of(params: LocalParams, entry: Entry, flat: Tensor, start: int) -> Iterator[tuple[str, Piece]]:
    """(Hugging Face name, rectangle) of elements start, start + 1, ... of a local parameter."""
    place, size = params.place(entry)
    inner = entry.local_shape(size)[1:]
    columns = math.prod(inner)
    for run in runs(entry, place, size):
        first = max(start, run.start * columns)
        last = min(start + flat.numel(), (run.start + run.num_rows) * columns)
        if first >= last:
            continue
        part, at = flat[first - start : last - start], first - run.start * columns
        origin = (run.row, run.column, *(0 for _ in entry.inner))[: 1 + len(inner)]
        for piece in rectangles(part, at, inner, origin):
            if entry.stacked:
                piece = Piece(piece.local.unsqueeze(0), (entry.expert, *piece.offset))
            yield run.hf, piece


@torch.no_grad()
def load_training_state(own: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    """Copy a training state into the live tensors of `own`. CheckpointError if it lacks one of them."""
    for part, tensors in own.items():
        missing = tensors.keys() - state[part].keys()
        if missing:
            raise CheckpointError(
                f"{part} state does not fit: {len(missing)} tensors are missing, as {sorted(missing)[:3]}. "
                "Was it saved from another model?"
            )
        for name, tensor in tensors.items():
            if state[part][name] is not tensor:
                tensor.copy_(state[part][name])
