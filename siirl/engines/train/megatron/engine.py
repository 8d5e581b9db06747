"""The Megatron-Core strategy: one model of one role, of any head, in every kind of parallelism."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from tensordict import TensorDict
from torch import Tensor

from siirl.algorithms.tensor_metrics import TensorMetrics
from siirl.compiler.plan import ModelPlan
from siirl.config import Config
from siirl.data.completions import no_experts
from siirl.data.rows import take_rows
from siirl.engines.train.attention.attention_kernels import flash_kernels
from siirl.engines.train.base import EXPERTS, BatchCounts, LossFn
from siirl.engines.train.hf_model import config_changes, model_class, new_head
from siirl.engines.train.language_model import logits_scale, pass_flops
from siirl.engines.train.megatron.adamw import StatePlace, state_place
from siirl.engines.train.megatron.exporter import Exporter
from siirl.engines.train.megatron.linear_adapters import adapter_entries, new_adapters
from siirl.engines.train.megatron.micro_batch import MicroBatch, make_micro_batch, make_rope
from siirl.engines.train.megatron.model import LocalParams, adapt_stages, all_agree, build_stages, wrap_stages
from siirl.engines.train.megatron.options import ddp_config, optimizer_config, transformer_config
from siirl.engines.train.megatron.pipeline_stage import KnownShapes
from siirl.engines.train.megatron.scope import MegatronScope
from siirl.engines.train.megatron.sources import Fill, weight_source
from siirl.engines.train.megatron.stage_routers import StageRouters
from siirl.engines.train.megatron.state import (
    OwnedShards,
    live_pieces,
    load_training_state,
    training_state,
)
from siirl.engines.train.megatron.vision_stage import add_tower, decoder_config, decoder_place
from siirl.engines.train.megatron.weights import entries, family_of, num_active_weights
from siirl.engines.train.packed.micro_batches import (
    MicroBatchLimit,
    images_seen,
    repeated_prompt_tokens,
    row_lengths,
)
from siirl.engines.train.packed.packing import (
    PackedBatch,
    new_columns,
    packed_lengths,
    packed_tokens,
    vector_outputs,
)
from siirl.engines.train.packed.shared_rows import SumOverRanks
from siirl.engines.train.pieces import Piece
from siirl.engines.train.settings import engine_settings
from siirl.engines.train.stepping import SteppingEngine
from siirl.errors import UserError
from siirl.model_files.hf_config import load_hf_config, written_changes
from siirl.models.sizes import router_choices
from siirl.observe.metrics import Metrics
from siirl.observe.spans import phase
from siirl.parallel.process_groups import ProcessGroupManager

Outputs = dict[str, Tensor]
Finish = Callable[[MicroBatch, list[int], Outputs], tuple[Tensor, Tensor, dict]]
"""(micro-batch, its rows' indices, outputs [M]) -> what Megatron's schedules take of a loss function."""


class MegatronEngine(SteppingEngine):
    """A model of any head trained (or only run) by Megatron-Core on the ranks of its plan, CPU or CUDA.

    Build it on all ranks of the plan together: it communicates. Ranks of one data-parallel shard are given
    the same rows, and return the same outputs and metrics.
    """

    def __init__(self, plan: ModelPlan, cfg: Config, groups: ProcessGroupManager, device: torch.device):
        settings = engine_settings(plan, cfg)
        megatron = settings.megatron
        host_parts = {
            "params": megatron.param_offload,
            "grads": plan.trains and megatron.grad_offload,
            "optimizer": plan.trains and megatron.optimizer_offload,
        }
        super().__init__(plan.name, settings, device, host_parts)
        self._dims = plan.dims
        self._rounds = plan.dims.pp if plan.dims.vpp > 1 else 1  # the interleaved schedule runs whole ones
        self._whole = load_hf_config(settings.model)
        self._hf = decoder_config(self._whole)
        family_of(self._hf)
        if plan.head != "lm":
            self._hf.tie_word_embeddings = False  # there is no output head to tie
        self._is_first = groups.rank == plan.ranks[0]
        fill = weight_source(self._hf, settings)
        self._scope = MegatronScope(plan.ranks, plan.dims, groups, megatron.seed)
        mpu = self._scope.groups
        self._data_group, self.dp_rank, self.dp_size = mpu.dp, mpu.dp.rank(), plan.dims.dp
        self._rope = make_rope(self._hf, self.device)
        self._flash = flash_kernels(settings.model.attention_kernels)
        with self._scope:
            self._build(plan, groups.get(plan.ranks), fill)

    def _build(self, plan: ModelPlan, group: dist.ProcessGroup, fill: Fill) -> None:
        """Stages, weights, gradient buffers, optimizer."""
        settings = self._settings
        self._config = transformer_config(self._hf, settings, plan.dims, plan.trains, _finalize)
        self._stages = build_stages(self._hf, plan.head, self._config, self._scope, plan.dims)
        tower = add_tower(self._stages, self._whole, settings, plan.trains)
        for stage in self._stages:  # a router is made on the CPU and moved in the first forward: too late
            stage.to(self.device)
        choices = router_choices(self._hf.to_dict()) if settings.replays_routers else None
        self._routers = StageRouters(self._stages, choices) if choices else None
        adapters = new_adapters(self._whole, plan.head, settings) if plan.trains else {}
        added = adapter_entries(entries(self._hf, plan.head, decoder_place(self._whole)), adapters)
        if added:
            scale = settings.model.lora_alpha / settings.model.lora_rank
            adapt_stages(self._stages, added, scale, self._config, self._scope, plan.dims)
        self._tower_weights = sum(x.num_rows * (x.columns or 0) for x in tower if not x.inner)
        more = [*added, *tower]
        self._params = LocalParams(self._hf, plan.head, self._stages, self._scope, plan.dims, more)
        fresh = new_head(self._hf, plan.head, settings.seed) | adapters
        problem: UserError | None = None
        try:
            fill(self._params, fresh)
        except UserError as error:
            problem = error
        all_agree(problem, group, f"read the weights of {settings.model.path}")
        self._stages[-1].top_k = settings.top_k
        if settings.full_kl and self._stages[-1].post_process:
            self._stages[-1].keep_reference_head()
        self._exporter = Exporter(self._params, self._scope, plan.dims)
        self._optimizer = None
        self._gathers_late = self._is_gathering = False
        self._modules: list[Any] = list(self._stages)
        if plan.trains:
            ddp = ddp_config(settings.megatron)
            self._modules = list(wrap_stages(self._stages, self._config, ddp, self._scope))
            if ddp.overlap_grad_reduce:
                waits = [module.no_sync for module in self._modules]
                self._config.no_sync_func = waits if len(waits) > 1 else waits[0]
            self._gathers_late = ddp.overlap_param_gather
            optimizer = optimizer_config(settings.optim, settings.megatron, ddp)
            self._optimizer = get_megatron_optimizer(
                optimizer, self._modules, config_overrides={}, use_gloo_process_groups=False
            )
        else:
            for stage in self._stages:
                stage.requires_grad_(False)
        self._shards = OwnedShards(self._params, self._optimizer)
        self._shards.allocate(state_place(settings.optim) if plan.trains else StatePlace())

    def compute(self, rows: TensorDict, outputs: tuple[str, ...], temperature: float) -> TensorDict:
        """Outputs of the head for response tokens, [B, T] float32, where `rows` are; no gradient.

        The last pipeline stage has them; it sends them to the others.
        """
        self._require_on_device("params")
        self._finish_gather()
        sees = EXPERTS in outputs
        outputs = tuple(name for name in outputs if name != EXPERTS)
        self._check_outputs(outputs)
        home = rows["response_ids"].device
        experts = no_experts(rows, self._routers.choices) if sees else {}
        dtype = self._config.params_dtype
        vectors = vector_outputs(self._hf.hidden_size, dtype, self._settings.top_k, self._hf.vocab_size)
        columns = new_columns(rows, outputs, vectors, self.device)

        def keep(batch: MicroBatch, index: list[int], found: Outputs) -> tuple[Tensor, Tensor, dict]:
            for name, column in columns.items():
                column[index] = self._cells(batch, found[name])
            return torch.zeros((), device=self.device), _no_tokens(), {}

        for module in self._modules:
            module.eval()
        with self._scope, torch.no_grad():
            self._run(rows, self._settings.forward_limit, keep, temperature, outputs, True, experts)
            if sees:
                groups = self._scope.groups
                experts = self._routers.whole(experts, (groups.tp, groups.cp, groups.pp), self.device)
            if self._dims.pp > 1:
                for column in columns.values():
                    dist.broadcast(column, group=self._scope.groups.pp, group_src=self._dims.pp - 1)
        return TensorDict(columns | experts, batch_size=rows.batch_size).to(home)

    def _train(
        self,
        rows: TensorDict,
        loss_fn: LossFn,
        counts: BatchCounts,
        outputs: tuple[str, ...],
        temperature: float,
    ) -> Metrics:
        metrics = TensorMetrics()
        unscaled = self._scale_router_losses(rows)

        def share(batch: MicroBatch, index: list[int], found: Outputs) -> tuple[Tensor, Tensor, dict]:
            columns = {name: self._cells(batch, value_M) for name, value_M in found.items()}
            loss = self._share(columns, batch.packed, batch.rows, loss_fn, counts, metrics)
            return loss * unscaled, _no_tokens(), {}

        for module in self._modules:
            module.train()
            module.zero_grad_buffer()
        with self._scope:
            self._run(rows, self._settings.train_limit, share, temperature, outputs, False, {})
            return self._step(lambda: self._of_last_stage(metrics.read()))

    def _scale_router_losses(self, rows: TensorDict) -> float:
        """Let Megatron scale losses so that those of the router are means over the mini-batch's tokens.

        It adds them up over micro-batches, each times the tokens of this rank; where several ranks share a
        row's tokens each has a share of the loss, too. Returns what undoes the scale for our own loss.
        """
        config = self._config
        if not (config.moe_aux_loss_coeff or config.moe_z_loss_coeff):
            return 1.0
        (num_tokens,) = self._reduce([sum(packed_lengths(rows))], dist.ReduceOp.SUM)
        scale = self._scope.groups.tp_cp.size() / num_tokens
        config.grad_scale_func = lambda loss: loss * scale
        return 1.0 / scale

    def _of_last_stage(self, metrics: Metrics) -> Metrics:
        """The metrics of the last pipeline stage, which alone computes the loss, on all stages."""
        if self._dims.pp == 1:
            return metrics
        entries: list[Any] = [metrics.entries]
        dist.broadcast_object_list(entries, group=self._scope.groups.pp, group_src=self._dims.pp - 1)
        return Metrics(entries[0])

    def _run(
        self,
        rows: TensorDict,
        limit: MicroBatchLimit,
        finish: Finish,
        temperature: float,
        outputs: tuple[str, ...],
        forward_only: bool,
        experts: dict[str, Tensor],
    ) -> None:
        """Run Megatron's schedule over the rows' micro-batches; `finish` is called on the last stage.

        experts: columns for what the routers choose, or nothing.
        """
        micro_batches, shares = self._split(rows, limit), self._shares_prompts(rows)
        lengths = self._padded_lengths([take_rows(rows, index) for index in micro_batches], shares)

        def batches() -> Iterator[tuple[MicroBatch, list[int]]]:
            for index, length in zip(micro_batches, lengths, strict=True):
                packed = self._packed(take_rows(rows, index), shares)
                yield self._micro_batch(take_rows(rows, index), packed, length, temperature, outputs), index

        def step(iterator: Iterator[tuple[MicroBatch, list[int]]], stage: Any) -> tuple[Any, Callable]:
            batch, index = next(iterator)
            with phase("micro_batch"):
                found = stage(batch.input_ids, batch.position_ids, None, packed_seq_params=batch.arguments)
            if experts:
                self._routers.put(experts, index, batch)
            return found, functools.partial(finish, batch, index)

        options: dict[str, Any] = {}
        if self._dims.pp > 1 and self._dims.vpp == 1:
            options["p2p_communicator"] = self._messages(lengths)
            options["pg_collection"] = self._scope.groups
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[batches() for _ in self._modules],
            model=self._modules,
            num_microbatches=len(micro_batches),
            seq_length=1,  # not used: shapes are known, or told with every message
            micro_batch_size=1,
            forward_only=forward_only,
            **options,
        )

    def _messages(self, lengths: list[int]) -> KnownShapes:
        """Between the stages, of micro-batches of so many tokens."""
        cuts = self._dims.cp * (self._dims.tp if self._config.sequence_parallel else 1)
        shapes = [(length // cuts, 1, self._hf.hidden_size) for length in lengths]
        return KnownShapes(self._scope.groups.pp, self._config, shapes)

    def _padded_lengths(self, micro_batches: list[TensorDict], shares: bool) -> list[int]:
        """Tokens that each micro-batch is filled up to: what ranks that share them divide, and where experts
        gather everybody's tokens as many on all data-parallel ranks."""
        black = self._settings.image_reader is not None  # the token of an image where no row has any
        totals: list[float] = [max(1, packed_tokens(rows, shares)) + black for rows in micro_batches]
        if self._config.moe_token_dispatcher_type == "allgather" and self._config.num_moe_experts:
            totals = self._reduce(totals, dist.ReduceOp.MAX)
        multiple = self._dims.tp if self._config.sequence_parallel else 1
        multiple *= 2 * self._dims.cp if self._dims.cp > 1 else 1
        return [-(-int(total) // multiple) * multiple for total in totals]

    def _micro_batch(
        self,
        rows: TensorDict,
        packed: PackedBatch,
        length: int,
        temperature: float,
        outputs: tuple[str, ...],
    ) -> MicroBatch:
        groups, dtype = self._scope.groups, self._config.params_dtype
        temperature *= logits_scale(self._hf)
        runs = groups.tp if self._config.sequence_parallel else None
        return make_micro_batch(
            rows, packed, self._rope, length, groups.cp, runs, dtype, temperature, outputs, self._flash
        )

    def _cells(self, batch: MicroBatch, value_M: Tensor) -> Tensor:
        """Values in their [B, T] places, whole on every context-parallel rank."""
        value_BT = batch.packed.to_cells(value_M)
        return SumOverRanks.apply(value_BT, self._scope.groups.cp) if self._dims.cp > 1 else value_BT

    def _clip(self, max_norm: float) -> float:
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        for part in self._optimizer.chained_optimizers if math.isfinite(norm) and max_norm > 0 else ():
            if part.get_parameters():
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm, norm)
        return norm

    def _update(self) -> None:
        self._optimizer.step_with_ready_grads()
        self._shards.release()
        self._is_gathering = self._gathers_late

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._exporter.specs(self._config.params_dtype)

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        self._require_on_device("params")
        return self._exported(self._exporter.tensors(dtype or self._config.params_dtype))

    def export_adapter(
        self, dtype: torch.dtype | None = None, with_base: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        self._require_on_device("params")
        return self._exported(self._exporter.adapter(dtype or self._config.params_dtype, with_base))

    def _exported(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        self._finish_gather()
        while True:
            with self._scope:  # not while the caller has a tensor: it may run another model in between
                found = next(tensors, None)
            if found is None:
                return
            yield found

    def state_dict(self) -> dict[str, Any]:
        """See TrainEngine. Tensors are pieces of the live ones, so reading into them in place is enough."""
        self._require_on_device("params", "optimizer")
        self._finish_gather()
        return training_state(self._params, self._shards) | self._counts_state() | self._base_state()

    def held_pieces(self) -> dict[str, list[Piece]] | None:
        self._finish_gather()
        return super().held_pieces()

    def _live_pieces(self) -> dict[str, list[Piece]]:
        return live_pieces(self._params)

    def _frozen_names(self) -> list[str]:
        return self._params.frozen_names

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_on_device("params", "optimizer")
        self._finish_gather()
        self._check_base(state)
        load_training_state(training_state(self._params, self._shards), state)
        with self._scope:
            self._shards.publish(self._modules)
        self._load_counts(state)
        self._shards.set_step(self.version)

    def offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        self._finish_gather()
        super().offload(params=params, grads=grads, optimizer=optimizer)

    def hf_config_changes(self) -> dict[str, Any]:
        head = self._settings.head
        kind = model_class(self._whole, head)._model_mapping[type(self._whole)]
        changes = config_changes(kind.__name__, head)
        return written_changes(self._settings.model) | changes

    def flops(self, rows: TensorDict, backward: bool) -> float:
        """See TrainEngine. A prompt that several of the rows share is computed once, and counted once."""
        num_weights = num_active_weights(self._hf, self._settings.head)
        again = repeated_prompt_tokens(rows) if self._shares_prompts(rows) else []
        whole, less = (pass_flops(num_weights, self._hf, x, backward) for x in (row_lengths(rows), again))
        reader, seeing = self._settings.image_reader, 0.0
        if reader is not None:
            patches = reader.num_patches(images_seen(rows, self._shares_prompts(rows)))
            seeing = 2.0 * patches * self._tower_weights * (3.0 if backward else 1.0)
        return whole - less + seeing

    def _local_tensors(self, part: str) -> Iterator[Tensor]:
        """This rank's tensors of a part; main weights are the optimizer's, unless they are the model's."""
        for param, _ in self._params:
            if part == "params":
                yield param
            elif part == "grads" and getattr(param, "main_grad", None) is not None:
                yield param.main_grad
            elif part == "optimizer" and self._optimizer is not None:
                owned, _ = self._shards.tensors(param)
                model_storage = param.untyped_storage()._cdata
                elsewhere = (x for x in owned.values() if x.untyped_storage()._cdata != model_storage)
                yield from (x for x in elsewhere if x.device.type == self.device.type)

    @property
    def _hidden_size(self) -> int:
        return self._hf.hidden_size

    @property
    def _outputs(self) -> tuple[str, ...]:
        return self._stages[-1].outputs

    @functools.cached_property
    def _seen_back(self) -> float:
        config = self._config
        by_flash = config.params_dtype in (torch.bfloat16, torch.float16)
        if config.num_moe_experts or not (self.device.type == "cpu" or by_flash):
            return 0
        return math.inf if config.window_size is None else config.window_size[0] + 1

    def _finish_gather(self) -> None:
        """Have whole parameters now: overlap_param_gather would gather them in the next training step."""
        if self._is_gathering:
            with self._scope:
                for module in self._modules:
                    module.start_param_sync(force_sync=True)
            self._is_gathering = False


def _finalize(stages: list[Any], num_tokens: Tensor | None, **options: Any) -> None:
    """Complete the gradients of a mini-batch: summed, and never divided, as shares of a loss add up."""
    finalize_model_grads(stages, None, **options)


def _no_tokens() -> Tensor:
    """What the schedule would divide by."""
    return torch.zeros((), dtype=torch.int32)
