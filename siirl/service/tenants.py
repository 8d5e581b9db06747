"""Training clients: an adapter with an optimizer for each, on one base, and the files that they are saved to.

On the worker's thread. Collective over the service's ranks unless said otherwise: all carry out the same
commands. The first of them has the files.
"""

import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from siirl.algorithms.client_losses import CLIENT_LOSSES, ClientLoss
from siirl.config import Config
from siirl.engines.train.fsdp.adapter_engine import AdapterEngine, TrainedAdapter, Work, take_steps
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

log = logging.getLogger(__name__)
Weights = dict[str, Tensor]
"""An adapter on the host, under the names of RolloutEngine.weight_specs."""
SAMPLER = re.compile(r"[\w-]+:sample:\d+")
"""The id of a sampling session."""
MLP = ("gate_proj", "up_proj", "down_proj")
Found = TypeVar("Found")


@dataclass
class Tenant:
    """A training client's model."""

    spec: AdapterSpec
    trained: TrainedAdapter


@dataclass(frozen=True)
class Snapshot:
    """An adapter at one time; nobody changes it."""

    weights: Weights
    rank: int


class Tenants:
    """The adapters of all training clients."""

    def __init__(self, cfg: Config, folder: Path, engine: AdapterEngine) -> None:
        """folder: of the files."""
        self.engine = engine
        self._cfg, self._folder = cfg, folder
        self._tenants: dict[str, Tenant] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self.vocab = load_hf_config(cfg.actor_rollout_ref.model).get_text_config().vocab_size

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def create(self, command: CreateModel) -> None:
        """A new adapter. Refused where it cannot be, or too many are there. Local."""
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
        ends = None if spec.attention and spec.mlp else ADAPTED if spec.attention else MLP
        adapter = self.engine.new_adapter(spec.rank, ends)
        adapter.draw(spec.seed)
        self._tenants[command.model] = Tenant(spec, TrainedAdapter(adapter))

    def train(self, commands: Sequence[ForwardBackward]) -> list[Trained | Refused]:
        """Add the gradients of losses, or with forward_only, which all have or none, give the losses alone.

        Those of several models go through the base together. A command of data that do not go with its loss
        is Refused, and has changed nothing.
        """
        answers: list[Trained | Refused | Work] = [self._work(one) for one in commands]
        works = [one for one in answers if isinstance(one, Work)]
        gradients = not commands[0].forward_only
        done = iter(self.engine.run(works, gradients))
        for number, (command, work) in enumerate(zip(commands, answers, strict=True)):
            if isinstance(work, Work):
                computed, gradient = next(done)
                if gradient is not None:
                    self._of(command.model).trained.add(gradient)
                told = [_said(computed.log_probs[row], one) for row, one in enumerate(command.data)]
                answers[number] = Trained(told, math.fsum(computed.losses))
        return answers  # type: ignore[return-value]

    def _work(self, command: ForwardBackward) -> Work | Refused:
        try:
            adapter = self._of(command.model).trained.adapter
            loss, options = _loss(command.loss, command.options)
            data = command.data
            if not data:
                raise Refused("there are no data")
            for number, one in enumerate(data):
                _check(f"datum {number}", one, loss, self.vocab, _longest(self._cfg))
        except Refused as error:
            return error
        whole = [one.inputs["target_tokens"] for one in data]
        width = max((one.shape[1] for one in whole if one.ndim > 1), default=0)
        targets = [_wide(one, width).astype(np.int64) for one in whole]
        inputs = {
            name: [
                _wide(one.inputs.get(name, np.ones_like(target)), width).astype(np.float64)
                for one, target in zip(data, whole, strict=True)
            ]
            for name in loss.inputs
        }

        def sum_of(log_prob: Tensor, rows: Sequence[int]) -> Tensor:
            device = log_prob.device
            own = {
                name: torch.from_numpy(np.concatenate([values[row] for row in rows])).to(device)
                for name, values in inputs.items()
            }
            return loss.sum_of(log_prob, own, options)

        return Work(
            adapter, [one.tokens for one in data], targets, sum_of, turn=crc32(command.model.encode())
        )

    def step(self, commands: Sequence[OptimStep]) -> list[float | Refused]:
        """The norm of each gradient, of models that are all different. Refused for one that is not finite: it
        is dropped."""
        there = [one for one in commands if one.model in self._tenants]
        taken = [(self._of(one.model).trained, one.adam) for one in there]
        norms = dict(zip((one.model for one in there), take_steps(taken, self.engine.group), strict=True))
        return [
            _missing(one.model)
            if one.model not in norms
            else norm
            if math.isfinite(norm := norms[one.model])
            else Refused(f"no step was taken: the norm of the gradient is {norm}, and it was dropped")
            for one in commands
        ]

    def save(self, command: SaveState) -> None:
        """Adapter and optimizer, without the gradient so far."""
        tenant = self._of(command.model)
        self.on_first(lambda: self._write(command, tenant.trained.state(), tenant, command.overwrite))

    def save_sampler(self, command: SaveSampler) -> None:
        """The adapter, to a file, or for a sampling session."""
        tenant = self._of(command.model)
        weights = tenant.trained.weights()
        if command.path is not None:
            self.on_first(lambda: self._write(command, weights, tenant, command.overwrite))
        if command.session is not None:
            kept = self._kept(command.session)
            rank = {"rank": str(tenant.spec.rank)}
            self.on_first(lambda: kept.parent.mkdir(parents=True, exist_ok=True))
            self.on_first(lambda: save_file(weights, kept, rank))
            self._snapshots[command.session] = Snapshot(weights, tenant.spec.rank)

    def save_external(self, command: SaveExternal) -> None:
        """The adapter in the files of peft."""
        tenant = self._of(command.model)
        self.on_first(lambda: self._write(command, tenant.trained.weights(), tenant))

    def load(self, command: LoadState) -> None:
        """What `save` wrote, into a model of its shape. A gradient so far is dropped."""
        if "/sampler_weights/" in command.path:
            raise Refused(f"{command.path} holds no state to train from: it was saved for sampling")
        told, stored = self.on_first(lambda: self.read(command.path))
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
        tenant.trained.load(stored, command.optimizer, told["version"])

    def on_first(self, do: Callable[[], Found]) -> Found:
        """What comes of it on the first rank, or what it raises there, on all ranks."""
        group, box = self.engine.group, [None, None]
        if group.rank() == 0:
            try:
                box = [do(), None]
            except Exception as error:  # told to all, who raise it
                if group.size() == 1:
                    raise
                box = [None, error]
        if group.size() > 1:
            dist.broadcast_object_list(box, group=group, group_src=0, device=torch.device("cpu"))
        if box[1] is not None:
            raise box[1]
        return box[0]  # type: ignore[return-value]

    def snapshot(self, source: str) -> Snapshot:
        """That of a sampling session, or of a path. Refused for a name that there is not."""
        if source in self._snapshots:
            return self._snapshots[source]
        if SAMPLER.fullmatch(source) and self.on_first(self._kept(source).exists):
            rank, weights = self.on_first(lambda: _read_snapshot(self._kept(source)))
            self._snapshots[source] = Snapshot(weights, rank)
            return self._snapshots[source]
        if PATH.fullmatch(source) is None or "/sampler_weights/" not in source:
            raise Refused(f"{source!r} names no weights that can be sampled from")
        told, stored = self.on_first(lambda: self.read(source))
        return Snapshot(stored, told["spec"]["rank"])

    def release(self, session: str) -> None:
        """Forget the models and snapshots of a session; files stay."""
        for held in (self._tenants, self._snapshots):
            for name in [name for name in held if name.startswith(f"{session}:")]:
                del held[name]
        if self.engine.group.rank() == 0:
            for path in self._kept(session).parent.glob(f"{session}:*"):
                path.unlink(missing_ok=True)

    def restore(self, model: str, state: Mapping[str, Any]) -> None:
        """A model as `state_of` gave it."""
        self.create(CreateModel(model, AdapterSpec(**state["spec"])))
        self._of(model).trained.load(state["tensors"], True, state["version"])

    def state_of(self, model: str) -> tuple[AdapterSpec, int, Weights]:
        """What a model is, without the gradient so far. Local."""
        tenant = self._of(model)
        return tenant.spec, tenant.trained.version, tenant.trained.state()

    def _kept(self, session: str) -> Path:
        """Where the adapter of a sampling session is."""
        return self._folder.with_name("sessions") / f"{session}.safetensors"

    def file(self, path: str) -> Path:
        """Where the tensors of a path are. Refused for what is no path."""
        match = PATH.fullmatch(path)
        if match is None:
            raise Refused(f"{path!r} is no path: tinker://MODEL/weights/NAME, or .../sampler_weights/NAME")
        return self._folder.joinpath(*match.groups()[:2], f"{match[3]}.safetensors")

    def read(self, path: str) -> tuple[dict[str, Any], Weights]:
        """What was written, and what it is. Refused if it is not there. Local."""
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
            "version": tenant.trained.version,
            "base_model": model.path,
            "time": time.time(),
            "size_bytes": size,
        }
        (aside := told.with_suffix(".told")).write_text(json.dumps(about))
        os.replace(aside, told)

    def _of(self, model: str) -> Tenant:
        if model not in self._tenants:
            raise _missing(model)
        return self._tenants[model]


def _missing(model: str) -> Refused:
    return Refused(f"there is no model {model!r}: its session is over, or it was not created")


def _read_snapshot(path: Path) -> tuple[int, Weights]:
    with safe_open(path, "pt") as file:
        return int(file.metadata()["rank"]), {name: file.get_tensor(name) for name in file.keys()}


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


def _wide(values: np.ndarray, width: int) -> np.ndarray:
    """[N] as it is for width 0; else [N, width], zeros where a row has fewer."""
    if not width:
        return values
    values = values.reshape(len(values), -1)
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))


def _said(log_prob: np.ndarray, one: Datum) -> np.ndarray:
    """Log-probs of the targets of a datum, in their shape."""
    target = one.inputs["target_tokens"]
    found = log_prob.reshape(len(target), -1)[:, : target.shape[1] if target.ndim > 1 else 1]
    return found.reshape(target.shape)
