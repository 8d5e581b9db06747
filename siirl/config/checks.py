"""Checks between keys that need no DAG."""

import re
from collections.abc import Iterator

from siirl.config.algorithm_table import LOSSES, OWN_LOSS
from siirl.config.common import OptimConfig, TrainedConfig
from siirl.config.root import Config, all_keys
from siirl.config.tree import with_broken
from siirl.errors import ConfigError, UserError, joined
from siirl.findings import Findings

_KEY = re.compile(r"[\w.]+")


def check_config(cfg: Config) -> None:
    """Refuse a configuration that cannot work; all contradictions are reported at once, one on each line.

    For a whole run or for the resolved configuration of a node. ConfigError for keys that contradict each
    other. Pure, and quick enough to call once for every node.
    """
    problems = contradictions(cfg)
    if problems:
        raise joined(problems)


def find_contradictions(cfg: Config, found: Findings) -> Config:
    """`check_config` that goes on: contradictions go to `found`. The keys that they start with are broken in
    the configuration that is returned, so that nothing is said of them twice.
    """
    problems = contradictions(cfg)
    for problem in problems:
        found.add(problem)
    subjects = (_KEY.match(str(problem)) for problem in problems)
    return with_broken(cfg, (key[0] for key in subjects if key and key[0] in all_keys()))


def contradictions(cfg: Config) -> list[UserError]:
    """What is wrong between keys, each by itself."""
    found = Findings()
    for check in CHECKS:
        found.take(ConfigError(problem) for problem in check(cfg))
    return found.problems


def _batch(cfg: Config) -> Iterator[str]:
    batch, mini = cfg.data.train_batch_size, cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    yield from _mini_batches("actor_rollout_ref.actor", mini, batch)
    if cfg.critic.ppo_mini_batch_size != mini and cfg.algorithm.may_use_critic:
        yield from _mini_batches("critic", cfg.critic.ppo_mini_batch_size, batch)


def _mini_batches(group: str, mini: int, batch: int) -> Iterator[str]:
    if batch % mini:
        why = "is larger than" if mini > batch else "does not divide"
        fix = next(size for size in range(min(mini, batch), 0, -1) if batch % size == 0)
        yield (
            f"{group}.ppo_mini_batch_size={mini} {why} data.train_batch_size={batch}: a training step is cut "
            f"into whole mini-batches of prompts. Set {group}.ppo_mini_batch_size={fix}, or another divisor."
        )


def _groups(cfg: Config) -> Iterator[str]:
    n, estimator = cfg.actor_rollout_ref.rollout.n, cfg.algorithm.adv_estimator
    if cfg.algorithm.estimator.compares_groups and n < 2:
        yield (
            f"actor_rollout_ref.rollout.n={n} with algorithm.adv_estimator={estimator}: the advantage is "
            "relative to the other samples of a prompt, and there are none. Set "
            "actor_rollout_ref.rollout.n=2 or more."
        )


def _lengths(cfg: Config) -> Iterator[str]:
    rollout, data = cfg.actor_rollout_ref.rollout, cfg.data
    for name, value, limit_name, limit in (
        ("prompt_length", rollout.prompt_length, "max_prompt_length", data.max_prompt_length),
        ("response_length", rollout.response_length, "max_response_length", data.max_response_length),
    ):
        if value != limit:
            yield (
                f"actor_rollout_ref.rollout.{name}={value} differs from data.{limit_name}={limit}: both are "
                f"the same limit. Set only data.{limit_name}."
            )


def _budgets(cfg: Config) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    actor, ref = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref
    for group, dynamic, name, budget in (
        ("actor", actor.use_dynamic_bsz, "ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu),
        (
            "ref",
            ref.log_prob_use_dynamic_bsz,
            "log_prob_max_token_len_per_gpu",
            ref.log_prob_max_token_len_per_gpu,
        ),
        (
            "rollout",
            rollout.log_prob_use_dynamic_bsz,
            "log_prob_max_token_len_per_gpu",
            rollout.log_prob_max_token_len_per_gpu,
        ),
    ):
        if dynamic and budget < longest:
            yield (
                f"actor_rollout_ref.{group}.{name}={budget} is less than the longest row, prompt "
                f"{rollout.prompt_length} + response {rollout.response_length} = {longest} tokens: a row is "
                f"never split. Set actor_rollout_ref.{group}.{name}={longest} or more."
            )


def _overlong(cfg: Config) -> Iterator[str]:
    buffer, rollout = cfg.reward_model.overlong_buffer, cfg.actor_rollout_ref.rollout
    if buffer.enable and buffer.len > rollout.response_length:
        yield (
            f"reward_model.overlong_buffer.len={buffer.len} is longer than a response "
            f"({rollout.response_length} tokens): the penalty would start before the first token. Lower it."
        )


def _sampling(cfg: Config) -> Iterator[str]:
    rollout = cfg.actor_rollout_ref.rollout
    prefix = "actor_rollout_ref.rollout"
    for where, params in ((prefix, rollout), (f"{prefix}.val_kwargs", rollout.val_kwargs)):
        if params.top_k == 0:
            yield f"{where}.top_k=0: no token could be sampled. Set {where}.top_k=-1 for no limit."
        if not 0 < params.top_p <= 1:
            yield f"{where}.top_p={params.top_p:g}: must be above 0 and at most 1. Set {where}.top_p=1.0."


def _greedy(cfg: Config) -> Iterator[str]:
    rollout, prefix = cfg.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.temperature == 0:
        greedy = f", or {prefix}.do_sample=false to decode greedily" if rollout.n == 1 else ""
        yield (
            f"{prefix}.temperature=0: log-probs are taken at the sampling temperature, and there are none at "
            f"0. Set {prefix}.temperature=1.0{greedy}."
        )


def _validation_samples(cfg: Config) -> Iterator[str]:
    prefix, val = "actor_rollout_ref.rollout", cfg.actor_rollout_ref.rollout.val_kwargs
    if val.do_sample and val.temperature == 0:
        yield (
            f"{prefix}.val_kwargs.do_sample=true with val_kwargs.temperature=0: temperature 0 is greedy. Set "
            f"{prefix}.val_kwargs.temperature=1.0, or {prefix}.val_kwargs.do_sample=false."
        )
    if val.n > 1 and not val.do_sample:
        yield (
            f"{prefix}.val_kwargs.n={val.n} with val_kwargs.do_sample=false: all {val.n} greedy responses "
            f"would be the same. Set {prefix}.val_kwargs.do_sample=true "
            f"{prefix}.val_kwargs.temperature=1.0, or {prefix}.val_kwargs.n=1."
        )


def _samples(cfg: Config) -> Iterator[str]:
    rollout, prefix = cfg.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.n > 1 and not rollout.do_sample:
        yield (
            f"{prefix}.n={rollout.n} with {prefix}.do_sample=false: all {rollout.n} greedy responses of a "
            f"prompt would be the same. Set {prefix}.do_sample=true."
        )


def _whole_model(cfg: Config) -> Iterator[str]:
    rollout, prefix = cfg.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.name == "hf" and rollout.tensor_model_parallel_size > 1:
        yield (
            f"{prefix}.tensor_model_parallel_size={rollout.tensor_model_parallel_size} with "
            f"{prefix}.name=hf: the hf rollout holds the whole model on each rank. Set "
            f"{prefix}.tensor_model_parallel_size=1."
        )


def _replay(cfg: Config) -> Iterator[str]:
    rollout, trainer, prefix = cfg.actor_rollout_ref.rollout, cfg.trainer, "actor_rollout_ref.rollout"
    if rollout.name != "replay":
        return
    if not rollout.replay_dir:
        yield (
            f"{prefix}.name=replay without {prefix}.replay_dir: there is nothing to replay. Set it to the "
            "trainer.dump_rollouts_dir of the run that recorded the rollouts."
        )
    if trainer.val_before_train or trainer.val_only or trainer.test_freq > 0:
        yield (
            f"{prefix}.name=replay cannot validate: no engine samples with the new weights. Set "
            "trainer.val_before_train=false trainer.test_freq=-1."
        )


def _loss(cfg: Config) -> Iterator[str]:
    actor = cfg.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    if actor.use_cpgd_loss and mode not in ("vanilla", "cpgd"):
        yield (
            f"actor_rollout_ref.actor.use_cpgd_loss=true and policy_loss.loss_mode={mode}: the first is "
            "short for policy_loss.loss_mode=cpgd. Set one of them."
        )
    for name, key in LOSSES.get(mode, OWN_LOSS).instead.items():
        if f"actor_rollout_ref.actor.{name}" in cfg.explicit:
            yield (
                f"actor_rollout_ref.actor.{name}={getattr(actor, name):g} with policy_loss.loss_mode={mode}: "
                "its bounds are divergences, not ratios, and have keys of their own. Set "
                f"actor_rollout_ref.actor.policy_loss.{key} instead."
            )


def _clipping(cfg: Config) -> Iterator[str]:
    actor = cfg.actor_rollout_ref.actor
    if actor.clip_ratio_c <= 1:
        yield (
            f"actor_rollout_ref.actor.clip_ratio_c={actor.clip_ratio_c:g}: the dual clip bounds ratios above "
            "1. Set it to more than 1, e.g. 3.0."
        )
    if actor.clip_ratio_low > 1:
        yield (
            f"actor_rollout_ref.actor.clip_ratio_low={actor.clip_ratio_low:g}: a ratio cannot fall below 0, "
            "so it is at most 1."
        )


def _correction(cfg: Config) -> Iterator[str]:
    actor, prefix = cfg.actor_rollout_ref.actor, "actor_rollout_ref.actor"
    correction, cap = actor.rollout_correction, actor.tis_imp_ratio_cap
    used = correction.weight != "none" or correction.reject != "none" or cap > 0
    if used and not actor.recompute_old_log_prob:
        yield (
            f"{prefix}.rollout_correction with {prefix}.recompute_old_log_prob=false: the ratio of the "
            "policy loss is taken to the rollout engine already, so there is nothing to correct. "
            "Remove one of them."
        )
    if cap > 0 and correction.weight != "none":
        yield (
            f"{prefix}.tis_imp_ratio_cap={cap:g} and {prefix}.rollout_correction.weight={correction.weight}: "
            "the first is short for the second. Set one of them."
        )
    for low, high, name in (
        (correction.low, correction.high, "low"),
        (correction.reject_low, correction.reject_high, "reject_low"),
    ):
        if low >= high:
            yield f"{prefix}.rollout_correction.{name}={low:g} is not below the upper bound {high:g}."


def _lag(cfg: Config) -> Iterator[str]:
    rollout, prefix = cfg.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.surplus > rollout.max_lag:
        yield (
            f"{prefix}.surplus={rollout.surplus:g} with {prefix}.max_lag={rollout.max_lag}: of the prompts "
            "in work one batch is trained in each step, so the last ones would be older than max_lag allows. "
            f"Set {prefix}.surplus={rollout.max_lag} or less, or a larger max_lag."
        )


def _prometheus(cfg: Config) -> Iterator[str]:
    address = cfg.trainer.prometheus_address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        yield (
            f"trainer.prometheus_address={address!r} is not host:port with a port of at most 65535. Set e.g. "
            "trainer.prometheus_address=127.0.0.1:9464."
        )


def _dynamic_sampling(cfg: Config) -> Iterator[str]:
    filters, n = cfg.algorithm.filter_groups, cfg.actor_rollout_ref.rollout.n
    if not filters.enable:
        return
    if n < 2:
        yield (
            f"algorithm.filter_groups.enable=true with actor_rollout_ref.rollout.n={n}: a single response of "
            "a prompt never differs from the others. Set actor_rollout_ref.rollout.n=2 or more."
        )
    for name, value in (
        ("trainer.dump_rollouts_dir", cfg.trainer.dump_rollouts_dir),
        ("actor_rollout_ref.rollout.replay_dir", cfg.actor_rollout_ref.rollout.name == "replay"),
    ):
        if value:
            yield (
                f"{name} with algorithm.filter_groups.enable=true: recorded rollouts hold one round of each "
                "step, dynamic sampling takes as many as it needs. Set algorithm.filter_groups.enable=false."
            )


def _resampling(cfg: Config) -> Iterator[str]:
    if not cfg.algorithm.use_pf_ppo:
        return
    known = {"reweight_method": ("pow", "max_min", "max_random"), "weight_pow": None}
    for name, value in cfg.algorithm.pf_ppo.items():
        choices = known.get(name, ())
        if choices == ():
            yield f"algorithm.pf_ppo.{name} is not a key of PF-PPO: set {' or '.join(known)}."
        elif choices is not None and value not in choices:
            yield f"algorithm.pf_ppo.{name}={value}: unknown name; the known ones are {', '.join(choices)}."


def _critic(cfg: Config) -> Iterator[str]:
    if not cfg.algorithm.may_use_critic and cfg.trainer.critic_warmup:
        yield (
            f"trainer.critic_warmup={cfg.trainer.critic_warmup} with algorithm.adv_estimator="
            f"{cfg.algorithm.adv_estimator}, which uses no critic: nothing would be trained in these "
            "steps. Set trainer.critic_warmup=0, or algorithm.adv_estimator=gae."
        )


def _critic_budgets(cfg: Config) -> Iterator[str]:
    critic, rollout = cfg.critic, cfg.actor_rollout_ref.rollout
    if not cfg.algorithm.may_use_critic:
        return
    longest = rollout.prompt_length + rollout.response_length
    for name, budget in (
        ("ppo_max_token_len_per_gpu", critic.ppo_max_token_len_per_gpu),
        ("forward_max_token_len_per_gpu", critic.forward_max_token_len_per_gpu),
    ):
        if critic.use_dynamic_bsz and budget < longest:
            yield (
                f"critic.{name}={budget} is less than the longest row, prompt {rollout.prompt_length} + "
                f"response {rollout.response_length} = {longest} tokens: a row is never split. Set it to "
                f"{longest} or more."
            )


def _actor_training(cfg: Config) -> Iterator[str]:
    yield from _training(cfg.actor_rollout_ref.actor, "actor_rollout_ref.actor")


def _critic_training(cfg: Config) -> Iterator[str]:
    if cfg.algorithm.may_use_critic:
        yield from _training(cfg.critic, "critic")


def _training(group: TrainedConfig, name: str) -> Iterator[str]:
    if not all(0 <= beta < 1 for beta in group.optim.betas):
        yield f"{name}.optim.betas={list(group.optim.betas)}: each must be at least 0 and less than 1."
    yield from _schedule(group.optim, f"{name}.optim")
    contents = group.checkpoint.save_contents
    if "model" not in contents:
        yield (
            f"{name}.checkpoint.save_contents=[{','.join(contents)}]: a checkpoint without the model cannot "
            "be resumed. Add model."
        )


def _shards(cfg: Config) -> Iterator[str]:
    for role, size in (
        ("actor", cfg.actor_rollout_ref.actor.fsdp_config.fsdp_size),
        ("ref", cfg.actor_rollout_ref.ref.fsdp_config.fsdp_size),
    ):
        if size == 0:
            key = f"actor_rollout_ref.{role}.fsdp_config.fsdp_size"
            yield f"{key}=0: no rank would hold the weights. Set {key}=-1 to shard over all ranks."


def _schedule(optim: OptimConfig, prefix: str) -> Iterator[str]:
    for name, share in (
        ("lr_warmup_steps_ratio", optim.lr_warmup_steps_ratio),
        ("min_lr_ratio", optim.min_lr_ratio),
    ):
        if share > 1:
            yield f"{prefix}.{name}={share:g}: a share is at most 1."
    for name, lr in (("lr_warmup_init", optim.lr_warmup_init), ("min_lr", optim.min_lr)):
        if lr > optim.lr:
            yield f"{prefix}.{name}={lr:g} is more than {prefix}.lr={optim.lr:g}, the peak. Lower it."
    if optim.min_lr and optim.min_lr_ratio:
        yield (
            f"{prefix}.min_lr={optim.min_lr:g} and {prefix}.min_lr_ratio={optim.min_lr_ratio:g} both name "
            "the final learning rate. Set one of them."
        )
    if optim.lr_decay_style and optim.warmup_style != "constant":
        yield (
            f"{prefix}.lr_decay_style={optim.lr_decay_style} and {prefix}.warmup_style={optim.warmup_style} "
            "both name the schedule. Set one of them."
        )
    if optim.lr_decay_style == "WSD" and optim.lr_wsd_decay_steps is None:
        yield f"{prefix}.lr_decay_style=WSD without the length of its decay. Set {prefix}.lr_wsd_decay_steps."


def _train_files(cfg: Config) -> Iterator[str]:
    trainer = cfg.trainer
    if not cfg.data.train_files and not trainer.val_only:
        yield "data.train_files is empty: there is nothing to train on. Name at least one parquet file."


def _val_files(cfg: Config) -> Iterator[str]:
    trainer = cfg.trainer
    validates = trainer.val_before_train or trainer.val_only or trainer.test_freq > 0
    if not cfg.data.val_files and validates:
        yield (
            "data.val_files is empty, but the run validates. Name a parquet file, or set "
            "trainer.val_before_train=false trainer.test_freq=-1."
        )


def _resume(cfg: Config) -> Iterator[str]:
    trainer = cfg.trainer
    if trainer.resume_mode == "resume_path" and not isinstance(trainer.resume_from_path, str):
        yield (
            "trainer.resume_mode=resume_path without a path. Set "
            "trainer.resume_from_path=DIR/global_step_N, or trainer.resume_mode=auto."
        )
    if trainer.resume_from_path is True:
        yield "trainer.resume_from_path=true: expected the path of a checkpoint, DIR/global_step_N."


def _workflow(cfg: Config) -> Iterator[str]:
    dag = cfg.dag
    if dag.workflow_path and dag.custom_pipeline_fn:
        yield (
            f"dag.workflow_path={dag.workflow_path} and dag.custom_pipeline_fn={dag.custom_pipeline_fn}: a "
            "run has one workflow. Set only one of them."
        )


CHECKS = (
    _batch,
    _groups,
    _lengths,
    _budgets,
    _overlong,
    _sampling,
    _greedy,
    _validation_samples,
    _samples,
    _whole_model,
    _replay,
    _loss,
    _clipping,
    _correction,
    _lag,
    _prometheus,
    _dynamic_sampling,
    _resampling,
    _critic,
    _critic_budgets,
    _critic_training,
    _actor_training,
    _shards,
    _train_files,
    _val_files,
    _resume,
    _workflow,
)
"""Each is left out from where it reads the value of a key that was refused."""
