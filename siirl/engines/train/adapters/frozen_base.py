"""Frozen weights that several engines of a process use: one copy, on the device while any of them computes.

Each engine has a module tree of its own around the same parameters, so that gathering, adapters and
optimizers of one never meet those of another.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from siirl.engines.train.adapters.lora import adapter_name, plain_name
from siirl.engines.train.transfers import HostCopies
from siirl.observe.spans import phase


class FrozenBase:
    """The frozen parameters of a model, and the engines that need them on the device now."""

    def __init__(self, model: nn.Module) -> None:
        """model: the sharded model that the parameters were loaded into."""
        self.model = model
        self._host = HostCopies()
        self._users: set[str] = set()

    def __bool__(self) -> bool:
        """Whether the weights are away from the device."""
        return bool(self._host)

    def tensors(self) -> Iterator[Tensor]:
        """This rank's shards."""
        for param in self.model.parameters():
            if not param.requires_grad:
                yield param.to_local()

    def onload(self, user: str) -> None:
        """Have the weights on the device until this user, and all others, let go of them."""
        self._users.add(user)
        if self._host:
            with phase("onload", part="frozen params"):
                self._host.restore()

    def offload(self, user: str) -> None:
        """This user is done; without another the weights move to host memory."""
        self._users.discard(user)
        frozen = [] if self._users or self._host else list(self.tensors())
        if frozen:
            with phase("offload", part="frozen params"):
                self._host.take(frozen)


def use_base(hf: nn.Module, base: nn.Module, device: torch.device) -> None:
    """Put the parameters and buffers of `base` in the place of those of `hf`; adapters get their own memory.

    Both are sharded alike, hf is still on the meta device and has never run. Names are compared without what
    adapters add to them. No communication.
    """
    shards = {plain_name(name): param for name, param in base.named_parameters(remove_duplicate=False)}
    buffers = dict(base.named_buffers())
    for prefix, module in hf.named_modules():
        start = f"{prefix}." if prefix else ""
        own = [f"{start}{name}" for name, _ in module.named_parameters(recurse=False)]
        if any(adapter_name(name) for name in own):
            module.to_empty(device=device, recurse=False)
            continue
        for name in own:
            setattr(module, name.removeprefix(start), shards[plain_name(name)])
        for name, _ in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffers[plain_name(f"{start}{name}")]


def join_shards(model: nn.Module, base: nn.Module) -> None:
    """Have FSDP gather the shards of `base` for `model` too, whose parameters are those of `base` already.

    FSDP keeps a padded shard beside each parameter and would make a second one where the rows of a tensor do
    not divide among the ranks.
    """
    padded = {}
    for item in _fsdp_params(base):
        item.reset_sharded_param()
        padded[id(item.sharded_param)] = item._sharded_param_data
    for item in _fsdp_params(model):
        param = getattr(item._module_info.module, item._module_info.param_name)
        if id(param) in padded:
            item.sharded_param, item._sharded_param_data = param, padded[id(param)]
        item.reset_sharded_param()


def _fsdp_params(model: nn.Module) -> Iterator:
    """What FSDP keeps of each parameter; its own classes, which torch does not document."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if hasattr(state, "_fsdp_param_groups"):
                groups = state._fsdp_param_groups
            else:  # torch up to 2.12: one at most
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            for group in groups:
                yield from group.fsdp_params
