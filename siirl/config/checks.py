"""Checks between keys that need no DAG."""

import datetime
import itertools
import math
from collections.abc import Callable, Iterator

from siirl.access import is_loopback
from siirl.config.algorithm_table import LOSSES, OWN_LOSS
from siirl.config.contradictions import CONTRADICTIONS, about
from siirl.config.resolve import get
from siirl.config.roles import ROLES, least_budget, sequence_ranks, token_budget
from siirl.config.root import Config
from siirl.config.tree import default_config, with_broken
from siirl.errors import ConfigError, UserError, joined
from siirl.findings import Findings

MINI_BATCH = ".ppo_mini_batch_size"


def check_config(cfg: Config) -> None:
    """Refuse a configuration that cannot work; all contradictions are reported at once, one on each line.

    For a whole run or for the resolved configuration of a node. ConfigError for keys that contradict each
    other. Pure, and quick enough to call once for every node.
    """
    problems = contradictions(cfg)
    if problems:
        raise joined(problems)


def find_contradictions(
    cfg: Config, found: Findings, trains: Callable[[str], bool] = lambda group: True
) -> Config:
    """`check_config` that goes on: contradictions go to `found`. The keys that they start with are broken in
    the configuration that is returned, so that nothing is said of them twice.

    trains: whether the workflow trains the model of a group; mini-batches of others are cut by nobody. It is
    asked only where they would be refused.
    """
    problems = [problem for problem in contradictions(cfg) if _concerns(problem, trains)]
    for problem in problems:
        found.add(problem)
    return with_broken(cfg, (key for problem in problems for key in problem.breaks))


def _concerns(problem: UserError, trains: Callable[[str], bool]) -> bool:
    groups = [key.removesuffix(MINI_BATCH) for key in problem.breaks if key.endswith(MINI_BATCH)]
    return all(trains(group) for group in groups)


def contradictions(cfg: Config) -> list[UserError]:
    """What is wrong between keys, each by itself."""
    found = Findings()
    for check in COMPUTED:
        found.take(check(cfg))
    for groups, rows in CONTRADICTIONS.items():
        for group, row in itertools.product(groups, rows):
            found.take(row.problems(cfg, group))
    return found.problems


def _batch(cfg: Config) -> Iterator[ConfigError]:
    batch, mini = cfg.data.train_batch_size, cfg.actor_rollout_ref.actor.ppo_mini_batch_size
    yield from _mini_batches("actor_rollout_ref.actor", mini, batch)
    if cfg.critic.ppo_mini_batch_size != mini and cfg.algorithm.may_use_critic:
        yield from _mini_batches("critic", cfg.critic.ppo_mini_batch_size, batch)


def _mini_batches(group: str, mini: int, batch: int) -> Iterator[ConfigError]:
    if batch % mini:
        why = "is larger than" if mini > batch else "does not divide"
        fix = next(size for size in range(min(mini, batch), 0, -1) if batch % size == 0)
        yield about(
            f"{group}.ppo_mini_batch_size",
            f"{group}.ppo_mini_batch_size={mini} {why} data.train_batch_size={batch}: a training step is cut "
            f"into whole mini-batches of prompts. Set {group}.ppo_mini_batch_size={fix}, or another divisor.",
        )


def _budgets(cfg: Config) -> Iterator[ConfigError]:
    rollout = cfg.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    for name, role in ROLES.items():
        if role.any_length or (role.trainer == "critic" and not cfg.algorithm.may_use_critic):
            continue
        for keys in filter(None, (role.train, role.forward)):
            budget, ranks = get(cfg, keys.max_tokens), sequence_ranks(cfg, name)
            least = least_budget(cfg, name, longest)
            if get(cfg, keys.dynamic) and token_budget(cfg, name, keys) < longest:
                shared = f" on each of the {ranks} ranks that share it" if ranks > 1 else ""
                yield about(
                    keys.max_tokens,
                    f"{keys.max_tokens}={budget}{shared} is less than the longest row, prompt "
                    f"{rollout.prompt_length} + response {rollout.response_length} = {longest} tokens: a row "
                    f"is never split over micro-batches. Set {keys.max_tokens}={least} or more.",
                )


def _loss(cfg: Config) -> Iterator[ConfigError]:
    actor = cfg.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    for name, key in LOSSES.get(mode, OWN_LOSS).instead.items():
        full = f"actor_rollout_ref.actor.{name}"
        if full in cfg.explicit and get(cfg, full) != get(default_config(), full):
            yield about(
                full,
                f"actor_rollout_ref.actor.{name}={getattr(actor, name):g} with policy_loss.loss_mode={mode}: "
                "its bounds are divergences, not ratios, and have keys of their own. Set "
                f"actor_rollout_ref.actor.policy_loss.{key} instead.",
            )


def _parts(cfg: Config) -> Iterator[ConfigError]:
    algorithm, key = cfg.algorithm, "algorithm.gdpo_rewards"
    if not algorithm.estimator.compares_parts:
        return
    if not algorithm.gdpo_rewards:
        yield about(
            key,
            f"{key} is empty with algorithm.adv_estimator={algorithm.adv_estimator}: it compares rewards "
            "one by one. Set NAME: WEIGHT for each, e.g. algorithm.gdpo_rewards={score: 1, format: 0.5}.",
        )
    for name, weight in algorithm.gdpo_rewards.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            yield about(f"{key}.{name}", f"{key}.{name}={weight}: expected a weight, a finite number.")
    shaped = {
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "reward_model.overlong_buffer.enable": cfg.reward_model.overlong_buffer.enable,
    }
    for other in (name for name, used in shaped.items() if used):
        yield about(
            other,
            f"{other}=true with algorithm.adv_estimator={algorithm.adv_estimator}: it reads the rewards that "
            f"gdpo_rewards names, so a change of the token rewards would count nothing. Set {other}=false.",
        )


def _resampling(cfg: Config) -> Iterator[ConfigError]:
    if not cfg.algorithm.use_pf_ppo:
        return
    known = {"reweight_method": ("pow", "max_min", "max_random"), "weight_pow": None}
    for name, value in cfg.algorithm.pf_ppo.items():
        choices = known.get(name, ())
        if choices == ():
            yield about(
                f"algorithm.pf_ppo.{name}",
                f"algorithm.pf_ppo.{name} is not a key of PF-PPO: set {' or '.join(known)}.",
            )
        elif choices is not None and value not in choices:
            yield about(
                f"algorithm.pf_ppo.{name}",
                f"algorithm.pf_ppo.{name}={value}: unknown name; the known ones are {', '.join(choices)}.",
            )


def _prometheus(cfg: Config) -> Iterator[ConfigError]:
    address = cfg.trainer.prometheus_address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        yield about(
            "trainer.prometheus_address",
            f"trainer.prometheus_address={address!r} is not host:port with a port of at most 65535. Set e.g. "
            "trainer.prometheus_address=127.0.0.1:9464.",
        )
    elif "prometheus" in cfg.trainer.logger and not (is_loopback(host) or cfg.trainer.prometheus_token_env):
        yield about(
            "trainer.prometheus_address",
            f"trainer.prometheus_address={address}: other machines could read the metrics without a token. "
            "Put a secret into an environment variable and name it by trainer.prometheus_token_env (in "
            "Prometheus: authorization: {credentials: ...}); or set trainer.prometheus_address="
            f"127.0.0.1:{port}.",
        )


def _serve(cfg: Config) -> Iterator[ConfigError]:
    serve = cfg.actor_rollout_ref.serve
    key = "actor_rollout_ref.serve"
    host, _, port = serve.address.rpartition(":")
    if serve.command and serve.listen:
        yield about(
            f"{key}.command",
            f"{key}.command={serve.command!r} and {key}.listen=True: either siirl starts what plays an "
            "episode, or it waits for it. Remove one of them.",
        )
    if not host or not port.isdecimal() or int(port) > 65535:
        yield about(
            f"{key}.address",
            f"{key}.address={serve.address!r} is not host:port with a port of at most 65535. Set e.g. "
            f"{key}.address=127.0.0.1:8100.",
        )


def _profiler(cfg: Config) -> Iterator[ConfigError]:
    profiler, trainer = cfg.profiler, cfg.trainer
    if not profiler.enable:
        return
    last, ranks = trainer.total_training_steps, trainer.nnodes * trainer.n_gpus_per_node
    beyond = [rank for rank in profiler.ranks if rank >= ranks and not profiler.all_ranks]
    if not profiler.profile_steps or (last is not None and min(profiler.profile_steps) > last):
        steps = ",".join(map(str, profiler.profile_steps))
        yield about(
            "profiler.profile_steps",
            f"profiler.profile_steps=[{steps}] with trainer.total_training_steps={last}: no step would be "
            "recorded. Set profiler.profile_steps to steps of the run, the first of which is 1.",
        )
    if not (profiler.ranks or profiler.all_ranks):
        yield about(
            "profiler.ranks",
            "profiler.ranks=[]: no rank would be recorded. Name some, or set profiler.all_ranks=true.",
        )
    elif beyond:
        yield about(
            "profiler.ranks",
            f"profiler.ranks=[{','.join(map(str, profiler.ranks))}]: the run has the ranks 0 to {ranks - 1} "
            f"(trainer.nnodes={trainer.nnodes}, trainer.n_gpus_per_node={trainer.n_gpus_per_node}). Leave "
            f"out {', '.join(map(str, beyond))}.",
        )


def _date(cfg: Config) -> Iterator[ConfigError]:
    told = cfg.data.template_date
    try:
        datetime.date.fromisoformat(told or "2000-01-01")
    except ValueError:
        yield about(
            "data.template_date",
            f"data.template_date={told}: chat templates write a day, as YYYY-MM-DD. Set e.g. "
            "data.template_date=2025-03-01, or leave it out for the day on which the run starts.",
        )


COMPUTED = (_batch, _budgets, _loss, _parts, _resampling, _prometheus, _serve, _profiler, _date)
"""Each is left out from where it reads the value of a key that was refused."""
