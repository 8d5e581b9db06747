"""Where each tensor of a model's files lands in the parameters of a vLLM model, and writing there at once.

vLLM's loaders are run once on tensors without values: which elements each copies, and whereto, is noted.
What the first load left in the parameters is then held against what came, element by element. From there on
weights are written into the very memory that kernels and CUDA graphs read, by a fused copy for each buffer.

Imported in an engine process and in vLLM's workers, never in a training worker.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import layerwise

from siirl.engines.rollout.vllm.samples import INT_OF_BYTES, fingerprint, sampled_sum
from siirl.engines.rollout.vllm.shared_buffer import open_buffer

COMPARED = 1 << 16
"""Elements of a piece that are read again after they were written, unless all are."""


class Piece(NamedTuple):
    """Elements of a parameter, and those of a tensor of the files that they are copies of."""

    layer: nn.Module
    param: str
    offset: int
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]


class Unresolved(Exception):
    """The places of a model's weights are not known, for this reason: they are loaded one by one."""


class _Copies(TorchDispatchMode):
    """Notes copies of `sources` into `targets`, which happen in neither; both by their storages."""

    def __init__(self, sources: dict[int, str], targets: dict[int, tuple[nn.Module, str]]) -> None:
        super().__init__()
        self._sources, self._targets = sources, targets
        self.pieces: dict[str, list[Piece]] = {name: [] for name in sources.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = args[0] if args and isinstance(args[0], Tensor) else None
        target = (
            self._targets.get(_storage(written)) if func._schema.is_mutable and written is not None else None
        )
        if target is None:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._note(*target, written, args[1])
        elif func not in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            raise Unresolved(f"{_called(*target)} is loaded by {func}")
        return written

    def _note(self, layer: nn.Module, param: str, written: Tensor, source: Tensor) -> None:
        name = self._sources.get(_storage(source))
        if name is None or source.shape != written.shape:
            raise Unresolved(f"{_called(layer, param)} is loaded with values that are computed")
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

    together: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = field(
        default_factory=dict
    )
    alone: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, target: Tensor, source: Tensor) -> None:
        if target.stride() == source.stride() and target.is_contiguous():
            targets, sources = self.together.setdefault((target.dtype, source.dtype), ([], []))
            targets.append(target)
            sources.append(source)
        else:
            self.alone.append((target, source))

    def run(self) -> None:
        for targets, sources in self.together.values():
            torch._foreach_copy_(targets, sources)
        for target, source in self.alone:
            target.copy_(source)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        joined = [pair for lists in self.together.values() for pair in zip(*lists, strict=True)]
        return joined + self.alone


class Places:
    """Of one worker's model. `learn`, then loads as ever with `saw`, then `check`; then writes."""

    def __init__(
        self, model: nn.Module, names: list[str], shapes: list[list[int]], dtypes: list[str]
    ) -> None:
        """names, shapes, dtypes: of the tensors of the files, by whose numbers entries speak of them."""
        self._model, self._names = model, names
        self._shapes = [tuple(shape) for shape in shapes]
        self._dtypes = [getattr(torch, dtype) for dtype in dtypes]
        self._number = {name: number for number, name in enumerate(names)}
        self._pieces: dict[str, list[Piece]] = {}
        self._seen: dict[tuple[str, int], Tensor] = {}
        self._kept: list[tuple[nn.Module, str, list[tuple[slice, ...]], list[Tensor]]] = []
        self._packed: list[nn.Module] = []
        self._scratch: dict[tuple[nn.Module, str], Tensor] = {}
        self._copies: dict[tuple, _Copy] = {}
        self._rows_left: list[int] = []
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
                    targets.setdefault(_storage(param), (layer, name))
                    loaders.append((param, layerwise._get_weight_loader(param)))
        sources = [
            torch.empty(shape, dtype=dtype, device="meta")
            for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        ]
        try:
            for param, _ in loaders:
                param.weight_loader = layerwise._get_original_loader(param)
            known = {_storage(source): name for source, name in zip(sources, self._names, strict=True)}
            with _Copies(known, targets) as copies, torch.no_grad():
                self._model.load_weights(list(zip(self._names, sources, strict=True)))
        finally:
            for param, loader in loaders:
                param.weight_loader = loader
        self._pieces = copies.pieces  # none of what another rank has, or of what vLLM does without

    def saw(self, name: str, tensor: Tensor) -> None:
        """A tensor that is being loaded, for `check`."""
        if self.why_not:
            return
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
        except Unresolved as reason:
            self.why_not = str(reason)
        self._seen.clear()

    def _find_packed(self) -> None:
        """Layers whose kernels read something else than their parameters: on a CPU they are packed again."""
        layers = {id(piece.layer): piece.layer for pieces in self._pieces.values() for piece in pieces}
        self._packed = [layer for layer in layers.values() if hasattr(layer, "cpu_linear")]
        self._moves = bool(self._packed) or any(map(_packs_experts, layers.values()))

    def _is_packed(self, layer: nn.Module, param: str) -> bool:
        """Whether the layer has no memory for a parameter: it is made for each sync, and then packed."""
        held = layer._parameters.get(param)
        return hasattr(layer, "cpu_linear") and (held is None or held.numel() == 0)

    def _check_values(self) -> None:
        here, there = [], []
        for name, pieces in self._pieces.items():
            for index, piece in enumerate(pieces):
                if self._is_packed(piece.layer, piece.param) or _packs_experts(piece.layer):
                    continue
                if (name, index) not in self._seen:
                    raise Unresolved(f"{name} did not come in the first load")
                held = piece.layer._parameters.get(piece.param)
                if held is None or held.untyped_storage().nbytes() < _end(piece) * held.element_size():
                    raise Unresolved(
                        f"{_called(piece.layer, piece.param)} has another layout once it is loaded"
                    )
                here.append(fingerprint(_elements(held, piece)))
                there.append((name, self._seen[name, index]))
        if not here:
            return
        differ = torch.stack(here) != torch.stack([value for _, value in there])
        for wrong in differ.nonzero().flatten().tolist()[:1]:
            raise Unresolved(f"{there[wrong][0]} is changed after it is loaded")

    def _check_covered(self) -> None:
        """Every element of each parameter belongs to one piece; the rest, as rows of padding, is kept."""
        found: dict[tuple[nn.Module, str], list[Piece]] = {}
        for pieces in self._pieces.values():
            for piece in pieces:
                found.setdefault((piece.layer, piece.param), []).append(piece)
        reached = {_storage(layer._parameters[name]) for layer, name in found}
        for layer in self._model.modules():
            for name, param in layer._parameters.items():
                if param is not None and param.numel() and _storage(param) not in reached:
                    raise Unresolved(f"{_called(layer, name)} gets no weights")
        for (layer, name), pieces in found.items():
            param = self._loaded_form(layer, name)
            spare = _uncovered(tuple(param.shape), param.stride(), pieces)
            if not spare:
                continue
            if self._is_packed(layer, name) or _packs_experts(layer):
                values = [torch.zeros(param[box].shape, dtype=param.dtype) for box in spare]
            else:
                values = [layer._parameters[name].data[box].clone() for box in spare]
            self._kept.append((layer, name, spare, values))

    def _loaded_form(self, layer: nn.Module, name: str) -> Tensor:
        """A parameter as vLLM's loaders see it; maybe without values."""
        if not self._is_packed(layer, name) and not _packs_experts(layer):
            return layer._parameters[name]
        return layerwise.get_layerwise_info(layer).restore_metadata[0][name]

    def begin(self) -> None:
        """Before the first write of a sync."""
        self._rows_left = [shape[0] if shape else 1 for shape in self._shapes]
        for pieces in self._pieces.values():
            for piece in pieces:
                key = (piece.layer, piece.param)
                if self._is_packed(*key) and key not in self._scratch:
                    like = self._loaded_form(*key)
                    self._scratch[key] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        for layer, name, boxes, values in self._kept:
            for box, value in zip(boxes, values, strict=True):
                self._target(layer, name)[box].copy_(value)

    def write(self, info: dict[str, Any], device: torch.device) -> None:
        """Write the rows that lie in a buffer, see WeightWriter.fillings. RuntimeError if they differ."""
        buffer = self._mapped(info["place"], device)
        number, whole = info["number"], info["whole"]
        begin, end, total = info["begin"], info["end"], info["sum"]
        if int(sampled_sum(buffer[begin:end], number, whole)) != total:
            raise RuntimeError(
                f"the bytes {begin} to {end} of the buffer of weights are not those that were put there"
            )
        copy = self._copy(buffer, info["entries"])
        copy.run()
        self._compare(copy.pairs(), number, whole)
        for index, _, rows, _ in zip(*[iter(info["entries"])] * 4, strict=True):
            self._rows_left[index] -= rows
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)

    def _mapped(self, place: dict[str, Any], device: torch.device) -> Tensor:
        """The sender's buffer, which is the same in all syncs."""
        key = str(place)
        if self._buffer is None or self._buffer[0] != key:
            self._copies.clear()
            self._buffer = None  # let go of the one before first
            self._buffer = (key, open_buffer(place, place["size"], device))
        return self._buffer[1]

    def finish(self) -> None:
        """After the last write of a sync. RuntimeError if a row has not come once."""
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
            elif (part := _of_rows(piece, shape, first, rows)) is None:
                continue
            begin = data.storage_offset() + part.source_offset - first * row
            source = data.as_strided(part.sizes, part.source_strides, begin)
            yield _elements(held, part), source

    def _compare(self, pairs: list[tuple[Tensor, Tensor]], number: int, whole: bool) -> None:
        """Read again what was written: all of it, or the begin of one piece, another each time."""
        for target, source in pairs if whole else pairs[number % max(len(pairs), 1) :][:1]:
            if not whole and target.ndim:
                rows = max(1, COMPARED // max(1, math.prod(target.shape[1:])))
                target, source = target[:rows], source[:rows]
            kind = INT_OF_BYTES[target.element_size()]
            wanted = source.to(target.dtype).contiguous().view(kind)
            if not torch.equal(target.contiguous().view(kind), wanted):
                raise RuntimeError("weights that were written are not those that are there")


def _uncovered(
    shape: tuple[int, ...], strides: tuple[int, ...], pieces: list[Piece]
) -> list[tuple[slice, ...]]:
    """Boxes of a parameter in no piece. Unresolved if an element is in two, or a piece is no box."""
    boxes = [_box(shape, strides, piece) for piece in pieces]
    edges = [
        sorted({0, size, *(box[axis][0] for box in boxes), *(box[axis][1] for box in boxes)})
        for axis, size in enumerate(shape)
    ]
    places = [{edge: place for place, edge in enumerate(axis)} for axis in edges]
    counts = np.zeros([max(1, len(axis) - 1) for axis in edges], dtype=np.int32)
    for box in boxes:
        cells = tuple(slice(places[a][begin], places[a][end]) for a, (begin, end) in enumerate(box))
        counts[cells] += 1
    if counts.max(initial=1) > 1:
        raise Unresolved(f"{_called(pieces[0].layer, pieces[0].param)} gets some of its weights twice")
    spare = []
    for cell in np.argwhere(counts == 0):
        spare.append(tuple(slice(edges[a][at], edges[a][at + 1]) for a, at in enumerate(cell)))
    if len(spare) > 64:
        raise Unresolved(f"{_called(pieces[0].layer, pieces[0].param)} gets weights for some of it only")
    return spare


def _box(shape: tuple[int, ...], strides: tuple[int, ...], piece: Piece) -> list[tuple[int, int]]:
    """[begin, end) of a piece along each axis of its parameter."""
    left, begins = piece.offset, [0] * len(shape)
    for axis in sorted(range(len(shape)), key=lambda axis: -strides[axis]):
        if shape[axis] > 1:
            begins[axis], left = divmod(left, strides[axis])
    own = {stride: size for stride, size in zip(piece.strides, piece.sizes, strict=True) if size > 1}
    box = []
    for axis, begin in enumerate(begins):
        size = own.pop(strides[axis], 1) if shape[axis] > 1 else 1
        box.append((begin, begin + size))
    fits = all(end <= size for (_, end), size in zip(box, shape, strict=True))
    if left or own or not fits or math.prod(end - begin for begin, end in box) != math.prod(piece.sizes):
        raise Unresolved(f"{_called(piece.layer, piece.param)} is loaded in pieces that are no rectangles")
    return box


def _of_rows(piece: Piece, shape: tuple[int, ...], first: int, rows: int) -> Piece | None:
    """What of a piece comes from some rows of its tensor, whose strides are those of a whole one."""
    row = math.prod(shape[1:])
    if not piece.sizes or piece.source_strides[0] != row or len(piece.sizes) != len(shape):
        raise RuntimeError(f"{_called(piece.layer, piece.param)} cannot be written by rows")
    begin = piece.source_offset // row
    low, high = max(begin, first), min(begin + piece.sizes[0], first + rows)
    if low >= high:
        return None
    skipped = low - begin
    return piece._replace(
        offset=piece.offset + skipped * piece.strides[0],
        sizes=(high - low, *piece.sizes[1:]),
        source_offset=piece.source_offset + skipped * row,
    )


def _elements(param: Tensor, piece: Piece) -> Tensor:
    held = param.data
    return held.as_strided(piece.sizes, piece.strides, held.storage_offset() + piece.offset)


def _end(piece: Piece) -> int:
    steps = ((size - 1) * stride for size, stride in zip(piece.sizes, piece.strides, strict=True))
    return piece.offset + sum(steps) + 1


def _packs_experts(layer: nn.Module) -> bool:
    """Whether these are experts whose weights a CPU kernel reads packed, see unpack_experts."""
    weight = layer._parameters.get("w13_weight")
    return weight is not None and weight.device.type == "cpu"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _called(layer: nn.Module, param: str) -> str:
    return f"{param} of a {type(layer).__name__}"
