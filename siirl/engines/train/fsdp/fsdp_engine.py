"""The FSDP2 strategy: weights, gradients and optimizer state of one model, sharded over its ranks."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from siirl.algorithms.tensor_metrics import TensorMetrics
from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.data.completions import no_experts
from siirl.data.rows import take_rows
from siirl.engines.train.adapters.frozen_base import FrozenBase
from siirl.engines.train.attention.ulysses import of_all_tokens, own_tokens
from siirl.engines.train.base import EXPERTS, BatchCounts, LossFn
from siirl.engines.train.experts.expert_parallel import add_up_copies
from siirl.engines.train.experts.router_loss import RouterLoss
from siirl.engines.train.experts.router_replay import RouterReplay, put_experts
from siirl.engines.train.fsdp.fsdp_model import (
    build_sharded,
    compute_dtype,
    fsdp_modules,
    group_of,
    leave_gathered,
    lies_whole,
    mesh_of,
    reduce_dtype,
    shard_again,
)
from siirl.engines.train.fsdp.fsdp_state import (
    base_names,
    exported,
    exported_adapter,
    held_tensors,
    live,
    live_pieces,
    load_training_state,
    parts_of,
    piecewise_state,
    specs,
    training_state,
)
from siirl.engines.train.hf_model import config_changes, torch_dtype
from siirl.engines.train.language_model import (
    MultipliedWeights,
    PackedModel,
    model_flops,
    run_packed,
    seen_back,
)
from siirl.engines.train.muon import make_optimizer
from siirl.engines.train.optimizer import STEP, scaled_to_norm
from siirl.engines.train.packed.micro_batches import images_seen, repeated_prompt_tokens, row_lengths
from siirl.engines.train.packed.packing import PackedBatch, new_columns, vector_outputs
from siirl.engines.train.packed.shared_rows import SumOverRanks
from siirl.engines.train.pieces import Piece
from siirl.engines.train.settings import engine_settings
from siirl.engines.train.stepping import SteppingEngine
from siirl.engines.train.transfers import Arrivals
from siirl.engines.weights.bucket import LiveWeights
from siirl.model_files.hf_config import written_changes
from siirl.observe.metrics import Metrics
from siirl.observe.spans import phase
from siirl.parallel.process_groups import ProcessGroupManager

if torch.cuda.is_available():
    from siirl.engines.train import triton_kernels
else:
    triton_kernels = None


class LoneGradients:
    """The gradients of a mini-batch, summed over its backward passes in the type that FSDP reduces in.

    FSDP finds none where it looks, and reduces nothing.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """model: sharded by FSDP over one rank, its weights in place. dtype: of the sums."""
        self._dtype = dtype
        self._sums: dict[nn.Parameter, Tensor] = {}
        units, owners = fsdp_modules(model), dict(_trained(model))
        for unit in units:
            unit.unshard()
        for name, gathered in _trained(model):
            if gathered is owners[name]:  # which FSDP does not gather
                continue
            gathered.register_post_accumulate_grad_hook(functools.partial(self._add, owners[name]))
        for unit in units:
            unit.reshard()

    def hand_over(self) -> None:
        """Make the sums the gradients of the parameters that have one; no sum outlives its cast."""
        while self._sums:
            owner, total = self._sums.popitem()
            grad = total.to(owner.dtype)
            owner.grad = DTensor.from_local(grad, owner.device_mesh, owner.placements, run_check=False)

    @torch.no_grad()
    def _add(self, owner: nn.Parameter, gathered: nn.Parameter) -> None:
        grad, gathered.grad = gathered.grad, None
        self._sums[owner] = _added(self._sums.get(owner), grad, self._dtype)


def _added(total: Tensor | None, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """total + grad, in total where there is one; else grad in this type, itself if it is of it."""
    if total is None and grad.dtype == dtype:
        return grad
    is_dense = grad.is_contiguous() and (total is None or total.is_contiguous())
    if triton_kernels is not None and grad.is_cuda and is_dense:
        return triton_kernels.added(total, grad, dtype)
    return grad.to(dtype) if total is None else total.add_(grad)


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters as they are now: FSDP puts the gathered ones in the places of the shards, and back."""
    return ((name, param) for name, param in model.named_parameters() if param.requires_grad)


class FSDPEngine(SteppingEngine):
    """A model of any head trained (or only run) by FSDP2 on the ranks of its plan, CPU or CUDA.

    Build it on all ranks of the plan together: it communicates. A plan with dp_replicate > 1 is HSDP. The
    learning rate follows the number of optimizer steps taken; schedules that need the total are told by
    `set_total_steps`.
    """

    _live: LiveWeights | None = None
    _is_gathered = False
    """See passing."""
    _ends_mini_batch = True
    """What FSDP was told of the backward pass that comes; at first it takes each for the last."""

    def __init__(
        self,
        plan: ModelPlan,
        cfg: Config,
        groups: ProcessGroupManager,
        device: torch.device,
        base: "FSDPEngine | None" = None,
    ):
        """base: the engine, on the same ranks, whose frozen weights this one uses; its own are adapters."""
        settings = engine_settings(plan, cfg)
        host_parts = {
            "params": settings.fsdp.param_offload,
            "grads": plan.trains and settings.grad_offload,
            "optimizer": plan.trains and settings.fsdp.optimizer_offload,
        }
        super().__init__(plan.name, settings, device, host_parts)
        self._group, self._data_group = groups.get(plan.ranks), group_of(plan, groups, "data")
        self._sequence_group = group_of(plan, groups, "sequence") if plan.dims.cp > 1 else None
        self.dp_rank, self.dp_size = dist.get_rank(self._data_group), plan.dims.dp
        self._is_first = dist.get_rank(self._group) == 0
        self._mesh, self._shard_group = mesh_of(plan, groups, self.device)
        self._model = build_sharded(
            settings, self._mesh, self._group, self.device, plan, base._model if base else None
        )
        self._parts = parts_of(self._model.hf)
        self._base = base._base if base else FrozenBase(self._model)
        self._base.onload(self.name)
        self._accumulates_locally = lies_whole(self._model, settings, self._mesh)
        self._lone: LoneGradients | None = None
        if plan.trains and self._mesh.size() == 1:
            self._lone = LoneGradients(self._model, reduce_dtype(settings))
        self._router_loss = RouterLoss(self._model.hf, settings.router_loss) if settings.router_loss else None
        self._replay = RouterReplay.of_model(self._model.hf) if settings.replays_routers else None
        self._optimizer = None
        if settings.optim:
            self._optimizer = make_optimizer(self._model, settings.optim, self._shard_group)

    def compute(self, rows: TensorDict, outputs: tuple[str, ...], temperature: float) -> TensorDict:
        """See TrainEngine; columns lie where `rows` are."""
        self._require_on_device("params")
        sees = EXPERTS in outputs
        outputs = tuple(name for name in outputs if name != EXPERTS)
        self._check_outputs(outputs)
        home = rows["response_ids"].device
        dtype, top_k = compute_dtype(self._settings), self._settings.top_k
        vectors = vector_outputs(
            self._hidden_size, dtype, top_k, self._model.hf.config.get_text_config().vocab_size
        )
        columns = new_columns(rows, outputs, vectors, home)
        arrivals = Arrivals(columns)
        experts = no_experts(rows, self._replay.choices) if sees else {}
        shares = self._shares_prompts(rows)
        self._model.eval()
        with torch.no_grad():
            for index in self._split(rows, self._settings.forward_limit):
                with phase("micro_batch"):
                    batch = self._packed(take_rows(rows, index), shares)
                    arrivals.take(index, self._run_packed(batch, temperature, outputs))
                    if sees and batch.places is not None:
                        put_experts(experts, index, batch.places, self._seen_experts(batch))
        arrivals.finish()
        for module in fsdp_modules(self._model):
            module.reshard()  # weights that stayed gathered would miss what the next step or load changes
        return TensorDict(columns | experts, batch_size=rows.batch_size)

    def _seen_experts(self, batch: PackedBatch) -> Tensor:
        """Those of all packed tokens in the last pass, [N, W], on each of the ranks that share the batch."""
        seen, shard = self._replay.seen(), batch.bounds.shard
        return seen if shard is None else of_all_tokens(seen, shard, len(batch.places[0]))

    def _run_packed(
        self, batch: PackedBatch, temperature: float, outputs: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """run_packed, by the experts that the batch names; they hold in its backward pass, too.

        Whole on each of the ranks that share the batch.
        """
        if self._replay:
            self._replay.give(batch.experts)
        found, group = run_packed(self._model, batch, temperature, outputs), self._sequence_group
        if group is None:
            return found
        return {name: SumOverRanks.apply(value_BT, group) for name, value_BT in found.items()}

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that have rows of their own."""
        return self._data_group

    @property
    def frozen_model(self) -> PackedModel:
        """The sharded model, of which nothing is trained, for passes that are not over rows: `passing`."""
        assert self._optimizer is None, f"{self.name} is trained"
        return self._model

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of activations."""
        return compute_dtype(self._settings)

    @property
    def has_compiled_layers(self) -> bool:
        return self._settings.model.compile_layers

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around passes of frozen_model. On one rank its weights stay gathered until they are asked for."""
        if self._mesh.size() == 1 and not self._is_gathered:
            for unit in fsdp_modules(self._model):
                leave_gathered(unit)
            self._is_gathered = True
        yield
        if not self._is_gathered:
            for unit in fsdp_modules(self._model):
                unit.reshard()  # gathered weights are not those that samplers are given

    def _require_on_device(self, *parts: str) -> None:
        super()._require_on_device(*parts)
        self._shard_again()

    def _shard_again(self) -> None:
        if self._is_gathered:
            for unit in fsdp_modules(self._model):
                shard_again(unit)
            self._is_gathered = False

    def _train(
        self,
        rows: TensorDict,
        loss_fn: LossFn,
        counts: BatchCounts,
        outputs: tuple[str, ...],
        temperature: float,
    ) -> Metrics:
        found, shares = TensorMetrics(), self._shares_prompts(rows)
        micro_batches = self._split(rows, self._settings.train_limit)
        if self._router_loss:
            add_up = functools.partial(self._reduce, op=dist.ReduceOp.SUM, group=self._group)
            self._router_loss.count(lambda: self._pass_ahead(rows, micro_batches), add_up)
        self._model.train()
        for number, index in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            self._model.set_is_last_backward(is_last)
            # Weights stay gathered, and gradients whole, until the last; FSDP tells each module.
            if self._accumulates_locally and is_last != self._ends_mini_batch:
                self._model.set_requires_gradient_sync(is_last)
                self._model.set_reshard_after_backward(is_last)
                self._ends_mini_batch = is_last
            with phase("micro_batch"):
                mine = take_rows(rows, index)
                batch = self._packed(mine, shares)
                columns, router_loss = self._run(batch, temperature, outputs)
                loss = self._share(columns, batch, mine, loss_fn, counts, found)
                (loss + router_loss).backward()
        return self._step(found.read)

    def _run(
        self, batch: PackedBatch, temperature: float, outputs: tuple[str, ...]
    ) -> tuple[dict[str, Tensor], Tensor | float]:
        """Columns of a micro-batch, and its share of the routers' loss."""
        if not self._router_loss:
            return self._run_packed(batch, temperature, outputs), 0.0
        if not batch.is_dummy:
            self._router_loss.begin(batch.num_tokens)
        columns = self._run_packed(batch, temperature, outputs)
        return columns, self._router_loss.end()

    def _packed(self, rows: TensorDict, share_prompts: bool = False) -> PackedBatch:
        batch = super()._packed(rows, share_prompts)
        return batch if self._sequence_group is None else own_tokens(batch, self._sequence_group)

    @torch.no_grad()
    def _pass_ahead(self, rows: TensorDict, micro_batches: list[list[int]]) -> int:
        """Run a mini-batch for what its routers choose; its tokens on this rank."""
        self._model.eval()
        num_tokens = 0
        for index in micro_batches:
            with phase("micro_batch"):
                batch = self._packed(take_rows(rows, index))
                self._run(batch, 1.0, self._outputs[:1])
                num_tokens += 0 if batch.is_dummy else batch.num_tokens
        return num_tokens

    def _clip(self, max_norm: float) -> float:
        if self._lone:
            self._lone.hand_over()
        add_up_copies(self._model, self._mesh)
        grads = [p.grad for p in self._trained()]
        return scaled_to_norm(grads, max_norm, self._shard_group)

    def _update(self) -> None:
        self._settle()
        self._optimizer.step()

    def _settle(self) -> None:
        """Wait for those who read the weights, which are about to change or to go."""
        if self._live is not None:
            self._live.settle()

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return dict(self._specs)

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        self._require_on_device("params")
        return exported(self._model.hf, self._parts, dtype or self._master_dtype)

    def live_weights(self) -> LiveWeights | None:
        self._require_on_device("params")
        if self._live is None or not self._live.lies_in(held_tensors(self._model.hf)):
            self._settle()
            self._live = live(self._model.hf, self._parts)
        return self._live

    def export_adapter(
        self, dtype: torch.dtype | None = None, with_base: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        self._require_on_device("params")
        return exported_adapter(self._model.hf, self._parts, dtype or self._master_dtype, with_base)

    def state_dict(self) -> dict[str, Any]:
        """See TrainEngine. Tensors are the engine's own DTensors, so reading into them in place is enough.

        With adapters: those alone, and "base", which weights they are on.
        """
        self._require_on_device("params", "optimizer")
        return self._training_state() | self._counts_state() | self._base_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_on_device("params", "optimizer")
        self._check_base(state)
        self._settle()
        load_training_state(self._training_state(), self._optimizer, state)
        self._load_counts(state)

    def _held_memory(self) -> list[Tensor]:
        return held_tensors(self._model.hf)

    def copied_weights(self) -> dict[str, Tensor]:
        self._require_on_device("params")
        return {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in piecewise_state(self._model.hf, self._parts).items()
        }

    @contextmanager
    def lent_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        self._require_on_device("params")
        own, live = self.copied_weights(), piecewise_state(self._model.hf, self._parts)
        self._settle()
        for name, tensor in live.items():
            tensor.copy_(weights[name])
        try:
            yield
        finally:
            self._settle()
            for name, tensor in live.items():
                tensor.copy_(own[name])

    def _live_pieces(self) -> dict[str, list[Piece]]:
        return live_pieces(self._model.hf, self._parts)

    def _training_state(self) -> dict[str, Any]:
        return training_state(self._model.hf, self._parts, self._optimizer)

    def _frozen_names(self) -> list[str]:
        return base_names(self._model.hf, self._parts)

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        if params:
            self._settle()
            self._shard_again()
        if params and self.device.type != "cpu":
            self._base.offload(self.name)
        super().offload(params=params, grads=grads, optimizer=optimizer)

    def onload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        super().onload(params=params, grads=grads, optimizer=optimizer)
        if params:
            self._base.onload(self.name)

    def hf_config_changes(self) -> dict[str, Any]:
        changes = config_changes(type(self._model.hf).__name__, self._settings.head)
        return written_changes(self._settings.model) | changes

    def flops(self, rows: TensorDict, backward: bool) -> float:
        """See TrainEngine. A prompt that several of the rows share is computed once, and counted once."""
        flops = functools.partial(model_flops, self._model.hf, backward=backward, weights=self._multiplied)
        lengths, shares, again = row_lengths(rows), self._shares_prompts(rows), 0.0
        if shares:
            again = flops(repeated_prompt_tokens(rows))
        reader = self._settings.image_reader
        patches = 0 if reader is None else reader.num_patches(images_seen(rows, shares))
        return flops(lengths, num_patches=patches) - again

    @functools.cached_property
    def _multiplied(self) -> MultipliedWeights:
        return MultipliedWeights.of(self._model.hf)

    @functools.cached_property
    def _specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and types stay, wherever the weights lie."""
        return specs(self._model.hf, self._parts, self._master_dtype)

    @functools.cached_property
    def _seen_back(self) -> float:
        by_flash = compute_dtype(self._settings) == torch.bfloat16
        return seen_back(self._model.hf) if self.device.type == "cpu" or by_flash else 0

    @property
    def _hidden_size(self) -> int:
        return self._model.hf.config.get_text_config().hidden_size

    @property
    def _master_dtype(self) -> torch.dtype:
        return torch_dtype(self._settings.fsdp.model_dtype, "fsdp_config.model_dtype")

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def _local_tensors(self, part: str) -> Iterator[Tensor]:
        for param in self._model.parameters():
            if part == "params" and param.requires_grad:
                yield param.to_local()
            elif part == "grads" and param.grad is not None:
                yield param.grad.to_local()
            elif part == "optimizer" and self._optimizer:
                state = self._optimizer.state.get(param, {})
                yield from (tensor.to_local() for name, tensor in state.items() if name != STEP)

    def _is_away(self, part: str) -> bool:
        return super()._is_away(part) or (part == "params" and bool(self._base))

    @property
    def _outputs(self) -> tuple[str, ...]:
        return self._model.outputs
