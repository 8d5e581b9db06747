"""Where each tensor of a model's files lands in the parameters of a vLLM model, and writing there at once.

vLLM's loaders are run once on tensors without values: which elements each copies, and whereto, is noted.
What the first load left in the parameters is then held against what came, element by element. From there on
weights are written into the very memory that kernels and CUDA graphs read, by a fused copy for each buffer.

Views of that memory are kept from one sync to the next. It stays where it is: vLLM's reload copies what came
over what its kernels read, and its sleep mode maps other memory under the same addresses. Both are checked
before each sync, by address and layout. Nothing of ours lies in the memory that sleeps, and whoever writes
has waited for the device before and after.

Imported in an engine process and in vLLM's workers, never in a training worker.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import layerwise

from siirl.engines.rollout.vllm.placed_pieces import (
    Memory,
    Piece,
    Unresolved,
    called,
    elements,
    end_of,
    of_box,
    source_box,
    storage_of,
    uncovered,
)
from siirl.engines.weights.bucket import Copies, HeldMemory
from siirl.engines.weights.shard_plan import Box, overlap, whole_box
from siirl.engines.weights.shared_buffer import INT_OF_BYTES, fingerprint, open_buffer, sampled_sum

COMPARED = 1 << 16
"""Elements of a piece that are read again after they were written, unless all are."""


class _Copies(TorchDispatchMode):
    """Notes copies of `sources` into `targets`, which happen in neither; both by their storages."""

    def __init__(self, sources: dict[int, str], targets: dict[int, tuple[nn.Module, str]]) -> None:
        super().__init__()
        self._sources, self._targets = sources, targets
        self.pieces: dict[str, list[Piece]] = {name: [] for name in sources.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = args[0] if args and isinstance(args[0], Tensor) else None
        target = (
            self._targets.get(storage_of(written))
            if func._schema.is_mutable and written is not None
            else None
        )
        if target is None:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._note(*target, written, args[1])
        elif func not in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            raise Unresolved(f"{called(*target)} is loaded by {func}")
        return written

    def _note(self, layer: nn.Module, param: str, written: Tensor, source: Tensor) -> None:
        name = self._sources.get(storage_of(source))
        if name is None or source.shape != written.shape:
            raise Unresolved(f"{called(layer, param)} is loaded with values that are computed")
        offset = int(written.storage_offset())
        piece = Piece(
            layer,
            param,
            offset,
            written.stride(),
            tuple(written.shape),
            int(source.storage_offset()),
            source.stride(),
        )
        self.pieces[name].append(piece)


@dataclass
class _Copy:
    """The copies of one buffer, once for all syncs: pairs of equal layout together, the others one by one."""

    together: Copies = field(default_factory=Copies)
    alone: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """All of them."""

    def add(self, target: Tensor, source: Tensor) -> None:
        self.pairs.append((target, source))
        if target.stride() == source.stride() and target.is_contiguous():
            self.together.add(target, source)
        else:
            self.alone.append((target, source))

    def run(self) -> None:
        self.together.run()
        for target, source in self.alone:
            target.copy_(source)


class _Tensors(NamedTuple):
    """The tensors that come, and what each brings."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    pieces: dict[str, list[Piece]]


class ParameterMap:
    """Of one worker's model. `learn`, then loads as ever with `saw`, then `check`; then writes."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        names: list[str],
        shapes: list[list[int]],
        dtypes: list[str],
    ) -> None:
        """device: the model's. names, shapes, dtypes: of the tensors of the files, by whose numbers entries
        speak of them.
        """
        self._model, self._device, self._names = model, device, names
        self._shapes = [tuple(shape) for shape in shapes]
        self._dtypes = [getattr(torch, dtype) for dtype in dtypes]
        self._number = {name: number for number, name in enumerate(names)}
        self._pieces: dict[str, list[Piece]] = {}
        self._of_whole = _Tensors(names, self._shapes, self._dtypes, {})  # once they are known
        self._seen: dict[tuple[str, int], Tensor] = {}
        self._kept: list[tuple[nn.Module, str, list[tuple[slice, ...]], list[Tensor]]] = []
        self._packed: list[nn.Module] = []
        self._scratch: dict[tuple[nn.Module, str], Tensor] = {}
        self._copies: dict[tuple, _Copy] = {}
        self._memory: dict[tuple[nn.Module, str], Memory] = {}  # at the end of the last sync
        self._held = HeldMemory(())  # the same, for a comparison at once
        self._made: list[tuple[nn.Module, str]] = []  # parameters that may be made for each sync
        self._rows_left: list[int] = []
        self._has_begun = False  # an update, which is not over
        self._moves = False  # whether the memory of parameters is another in each sync
        self._buffer: tuple[str, Tensor] | None = None
        self.why_not = ""
        """Why weights cannot be written in place; "" if they can."""

    def learn(self) -> None:
        """Run vLLM's loaders on tensors without values. The model is about to load: its layers are bare."""
        try:
            self._learn()
        except Unresolved as reason:
            self.why_not = str(reason)
        except Exception as error:  # noqa: BLE001 - whatever a loader makes of empty tensors
            self.why_not = f"vLLM's loaders cannot be followed: {type(error).__name__}: {error}"

    def _learn(self) -> None:
        targets: dict[int, tuple[nn.Module, str]] = {}
        loaders: list[tuple[Tensor, Any]] = []
        for layer in self._model.modules():
            if "MLA" in type(layer).__name__:
                raise Unresolved(f"{type(layer).__name__} computes weights of its own from those that come")
            method = getattr(layer, "quant_method", None)
            if method is not None and not type(method).__name__.startswith("Unquantized"):
                raise Unresolved(f"{type(layer).__name__} is loaded by {type(method).__name__}")
            for name, param in layer._parameters.items():
                if param is not None:
                    targets.setdefault(storage_of(param), (layer, name))
                    loaders.append((param, layerwise._get_weight_loader(param)))
        sources = [
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        ]
        try:
            for param, _ in loaders:
                param.weight_loader = layerwise._get_original_loader(param)
            known = {storage_of(source): name for source, name in zip(sources, self._names, strict=True)}
            with _Copies(known, targets) as copies, torch.no_grad():
                self._model.load_weights(list(zip(self._names, sources, strict=True)))
        finally:
            for param, loader in loaders:
                param.weight_loader = loader
        self._pieces = copies.pieces  # none of what another rank has, or of what vLLM does without

    def saw(self, name: str, tensor: Tensor) -> None:
        """A tensor that is being loaded, for `check`; in host memory, of an engine that is started again."""
        if self.why_not:
            return
        tensor = tensor.to(self._device)
        for index, piece in enumerate(self._pieces.get(name, ())):
            begin = tensor.storage_offset() + piece.source_offset
            source = tensor.as_strided(piece.sizes, piece.source_strides, begin)
            kind = piece.layer._parameters[piece.param]
            dtype = kind.dtype if kind is not None else tensor.dtype
            self._seen[name, index] = fingerprint(source.to(dtype))

    def check(self) -> None:
        """After a complete load: do the parameters hold what came, and is every element of them known?"""
        if self.why_not:
            return
        try:
            self._find_packed()
            self._check_values()
            self._check_covered()
            self._check_alone()
        except Unresolved as reason:
            self.why_not = str(reason)
        except Exception as error:  # noqa: BLE001 - then the loaders go on as ever
            self.why_not = f"what was loaded cannot be compared: {type(error).__name__}: {error}"
        self._seen.clear()
        self._of_whole = _Tensors(self._names, self._shapes, self._dtypes, self._pieces)
        self._memory = self._where()
        self._held = HeldMemory(self._params())

    def _find_packed(self) -> None:
        """Layers whose kernels read something else than their parameters: on a CPU they are packed again."""
        layers = {id(piece.layer): piece.layer for pieces in self._pieces.values() for piece in pieces}
        self._packed = [layer for layer in layers.values() if hasattr(layer, "cpu_linear")]
        packed = set(self._packed)
        self._made = [key for key in self._found() if key[0] in packed]
        self._moves = bool(self._packed) or any(map(_packs_experts, layers.values()))

    def _is_packed(self, layer: nn.Module, param: str) -> bool:
        """Whether the layer has no memory for a parameter: it is made for each sync, and then packed."""
        held = layer._parameters.get(param)
        return hasattr(layer, "cpu_linear") and (held is None or held.numel() == 0)

    def _check_values(self) -> None:
        names, differ = self._compared()
        for name, wrong in zip(names, differ.tolist(), strict=True):
            if wrong:
                raise Unresolved(f"{name} is changed after it is loaded")

    def _compared(self) -> tuple[list[str], Tensor]:
        """For each piece the name of its tensor, and whether the parameter has something else there."""
        here, there, names = [], [], []
        for name, pieces in self._pieces.items():
            for index, piece in enumerate(pieces):
                if self._is_packed(piece.layer, piece.param) or _packs_experts(piece.layer):
                    continue
                if (name, index) not in self._seen:
                    raise Unresolved(f"{name} did not come in the first load")
                held = piece.layer._parameters.get(piece.param)
                end = end_of(piece) + (held.storage_offset() if held is not None else 0)
                if held is None or held.untyped_storage().nbytes() < end * held.element_size():
                    raise Unresolved(
                        f"{called(piece.layer, piece.param)} has another layout once it is loaded"
                    )
                here.append(fingerprint(elements(held, piece)))
                there.append(self._seen[name, index])
                names.append(name)
        if not here:
            return [], torch.zeros(0, dtype=torch.bool)
        return names, torch.stack(here) != torch.stack(there)

    def _check_covered(self) -> None:
        """Every element of each parameter belongs to one piece; the rest, as rows of padding, is kept."""
        found: dict[tuple[nn.Module, str], list[Piece]] = {}
        for pieces in self._pieces.values():
            for piece in pieces:
                found.setdefault((piece.layer, piece.param), []).append(piece)
        reached = {storage_of(layer._parameters[name]) for layer, name in found}
        for layer in self._model.modules():
            for name, param in layer._parameters.items():
                if param is not None and param.numel() and storage_of(param) not in reached:
                    raise Unresolved(f"{called(layer, name)} gets no weights")
        for (layer, name), pieces in found.items():
            param = self._loaded_form(layer, name)
            spare = uncovered(tuple(param.shape), param.stride(), pieces)
            if not spare:
                continue
            if self._is_packed(layer, name) or _packs_experts(layer):
                values = [torch.zeros(param[box].shape, dtype=param.dtype) for box in spare]
            else:
                values = [layer._parameters[name].data[box].clone() for box in spare]
            self._kept.append((layer, name, spare, values))

    def _check_alone(self) -> None:
        """No layer with weights has further tensors, which might be made of them."""
        for layer in {id(layer): layer for layer, _ in self._found()}.values():
            if layer in self._packed or _packs_experts(layer):
                continue  # packed again after each sync
            for name, value in vars(layer).items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    raise Unresolved(f"{called(layer, name)} may be made of its weights")

    def _found(self) -> list[tuple[nn.Module, str]]:
        """The parameters that get weights."""
        return list({(piece.layer, piece.param) for pieces in self._pieces.values() for piece in pieces})

    def _where(self) -> dict[tuple[nn.Module, str], "Memory"]:
        """Where those parameters lie, but the ones that are made for each sync."""
        if self.why_not:
            return {}
        return {
            (layer, name): Memory.of(layer._parameters[name])
            for layer, name in self._found()
            if not self._is_packed(layer, name) and not _packs_experts(layer)
        }

    def _loaded_form(self, layer: nn.Module, name: str) -> Tensor:
        """A parameter as vLLM's loaders see it; maybe without values."""
        if not self._is_packed(layer, name) and not _packs_experts(layer):
            return layer._parameters[name]
        return layerwise.get_layerwise_info(layer).restore_metadata[0][name]

    def boxes(self) -> list[tuple[int, Box]] | None:
        """The rectangles of tensors, by their numbers, that this worker keeps; None if some is none."""
        found: list[tuple[int, Box]] = []
        try:
            for name, pieces in self._of_whole.pieces.items():
                number = self._number[name]
                own = {source_box(piece, self._of_whole.shapes[number]) for piece in pieces}
                if any(overlap(one, other) is not None for one, other in combinations(own, 2)):
                    return None
                found += [(number, box) for box in sorted(own)]
        except Unresolved:
            return None
        return found

    def take_parts(self, parts: list[tuple[int, Box]] | None) -> None:
        """From the next sync on these parts come, each as a tensor of its own; None: whole tensors."""
        self._copies.clear()
        names, shapes, dtypes, pieces = self._of_whole
        self._names, self._shapes, self._dtypes, self._pieces = self._of_whole
        if parts is None:
            return
        self._names = [f"{names[number]} {box}" for number, box in parts]
        self._shapes = [tuple(end - begin for begin, end in box) for _, box in parts]
        self._dtypes = [dtypes[number] for number, _ in parts]
        self._pieces = {}
        for name, (number, box) in zip(self._names, parts, strict=True):
            found = (of_box(piece, shapes[number], box) for piece in pieces[names[number]])
            self._pieces[name] = [piece for piece in found if piece is not None]

    def begin(self) -> None:
        """Before the first write of a sync. RuntimeError if a parameter is not what it was."""
        self._has_begun = False
        self._check_memory()
        self._rows_left = [shape[0] if shape else 1 for shape in self._shapes]
        for key in self._made:
            if self._is_packed(*key) and key not in self._scratch:
                like = self._loaded_form(*key)
                self._scratch[key] = torch.empty_strided(
                    like.shape, like.stride(), dtype=like.dtype, device=self._device
                )
        for layer, name, boxes, values in self._kept:
            for box, value in zip(boxes, values, strict=True):
                self._target(layer, name)[box].copy_(value)
        self._has_begun = True

    def _check_memory(self) -> None:
        """Views of parameters that lie elsewhere now are made anew; other layouts are an error."""
        params = self._params()
        if self._held.is_of(params):
            return
        now = [*map(Memory.of, params)]
        for ((layer, name), before), found in zip(self._memory.items(), now, strict=True):
            if found.layout != before.layout:
                raise RuntimeError(f"{called(layer, name)} has another layout than when weights were loaded")
        self._copies.clear()
        self._memory = dict(zip(self._memory, now, strict=True))
        self._held = HeldMemory(params)

    def _params(self) -> list[Tensor]:
        """What lies in _memory, as it is now."""
        return [layer._parameters[name] for layer, name in self._memory]

    def write(self, info: dict[str, Any]) -> None:
        """Write the rows that lie in a buffer, see WeightWriter.fillings. RuntimeError if they differ, and if
        the begin has failed: who sends them has not heard of it yet.
        """
        if not self._has_begun:
            raise RuntimeError("nothing is written, as the begin of this update has failed")
        buffer = self._mapped(info["place"])
        number, whole = info["number"], info["whole"]
        begin, end, total = info["begin"], info["end"], info["sum"]
        copy = self._copy(buffer, info["entries"])
        found = sampled_sum(buffer[begin:end], number, whole)
        copy.run()
        differ = self._differ(copy.pairs, number, whole)
        found, wrong = torch.stack([found, differ]).tolist()  # waits for the device, once
        if found != total:
            raise RuntimeError(
                f"the bytes {begin} to {end} of the buffer of weights are not those that were put there"
            )
        if wrong:
            raise RuntimeError("weights that were written are not those that are there")
        for index, _, rows, _ in zip(*[iter(info["entries"])] * 4, strict=True):
            self._rows_left[index] -= rows

    def _mapped(self, place: dict[str, Any]) -> Tensor:
        """The sender's buffer, which is the same in all syncs."""
        key = str(place)
        if self._buffer is None or self._buffer[0] != key:
            self._copies.clear()
            self._buffer = None  # let go of the one before first
            self._buffer = (key, open_buffer(place, place["size"], self._device))
        return self._buffer[1]

    @property
    def packs(self) -> bool:
        """Whether `finish` has layers pack what was written, which is code of vLLM's."""
        return bool(self._packed)

    def finish(self) -> None:
        """After the last write of a sync. RuntimeError if a row has not come once."""
        self._has_begun = False
        wrong = [name for name, left in zip(self._names, self._rows_left, strict=True) if left]
        if wrong:
            raise RuntimeError(f"{len(wrong)} weights were not written once, as {', '.join(wrong[:3])}")
        for layer in self._packed:
            held = dict(layer._parameters)
            for (owner, name), scratch in self._scratch.items():
                if owner is layer:
                    layer._parameters[name] = nn.Parameter(scratch, requires_grad=False)
            layer.quant_method.process_weights_after_loading(layer)
            layer._parameters.update(held)
        self._scratch.clear()

    def _target(self, layer: nn.Module, name: str) -> Tensor:
        scratch = self._scratch.get((layer, name))
        return layer._parameters[name].data if scratch is None else scratch

    def _copy(self, buffer: Tensor, entries: list[int]) -> _Copy:
        key = (buffer.data_ptr(), *entries)
        if key not in self._copies:
            made = _Copy()
            for index, first, rows, start in zip(*[iter(entries)] * 4, strict=True):
                for target, source in self._pairs(buffer, index, first, rows, start):
                    made.add(target, source)
            if self._moves:
                return made
            self._copies[key] = made
        return self._copies[key]

    def _pairs(
        self, buffer: Tensor, index: int, first: int, rows: int, start: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The views of `rows` rows of a tensor from the first on, which lie in the buffer from `start`."""
        shape, dtype = self._shapes[index], self._dtypes[index]
        row = math.prod(shape[1:])
        size = rows * row if shape else 1
        data = buffer[start : start + size * dtype.itemsize].view(dtype)
        for piece in self._pieces.get(self._names[index], ()):
            held = self._target(piece.layer, piece.param)
            if rows == (shape[0] if shape else 1):
                part = piece
            elif (part := of_box(piece, shape, ((first, first + rows), *whole_box(shape[1:])))) is None:
                continue
            begin = data.storage_offset() + part.source_offset
            source = data.as_strided(part.sizes, part.source_strides, begin)
            yield elements(held, part), source

    def _differ(self, pairs: list[tuple[Tensor, Tensor]], number: int, whole: bool) -> Tensor:
        """How many pieces are not what was written, on the device; of all, or of the begin of one, another
        each time."""
        found = torch.zeros((), dtype=torch.int64, device=self._device)
        for target, source in pairs if whole else pairs[number % max(len(pairs), 1) :][:1]:
            if not whole and target.ndim:
                rows = max(1, COMPARED // max(1, math.prod(target.shape[1:])))
                target, source = target[:rows], source[:rows]
            kind = INT_OF_BYTES[target.element_size()]
            wanted = source.to(target.dtype).contiguous().view(kind)
            found += (target.contiguous().view(kind) != wanted).any()
        return found


def read_parameter(model: nn.Module, name: str) -> Tensor:
    """A parameter; where a CPU kernel multiplies by a packed copy, by what: it multiplies the identity."""
    layer, param = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    if not hasattr(layer, "cpu_linear") or not name.endswith(".weight"):
        return param
    like = param if param.numel() else layerwise.get_layerwise_info(layer).restore_metadata[0]["weight"]
    return layer.cpu_linear(torch.eye(like.shape[1], dtype=param.dtype), param, None).t()


def _packs_experts(layer: nn.Module) -> bool:
    """Whether these are experts whose weights a CPU kernel reads packed, see unpack_experts."""
    weight = layer._parameters.get("w13_weight")
    return weight is not None and weight.device.type == "cpu"
