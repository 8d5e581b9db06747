"""Groups reward_model and custom_reward_function."""

from dataclasses import dataclass
from typing import Any

from siirl.config.common import STRATEGY, MegatronConfig, ModelConfig, TrainedConfig, TrainedFSDPConfig
from siirl.config.keys import group, key


@dataclass(frozen=True)
class JudgeConfig:
    """A generative judge: it is asked about a response, and its answer is read."""

    name: str | None = key(
        None,
        "rollout engine of a judge, which reward_model.model.path then is; null: the model has a score head",
        choices=("hf", "vllm"),
    )
    url: str | None = key(
        None, "judge behind an OpenAI-compatible service instead: .../v1/chat/completions; see also remote"
    )
    served_model: str = key("default", "name of the model that the service is asked for", when="url")
    prompt: str | None = key(
        None,
        "what the judge is asked, or a file of it, in which {prompt}, {response}, {ground_truth} and "
        "{data_source} are filled in; null: to grade from 0 to 10",
    )
    pattern: str = key(
        r"(?i)score\W{0,5}?(-?\d+(?:\.\d+)?)",
        "regular expression whose last match in the answer has the grade in its first group",
    )
    parser: str | None = key(
        None, "function in place of pattern, file.py:fn or pkg.mod:fn: answer -> grade, or None"
    )
    low: float = key(0.0, "worst grade; a lower one is malformed")
    high: float = key(10.0, "best grade; the score is (grade - low) / (high - low)")
    default_score: float = key(0.0, "score of a response whose grade is malformed or missing")
    max_tokens: int = key(512, "longest answer, in tokens", low=1)
    temperature: float = key(0.0, "sampling temperature; 0: greedy, the same answer every time", low=0)


@dataclass(frozen=True)
class OverlongBufferConfig:
    """Penalty for responses that come close to the length limit (DAPO's soft over-long punishment)."""

    enable: bool = key(False, "penalise responses longer than max_response_length - len")
    len: int = key(512, "tokens over which the penalty grows", when="enable", low=1)
    penalty_factor: float = key(1.0, "penalty at the limit", when="enable", low=0)
    log: bool = key(False, "log the penalty", when="enable")


@dataclass(frozen=True)
class RemoteRewardConfig:
    """A service that scores responses (reward_manager=remote, or the function `remote`)."""

    url: str | None = key(None, "its http(s) address")
    timeout_s: float = key(30.0, "longest time for one try, in seconds", when="url", low=0, excluded=0)
    max_tries: int = key(5, "tries for each response, with growing waits between them", when="url", low=1)
    away_s: float = key(
        120.0,
        "how long a service that has answered before may be away, in seconds, whatever max_tries says",
        when="url",
        low=0,
    )
    max_concurrent: int = key(16, "requests of each rank at once", when="url", low=1)
    max_per_s: float = key(0.0, "requests of each rank per second; 0: any number", when="url", low=0)
    token_env: str | None = key(
        None, "environment variable whose value is sent as a bearer token", when="url"
    )


@dataclass(frozen=True)
class RewardModelModelConfig(ModelConfig):
    """ModelConfig of a model that scores conversations."""

    path: str = key(
        "",
        "directory of a Hugging Face model with a score head, of a judge, or of any language model if a node "
        "trains it; or ORG/NAME on the hub",
    )
    rm_tokenizer: str | None = key(
        None, "directory of the reward model's tokenizer, which then renders every conversation; null: path"
    )


@dataclass(frozen=True)
class RewardModelConfig(TrainedConfig):
    """How responses are scored, and how a reward model that a node trains learns."""

    enable: bool = key(False, "score by a model, or train it, in a node of node_role REWARD that has one")
    strategy: str = key("fsdp", "backend of the reward model", **STRATEGY, when="enable")
    model: RewardModelModelConfig = group(RewardModelModelConfig, "reward model", when="enable")
    fsdp_config: TrainedFSDPConfig = group(
        TrainedFSDPConfig, "sharding and offload under fsdp", when="strategy=fsdp"
    )
    megatron: MegatronConfig = group(
        MegatronConfig, "sizes and options under megatron", when="strategy=megatron"
    )
    share_instance: int | None = key(
        None,
        "in the config of a REWARD node: the agent whose reward model, which it trains, scores; null: a "
        "model of its own",
    )
    micro_batch_size_per_gpu: int = key(
        None,
        "conversations of a micro-batch on each rank, unless use_dynamic_bsz",
        when="use_dynamic_bsz=false",
        low=1,
    )
    scored_text: str = key(
        "auto",
        "what reward functions get as solution_str: the answer, without reasoning and tool calls, or whole, "
        "all that was said; auto: siirl's functions that judge answers get those, all others the whole",
        choices=("auto", "answer", "whole"),
    )
    max_length: int | None = key(
        None,
        "longest conversation, in tokens, of which the beginning is cut; null: the model's positions",
        when="enable",
        low=1,
    )
    use_dynamic_bsz: bool = key(False, "fill micro-batches up to a token budget", when="enable", auto=True)
    reward_manager: str = key(
        "naive",
        "how rows are scored: naive, parallel and prime call a function for each row, in processes with a "
        "time limit for each row; dapo does so too and notes acc; batch calls custom_reward_function once "
        "for all rows of a rank; remote asks a service",
        choices=("naive", "batch", "dapo", "parallel", "prime", "remote"),
        later_choices={"embodied": "rewards of environments"},
    )
    forward_max_token_len_per_gpu: int = key(
        32768, "that budget: tokens of a micro-batch on each rank", when="use_dynamic_bsz", low=1, auto=True
    )
    reward_kwargs: dict[str, Any] = key({}, "arguments of the built-in reward functions")
    judge: JudgeConfig = group(JudgeConfig, "generative judge", when="enable")
    weights: dict[str, Any] = key(
        {},
        "how a node adds up the rewards of others: data source or pattern: {reward: weight, or {weight, "
        "low, high, standardize}}; empty: as they are",
    )
    sandbox_fusion: dict[str, Any] | None = key(
        None, "remote sandbox for code: url, max_concurrent, memory_limit_mb, timeout_s, max_tries"
    )
    remote: RemoteRewardConfig = group(RemoteRewardConfig, "service that scores responses")
    overlong_buffer: OverlongBufferConfig = group(OverlongBufferConfig, "penalty for long responses")
    on_error: str = key(
        "zero",
        "a response that a built-in function cannot score, or not in time, counts as zero and is "
        "reported, or stops the run",
        choices=("zero", "raise"),
    )
    num_workers: int | None = key(
        None,
        "processes that score responses on each rank; null: the cores shared among the ranks of a machine",
        low=1,
    )


@dataclass(frozen=True)
class CustomRewardFunctionConfig:
    """A reward function of the user's own."""

    path: str | None = key(
        None, "Python file or module of the function; null: chosen by the row's data source"
    )
    name: str = key("compute_score", "name of the function", when="path")
    weights: dict[str, Any] = key(
        {},
        "several functions of the file, whose scores are added up: name: weight, or name: {weight, low, "
        "high}; empty: name alone",
        when="path",
    )
    reward_kwargs: dict[str, Any] = key({}, "further arguments of the function", when="path")
    on_error: str = key(
        "raise",
        "a score of this function that fails stops the run, or counts as zero and is reported",
        choices=("raise", "zero"),
    )
    timeout_s: float = key(30.0, "longest time for one score, in seconds", low=0, excluded=0)
