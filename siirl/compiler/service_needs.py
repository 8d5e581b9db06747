"""What a training service keeps and needs, by its adapters. Pure."""

from siirl.compiler.memory.estimate import adapter_params, read_shape
from siirl.config import Config
from siirl.spelling import size_text

WIDTH = 4
"""Bytes of a number: adapters are trained in float32."""
COPIES = {"weights": 1, "state": 3, "device": 4}
"""For each number of an adapter: a sampler's weights; with Adam's two; with the gradient, where it trains."""


def adapter_bytes(cfg: Config, rank: int) -> dict[str, int]:
    """Of an adapter of this rank: its weights, its state on disk, what it takes on the device. Empty if the
    shape of the model is not known here."""
    shape, model = read_shape(cfg, "actor"), cfg.actor_rollout_ref.model
    if isinstance(shape, str):
        return {}
    numbers = adapter_params(model, shape) // max(1, model.lora_rank) * rank
    return {name: copies * numbers * WIDTH for name, copies in COPIES.items()}


def service_lines(cfg: Config) -> list[str]:
    """What `siirl check` says of it; nothing of a run that is no service."""
    service, rank = cfg.service, cfg.actor_rollout_ref.model.lora_rank
    if not service.enable or not (size := {k: size_text(v) for k, v in adapter_bytes(cfg, rank).items()}):
        return []
    all_models = size_text(service.max_models * adapter_bytes(cfg, rank)["device"])
    disk = f"{service.max_disk_gb:g} GB a tenant" if service.max_disk_gb else "without a limit"
    return [
        f"device: {size['device']} for each model that trains at rank {rank} (weights, gradient, Adam), "
        f"{all_models} for {service.max_models}, beside the base",
        f"host: {size['weights']} for each sampling client of current weights, until its session ends",
        f"disk: {size['state']} for each state, {size['weights']} for weights of a sampler, {disk}; they "
        f"stay in {cfg.trainer.output_dir}/service/models until they are deleted",
    ]
