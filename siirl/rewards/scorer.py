"""Scores of responses: rows with tokens in, rows with `score` and `reward_info` out, beside other work."""

import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from siirl.config import Config
from siirl.data.reasoning_gym_rows import PREFIX
from siirl.data.rows import make_rows, objects, renamed
from siirl.data.said import said_in
from siirl.dialect.dialect import Dialect, dialect_of
from siirl.errors import DataError, EndpointError, RewardError
from siirl.observe.columns import part_metric
from siirl.observe.metrics import Metrics
from siirl.observe.spans import phase
from siirl.rewards.by_data_source import RewardChooser, functions_of, is_custom
from siirl.rewards.code import longest_s
from siirl.rewards.pool import GIVEN_UP, WorkerPool
from siirl.rewards.reward_registry import REWARDS, Executor
from siirl.rewards.reward_service import REMOTE
from siirl.rewards.sample import Outcome, Sample, failed, score_sample
from siirl.rewards.user_function import check_user_function
from siirl.user_code.load_object import kept_texts

log = logging.getLogger(__name__)

MAX_WORKERS = 8  # of one rank, when reward_model.num_workers does not say


Added = Callable[[str], Collection[str]]
"""Data source -> the functions, or rewards of nodes, whose weighted sum is the score; () without parts."""


def no_parts(_: str) -> tuple[str, ...]:
    """What is added up where nothing is."""
    return ()


def count_values(
    metrics: Metrics,
    told: Iterable[tuple[str, Mapping[str, Any] | None]],
    added: Added,
    validate: bool = False,
) -> None:
    """Means of the numbers that reward functions give besides the score, reward/SOURCE/NAME/mean.

    told: data source and reward_info of each row. Those that are added up also have one over all sources.
    """
    kind, parts = "val" if validate else "reward", functools.cache(added)
    for source, info in told:
        for name, value in (info or {}).items():
            if isinstance(value, int | float):
                metrics.mean(f"{kind}/{source}/{name}/mean", float(value))
                if name in parts(source):
                    metrics.mean(part_metric(name, validate), float(value))


class RewardScorer:
    """Scores the rows of one rank; every rank that holds rows has its own. No communication between ranks.

    A thread decodes the responses and calls functions that take microseconds; those that ask a service run in
    further threads; all others run in a pool of processes, each sample with a time limit. The user's function
    is loaded once at construction: RewardError or ConfigError if that fails.

    A failing user function or service raises RewardError from the future's result(), or counts as 0 if
    custom_reward_function.on_error is "zero"; so does a built-in function that cannot judge a response,
    or not in time, by reward_model.on_error. A service that cannot be reached, and a sandbox that does not
    work, raise always.
    """

    def __init__(self, cfg: Config, tokenizer: PreTrainedTokenizerBase, dialect: Dialect | None = None):
        """dialect: of the policy whose rows are scored, where it is known already."""
        user = cfg.custom_reward_function
        self._dialect = dialect or dialect_of(cfg, tokenizer)
        self._scored = cfg.reward_model.scored_text
        check_user_function(cfg)
        self.chooser = RewardChooser(cfg)
        self._tokenizer = tokenizer
        self._on_error = user.on_error
        self._on_own_error = cfg.reward_model.on_error
        self._custom_names = {part: f"{name} of {user.path}" for part, name in functions_of(cfg)}
        self._functions = {
            name: functools.partial(REWARDS[name].fn, **kwargs)
            for name, kwargs in self.chooser.kwargs.items()
        }
        custom = None
        if self.chooser.custom:
            custom = {
                "path": user.path,
                "name": " and ".join(name for _, name in functions_of(cfg)),
                "names": dict(functions_of(cfg)),
                "reward_kwargs": dict(user.reward_kwargs),
            }
        files = (*cfg.data.train_files, *cfg.data.val_files)
        setup = {
            "kwargs": self.chooser.kwargs,
            "custom": custom,
            "batch": self.chooser.manager == "batch",
            "kept": kept_texts(),
            "imports": ["reasoning_gym"] * any(name.startswith(PREFIX) for name in files),
        }
        workers = cfg.reward_model.num_workers or _default_workers(cfg.trainer.n_gpus_per_node)
        longer = {"code": longest_s(**self.chooser.kwargs["code"])}
        self._pool = WorkerPool(workers, user.timeout_s, setup, longer)
        self._metrics = Metrics()
        if custom is not None:
            self._pool.start_one()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
        self._askers = ThreadPoolExecutor(self.chooser.max_concurrent(), thread_name_prefix="reward_service")

    def submit(
        self, rows: TensorDict, by_domain: bool = False, names: Mapping[str, str] | None = None
    ) -> Future[TensorDict]:
        """Start scoring [B] rows; the future holds score [B] float32 and reward_info [B], on the CPU.

        Reads response_ids, response_length, raw_prompt, data_source, ground_truth, extra_info, sample_index;
        of agents that talk also turn_id: the response is then the agent's last turn in the row. The rows must
        not be changed in place until the result is there. by_domain: put the scores of each source into the
        metrics. names: which of the two columns to give, under other names.
        """
        return self._thread.submit(self._traced, rows, by_domain, names)

    def drain_metrics(self) -> Metrics:
        """What happened since the last call: reward/failed, /timeout, /tried_again, /worker_death and
        /worker_leak, scoring_s.

        By domain also reward/SOURCE/mean, and the means of further values, reward/SOURCE/NAME/mean.
        """
        metrics, self._metrics = self._metrics, Metrics()
        return metrics

    def close(self) -> None:
        """Finish what was submitted and end the workers."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._askers.shutdown(wait=True, cancel_futures=True)
        self._pool.close()

    def _traced(self, rows: TensorDict, by_domain: bool, names: Mapping[str, str] | None) -> TensorDict:
        with phase("score", rows=len(rows)):
            scored = self._score(rows, by_domain)
        return scored if names is None else renamed(scored, names)

    def _score(self, rows: TensorDict, by_domain: bool) -> TensorDict:
        start = time.perf_counter()
        samples = self.samples(rows)
        outcomes = self._outcomes(samples)
        self._judge_failures(rows, samples, outcomes)
        if self.chooser.manager == "dapo":
            for outcome in outcomes:
                outcome.info.setdefault("acc", float(outcome.score > 0))
        if by_domain:
            self._count_by_domain(samples, outcomes)
        self._metrics.max("reward/scoring_s", time.perf_counter() - start)
        return make_rows(
            {
                "score": torch.tensor([outcome.score for outcome in outcomes], dtype=torch.float32),
                "reward_info": [outcome.info or NO_INFO for outcome in outcomes],
            }
        )

    def samples(self, rows: TensorDict) -> list[Sample]:
        """What the functions are given of each row."""
        said = said_in(rows, self._tokenizer, self._dialect)
        sources = objects(rows, "data_source")
        mixes = {source: self.chooser.mix(source) for source in set(sources)}
        columns = zip(sources, said, objects(rows, "ground_truth"), objects(rows, "extra_info"), strict=True)
        return [
            Sample(mixes[source].parts, source, x.raw, *rest, mixes[source].offset, x.as_dict(), self._scored)
            for source, x, *rest in columns
        ]

    def _outcomes(self, samples: list[Sample]) -> list[Outcome]:
        """What comes of each sample, scored by the executor of its data source."""
        sources = {sample.data_source for sample in samples}
        executors = {source: self.chooser.executor(source) for source in sources}
        indices: dict[Executor, list[int]] = {"inline": [], "process": [], "thread": []}
        for index, sample in enumerate(samples):
            indices[executors[sample.data_source]].append(index)
        outcomes = {index: self._asked(samples[index]) for index in indices["inline"]}
        asked = {self._askers.submit(self._asked, samples[index]): index for index in indices["thread"]}
        if indices["process"]:
            deaths, again, leaks = self._pool.num_deaths, self._pool.num_tried_again, self._pool.num_leaks
            pooled = self._pool.run([samples[index] for index in indices["process"]], self._is_fatal)
            outcomes |= dict(zip(indices["process"], pooled, strict=True))
            self._metrics.sum("reward/worker_death", self._pool.num_deaths - deaths)
            self._metrics.sum("reward/worker_leak", self._pool.num_leaks - leaks)
            self._metrics.sum("reward/tried_again", self._pool.num_tried_again - again)
        for future in as_completed(asked):
            index = asked[future]
            outcomes[index] = future.result()
            if self._is_fatal(samples[index], outcomes[index]):
                for waiting in asked:
                    waiting.cancel()
                break
        return [outcomes.get(index, GIVEN_UP) for index in range(len(samples))]

    def _asked(self, sample: Sample) -> Outcome:
        try:
            return score_sample(self._functions, sample)
        except (DataError, EndpointError, ValueError) as error:
            return failed(error)

    def _is_fatal(self, sample: Sample, outcome: Outcome) -> bool:
        """Whether an outcome ends the run: bad data, a broken service, or what the user does not tolerate."""
        if outcome.failure in (None, "service"):
            return outcome.failure == "service"
        if _is_users(sample):
            return self._on_error == "raise"
        return outcome.failure == "data" or self._on_own_error == "raise"

    def _count_by_domain(self, samples: list[Sample], outcomes: list[Outcome]) -> None:
        told = [(sample.data_source, outcome.info) for sample, outcome in zip(samples, outcomes, strict=True)]
        count_values(self._metrics, told, self.chooser.added)
        for sample, outcome in zip(samples, outcomes, strict=True):
            self._metrics.mean(f"reward/{sample.data_source}/mean", outcome.score)

    def _judge_failures(self, rows: TensorDict, samples: list[Sample], outcomes: list[Outcome]) -> None:
        """Raise for failures that must stop the run; count the others, with a note in their reward_info."""
        failed = [index for index, outcome in enumerate(outcomes) if outcome.failure]
        if not failed:
            return
        for index in failed:
            if self._is_fatal(samples[index], outcomes[index]):
                message = self._message(rows, samples[index], outcomes[index], index)
                error = RewardError(f"{message}. {_fix(samples[index], outcomes[index])}")
                error.frames = outcomes[index].frames
                raise error
            outcomes[index].info.update(error=outcomes[index].error, failure=outcomes[index].failure)
        timeouts = sum(outcomes[index].failure == "timeout" for index in failed)
        self._metrics.sum("reward/failed", len(failed))
        self._metrics.sum("reward/timeout", timeouts)
        log.warning(
            "%d of %d samples were not scored (%d timeouts) and count as 0. The first: %s",
            len(failed),
            len(samples),
            timeouts,
            self._message(rows, samples[failed[0]], outcomes[failed[0]], failed[0]),
        )

    def _message(self, rows: TensorDict, sample: Sample, outcome: Outcome, index: int) -> str:
        names = " + ".join(self._custom_names.get(name, name) for name, _ in sample.parts)
        return (
            f"reward function {names} failed on sample_index {int(rows['sample_index'][index])} "
            f"(data_source {sample.data_source!r}): {outcome.error}"
        )


def _is_users(sample: Sample) -> bool:
    """Whether the user's own function or service takes part in a sample's score."""
    return any(is_custom(name) or name == REMOTE for name, _ in sample.parts)


def _fix(sample: Sample, outcome: Outcome) -> str:
    """What to do about a failure that ends the run."""
    if outcome.failure == "service":
        return "Nothing was trained on this step's rows."
    if outcome.failure == "data" and not _is_users(sample):
        return "Correct the row in the dataset, or choose another function for its data source."
    key = "custom_reward_function" if _is_users(sample) else "reward_model"
    return f"Correct it, or set {key}.on_error=zero to count such samples as 0."


NO_INFO: dict[str, Any] = {}


def _default_workers(ranks_per_machine: int) -> int:
    """This rank's share of the machine's cores; at least two, so that a hung sample delays no other."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(MAX_WORKERS, cores // ranks_per_machine))
