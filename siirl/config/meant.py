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
    **dict.fromkeys(("peft_config", "lora_config"), f"{_MODEL}.lora_rank"),
    **dict.fromkeys(("importance_sampling_level",), f"{_ACTOR}.policy_loss.loss_mode"),
    **dict.fromkeys(("log_completions", "num_completions_to_print"), "trainer.log_val_generations"),
    **dict.fromkeys(("eval_strategy", "val_period"), "trainer.test_freq"),
    **dict.fromkeys(("save_strategy",), "trainer.save_freq"),
    **dict.fromkeys(("eval_on_start",), "trainer.val_before_train"),
    **dict.fromkeys(("top_p", "top_k", "temperature", "dtype"), f"{_ROLLOUT}.*"),
    **dict.fromkeys(("max_model_length", "vllm_max_model_len"), f"{_ROLLOUT}.max_model_len"),
    **dict.fromkeys(("max_staleness", "max_async_level", "max_off_policy_steps"), f"{_ROLLOUT}.max_lag"),
    **dict.fromkeys(("use_liger_kernel", "liger"), f"{_MODEL}.use_liger"),
    **dict.fromkeys(("torch_compile", "compile"), f"{_MODEL}.compile_layers"),
    **dict.fromkeys(("tokenizer_path", "processing_class", "tokenizer_name"), f"{_DATA}.tokenizer"),
    **dict.fromkeys(("shuffle_dataset",), f"{_DATA}.shuffle"),
    **dict.fromkeys(("input_key", "prompt_column"), f"{_DATA}.columns.prompt"),
    **dict.fromkeys(("label_key", "answer_key"), f"{_DATA}.columns.ground_truth"),
    **dict.fromkeys(("prompt_max_len",), f"{_DATA}.max_prompt_length"),
    **dict.fromkeys(("generate_max_len",), f"{_DATA}.max_response_length"),
    **dict.fromkeys(("num_prompts_per_step",), f"{_DATA}.train_batch_size"),
    **dict.fromkeys(("train_global_batch_size", "train_gbs"), f"{_ACTOR}.ppo_mini_batch_size"),
    **dict.fromkeys(
        ("micro_train_batch_size", "train_micro_batch_size"), f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    ),
    **dict.fromkeys(("num_generations_per_prompt",), f"{_ROLLOUT}.n"),
    **dict.fromkeys(("actor_learning_rate",), f"{_ACTOR}.optim.lr"),
    **dict.fromkeys(("lr_critic",), "critic.optim.lr"),
    **dict.fromkeys(("max_num_steps", "num_rollout"), "trainer.total_training_steps"),
    **dict.fromkeys(("max_epochs", "max_num_epochs", "n_epochs"), "trainer.total_epochs"),
    **dict.fromkeys(("use_wandb",), "trainer.logger"),
    **dict.fromkeys(("remote_rm_url",), "reward_model.remote.url"),
    **dict.fromkeys(("reference_policy_kl_penalty",), f"{_ACTOR}.kl_loss_coef"),
    **dict.fromkeys(("ratio_clip_min",), f"{_ACTOR}.clip_ratio_low"),
    **dict.fromkeys(("ratio_clip_max",), f"{_ACTOR}.clip_ratio_high"),
    **dict.fromkeys(("dynamic_sampling", "filter_zero_std"), "algorithm.filter_groups.enable"),
    **dict.fromkeys(("cp_size", "sp_size", "ulysses"), f"{_ACTOR}.ulysses_sequence_parallel_size"),
    **dict.fromkeys(("sequence_parallel_size",), f"{_ACTOR}.ulysses_sequence_parallel_size"),
    **dict.fromkeys(("ep_size",), f"{_ACTOR}.fsdp_config.expert_parallel_size"),
    **dict.fromkeys(("pp_size", "pipeline_parallel_size"), f"{_ACTOR}.megatron.pipeline_model_parallel_size"),
    **dict.fromkeys(("cpu_offload", "offload"), f"{_ACTOR}.fsdp_config.param_offload"),
    **dict.fromkeys(("seed",), "trainer.seed"),
}
"""Last part of a name -> the key that does what is meant; `*` is that part."""

_DR_GRPO = f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
_DAPO = f"{_ACTOR}.loss_agg_mode=token-mean {_ACTOR}.clip_ratio_high=0.28"

VALUES = {
    "actor_rollout_ref.rollout.weight_link": {"spread": "auto"},  # was cut: it saved nothing
    "algorithm.adv_estimator": {
        **{
            "ppo": "gae",
            "group": "grpo",
            **dict.fromkeys(
                ("drgrpo", "dr_grpo"), f"grpo {_DR_GRPO} algorithm.norm_adv_by_std_in_grpo=false"
            ),
            "dapo": f"grpo {_DAPO} algorithm.filter_groups.enable=true",
            **{
                loss: f"grpo {_ACTOR}.policy_loss.loss_mode={loss}"
                for loss in ("gspo", "gmpo", "cispo", "sapo")
            },
        },
        **{"reinforce": "reinforce_plus_plus", "reinforce++": "reinforce_plus_plus", "loo": "rloo"},
    },
    "actor_rollout_ref.actor.policy_loss.loss_mode": {
        **dict.fromkeys(("ppo", "clip", "clipped"), "vanilla"),
        "grpo": f"vanilla {_ACTOR}.loss_agg_mode=seq-mean-token-mean",
        "dapo": f"vanilla {_DAPO}",
        "bnpo": f"vanilla {_ACTOR}.loss_agg_mode=token-mean",
        **dict.fromkeys(("drgrpo", "dr_grpo"), f"vanilla {_DR_GRPO}"),
        "sequence": f"gspo {_ACTOR}.loss_agg_mode=seq-mean-token-mean",
    },
    "actor_rollout_ref.actor.loss_agg_mode": {
        **dict.fromkeys(("dapo", "bnpo", "token", "token_mean"), "token-mean"),
        **dict.fromkeys(("grpo", "sequence", "sequence_mean", "sample"), "seq-mean-token-mean"),
        **dict.fromkeys(("drgrpo", "dr_grpo"), "seq-mean-token-sum-norm"),
    },
    "actor_rollout_ref.rollout.name": {"transformers": "hf", "huggingface": "hf", "sgl": "sglang"},
    "actor_rollout_ref.actor.strategy": {
        "fsdp1": "fsdp",
        "ddp": "fsdp",
        "deepspeed": "fsdp",
        "zero3": "fsdp",
    },
}
"""Key -> what people write -> the value that is meant, and the other settings that it takes."""

COMMANDS = {
    **dict.fromkeys(("train", "start", "launch", "fit", "grpo", "ppo", "sft", "rl"), "run"),
    **dict.fromkeys(("validate", "lint", "verify", "dry-run"), "check"),
    **dict.fromkeys(("evaluate", "val"), "eval"),
    **dict.fromkeys(("init", "create", "quickstart"), "new"),
    **dict.fromkeys(("list", "runs", "status", "ps"), "ls"),
    **dict.fromkeys(("log", "logs", "tail", "stats", "top"), "watch"),
    **dict.fromkeys(("generate", "infer", "sample"), "chat"),
    **dict.fromkeys(("version",), "--version"),
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
    last = name.rpartition(".")[2].lower()
    return KEYS[last].replace("*", last) if last in KEYS else None


def meant_value(key: str, value: str) -> str | None:
    """The value of a key that is meant, with what else it takes; None if nothing is known of it."""
    here, _, more = VALUES.get(key, {}).get(value.lower(), "").partition(" ")
    return f"{here}, with {more}" if more else here or None
