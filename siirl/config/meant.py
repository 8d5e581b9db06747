"""What people mean by names that are none here: words of other trainers, by meaning, not by letters.

Keys are known by the last part of a name, whatever stands before it; what siiRL and verl call theirs is in
foreign_keys.txt.
"""

_ACTOR, _ROLLOUT, _DATA = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "data"
_MODEL, _DEVICES = "actor_rollout_ref.model", "trainer.n_gpus_per_node"
_CHECKPOINTS, _RESUME = "trainer.default_local_dir", "trainer.resume_from_path"

KEYS = {
    **dict.fromkeys(("lr", "learning_rate", "actor_lr"), f"{_ACTOR}.optim.lr"),
    **dict.fromkeys(("weight_decay",), f"{_ACTOR}.optim.weight_decay"),
    **dict.fromkeys(("warmup_ratio", "warmup_steps_ratio"), f"{_ACTOR}.optim.lr_warmup_steps_ratio"),
    **dict.fromkeys(("warmup_steps",), f"{_ACTOR}.optim.lr_warmup_steps"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler"), f"{_ACTOR}.optim.warmup_style"),
    **dict.fromkeys(("max_grad_norm", "gradient_clipping", "clip_grad"), f"{_ACTOR}.grad_clip"),
    **dict.fromkeys(("loss_type", "loss", "policy_loss_type"), f"{_ACTOR}.policy_loss.loss_mode"),
    **dict.fromkeys(("loss_aggregation", "loss_reduction"), f"{_ACTOR}.loss_agg_mode"),
    **dict.fromkeys(("epsilon", "cliprange", "clip_range", "clip_eps", "eps_clip"), f"{_ACTOR}.clip_ratio"),
    **dict.fromkeys(("epsilon_high", "clip_range_high"), f"{_ACTOR}.clip_ratio_high"),
    **dict.fromkeys(("beta", "kl_beta", "init_kl_coef", "kl_coeff"), f"{_ACTOR}.kl_loss_coef"),
    **dict.fromkeys(("entropy_coef", "entropy_bonus", "ent_coef"), f"{_ACTOR}.entropy_coeff"),
    **dict.fromkeys(("num_iterations", "num_ppo_epochs", "noptepochs"), f"{_ACTOR}.ppo_epochs"),
    **dict.fromkeys(("mini_batch_size", "minibatch_size"), f"{_ACTOR}.ppo_mini_batch_size"),
    **dict.fromkeys(
        ("micro_batch_size", "per_device_train_batch_size"), f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    ),
    **dict.fromkeys(("batch_size", "rollout_batch_size", "global_batch_size"), f"{_DATA}.train_batch_size"),
    **dict.fromkeys(
        ("num_generations", "group_size", "n_samples_per_prompt", "num_samples"), f"{_ROLLOUT}.n"
    ),
    **dict.fromkeys(
        ("max_completion_length", "max_new_tokens", "max_tokens", "response_length"),
        f"{_DATA}.max_response_length",
    ),
    **dict.fromkeys(("prompt_length", "max_prompt_tokens"), f"{_DATA}.max_prompt_length"),
    **dict.fromkeys(("train_dataset", "train_data", "dataset", "prompt_data"), f"{_DATA}.train_files"),
    **dict.fromkeys(("eval_dataset", "val_data", "test_files", "eval_data"), f"{_DATA}.val_files"),
    **dict.fromkeys(("temp", "sampling_temperature"), f"{_ROLLOUT}.temperature"),
    **dict.fromkeys(
        ("gpu_memory_fraction", "vllm_gpu_memory_utilization"), f"{_ROLLOUT}.gpu_memory_utilization"
    ),
    **dict.fromkeys(("rollout_engine", "rollout_backend", "use_vllm"), f"{_ROLLOUT}.name"),
    **dict.fromkeys(
        ("model_name", "model_name_or_path", "model_path", "pretrain", "hf_checkpoint"),
        "actor_rollout_ref.model.path",
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing"),
        "actor_rollout_ref.model.enable_gradient_checkpointing",
    ),
    **dict.fromkeys(("lora_r", "lora_dim"), "actor_rollout_ref.model.lora_rank"),
    **dict.fromkeys(("report_to", "logging", "loggers", "log_with"), "trainer.logger"),
    **dict.fromkeys(("run_name", "exp_name", "wandb_name"), "trainer.experiment_name"),
    **dict.fromkeys(("max_steps", "total_steps", "num_steps", "train_steps"), "trainer.total_training_steps"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "epochs", "num_episodes"), "trainer.total_epochs"),
    **dict.fromkeys(("eval_steps", "eval_freq", "eval_interval", "val_freq"), "trainer.test_freq"),
    **dict.fromkeys(("save_steps", "save_interval", "checkpoint_freq"), "trainer.save_freq"),
    **dict.fromkeys(("save_total_limit", "max_ckpt_to_keep"), "trainer.max_actor_ckpt_to_keep"),
    **dict.fromkeys(("num_gpus", "n_gpus", "gpus", "num_processes"), "trainer.n_gpus_per_node"),
    **dict.fromkeys(("num_nodes", "num_machines"), "trainer.nnodes"),
    **dict.fromkeys(("random_seed",), "trainer.seed"),
    **dict.fromkeys(("advantage_estimator", "adv_type", "advantage", "algo"), "algorithm.adv_estimator"),
    **dict.fromkeys(("discount", "discount_factor"), "algorithm.gamma"),
    **dict.fromkeys(("gae_lambda", "lambda", "lambd"), "algorithm.lam"),
    **dict.fromkeys(
        ("reward_func", "reward_funcs", "reward_function", "reward_fn"), "custom_reward_function.path"
    ),
    **dict.fromkeys(("num_return_sequences", "n_rollouts", "rollout_n", "num_rollouts"), f"{_ROLLOUT}.n"),
    **dict.fromkeys(("wandb_project", "project", "tensorboard_project"), "trainer.project_name"),
    **dict.fromkeys(
        ("output", "save_path", "out_dir", "log_dir", "save_dir", "run_dir"), "trainer.output_dir"
    ),
    **dict.fromkeys(("ckpt_dir", "ckpt_path", "checkpoint_dir", "save_checkpoint_path"), _CHECKPOINTS),
    **dict.fromkeys(("resume_from_checkpoint", "load_checkpoint", "load_path", "resume"), _RESUME),
    **dict.fromkeys(
        ("bf16", "fp16", "mixed_precision", "precision", "compute_dtype"),
        f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype",
    ),
    **dict.fromkeys(("kl_penalty_coef", "kl_coef_loss", "kl_weight"), f"{_ACTOR}.kl_loss_coef"),
    **dict.fromkeys(("use_kl", "kl_loss"), f"{_ACTOR}.use_kl_loss"),
    **dict.fromkeys(
        ("tp", "tp_size", "tensor_parallel_size", "vllm_tensor_parallel_size", "rollout_tp"),
        f"{_ROLLOUT}.tensor_model_parallel_size",
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_betas"), f"{_ACTOR}.optim.betas"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), f"{_ACTOR}.optim.lr_warmup_steps"),
    **dict.fromkeys(("attn_implementation", "flash_attn", "use_flash_attn"), f"{_MODEL}.attention_kernels"),
    **dict.fromkeys(("use_lora", "use_peft", "peft_r", "lora"), f"{_MODEL}.lora_rank"),
    **dict.fromkeys(("lora_target_modules", "lora_modules"), f"{_MODEL}.target_modules"),
    **dict.fromkeys(
        ("scale_rewards", "norm_adv", "normalize_advantage"), "algorithm.norm_adv_by_std_in_grpo"
    ),
    **dict.fromkeys(("critic_learning_rate", "critic_lr", "vf_lr"), "critic.optim.lr"),
    **dict.fromkeys(("reward_model_path", "reward_pretrain", "rm_path"), "reward_model.model.path"),
    **dict.fromkeys(("train_path", "train_file", "prompt_file", "dataset_name"), f"{_DATA}.train_files"),
    **dict.fromkeys(("eval_path", "val_path", "eval_file", "val_file"), f"{_DATA}.val_files"),
    **dict.fromkeys(("seq_len", "max_len", "max_seq_length"), f"{_DATA}.max_response_length"),
    **dict.fromkeys(("num_gpus_per_node", "actor_num_gpus_per_node", "nproc_per_node"), _DEVICES),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation_steps"), f"{_ACTOR}.ppo_mini_batch_size"),
    **dict.fromkeys(("stop_words", "stop_tokens", "eos_token_id"), f"{_ROLLOUT}.stop_token_ids"),
    **dict.fromkeys(("zero_stage", "deepspeed", "sharding"), f"{_ACTOR}.strategy"),
    **dict.fromkeys(("reward_weights", "reward_function_weights"), "custom_reward_function.weights"),
}
"""Last part of a name -> the key that does what is meant."""

VALUES = {
    "actor_rollout_ref.rollout.weight_link": {"spread": "auto"},  # was cut: it saved nothing
    "algorithm.adv_estimator": {
        **{
            "ppo": "gae",
            "group": "grpo",
            "drgrpo": "grpo",
            "dr_grpo": "grpo",
            "dapo": "grpo",
            "gspo": "grpo",
        },
        **{"reinforce": "reinforce_plus_plus", "reinforce++": "reinforce_plus_plus", "loo": "rloo"},
    },
    "actor_rollout_ref.actor.policy_loss.loss_mode": {
        **{"ppo": "vanilla", "grpo": "vanilla", "clip": "vanilla", "clipped": "vanilla", "dapo": "vanilla"},
    },
    "actor_rollout_ref.rollout.name": {"transformers": "hf", "huggingface": "hf", "sgl": "sglang"},
    "actor_rollout_ref.actor.strategy": {
        "fsdp1": "fsdp",
        "ddp": "fsdp",
        "deepspeed": "fsdp",
        "zero3": "fsdp",
    },
}
"""Key -> what people write -> the value that is meant."""

COMMANDS = {
    **dict.fromkeys(("train", "start", "launch", "fit", "grpo", "ppo", "sft", "rl"), "run"),
    **dict.fromkeys(("validate", "lint", "verify", "dry-run"), "check"),
    **dict.fromkeys(("evaluate", "val"), "eval"),
    **dict.fromkeys(("init", "create", "quickstart"), "new"),
    **dict.fromkeys(("list", "runs", "status"), "ls"),
    **dict.fromkeys(("continue", "restart"), "resume"),
    **dict.fromkeys(("diff",), "compare"),
    **dict.fromkeys(("ui", "dashboard", "show", "open"), "view"),
    **dict.fromkeys(("explain", "draw"), "plan"),
    **dict.fromkeys(("merge", "save"), "export"),
    **dict.fromkeys(("env", "info", "diagnose"), "doctor"),
}
"""What people type -> the command that is meant."""


def meant_key(name: str) -> str | None:
    """The key that is meant by a name of another trainer; None if nothing is known of it."""
    return KEYS.get(name.rpartition(".")[2].lower())


def meant_value(key: str, value: str) -> str | None:
    """The value of a key that is meant; None if nothing is known of it."""
    return VALUES.get(key, {}).get(value.lower())
