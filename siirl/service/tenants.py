"""Training clients: an adapter with an optimizer for each, on one base, and the files that they are saved to.

On the worker's thread. One process for now: the worker's ranks do not follow (siirl/compiler/checks).
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

from siirl.algorithms.client_losses import CLIENT_LOSSES, ClientLoss
from siirl.algorithms.tensor_metrics import TensorMetrics
from siirl.config import Config, with_overrides
from siirl.data.rows import make_rows
from siirl.engines.train.base import BatchCounts, TokenOutputs, TrainEngine
from siirl.model_files.hf_config import load_hf_config
from siirl.model_files.weight_slices import write_adapter
from siirl.models.adapter_targets import ADAPTED
from siirl.service.commands import (
    PATH,
    AdapterSpec,
    CreateModel,
    Datum,
    ForwardBackward,
    LoadState,
    OptimStep,
    Refused,
    SaveExternal,
    SaveSampler,
    SaveState,
    Saving,
    Trained,
)
from siirl.service.saved_weights import check_room

Weights = dict[str, Tensor]
"""An adapter on the host, under the names of RolloutEngine.weight_specs."""
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass
class Tenant:
    """A training client's model."""

    spec: AdapterSpec
    engine: TrainEngine
    lost: str = ""
    """Why the gradient so far is not all that was asked for; empty if it is."""


@dataclass(frozen=True)
class Snapshot:
    """An adapter at one time; nobody changes it."""

    weights: Weights
    rank: int


class Tenants:
    """The adapters of all training clients."""

    def __init__(self, cfg: Config, folder: Path, make: Callable[[str, Config], TrainEngine]) -> None:
        """folder: of the files. make: an engine of this name for an adapter on the base."""
        self._cfg, self._folder, self._make = cfg, folder, make
        self._tenants: dict[str, Tenant] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._vocab = load_hf_config(cfg.actor_rollout_ref.model).get_text_config().vocab_size

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def create(self, command: CreateModel) -> None:
        """A new adapter. Refused where it cannot be, or too many are there."""
        most, spec = self._cfg.service.max_models, command.spec
        if len(self._tenants) >= most and command.model not in self._tenants:
            raise Refused(
                f"{most} models train here already (service.max_models): end a session, or raise the key"
            )
        largest = self._cfg.actor_rollout_ref.model.lora_rank
        if not 1 <= spec.rank <= largest:
            raise Refused(f"rank {spec.rank}: this server has ranks 1 to {largest} (model.lora_rank)")
        if not (spec.attention or spec.mlp):
            raise Refused("train_attn and train_mlp are both false: nothing would be trained")
        overrides: dict[str, Any] = {
            "actor_rollout_ref.model.lora_rank": spec.rank,
            "trainer.seed": spec.seed,
        }
        if not (spec.attention and spec.mlp):
            overrides["actor_rollout_ref.model.target_modules"] = ADAPTED if spec.attention else MLP
        engine = self._make(command.model, with_overrides(self._cfg, overrides))
        self._tenants[command.model] = Tenant(spec, engine)

    def train(self, command: ForwardBackward) -> Trained:
        """Add the gradient of a loss; or with forward_only the loss alone. Refused for data that it does not
        go with: then nothing has changed."""
        tenant = self._of(command.model)
        loss, options = _loss(command.loss, command.options)
        rows, by_name = _rows(command.data, loss, self._vocab, _longest(self._cfg))
        outputs = ("top_log_prob",) if by_name else ("log_prob",)
        kept: dict[int, Tensor] = {}

        def share(found: TokenOutputs, part: TensorDict, _: BatchCounts) -> tuple[Tensor, TensorMetrics]:
            log_prob = found.top_log_prob_BT if by_name else found.log_prob_BT
            kept.update(zip(part["row_id"].tolist(), log_prob.detach(), strict=True))
            total = loss.sum_of(log_prob.double(), {name: part[name] for name in loss.inputs}, options)
            metrics = TensorMetrics()
            metrics.sum("loss", total.detach())
            return total, metrics

        if command.forward_only:
            columns = tenant.engine.compute(rows, outputs, 1.0)
            found = TokenOutputs(**{f"{name}_BT": columns[name] for name in outputs})
            _, metrics = share(found, rows, BatchCounts(0.0, 0.0, 0))
            total = metrics.read().values()["loss"]
        else:
            try:
                total = tenant.engine.add_gradients(rows, share, outputs, 1.0).values()["loss"]
            except BaseException as error:
                tenant.engine.drop_gradients()
                tenant.lost = f"a forward_backward before it failed ({type(error).__name__})"
                raise
        return Trained([_said(kept[row], one) for row, one in enumerate(command.data)], total)

    def step(self, command: OptimStep) -> float:
        """The norm of the gradient. Refused for one that is not finite, or not whole: it is dropped."""
        tenant = self._of(command.model)
        if tenant.lost:
            reason, tenant.lost = tenant.lost, ""
            tenant.engine.drop_gradients()
            raise Refused(f"no step was taken: {reason}, so the gradient was dropped. Begin it anew")
        norm = tenant.engine.step(command.adam)
        if not math.isfinite(norm):
            raise Refused(f"no step was taken: the norm of the gradient is {norm}, and it was dropped")
        return norm

    def save(self, command: SaveState) -> None:
        """Adapter and optimizer, without the gradient so far."""
        tenant, state = self._of(command.model), self._of(command.model).engine.state_dict()
        tensors = {
            f"{part}/{name}": local_part(tensor).clone()
            for part in ("model", "optimizer")
            for name, tensor in state[part].items()
        }
        self._write(command, tensors, tenant, command.overwrite)

    def save_sampler(self, command: SaveSampler) -> None:
        """The adapter, to a file, or for a sampling session."""
        tenant = self._of(command.model)
        weights = {name: one.detach().cpu().clone() for name, one in tenant.engine.export_adapter()}
        if command.session is not None:
            self._snapshots[command.session] = Snapshot(weights, tenant.spec.rank)
        if command.path is not None:
            self._write(command, weights, tenant, command.overwrite)

    def save_external(self, command: SaveExternal) -> None:
        """The adapter in the files of peft."""
        tenant = self._of(command.model)
        self._write(
            command, {name: one.detach().cpu() for name, one in tenant.engine.export_adapter()}, tenant
        )

    def load(self, command: LoadState) -> None:
        """What `save` wrote, into a model of its shape. A gradient so far is dropped."""
        told, stored = self.read(command.path)
        if "/sampler_weights/" in command.path:
            raise Refused(f"{command.path} holds no state to train from: it was saved for sampling")
        model = self._cfg.actor_rollout_ref.model.path
        if told["base_model"] != model:
            raise Refused(f"{command.path} was trained on {told['base_model']}, and this server has {model}")
        spec = AdapterSpec(**told["spec"])
        if command.creates:
            self.create(CreateModel(command.model, spec))
        tenant = self._of(command.model)
        if (tenant.spec.rank, tenant.spec.attention, tenant.spec.mlp) != (
            spec.rank,
            spec.attention,
            spec.mlp,
        ):
            raise Refused(
                f"{command.path} is an adapter of another shape: {spec}, and this one {tenant.spec}"
            )
        engine = tenant.engine
        engine.drop_gradients()
        tenant.lost, own = "", engine.state_dict()
        for part in ("model", *(("optimizer",) if command.optimizer else ())):
            for name, tensor in own[part].items():
                local_part(tensor).copy_(stored[f"{part}/{name}"])
        if not command.optimizer:
            for tensor in own["optimizer"].values():
                local_part(tensor).zero_()
        engine.load_state_dict(own | {"version": told["version"] if command.optimizer else 0})

    def snapshot(self, source: str) -> Snapshot:
        """That of a sampling session, or of a path. Refused for a name that there is not."""
        if source in self._snapshots:
            return self._snapshots[source]
        if PATH.fullmatch(source) is None or "/sampler_weights/" not in source:
            raise Refused(f"{source!r} names no weights that can be sampled from")
        told, stored = self.read(source)
        return Snapshot(stored, told["spec"]["rank"])

    def release(self, session: str) -> None:
        """Forget the models and snapshots of a session; files stay."""
        for held in (self._tenants, self._snapshots):
            for name in [name for name in held if name.startswith(f"{session}:")]:
                del held[name]

    def file(self, path: str) -> Path:
        """Where the tensors of a path are. Refused for what is no path."""
        match = PATH.fullmatch(path)
        if match is None:
            raise Refused(f"{path!r} is no path: tinker://MODEL/weights/NAME, or .../sampler_weights/NAME")
        return self._folder.joinpath(*match.groups()[:2], f"{match[3]}.safetensors")

    def read(self, path: str) -> tuple[dict[str, Any], Weights]:
        """What was written, and what it is. Refused if it is not there."""
        file = self.file(path)
        try:
            return json.loads(file.with_suffix(".json").read_text()), load_file(file)
        except FileNotFoundError:
            raise Refused(f"{path}: nothing was saved there") from None

    def _write(self, command: Saving, tensors: Weights, tenant: Tenant, overwrite: bool = False) -> None:
        """Whole or not at all: what the second file does not name is not there."""
        path, model = str(command.path), self._cfg.actor_rollout_ref.model
        file = self.file(path)
        told = file.with_suffix(".json")
        if told.exists() and not overwrite:
            raise Refused(f"{path} is there already: save under another name, or with overwrite")
        size = sum(one.nbytes for one in tensors.values())
        check_room(self._folder, command.model, size, self._cfg.service.max_disk_gb)
        file.parent.mkdir(parents=True, exist_ok=True)
        told.unlink(missing_ok=True)
        if isinstance(command, SaveExternal):
            file = file.with_suffix("")
            shutil.rmtree(file, ignore_errors=True)
            file.mkdir()
            write_adapter(file, tensors, tenant.spec.rank, model.lora_alpha, model.path)
        else:
            save_file(
                {name: one.contiguous() for name, one in tensors.items()}, aside := file.with_suffix(".new")
            )
            os.replace(aside, file)
        about = {
            **command.labels,
            "spec": asdict(tenant.spec),
            "version": tenant.engine.version,
            "base_model": model.path,
            "time": time.time(),
            "size_bytes": size,
        }
        (aside := told.with_suffix(".told")).write_text(json.dumps(about))
        os.replace(aside, told)

    def _of(self, model: str) -> Tenant:
        if model not in self._tenants:
            raise Refused(f"there is no model {model!r}: its session is over, or it was not created")
        return self._tenants[model]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, as a plain one in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _longest(cfg: Config) -> int:
    return cfg.data.max_prompt_length + cfg.data.max_response_length


def _loss(name: str, options: Mapping[str, float | str]) -> tuple[ClientLoss, dict[str, float]]:
    loss = CLIENT_LOSSES.get(name)
    if loss is None:
        raise Refused(
            f"loss_fn {name!r} is not served: it has no public definition here. There are "
            f"{', '.join(CLIENT_LOSSES)}, and forward_backward_custom"
        )
    unknown = sorted(options.keys() - loss.options.keys())
    if unknown or any(isinstance(value, str) for value in options.values()):
        raise Refused(f"loss_fn_config of {name}: it has the numbers {sorted(loss.options)}, not {options}")
    return loss, loss.options | dict(options)  # type: ignore[operator]


def _rows(data: Sequence[Datum], loss: ClientLoss, vocab: int, longest: int) -> tuple[TensorDict, bool]:
    """The data as rows, and whether their targets are named: they are not the tokens that follow.

    The prompt is the first token, the response the others and the last target. Refused for what is no
    number, token or shape that the loss goes with.
    """
    if not data:
        raise Refused("there are no data")
    for number, one in enumerate(data):
        _check(f"datum {number}", one, loss, vocab, longest)
    by_name = any(
        one.inputs["target_tokens"].ndim > 1 or one.inputs["target_tokens"][:-1].tolist() != one.tokens[1:]
        for one in data
    )
    width = max(len(one.tokens) for one in data)
    targets = [np.atleast_2d(one.inputs["target_tokens"].T).T for one in data]
    most = max(one.shape[1] for one in targets) if by_name else 0
    length = torch.tensor([len(one.tokens) for one in data])
    response = [[*one.tokens[1:], int(target[-1, 0])] for one, target in zip(data, targets, strict=True)]
    columns = {
        "row_id": torch.arange(len(data)),
        "prompt_ids": torch.tensor([one.tokens[:1] for one in data]),
        "prompt_length": torch.ones(len(data), dtype=torch.long),
        "response_ids": torch.tensor([row + [0] * (width - len(row)) for row in response]),
        "response_length": length,
        "response_mask": torch.arange(width) < length[:, None],
    }
    if by_name:
        columns["top_ids"] = _stacked(targets, width, most, torch.int64)
    for name in loss.inputs:
        values = [one.inputs.get(name, np.ones_like(one.inputs["target_tokens"])) for one in data]
        columns[name] = _stacked(values, width, most, torch.float64)
    return make_rows(columns), by_name


def _check(where: str, one: Datum, loss: ClientLoss, vocab: int, longest: int) -> None:
    count, target = len(one.tokens), one.inputs.get("target_tokens")
    if not 1 <= count <= longest:
        raise Refused(
            f"{where} has {count} tokens: 1 to {longest} are taken here (data.max_prompt_length + "
            "data.max_response_length)"
        )
    if target is None or target.dtype.kind != "i" or target.shape[0] != count or 0 in target.shape:
        shape = None if target is None else list(target.shape)
        raise Refused(f"{where}: target_tokens are {count} whole numbers, or {count} times K; here {shape}")
    for name, values in (("tokens", np.asarray(one.tokens)), ("target_tokens", target)):
        if values.min() < 0 or values.max() >= vocab:
            raise Refused(f"{where}: {name} are ids below {vocab}, not {values.min()} to {values.max()}")
    for name in loss.inputs:
        if name not in one.inputs and name != "weights":
            raise Refused(f"{where} has no {name}, which the loss reads")
        values = one.inputs.get(name, target)
        if values.shape != target.shape:
            raise Refused(f"{where}: {name} has shape {list(values.shape)}, not {list(target.shape)}")
        if not np.isfinite(values).all():
            raise Refused(f"{where}: {name} has a number that is not finite")


def _stacked(parts: Sequence[np.ndarray], width: int, most: int, dtype: torch.dtype) -> Tensor:
    """[B, T], or [B, T, K] with most targets K: zero where a row has none."""
    found = torch.zeros(len(parts), width, *([most] if most else []), dtype=dtype)
    for row, part in enumerate(parts):
        values = torch.tensor(part).to(dtype)
        if most:
            values = values.reshape(len(part), -1)
            found[row, : len(part), : values.shape[1]] = values
        else:
            found[row, : len(part)] = values
    return found


def _said(log_prob: Tensor, one: Datum) -> np.ndarray:
    """Log-probs of the targets of a datum, in their shape."""
    target = one.inputs["target_tokens"]
    found = log_prob[: len(target)].float().cpu()
    if found.ndim > 1:
        found = found[:, : target.shape[1] if target.ndim > 1 else 1]
    return found.reshape(target.shape).numpy()
