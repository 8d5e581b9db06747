"""Passes of a frozen base, sharded by FSDP2, in which each request has tokens of its own and an adapter.

Requests of several clients go through one pass. What comes of a request follows from it alone: how its rows
are sharded over the ranks, cut into pieces that a pass has room for, and padded; how many others share it
changes no bit on a CPU (adapted_layers.py).

Legend: N tokens of a request or a piece, K targets of a token, P numbers of an adapter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from siirl.algorithms.log_probs import linear_log_prob_entropy
from siirl.algorithms.top_log_probs import linear_drawn_log_probs, linear_log_probs_of, linear_top_log_probs
from siirl.compiler.memory.estimate import LOGITS_CHUNK
from siirl.engines.train.adapters.adapted_layers import AdaptedLayers, Adapter, Gradient, Segment
from siirl.engines.train.base import AdamStep
from siirl.engines.train.fsdp.fsdp_engine import FSDPEngine
from siirl.engines.train.kept_logits import kept_logits_bytes
from siirl.engines.train.language_model import seen_back
from siirl.engines.train.optimizer import MOMENTS, STEP
from siirl.engines.train.packed.micro_batches import MicroBatchLimit
from siirl.engines.train.packed.sequence_bounds import bounds_of, bounds_of_alike
from siirl.engines.train.transfers import sent
from siirl.models.families import family_of

Loss = Callable[[Tensor, Sequence[int]], Tensor]
"""(log-probs of the targets of some rows, one behind the other, [N] or [N, K]; which rows) -> their sum."""

TYPICAL_ROWS = (250, 249, 249, 249)
"""Tokens of rows that layers are compiled with: the compiler chooses kernels for such a number. Together a
prime, as it takes sizes that are equal once for the same."""


@dataclass(frozen=True)
class Work:
    """What is computed for one request."""

    adapter: Adapter | None
    """None: the base alone."""
    rows: Sequence[Sequence[int]]
    """Tokens of each sequence, one at least."""
    targets: Sequence[np.ndarray]
    """What each token predicts, int64 [N], or of all rows [N, K]."""
    loss: Loss | None = None
    top_k: int = 0
    """So many of the words that each token may predict are told, the likeliest."""
    drawn: tuple[float, int] | None = None
    """At this temperature and by this seed they are drawn, and are not the likeliest."""
    turn: int = 0
    """Which rank gets the first rows; always the same for an adapter in training, whose sums of gradients
    are then of the same rows on each rank."""


@dataclass
class Computed:
    """What comes of a Work on this rank; of all ranks together in `AdapterEngine.run`'s answer."""

    log_probs: dict[int, np.ndarray] = field(default_factory=dict)
    """Row -> of its targets, float32."""
    top: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Row -> log-probs and words, [N, top_k]."""
    losses: list[float] = field(default_factory=list)
    """Of each piece."""


@dataclass(frozen=True)
class _Piece:
    """Rows of one request in one pass."""

    number: int
    """Which request."""
    rows: list[int]


class TrainedAdapter:
    """An adapter, the sum of gradients since the last step, and AdamW."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.version = 0
        """Steps taken."""
        self.sums: Tensor | None = None
        """This rank's share of the gradient, [P]; None: nothing was added."""
        self.moments: dict[str, Tensor] = {}
        """As torch.optim.AdamW names them: step, exp_avg, exp_avg_sq. None before the first step."""

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of a request."""
        self.sums = gradient.clone() if self.sums is None else self.sums.add_(gradient)

    def start_moments(self) -> None:
        """If there are none: of zeros."""
        if not self.moments:
            step = torch.zeros((), dtype=torch.float32, device=self.adapter.vector.device)
            zeros = {name: torch.zeros_like(self.adapter.vector) for name in MOMENTS}
            self.moments = {STEP: step, **zeros}

    def weights(self) -> dict[str, Tensor]:
        """A copy of each matrix on the host."""
        return self.adapter.parts(_on_host(self.adapter.vector))

    def state(self) -> dict[str, Tensor]:
        """A copy of weights and moments, each matrix by its name, on the host: what `load` takes."""
        found = {f"model/{name}": one for name, one in self.weights().items()}
        for kind, value in self.moments.items():
            own = _on_host(value)
            parts = {"": own} if own.ndim == 0 else self.adapter.parts(own)
            found |= {f"optimizer/{kind}.{name}".rstrip("."): one for name, one in parts.items()}
        return found

    def load(self, state: Mapping[str, Tensor], with_optimizer: bool, version: int) -> None:
        """Take what `state` gave; the gradient so far is dropped."""
        self.adapter.take({n.removeprefix("model/"): one for n, one in state.items() if n[:6] == "model/"})
        self.sums, self.version = None, version if with_optimizer else 0
        self.moments = {}
        if not (with_optimizer and version):
            return
        self.start_moments()
        self.moments[STEP].copy_(state[f"optimizer/{STEP}"])
        for kind in MOMENTS:
            for name, matrix in self.adapter.parts(self.moments[kind]).items():
                matrix.copy_(state[f"optimizer/{kind}.{name}"])


@torch.no_grad()
def take_steps(taken: Sequence[tuple[TrainedAdapter, AdamStep]], group: dist.ProcessGroup) -> list[float]:
    """Step each adapter by what was added, on all ranks of the group, and forget it; the norms before they
    were clipped.

    Those of the same parameters step in one call. A gradient that is not finite changes nothing: its norm
    says so. Nor does one that is not there.
    """
    if not taken:
        return []
    gradients = [one.sums for one, _ in taken]
    zero = torch.zeros((), dtype=torch.float64, device=taken[0][0].adapter.vector.device)
    for one, _ in taken:
        one.sums = None
    if group.size() > 1:
        for gradient in filter(lambda one: one is not None, gradients):
            dist.all_reduce(gradient, group=group)
    norms = torch.stack(
        [zero if one is None else torch.linalg.vector_norm(one, dtype=torch.float64) for one in gradients]
    ).tolist()
    alike: dict[AdamStep, list[tuple[TrainedAdapter, Tensor]]] = {}
    for (one, adam), gradient, norm in zip(taken, gradients, norms, strict=True):
        if gradient is not None and np.isfinite(norm):
            if 0 < adam.max_norm < norm:
                gradient.mul_(adam.max_norm / norm)
            one.start_moments()
            alike.setdefault(adam, []).append((one, gradient))
    for adam, own in alike.items():
        adamw(
            [one.adapter.vector for one, _ in own],
            [gradient for _, gradient in own],
            *([one.moments[name] for one, _ in own] for name in MOMENTS),
            [],
            [one.moments[STEP] for one, _ in own],
            fused=True,
            amsgrad=False,
            beta1=adam.beta1,
            beta2=adam.beta2,
            lr=adam.learning_rate,
            weight_decay=adam.weight_decay,
            eps=adam.eps,
            maximize=False,
        )
        for one, _ in own:
            one.adapter.changed()
            one.version += 1
    return norms


def _on_host(tensor: Tensor) -> Tensor:
    """A copy, in one piece: of its many parts each would be one of its own."""
    return tensor.detach().to("cpu", copy=True)


class AdapterEngine:
    """All methods are collective over the ranks of the base; all give the same works."""

    def __init__(
        self, base: FSDPEngine, targets: str | Sequence[str], alpha: float, limit: MicroBatchLimit
    ) -> None:
        """base: with the frozen weights, on the device for good. limit: of a rank's rows in a pass."""
        self.group, self.device = base.data_group, base.device
        self._base, self._limit, self._alpha = base, limit, alpha
        self._model: Any = base.frozen_model
        kind, on_cpu = family_of(self._model.hf.config.model_type), self.device.type == "cpu"
        self._apart, self._has_compiled_layers = on_cpu, (compiled := base.has_compiled_layers)
        self.layers = AdaptedLayers(self._model.hf, targets, base.compute_dtype, on_cpu and not compiled)
        self._in_turn = not seen_back(self._model.hf) or kind.has_states or (on_cpu and compiled)
        self._pieces: list[tuple[Work, _Piece]] = []
        self._model.eval()
        self._model.head = self._head

    def prepare(self, rank: int) -> None:
        """Have compiled layers compiled, which takes a while, for passes like these with whatever adapters.
        rank: as clients' adapters have it."""
        if self._has_compiled_layers:
            rows = [[0] * length for length in TYPICAL_ROWS] * self.group.size()
            targets = [np.zeros(len(row), np.int64) for row in rows]
            work = Work(self.new_adapter(rank), rows, targets, lambda log_prob, _: log_prob.sum())
            for gradients in (True, False):
                self.run([work], gradients)

    @property
    def most_tokens(self) -> int | None:
        """Of a pass, on a rank; None where it is so many rows."""
        return self._limit.max_tokens

    def new_adapter(self, rank: int, ends: Sequence[str] | None = None) -> Adapter:
        """Of zeros. ends: names of the layers that it has, the last part of each; None: all."""
        shapes = self.layers.shapes
        if ends is not None:
            shapes = {name: one for name, one in shapes.items() if name.rpartition(".")[2] in ends}
        return Adapter(shapes, rank, self._alpha, self.device)

    def run(self, works: Sequence[Work], gradients: bool) -> list[tuple[Computed, Tensor | None]]:
        """What comes of each, whole on every rank; and this rank's share of its gradient, until the next one.

        With gradients, of each adapter once.
        """
        computed = [Computed() for _ in works]
        sums = [one.adapter.gradient() if gradients and one.adapter else None for one in works]
        passes = [self._passes(works, rank) for rank in range(self.group.size())]
        mine = passes[self.group.rank()]
        mine += [[] for _ in range(max(map(len, passes)) - len(mine))]
        with self._base.passing(), torch.set_grad_enabled(gradients):
            for pieces in mine:
                self._pass(works, pieces, computed, sums)
        return list(zip(self._together(computed), [one and one.sum for one in sums], strict=True))

    def _together(self, computed: list[Computed]) -> list[Computed]:
        """Of all ranks, in their order."""
        if self.group.size() == 1:
            return computed
        told: list[list[Computed]] = [[] for _ in range(self.group.size())]
        dist.all_gather_object(told, computed, group=self.group)
        for number, whole in enumerate(computed):
            of_ranks = [one[number] for one in told]
            whole.losses = list(chain.from_iterable(one.losses for one in of_ranks))
            for one in of_ranks:
                whole.log_probs |= one.log_probs
                whole.top |= one.top
        return computed

    def _passes(self, works: Sequence[Work], rank: int) -> list[list[_Piece]]:
        """The pieces of each pass of a rank: those of a request in their order."""
        found: list[list[_Piece]] = []
        room = 0
        for number, work in enumerate(works):
            for rows, size in self._cut(work, rank):
                if size > room or self._in_turn:
                    found.append([])
                    room = self._limit.most
                found[-1].append(_Piece(number, rows))
                room -= size
        return found

    def _cut(self, work: Work, rank: int) -> list[tuple[list[int], int]]:
        """The rank's rows of a request, in pieces within the limit, and the size of each."""
        pieces: list[tuple[list[int], int]] = []
        for row in self._sharded(work)[rank]:
            size = len(work.rows[row]) if self._limit.max_rows is None else 1
            if not pieces or pieces[-1][1] + size > self._limit.most:
                pieces.append(([], 0))
            rows, so_far = pieces[-1]
            pieces[-1] = ([*rows, row], so_far + size)
        return pieces

    def _sharded(self, work: Work) -> list[list[int]]:
        """The rows of each rank: the longest first, to whom has the fewest tokens."""
        ranks = self.group.size()
        load, shards = [0] * ranks, [list[int]() for _ in range(ranks)]
        for row in sorted(range(len(work.rows)), key=lambda row: -len(work.rows[row])):
            place = load.index(min(load))
            load[place] += len(work.rows[row])
            shards[place].append(row)
        return [sorted(shards[(rank - work.turn) % ranks]) for rank in range(ranks)]

    def _pass(
        self,
        works: Sequence[Work],
        pieces: Sequence[_Piece],
        computed: Sequence[Computed],
        sums: Sequence[Gradient | None],
    ) -> None:
        """Run the base on some pieces; none: on a token that keeps this rank in step with the others."""
        rows = [work.rows[row] for work, own in _of(works, pieces) for row in own] or [[0]]
        lengths = [len(row) for row in rows]
        ids_N = sent(
            torch.from_numpy(np.concatenate([np.asarray(row, np.int64) for row in rows])), self.device
        )
        place_N = sent(torch.cat([torch.arange(length) for length in lengths]), self.device)
        bounds = (
            bounds_of_alike(lengths, self.device)
            if self._apart
            else bounds_of(sent(torch.tensor(lengths), self.device))
        )
        sizes = [sum(len(work.rows[row]) for row in own) for work, own in _of(works, pieces)] or [1]
        tokens = [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        adapters = [works[piece.number].adapter for piece in pieces] or [None]
        gradients = [sums[piece.number] for piece in pieces] or [None]
        self._pieces = [(works[piece.number], piece) for piece in pieces]
        index_N = torch.arange(len(ids_N), device=self.device)
        with self.layers.passing([*map(Segment, tokens, adapters, gradients)], self.device):
            found = self._model(
                ids_N.unsqueeze(0), place_N.unsqueeze(0), bounds, index_N, ids_N, 1.0, ("log_prob",)
            )
            losses = [value.sum() * 0.0 for value in found.values()] if not pieces else []
            for number, (work, piece) in enumerate(self._pieces):
                if work.loss is not None:
                    losses.append(work.loss(found[f"{number}"].double(), piece.rows))
            if torch.is_grad_enabled():
                torch.stack([one.double() for one in losses]).sum().backward()
        of_pieces = iter(torch.stack([one.detach() for one in losses]).tolist() if losses else ())
        for number, (work, piece) in enumerate(self._pieces):  # read when all of the pass is queued
            whole = computed[piece.number]
            if work.loss is not None:
                whole.losses.append(next(of_pieces))
            sizes = [len(work.rows[row]) for row in piece.rows]
            told = [one.numpy() for one in found[f"{number}"].detach().float().cpu().split(sizes)]
            whole.log_probs |= zip(piece.rows, told, strict=True)
            if work.top_k:
                top = [found[f"{number}.{kind}"].cpu().split(sizes) for kind in ("top", "words")]
                pairs = [(a.numpy(), b.numpy()) for a, b in zip(*top, strict=True)]
                whole.top |= zip(piece.rows, pairs, strict=True)
        self._pieces = []

    def _head(
        self, hidden_ND: Tensor, target_N: Tensor, temperature: float, *more: object
    ) -> dict[str, Tensor]:
        """Of each piece, by its number: log-probs of the targets, and what is likeliest."""
        weight_VD = self._model.hf.get_output_embeddings().weight
        chunk = max(1, LOGITS_CHUNK // len(weight_VD))
        cap = getattr(self._model.hf.config, "final_logit_softcapping", None)
        if not self._pieces:
            one, *_ = linear_log_prob_entropy(hidden_ND, weight_VD, target_N, temperature, with_entropy=False)
            return {"": one}
        sizes = [sum(len(work.rows[row]) for row in piece.rows) for work, piece in self._pieces]
        found: dict[str, Tensor] = {}
        for number, (own_ND, (work, piece)) in enumerate(
            zip(hidden_ND.split(sizes), self._pieces, strict=True)
        ):
            whole = np.concatenate([work.targets[row] for row in piece.rows])
            targets = sent(torch.from_numpy(np.ascontiguousarray(whole, np.int64)), self.device)
            if targets.ndim == 1:
                kept = kept_logits_bytes(len(targets), weight_VD, by_room=False)
                how = {"with_entropy": False, "chunk": chunk, "kept_bytes": kept, "cap": cap}
                one, *_ = linear_log_prob_entropy(own_ND, weight_VD, targets, temperature, **how)
            else:
                how = {"chunk": max(1, chunk // 4), "cap": cap}
                one = linear_log_probs_of(own_ND, weight_VD, targets, temperature, **how)
            found[f"{number}"] = one
            if work.top_k:
                how = {"chunk": max(1, chunk // 4), "cap": cap}
                if work.drawn is None:
                    top, words = linear_top_log_probs(own_ND, weight_VD, work.top_k, temperature, **how)
                else:
                    top, words = linear_drawn_log_probs(own_ND, weight_VD, work.top_k, *work.drawn, **how)
                found |= {f"{number}.top": top, f"{number}.words": words}
        return found


def _of(works: Sequence[Work], pieces: Sequence[_Piece]) -> list[tuple[Work, list[int]]]:
    return [(works[piece.number], piece.rows) for piece in pieces]
