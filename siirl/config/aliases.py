"""Older and duplicate names of keys: setting one sets the keys that it stands for."""

POLICY = "actor_rollout_ref"
FSDP_KEYS = (
    "param_offload",
    "optimizer_offload",
    "fsdp_size",
    "model_dtype",
    "mixed_precision.param_dtype",
    "mixed_precision.reduce_dtype",
)
MEGATRON_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "sequence_parallel",
)
MEGATRON_KEYS = (
    *MEGATRON_SIZES,
    "param_dtype",
    "param_offload",
    "override_transformer_config",
    "use_dist_checkpointing",
    "dist_checkpointing_path",
    "use_mbridge",
)
MEGATRON_TRAINING_KEYS = (
    "use_distributed_optimizer",
    "grad_offload",
    "optimizer_offload",
    "override_ddp_config",
)

ALIASES: dict[str, tuple[str, ...]] = (
    {
        "data.filter_overlong_prompt": ("data.filter_overlong_prompts",),
        f"{POLICY}.actor.optim.clip_grad": (f"{POLICY}.actor.grad_clip",),
        f"{POLICY}.actor.param_offload": (f"{POLICY}.actor.fsdp_config.param_offload",),
        f"{POLICY}.actor.optimizer_offload": (f"{POLICY}.actor.fsdp_config.optimizer_offload",),
        f"{POLICY}.actor.checkpoint.contents": (
            f"{POLICY}.actor.checkpoint.save_contents",
            f"{POLICY}.actor.checkpoint.load_contents",
        ),
        f"{POLICY}.ref.param_offload": (f"{POLICY}.ref.fsdp_config.param_offload",),
        "critic.optim.clip_grad": ("critic.grad_clip",),
        "critic.checkpoint.contents": ("critic.checkpoint.save_contents", "critic.checkpoint.load_contents"),
    }
    | {f"critic.model.fsdp_config.{name}": (f"critic.fsdp_config.{name}",) for name in FSDP_KEYS}
    | {
        f"{POLICY}.model.fsdp_config.{name}": tuple(
            f"{POLICY}.{role}.fsdp_config.{name}"
            for role in ("actor", "ref")
            if (role, name) != ("ref", "optimizer_offload")
        )
        for name in FSDP_KEYS
    }
)
ALIASES |= {
    f"{POLICY}.model.megatron.{name}": tuple(f"{POLICY}.{role}.megatron.{name}" for role in ("actor", "ref"))
    for name in (*MEGATRON_KEYS, "seed")
}
ALIASES |= {
    f"{POLICY}.model.megatron.{name}": (f"{POLICY}.actor.megatron.{name}",) for name in MEGATRON_TRAINING_KEYS
}
ALIASES |= {
    f"critic.model.megatron.{name}": (f"critic.megatron.{name}",)
    for name in (*MEGATRON_KEYS, *MEGATRON_TRAINING_KEYS, "seed")
}
ALIASES |= {
    f"reward_model.model.fsdp_config.{name}": (f"reward_model.fsdp_config.{name}",)
    for name in FSDP_KEYS
    if name != "optimizer_offload"
}
ALIASES |= {
    f"reward_model.model.megatron.{name}": (f"reward_model.megatron.{name}",)
    for name in (*MEGATRON_KEYS, "seed")
}
