"""Values of keys that do not go together: a row says when, and what is said of them."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from siirl.config.actor import ROW_DIVERGENCES
from siirl.config.resolve import get
from siirl.config.root import TOP_GROUPS, Config, all_keys
from siirl.config.values import show
from siirl.errors import ConfigError

PLACEHOLDER = re.compile(r"\{([\w.]*)(=?)\}")


@dataclass(frozen=True)
class Contradiction:
    """Values that cannot be, or not together."""

    holds: Callable[[Any], object]
    """Whether a group has them."""
    text: str
    """{key=} is a key with its value, {key} its value, {} the group, to which keys are relative (or full)."""

    def problems(self, cfg: Config, group: str) -> Iterator[ConfigError]:
        """What is wrong with a group ("": all of the configuration), if it has such values and is used."""
        uses = {"critic": cfg.algorithm.may_use_critic, "reward_model": cfg.reward_model.enable}
        used = uses.get(group, True)
        if used and self.holds(get(cfg, group) if group else cfg):
            subject = PLACEHOLDER.sub(lambda found: _full(group, found[1]), self.text.partition(" ")[0])
            text = PLACEHOLDER.sub(lambda found: _shown(cfg, group, *found.groups()), self.text)
            yield about(subject.rstrip(":,"), text)


def about(key: str, text: str) -> ConfigError:
    """What is wrong with the value of a key; of no single one, if all of them have another name."""
    error = ConfigError(text)
    error.breaks = (key,) if key in all_keys() else ()
    return error


def _full(group: str, name: str) -> str:
    if not name:
        return group
    return name if name.split(".")[0] in TOP_GROUPS else f"{group}.{name}"


def _shown(cfg: Config, group: str, name: str, equals: str) -> str:
    if not name:
        return group
    full = _full(group, name)
    value = get(cfg, full)
    text = f"{value:g}" if isinstance(value, float) else show(all_keys()[full], value)
    return f"{full}={text}" if equals else text


ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_ONE_ROUND = (
    " with algorithm.filter_groups.enable=true: recorded rollouts hold one round of each step, dynamic "
    "sampling takes as many as it needs. Set algorithm.filter_groups.enable=false."
)

CONTRADICTIONS: Mapping[tuple[str, ...], tuple[Contradiction, ...]] = {
    ("",): (
        Contradiction(
            lambda cfg: (
                cfg.algorithm.estimator.compares_groups
                and cfg.actor_rollout_ref.rollout.n < 2
                and not cfg.actor_rollout_ref.rollout.gives_data
            ),
            "{actor_rollout_ref.rollout.n=} with {algorithm.adv_estimator=}: the advantage is relative to "
            "the other samples of a prompt, and there are none. Set actor_rollout_ref.rollout.n=2 or more.",
        ),
        Contradiction(
            lambda cfg: (
                cfg.actor_rollout_ref.actor.loss_agg_mode == "prompt-mean"
                and cfg.algorithm.credit.equal_weight != "none"
            ),
            "{algorithm.credit.equal_weight=} with {actor_rollout_ref.actor.loss_agg_mode=}: both say what "
            "has the same share of the loss. Leave out one of them.",
        ),
        Contradiction(
            lambda cfg: cfg.algorithm.adv_estimator == "maxrl" and cfg.algorithm.use_kl_in_reward,
            "{algorithm.use_kl_in_reward=} with {algorithm.adv_estimator=}: it divides by the mean reward of "
            "a prompt as its success rate, and a reward less the KL is none. Set "
            "algorithm.use_kl_in_reward=false actor_rollout_ref.actor.use_kl_loss=true.",
        ),
        Contradiction(
            lambda cfg: cfg.algorithm.adv_estimator == "maxrl" and cfg.reward_model.overlong_buffer.enable,
            "{reward_model.overlong_buffer.enable=} with {algorithm.adv_estimator=}: it divides by the mean "
            "reward of a prompt as its success rate, and a penalty makes rewards negative. Set "
            "reward_model.overlong_buffer.enable=false.",
        ),
        Contradiction(
            lambda cfg: bool(cfg.data.mixture) and cfg.data.curriculum_key is not None,
            "data.mixture with {data.curriculum_key=}: both say which prompt comes next. Leave out one of "
            "them; max_steps of a source in data.mixture ends what is easy.",
        ),
        Contradiction(
            lambda cfg: cfg.actor_rollout_ref.rollout.prompt_length != cfg.data.max_prompt_length,
            "{actor_rollout_ref.rollout.prompt_length=} differs from {data.max_prompt_length=}: both are the "
            "same limit. Set only data.max_prompt_length.",
        ),
        Contradiction(
            lambda cfg: cfg.actor_rollout_ref.rollout.response_length != cfg.data.max_response_length,
            "{actor_rollout_ref.rollout.response_length=} differs from {data.max_response_length=}: both are "
            "the same limit. Set only data.max_response_length.",
        ),
        Contradiction(
            lambda cfg: (
                cfg.reward_model.overlong_buffer.enable
                and cfg.reward_model.overlong_buffer.len > cfg.actor_rollout_ref.rollout.response_length
            ),
            "{reward_model.overlong_buffer.len=} is longer than a response "
            "({actor_rollout_ref.rollout.response_length} tokens): the penalty would start before the first "
            "token. Lower it.",
        ),
        Contradiction(
            lambda cfg: (
                cfg.actor_rollout_ref.rollout.multi_turn.enable
                and cfg.actor_rollout_ref.rollout.multi_turn.show_tools == "system"
                and cfg.actor_rollout_ref.rollout.multi_turn.format not in ("auto", "hermes")
            ),
            "{actor_rollout_ref.rollout.multi_turn.show_tools=} with "
            "{actor_rollout_ref.rollout.multi_turn.format=}: the model would be told to call tools as hermes "
            "does, and its calls be read otherwise. Leave format out, or describe the tools in your prompts.",
        ),
        Contradiction(
            lambda cfg: cfg.data.has_images and cfg.data.truncation != "error",
            "{data.dataset_type=} with {data.truncation=}: a prompt would be cut in the middle of an image. "
            "Set data.truncation=error, and drop longer prompts by data.filter_overlong_prompts=true.",
        ),
        Contradiction(
            lambda cfg: (
                cfg.trainer.device == "cpu"
                and cfg.actor_rollout_ref.rollout.name == "vllm"
                and cfg.actor_rollout_ref.rollout.quantization
            ),
            "{actor_rollout_ref.rollout.quantization=} with {trainer.device=}: vLLM rounds weights to FP8 on "
            "GPUs only. Set actor_rollout_ref.rollout.quantization=null.",
        ),
        Contradiction(
            lambda cfg: (
                cfg.profiler.enable and cfg.profiler.tool == "torch_memory" and cfg.trainer.device == "cpu"
            ),
            "{profiler.tool=} with {trainer.device=}: it records what the allocator of a GPU does. Set "
            "profiler.tool=torch profiler.with_memory=true.",
        ),
        Contradiction(
            lambda cfg: cfg.actor_rollout_ref.rollout.replays and cfg.trainer.validates,
            "{actor_rollout_ref.rollout.name=} cannot validate: no engine samples with the new weights. Set "
            "trainer.val_before_train=false trainer.test_freq=-1.",
        ),
        Contradiction(
            lambda cfg: cfg.algorithm.filter_groups.enable and cfg.actor_rollout_ref.rollout.n < 2,
            "{algorithm.filter_groups.enable=} with {actor_rollout_ref.rollout.n=}: a single response of a "
            "prompt never differs from the others. Set actor_rollout_ref.rollout.n=2 or more.",
        ),
        Contradiction(
            lambda cfg: cfg.algorithm.filter_groups.enable and cfg.trainer.dump_rollouts_dir,
            f"trainer.dump_rollouts_dir{_ONE_ROUND}",
        ),
        Contradiction(
            lambda cfg: cfg.algorithm.filter_groups.enable and cfg.actor_rollout_ref.rollout.replays,
            f"actor_rollout_ref.rollout.replay_dir{_ONE_ROUND}",
        ),
        Contradiction(
            lambda cfg: not cfg.algorithm.may_use_critic and cfg.trainer.critic_warmup,
            "{trainer.critic_warmup=} with {algorithm.adv_estimator=}, which uses no critic: nothing would "
            "be trained in these steps. Set trainer.critic_warmup=0, or algorithm.adv_estimator=gae.",
        ),
        Contradiction(
            lambda cfg: (
                cfg.actor_rollout_ref.rollout.gives_data
                and cfg.actor_rollout_ref.rollout.n != len(cfg.data.response_keys)
            ),
            "{actor_rollout_ref.rollout.n=} with {data.response_keys=}: the dataset gives a response for "
            "each column. Set actor_rollout_ref.rollout.n to their number.",
        ),
        Contradiction(
            lambda cfg: cfg.actor_rollout_ref.actor.loss.pairs and cfg.actor_rollout_ref.rollout.n != 2,
            "{actor_rollout_ref.actor.policy_loss.loss_mode=} with {actor_rollout_ref.rollout.n=}: it "
            "compares two responses of a prompt. Set actor_rollout_ref.rollout.n=2.",
        ),
        Contradiction(
            lambda cfg: not cfg.data.val_files and cfg.trainer.validates,
            "data.val_files names nothing, but the run validates. Name a file of prompts, or set "
            "trainer.val_before_train=false trainer.test_freq=-1.",
        ),
    ),
    ("trainer",): (
        Contradiction(
            lambda trainer: (
                trainer.trace
                and trainer.trace_steps
                and trainer.total_training_steps is not None
                and min(trainer.trace_steps) > trainer.total_training_steps
            ),
            "{trace_steps=} with {total_training_steps=}: no step would be traced. Set {}.trace_steps to "
            "steps of the run (0: before the first one), or leave it out.",
        ),
        Contradiction(
            lambda trainer: (
                trainer.resume_mode == "resume_path" and not isinstance(trainer.resume_from_path, str)
            ),
            "{resume_mode=} without a path. Set trainer.resume_from_path=DIR/global_step_N, or "
            "trainer.resume_mode=auto.",
        ),
        Contradiction(
            lambda trainer: trainer.resume_from_path is True,
            "{resume_from_path=}: expected the path of a checkpoint, DIR/global_step_N.",
        ),
        Contradiction(
            lambda trainer: (trainer.min_nnodes or 1) > trainer.nnodes,
            "{nnodes=} with {min_nnodes=}: a run has {}.nnodes machines at most. Set {}.nnodes=MIN:MAX.",
        ),
        Contradiction(
            lambda trainer: trainer.launcher == "local" and trainer.nnodes > 1,
            "{nnodes=} with {launcher=}, which starts processes on one machine only. Set {}.launcher=ray, or "
            "start one `torchrun --nnodes ... -m siirl.main_dag ...` on each machine with "
            "{}.launcher=torchrun, or set {}.nnodes=1.",
        ),
    ),
    ("dag",): (
        Contradiction(
            lambda dag: dag.workflow_path and dag.custom_pipeline_fn,
            "{workflow_path=} and {custom_pipeline_fn=}: a run has one workflow. Set only one of them.",
        ),
    ),
    (f"{ROLLOUT}.val_kwargs",): (
        Contradiction(
            lambda val: val.do_sample and val.temperature == 0,
            "{do_sample=} with val_kwargs.temperature=0: temperature 0 is greedy. Set {}.temperature=1.0, or "
            "{}.do_sample=false.",
        ),
        Contradiction(
            lambda val: val.n > 1 and not val.do_sample,
            "{n=} with val_kwargs.do_sample=false: all {n} greedy responses would be the same. Set "
            "{}.do_sample=true {}.temperature=1.0, or {}.n=1.",
        ),
        Contradiction(
            lambda val: val.n > 1 and val.do_sample and val.top_k == 1,
            "{n=} with {top_k=}: with one token to choose from, all {n} responses would be the same. Set "
            "{}.top_k=-1, or {}.n=1.",
        ),
    ),
    (ROLLOUT,): (
        Contradiction(
            lambda rollout: (
                rollout.reasoning_marks
                and (len(rollout.reasoning_marks) != 2 or "" in rollout.reasoning_marks)
            ),
            "{reasoning_marks=}: it is what begins the reasoning and what ends it. Set "
            "{}.reasoning_marks=[<think>,</think>], for one, or [] for a model that does not reason.",
        ),
        Contradiction(
            lambda rollout: rollout.n > 1 and not rollout.do_sample,
            "{n=} with {do_sample=}: all {n} greedy responses of a prompt would be the same. Set "
            "{}.do_sample=true.",
        ),
        Contradiction(
            lambda rollout: rollout.n > 1 and rollout.do_sample and rollout.top_k == 1,
            "{n=} with {top_k=}: with one token to choose from, all {n} responses of a prompt would be the "
            "same. Set {}.top_k=-1.",
        ),
        Contradiction(
            lambda rollout: (
                rollout.name == "vllm" and rollout.quantization and rollout.max_log_prob_diff is None
            ),
            "{quantization=} without a bound for how far it takes the engine from the policy: none suits "
            "every model. Set {}.max_log_prob_diff, in nats a token: 0.1, for one (bfloat16 alone is below "
            "0.02).",
        ),
        Contradiction(
            lambda rollout: rollout.name == "vllm" and rollout.quantization and rollout.dtype == "float32",
            "{quantization=} with {dtype=}: matmuls in FP8 give 16 bits. Set {}.dtype=bfloat16.",
        ),
        Contradiction(
            lambda rollout: (
                rollout.max_model_len is not None
                and rollout.max_model_len < rollout.prompt_length + rollout.response_length
            ),
            "{max_model_len=} is less than the longest row, {data.max_prompt_length=} and "
            "{data.max_response_length=}: a prompt so long could not be sampled from. Remove "
            "{}.max_model_len, or lower these.",
        ),
        Contradiction(
            lambda rollout: rollout.replays and not rollout.replay_dir,
            "{name=} without {}.replay_dir: there is nothing to replay. Set it to the "
            "trainer.dump_rollouts_dir of the run that recorded the rollouts.",
        ),
        Contradiction(
            lambda rollout: rollout.surplus > rollout.max_lag,
            "{surplus=} with {max_lag=}: of the prompts in flight one batch is trained in each step, so the "
            "last ones would be older than max_lag allows. Set {}.surplus={max_lag} or less, or a larger "
            "max_lag.",
        ),
    ),
    (ACTOR,): (
        Contradiction(
            lambda actor: actor.use_cpgd_loss and actor.policy_loss.loss_mode not in ("vanilla", "cpgd"),
            "{use_cpgd_loss=} and {policy_loss.loss_mode=}: the first is short for "
            "policy_loss.loss_mode=cpgd. Set one of them.",
        ),
        Contradiction(
            lambda actor: (
                actor.policy_loss.loss_mode == "clip_cov"
                and actor.policy_loss.clip_cov_lb >= actor.policy_loss.clip_cov_ub
            ),
            "{policy_loss.clip_cov_lb=} is not below {policy_loss.clip_cov_ub=}: no covariance is between "
            "them, so nothing would be clipped. Correct them.",
        ),
        Contradiction(
            lambda actor: actor.clip_ratio_low > 1,
            "{clip_ratio_low=}: a ratio cannot fall below 0, so it is at most 1.",
        ),
        Contradiction(
            lambda actor: not actor.recompute_old_log_prob and actor.corrects_rollout,
            "{}.rollout_correction with {recompute_old_log_prob=}: the ratio of the policy loss is taken to "
            "the rollout engine already, so there is nothing to correct. Remove one of them.",
        ),
        Contradiction(
            lambda actor: actor.tis_imp_ratio_cap > 0 and actor.rollout_correction.weight != "none",
            "{tis_imp_ratio_cap=} and {rollout_correction.weight=}: the first is short for the second. Set "
            "one of them.",
        ),
        Contradiction(
            lambda actor: (
                actor.rollout_correction.reject in ROW_DIVERGENCES
                and actor.rollout_correction.reject_divergence is None
            ),
            "{rollout_correction.reject=} without a bound: there is no divergence that suits every model. "
            "Set {}.rollout_correction.reject_divergence, in nats.",
        ),
        Contradiction(
            lambda actor: (
                actor.use_kl_loss
                and actor.kl_loss_weighted
                and actor.kl_loss_type.removesuffix("+") != actor.kl_loss_type
            ),
            "{kl_loss_weighted=} with {kl_loss_type=}: the + takes the gradient of k2 in place of the "
            "estimate's own, and the weight would change it once more. Leave out one of them.",
        ),
        Contradiction(
            lambda actor: actor.use_kl_loss and actor.kl_loss_weighted and actor.kl_loss_type == "full",
            "{kl_loss_weighted=} with {kl_loss_type=}: the KL over the whole vocabulary is no estimate from "
            "sampled tokens, so there is nothing to weigh. Remove {}.kl_loss_weighted.",
        ),
        Contradiction(
            lambda actor: actor.picks_by_entropy and not actor.recompute_old_log_prob,
            "{top_entropy_quantile=} with {recompute_old_log_prob=}: tokens are picked by the entropy before "
            "the step, which the pass of old log-probs computes. Set {}.recompute_old_log_prob=true.",
        ),
        Contradiction(
            lambda actor: actor.loss.kinked and not actor.recompute_old_log_prob,
            "{policy_loss.loss_mode=} with {recompute_old_log_prob=}: its penalty has the sign of the log "
            "ratio as its slope, which would be that of the rollout engine's rounding. Set "
            "{}.recompute_old_log_prob=true.",
        ),
        Contradiction(
            lambda actor: actor.imitates and (actor.corrects_rollout or actor.opsm_delta is not None),
            "{}.rollout_correction or {}.opsm_delta with {policy_loss.loss_mode=}, which makes responses "
            "likelier whoever sampled them: there is nothing to correct. Remove it.",
        ),
        Contradiction(
            lambda actor: actor.imitates and actor.picks_by_entropy,
            "{top_entropy_quantile=} with {policy_loss.loss_mode=}, for which no entropy is computed before "
            "the step. Set {}.top_entropy_quantile=1.",
        ),
        Contradiction(
            lambda actor: (
                actor.loss.imitates and actor.use_kl_loss and not actor.kl_loss_type.startswith("full")
            ),
            "{kl_loss_type=} with {policy_loss.loss_mode=}: it estimates the KL from tokens that the policy "
            "sampled, and these are given. Set {}.kl_loss_type=full, which needs none.",
        ),
        Contradiction(
            lambda actor: actor.loss.distills and not actor.imitates and actor.opsm_delta is not None,
            "{opsm_delta=} with {policy_loss.loss_mode=}: it masks rows by their advantage: there is none. "
            "Set {}.opsm_delta=null.",
        ),
        Contradiction(
            lambda actor: (
                actor.distills and not actor.distribution and actor.distill.divergence != "reverse_kl"
            ),
            "{distill.divergence=} with {distill.top_k=}: from the log-probs of sampled tokens there is "
            "reverse_kl. Set {}.distill.top_k=64, for one, or -1 for the whole vocabulary.",
        ),
        Contradiction(
            lambda actor: actor.distill.enable and actor.loss.imitates and not actor.distribution,
            "{distill.top_k=} with {policy_loss.loss_mode=}: it is a divergence at tokens that the policy "
            "sampled, and these are given. Set {}.distill.top_k=64, for one, or -1 for the whole vocabulary.",
        ),
        Contradiction(
            lambda actor: actor.distill.enable and actor.loss.pairs,
            "{distill.enable=} with {policy_loss.loss_mode=}, which is a loss of pairs, not of tokens. "
            "Set {}.distill.enable=false.",
        ),
        Contradiction(
            lambda actor: actor.loss.pairs and actor.use_kl_loss,
            "{use_kl_loss=} with {policy_loss.loss_mode=}, which keeps the policy close to the reference by "
            "{}.policy_loss.dpo_beta alone. Remove it.",
        ),
        Contradiction(
            lambda actor: actor.loss.pairs and actor.entropy_coeff,
            "{entropy_coeff=} with {policy_loss.loss_mode=}, which is a loss of pairs of responses, and has "
            "no entropy. Remove it.",
        ),
        Contradiction(
            lambda actor: actor.router_replay.mode == "R2" and not actor.recompute_old_log_prob,
            "{router_replay.mode=} with {recompute_old_log_prob=}: the pass of old log-probs is what chooses "
            "the experts. Set {}.recompute_old_log_prob=true, or {}.router_replay.mode=R3.",
        ),
        Contradiction(
            lambda actor: actor.router_replay.mode != "disabled" and (actor.imitates or actor.loss.pairs),
            "{router_replay.mode=} with {policy_loss.loss_mode=}, a loss without log-probs of before the "
            "step: there is nothing to stay close to. Set {}.router_replay.mode=disabled.",
        ),
        Contradiction(
            lambda actor: actor.loss.pairs and actor.shuffle,
            "{shuffle=} with {policy_loss.loss_mode=}: the two rows of a pair would be in different "
            "mini-batches. Set {}.shuffle=false; data.shuffle draws the order of prompts.",
        ),
        Contradiction(
            lambda actor: actor.rollout_correction.low >= actor.rollout_correction.high,
            "{rollout_correction.low=} is not below the upper bound {rollout_correction.high}.",
        ),
        Contradiction(
            lambda actor: actor.rollout_correction.reject_low >= actor.rollout_correction.reject_high,
            "{rollout_correction.reject_low=} is not below the upper bound {rollout_correction.reject_high}.",
        ),
    ),
    ("critic",): (
        Contradiction(
            lambda critic: critic.loss_agg_mode == "prompt-mean",
            "{loss_agg_mode=}: the mean over prompts is one of the policy loss. Set "
            "{}.loss_agg_mode=token-mean.",
        ),
    ),
    (ACTOR, "critic", "reward_model"): (
        Contradiction(
            lambda trained: trained.optim.lr_warmup_init > trained.optim.lr,
            "{optim.lr_warmup_init=} is more than {optim.lr=}, the peak. Lower it.",
        ),
        Contradiction(
            lambda trained: trained.optim.min_lr > trained.optim.lr,
            "{optim.min_lr=} is more than {optim.lr=}, the peak. Lower it.",
        ),
        Contradiction(
            lambda trained: trained.optim.min_lr and trained.optim.min_lr_ratio,
            "{optim.min_lr=} and {optim.min_lr_ratio=} both name the final learning rate. Set one of them.",
        ),
        Contradiction(
            lambda trained: trained.optim.lr_decay_style and trained.optim.warmup_style != "constant",
            "{optim.lr_decay_style=} and {optim.warmup_style=} both name the schedule. Set one of them.",
        ),
        Contradiction(
            lambda trained: (
                trained.optim.lr_decay_style == "WSD" and trained.optim.lr_wsd_decay_steps is None
            ),
            "{optim.lr_decay_style=} without the length of its decay. Set {}.optim.lr_wsd_decay_steps.",
        ),
        Contradiction(
            lambda trained: trained.optim.name == "muon" and trained.strategy != "fsdp",
            "{optim.name=} with {strategy=}: it is Muon over matrices as FSDP2 shards them. Set "
            "{}.optim.name=adamw, or {}.strategy=fsdp.",
        ),
        Contradiction(
            lambda trained: "model" not in trained.checkpoint.save_contents,
            "{checkpoint.save_contents=}: a checkpoint without the model cannot be resumed. Add model.",
        ),
    ),
}
"""Groups -> what is refused in each of them."""
