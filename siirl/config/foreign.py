"""What keys of siiRL and verl are called here, what becomes of them, and whose defaults are others.

The one table of these facts: the messages about unknown keys, `siirl migrate` and docs/migration.md read it.
Names may end in `.*`, and stand for every key below; `*` within a name is any text without a dot.
"""

import re
from dataclasses import dataclass
from typing import Any

from siirl.config.algorithm_table import WITH_CRITIC, losses_with

POLICY = "actor_rollout_ref"
ROLLOUT = f"{POLICY}.rollout"
CORRECTION = f"{POLICY}.actor.rollout_correction"


@dataclass(frozen=True)
class Foreign:
    """A key that is not one of siirl, or means something else here."""

    here: str = ""
    """The key with its meaning, "" if there is none; a trailing `*` takes the rest of the name."""
    why: str = ""
    """What became of it, for a comment."""
    asks_nothing: tuple[str, ...] = ()
    """Values with which the key changes nothing; with any other, what it asks for cannot be had (unless
    harmless)."""
    harmless: bool = False
    """Leaving the key out never changes what is computed."""


def _moved(here: str, why: str = "") -> Foreign:
    return Foreign(here=here, why=why)


def _dropped(why: str) -> Foreign:
    return Foreign(why=why, harmless=True)


def _lost(why: str, *asks_nothing: str) -> Foreign:
    return Foreign(why=why, asks_nothing=asks_nothing)


OFF = ("false", "null", "none", "")
LAYERS = "each transformer layer is one FSDP2 unit, gathered when it runs and freed after it"
CHUNKS = "entropy and log-probs are always computed in chunks"
SCORE_OR_JUDGE = (
    "a reward model with a score head runs under reward_model.strategy; one that writes its grade is "
    "reward_model.judge.name=vllm, on the settings of actor_rollout_ref.rollout"
)
VISION = "an option of vision models: images and videos in prompts cannot be trained on"
PROFILED = "trainer.trace=true writes a timeline of every rank"

FOREIGN: dict[str, Foreign] = {
    "model_engine": _moved(f"{POLICY}.actor.strategy", "the strategy of actor, reference and critic"),
    "hydra.*": _dropped("outputs go to trainer.output_dir"),
    # policy
    f"{POLICY}.actor.optim.lr_scheduler_type": _moved(f"{POLICY}.actor.optim.warmup_style"),
    "critic.optim.lr_scheduler_type": _moved("critic.optim.warmup_style"),
    "*.optim.total_training_steps": Foreign(
        here="*.optim.total_training_steps", asks_nothing=("-1",), why="-1 there is 0 here: all steps"
    ),
    "critic.fsdp.*": _moved("critic.fsdp_config.*"),
    f"{POLICY}.actor.fsdp_config.grad_offload": _moved(f"{POLICY}.actor.grad_offload"),
    f"{POLICY}.*.fsdp_config.grad_offload": _dropped("there are no gradients between phases"),
    "critic.*.fsdp_config.grad_offload": _dropped("there are no gradients between phases"),
    f"{POLICY}.model.use_rmpad": _dropped("rows are always packed"),
    "*.model.use_rmpad": _dropped("rows are always packed"),
    f"{POLICY}.model.use_shm": _dropped("each rank reads its own slices of the files"),
    "*.model.use_shm": _dropped("each rank reads its own slices of the files"),
    "data.use_shm": _dropped("each rank reads its own rows"),
    "*.model.tokenizer_path": _dropped("the tokenizer is that of the policy's directory (data.tokenizer)"),
    f"{POLICY}.model.lora_adapter_path": _lost("starting from an adapter: merge it into the model", *OFF),
    f"{POLICY}.model.exclude_modules": _lost("target_modules lists the modules that get adapters", *OFF),
    f"{POLICY}.model.lora.rank": _moved(f"{POLICY}.model.lora_rank"),
    f"{POLICY}.model.lora.alpha": _moved(f"{POLICY}.model.lora_alpha"),
    f"{POLICY}.model.fused_kernel_options.*": _dropped(CHUNKS),
    f"{POLICY}.actor.entropy_from_logits_chunk_size": _dropped(CHUNKS),
    f"{POLICY}.actor.calculate_entropy": _dropped("the entropy is always among the metrics"),
    f"{POLICY}.actor.tau_pos": _moved(f"{POLICY}.actor.policy_loss.tau_pos"),
    f"{POLICY}.actor.tau_neg": _moved(f"{POLICY}.actor.policy_loss.tau_neg"),
    f"{POLICY}.actor.loss_scale_factor": _lost("seq-mean-token-sum-norm divides by response_length", *OFF),
    f"{POLICY}.actor.freeze_vision_tower": _lost(VISION, *OFF),
    "*.fsdp_config.reshard_after_forward": _dropped(LAYERS),
    "*.fsdp_config.forward_prefetch": _dropped(LAYERS),
    "*.fsdp_config.use_orig_params": _dropped(LAYERS),
    "*.fsdp_config.use_torch_compile": _dropped("the fsdp engine does not use torch.compile"),
    "*.fsdp_config.entropy_*": _dropped(CHUNKS),
    "*.fsdp_config.offload_policy": _lost(
        "CPU offload within a step: param_offload works between phases", *OFF
    ),
    "*.fsdp_config.dtype": _moved("*.fsdp_config.mixed_precision.param_dtype"),
    f"{POLICY}.actor.megatron.vanilla_mbridge": _dropped("weights are read by siirl's own tables"),
    # rollout
    f"{ROLLOUT}.mode": _dropped("how verl's workers talk to the engine; the newest policy samples in both"),
    f"{ROLLOUT}.chat_scheduler": _lost("own schedulers of turns: the DAG says who speaks next", *OFF),
    f"{ROLLOUT}.layered_summon": _dropped("weights are always sent in buckets"),
    f"{ROLLOUT}.checkpoint_engine.*": _dropped("weights are always sent in buckets"),
    f"{ROLLOUT}.update_weights_bucket_megabytes": _dropped("weights are always sent in buckets"),
    f"{ROLLOUT}.enable_prefix_caching": _moved(f"{ROLLOUT}.engine_kwargs.vllm.enable_prefix_caching"),
    f"{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache": _lost(VISION, *OFF),
    f"{ROLLOUT}.data_parallel_size": _lost("one engine on each tensor_model_parallel_size ranks", "1"),
    f"{ROLLOUT}.expert_parallel_size": _lost("expert parallel rollouts", "1"),
    f"{ROLLOUT}.pipeline_model_parallel_size": _lost("pipeline parallel rollouts", "1"),
    f"{ROLLOUT}.skip_tokenizer_init": _dropped("the engine takes and gives token ids"),
    f"{ROLLOUT}.logprobs_mode": _dropped("log-probs are those of the distribution that is sampled"),
    f"{ROLLOUT}.agent.default_agent_loop": _dropped("the DAG says how agents and tools take turns"),
    f"{ROLLOUT}.trace.*": _dropped("conversations are written to trainer.output_dir"),
    # verl's rollout correction: see migrate/correction.py
    "algorithm.rollout_correction.rollout_is": _moved(
        f"{CORRECTION}.level", f"{CORRECTION}.weight=truncate, with {CORRECTION}.level=token or sequence"
    ),
    "algorithm.rollout_correction.rollout_is_threshold": _moved(f"{CORRECTION}.high"),
    "algorithm.rollout_correction.rollout_rs": _moved(f"{CORRECTION}.reject"),
    "algorithm.rollout_correction.rollout_rs_threshold": _moved(
        f"{CORRECTION}.reject_high", f"{CORRECTION}.reject_low and reject_high"
    ),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": _moved(f"{CORRECTION}.reject_low"),
    "algorithm.rollout_correction.bypass_mode": _moved(
        f"{POLICY}.actor.recompute_old_log_prob", f"{POLICY}.actor.recompute_old_log_prob=false"
    ),
    "algorithm.rollout_correction.bypass_old_logprob_for_rollout": _moved(
        f"{POLICY}.actor.recompute_old_log_prob", f"{POLICY}.actor.recompute_old_log_prob=false"
    ),
    "algorithm.rollout_correction.loss_type": _lost("a policy gradient without a clip", "ppo_clip", *OFF),
    "algorithm.rollout_correction.use_pure_rollout_correction": _lost(
        "a policy gradient without a clip", *OFF
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": _lost(
        "weights divided by their mean over the batch", *OFF
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": _lost(
        f"a row is left out by {CORRECTION}.reject", *OFF
    ),
    "algorithm.gae_lambda": _moved("algorithm.lam"),
    # rewards
    "reward.custom_reward_function.*": _moved("custom_reward_function.*"),
    "reward.reward_manager.name": _moved("reward_model.reward_manager"),
    "reward.reward_manager.source": _lost(
        "reward managers of your own: use custom_reward_function", "register"
    ),
    "reward.num_workers": _moved("reward_model.num_workers"),
    "reward.sandbox_fusion.*": _moved("reward_model.sandbox_fusion.*"),
    "sandbox_fusion.*": _moved("reward_model.sandbox_fusion.*"),
    "reward_model.sandbox_fusion_url": _moved("reward_model.sandbox_fusion.url"),
    "reward.reward_kwargs.overlong_buffer_cfg.*": _moved("reward_model.overlong_buffer.*"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.*": _moved("reward_model.overlong_buffer.*"),
    "reward.reward_kwargs.max_resp_len": _dropped("it is data.max_response_length"),
    "reward_model.reward_kwargs.max_resp_len": _dropped("it is data.max_response_length"),
    "reward.reward_kwargs.*": _moved("reward_model.reward_kwargs.*"),
    "reward.reward_model.enable": _moved("reward_model.enable"),
    "reward.reward_model.model_path": _moved("reward_model.model.path"),
    "reward.reward_model.rollout.*": _dropped(SCORE_OR_JUDGE),
    "reward_model.rollout.*": _dropped(SCORE_OR_JUDGE),
    "reward.reward_model.enable_resource_pool": _lost(
        "placement of the DAG's node gives a model ranks", *OFF
    ),
    "reward_model.enable_resource_pool": _lost("placement of the DAG's node gives a model ranks", *OFF),
    "reward_model.use_reward_loop": _dropped("rows are scored while others are computed"),
    "reward_model.reward_loop_*": _lost("reward managers of your own: use custom_reward_function", *OFF),
    # data
    "data.dataloader_num_workers": _dropped("each rank tokenises its own rows"),
    "data.filter_overlong_prompts_workers": _dropped("each rank tokenises its own rows"),
    "data.trust_remote_code": _dropped(f"{POLICY}.model.trust_remote_code decides"),
    "data.validation_shuffle": _lost("validation prompts in another order", *OFF),
    "data.return_multi_modal_inputs": _lost(VISION, *OFF, "true"),
    "data.train_max_samples": _lost("a part of the files: write smaller ones", "-1"),
    "data.val_max_samples": _lost("a part of the files: write smaller ones", "-1"),
    "data.custom_cls.*": _lost("datasets of your own: write Parquet files", "dataset", *OFF),
    # critic, trainer
    "critic.use_critic_model": _dropped("algorithm.adv_estimator decides"),
    "critic.enable": _dropped("algorithm.adv_estimator decides"),
    "critic.forward_micro_batch_size": _dropped("that of training holds for both passes"),
    "critic.forward_micro_batch_size_per_gpu": _dropped("that of training holds for both passes"),
    "trainer.use_legacy_worker_impl": _dropped("there is one implementation"),
    "trainer.use_v1": _dropped("there is one implementation"),
    "trainer.v1.trainer_mode": _lost("asynchronous training", "sync"),
    "trainer.esi_redundant_time": _dropped("checkpoints are written at trainer.save_freq"),
    "trainer.device": Foreign(
        asks_nothing=("cuda", "cpu", "auto"), why="NPUs: siirl runs on NVIDIA GPUs and on CPUs"
    ),
    "ray_kwargs.*": _dropped("ray_init.* has Ray's settings"),
    "ray_init.timeline_json_file": _dropped(PROFILED),
    "global_profiler.*": _dropped(PROFILED),
    f"{POLICY}.*.profiler.*": _dropped(PROFILED),
    "critic.profiler.*": _dropped(PROFILED),
    "transfer_queue.*": _dropped("rows travel between ranks without a queue"),
    "distillation.enabled": _lost("distillation from a teacher", *OFF),
}

FOLLOW_BUDGET = f"${{{POLICY}.actor.ppo_max_token_len_per_gpu}}"
FOLLOW_DYNAMIC = f"${{{POLICY}.actor.use_dynamic_bsz}}"


@dataclass(frozen=True)
class OtherDefault:
    """A key of siirl whose default elsewhere is another; text in ${} names the key that it follows there."""

    changes: str
    """What the difference changes."""
    verl: Any = None
    siirl: Any = None
    when: str = ""
    """ "key=a|b": only then does the key act."""


DYNAMIC = "micro-batches: speed and memory"
GAE = f"algorithm.adv_estimator={'|'.join(WITH_CRITIC)}"
MEGATRON = f"{POLICY}.actor.strategy=megatron"
VLLM = f"{ROLLOUT}.name=vllm"
DPPO = f"{POLICY}.actor.policy_loss.{losses_with('ratio_cap')}"

OTHER_DEFAULTS: dict[str, OtherDefault] = {
    "critic.optim.lr": OtherDefault("how fast the critic learns", verl=1e-5, siirl=1e-5, when=GAE),
    f"{ROLLOUT}.tensor_model_parallel_size": OtherDefault(
        "ranks of one engine: speed, memory", verl=2, siirl=2, when=VLLM
    ),
    f"{ROLLOUT}.enforce_eager": OtherDefault("CUDA graphs: speed, memory", verl=False),
    f"{ROLLOUT}.max_num_seqs": OtherDefault("sequences at once: speed, memory", verl=256),
    "trainer.balance_batch": OtherDefault("which rank computes which rows: speed", verl=True, siirl=True),
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": OtherDefault(DYNAMIC, verl=FOLLOW_DYNAMIC, siirl=FOLLOW_DYNAMIC),
    f"{POLICY}.ref.log_prob_use_dynamic_bsz": OtherDefault(
        DYNAMIC, verl=FOLLOW_DYNAMIC, siirl=FOLLOW_DYNAMIC
    ),
    "critic.use_dynamic_bsz": OtherDefault(DYNAMIC, verl=FOLLOW_DYNAMIC, siirl=FOLLOW_DYNAMIC, when=GAE),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": OtherDefault(
        DYNAMIC, verl=FOLLOW_BUDGET, siirl=FOLLOW_BUDGET
    ),
    f"{POLICY}.ref.log_prob_max_token_len_per_gpu": OtherDefault(
        DYNAMIC, verl=FOLLOW_BUDGET, siirl=FOLLOW_BUDGET
    ),
    f"{POLICY}.actor.clip_ratio_low": OtherDefault(
        "clip_ratio alone changes nothing there", verl=0.2, siirl=0.2
    ),
    f"{POLICY}.actor.clip_ratio_high": OtherDefault(
        "clip_ratio alone changes nothing there", verl=0.2, siirl=0.2
    ),
    f"{POLICY}.actor.policy_loss.clip_divergence_low": OtherDefault("trust region", verl=0.2, when=DPPO),
    f"{POLICY}.actor.policy_loss.clip_divergence_high": OtherDefault("trust region", verl=0.2, when=DPPO),
    f"{POLICY}.actor.policy_loss.ratio_cap": OtherDefault("greatest weight of a token", verl=3.0, when=DPPO),
    "algorithm.filter_groups.max_num_gen_batches": OtherDefault(
        "rounds of dynamic sampling; 0: no limit", verl=0, when="algorithm.filter_groups.enable=true"
    ),
    f"{POLICY}.actor.megatron.param_offload": OtherDefault(
        "where parameters wait: speed, memory", verl=False, siirl=False, when=MEGATRON
    ),
    "critic.megatron.param_offload": OtherDefault(
        "where parameters wait: speed, memory", verl=False, siirl=False, when="critic.strategy=megatron"
    ),
}


def foreign(name: str) -> tuple[Foreign, str] | None:
    """(what is known of a foreign key, its name here or ""), the first entry that fits; None if unknown."""
    for pattern, entry in FOREIGN.items():
        found = re.fullmatch(_regular(pattern), name)
        if found:
            here = entry.here
            for part in found.groups() if "*" in here else ():
                here = here.replace("*", part, 1)
            return entry, here
    return None


def foreign_hint(name: str) -> str:
    """A sentence on an unknown key that siiRL or verl has, or an empty string."""
    known = foreign(name)
    if known is None:
        return ""
    entry, here = known
    if here:
        more = f" ({entry.why})" if entry.why else ""
        return f" siiRL or verl has it; here it is {here}{more}."
    return f" siiRL or verl has it; there is no such key here: {entry.why}. Remove it."


def _regular(pattern: str) -> str:
    """`.*` at the end takes any number of names, `*` elsewhere part of one, at the start any number."""
    body = re.escape(pattern)
    if body.endswith(r"\.\*"):
        body = body[: -len(r"\.\*")] + r"\.(.+)"
    if body.startswith(r"\*\."):
        body = r"(.+)\." + body[len(r"\*\.") :]
    return body.replace(r"\*", "([^.]*)")
