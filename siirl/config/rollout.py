"""Group actor_rollout_ref.rollout."""

from dataclasses import dataclass
from typing import Any

from siirl.config.common import ServiceConfig
from siirl.config.keys import group, key, seed_key
from siirl.findings import is_broken

EXTERNAL = "actor_rollout_ref.rollout.name=openai"
ASSISTANT_TURNS = 16
"""Most turns of an agent with tools, until it is another's turn, where nothing bounds them."""
TOOL_FORMATS = (
    "auto",
    "apertus",
    "command_a",
    "command_r",
    "deepseek_dsml",
    "deepseek_v3",
    "functionary_v31",
    "functionary_v32",
    "functiongemma",
    "functools",
    "gemma4",
    "gigachat",
    "glm",
    "gpt_oss",
    "granite",
    "granite_fc",
    "hermes",
    "hy3",
    "internlm",
    "json",
    "kimi_k2",
    "kimi_k3",
    "lfm2",
    "llama3_json",
    "longcat",
    "minicpm",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "muse",
    "nemotron",
    "olmo3",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
    "solar",
    "step3",
    "tool_calls",
)
"""Names of formats of tool calls (docs/tools.md); their readers are in siirl/dialect/tool_formats.py."""


@dataclass(frozen=True)
class ValKwargs:
    """How validation samples."""

    top_k: int = key(-1, "sample among the k likeliest tokens; -1: all", low=-1, excluded=0, when="do_sample")
    top_p: float = key(
        1.0,
        "sample among the likeliest tokens of this total probability",
        low=0,
        high=1,
        excluded=0,
        when="do_sample",
    )
    temperature: float = key(0.0, "sampling temperature; 0: greedy", low=0, when="do_sample")
    n: int = key(1, "responses of each prompt", low=1)
    do_sample: bool = key(False, "sample; False: greedy")


STOP_SOURCES = ("tokenizer", "config", "generation_config", "template")


@dataclass(frozen=True)
class MultiTurnConfig:
    """Tools, and the turns with them."""

    enable: bool = key(False, "the model may call tools, and goes on after their answers")
    max_assistant_turns: int | None = key(
        None,
        "most turns of the assistant, until it is another's turn; null: max_user_turns + 1, without that "
        f"{ASSISTANT_TURNS}",
        when="enable",
        low=1,
    )
    show_tools: str = key(
        "template",
        "how the model is told of its tools: by its chat template, or by siirl in the system message, for "
        "templates that show none (docs/model_turns.md); it is then told to call them as hermes does",
        choices=("template", "system"),
        when="enable",
    )
    tool_config_path: str | None = key(None, "file that lists the tools (docs/tools.md)", when="enable")
    format: str = key(
        "auto",
        "format in which the model writes tool calls, or file.py:function; auto: as its chat template does",
        choices=TOOL_FORMATS,
        user_code=True,
        when="enable",
    )
    max_user_turns: int | None = key(
        None,
        "how often tools may answer, until it is another's turn; null: max_assistant_turns - 1",
        when="enable",
        low=0,
    )
    max_parallel_calls: int = key(1, "most tool calls of one turn; they run at once", when="enable", low=1)
    max_tool_response_length: int = key(256, "most characters of a tool response", when="enable", low=1)
    tool_response_truncate_side: str = key(
        "middle",
        "what is kept of a longer one; middle: both ends",
        choices=("left", "middle", "right"),
        when="enable",
    )
    tool_timeout_s: float = key(
        30.0, "longest run of one tool call, in seconds", when="enable", low=0, excluded=0
    )


@dataclass(frozen=True)
class EngineKwargs:
    """Arguments handed to the engine as they are; any key may be added."""

    vllm: dict[str, Any] = key(
        {},
        "arguments of vLLM's engine (EngineArgs), over those that siirl sets",
        when="actor_rollout_ref.rollout.name=vllm",
    )
    sglang: dict[str, Any] = key(
        {},
        "arguments of SGLang's engine (ServerArgs), over those that siirl sets",
        when="actor_rollout_ref.rollout.name=sglang",
    )


@dataclass(frozen=True)
class AgentEndpointConfig(ServiceConfig):
    """The service that speaks for an external agent (rollout.name=openai)."""

    url: str | None = key(None, "OpenAI-compatible address: .../v1/chat/completions")
    max_tries: int = key(5, "tries of a turn before its episode is dropped", low=1)


@dataclass(frozen=True)
class BranchConfig:
    """Candidates of a turn: an episode of an interaction branches there."""

    candidates: int = key(1, "turns that are sampled in the place of one; each is scored, or goes on", low=1)
    visits: tuple[int, ...] = key(
        (), "the visits of the node at which an episode branches, from 0 on; empty: all"
    )
    go_on: str = key(
        "all",
        "which candidates go on: all, each to an end of its own; or the best, by what the environment gave "
        "until the next such turn",
        choices=("all", "best"),
    )


@dataclass(frozen=True)
class PoolConfig:
    """An opponent pool (league): an agent that is not trained plays as a kept version of another's policy."""

    policy: int | None = key(
        None,
        "agent with a policy in training, of whose older versions this agent, which is not trained, is one "
        "in each step: its opponent pool",
        low=0,
    )
    size: int = key(16, "most versions in the pool; one more, and the oldest leaves", low=1, when="policy")
    every_steps: int = key(
        10,
        "promotion: steps after which the policy's weights become a version; 0: never",
        low=0,
        when="policy",
    )
    win_rate: float | None = key(
        None,
        "promotion, too: as soon as the policy wins this share of its games, averaged over the versions",
        low=0,
        high=1,
        when="policy",
    )
    sampling: str = key(
        "uniform",
        "who is drawn: any version, the latest, or in proportion to (1 - w)^power (pfsp) or w (1 - w) "
        "(pfsp_even), where w is the policy's win rate against the version",
        choices=("uniform", "latest", "pfsp", "pfsp_even"),
        when="policy",
    )
    power: float = key(2.0, "how much harder versions are preferred", low=0, when="sampling=pfsp")
    current: float = key(
        0.0,
        "probability with which the policy's current weights play in the place of a version: self-play",
        low=0,
        high=1,
        when="policy",
    )


@dataclass(frozen=True)
class AgentConfig:
    """Agents in environments."""

    train_cycle: int | None = key(
        None,
        "steps for which one agent's policy is trained before the next one's, in the order of agents; null: "
        "all in every step",
        low=1,
    )
    process_path: str | None = key(
        None, "file (or module) with pre_process and post_process, called around a turn in an interaction"
    )
    pre_process_kwargs: dict[str, Any] = key({}, "keyword arguments of pre_process")
    post_process_kwargs: dict[str, Any] = key({}, "keyword arguments of post_process")
    env_path: tuple[str, ...] = key(
        (),
        "environment that the agent acts in after each turn, [file.py:Class]: an ENV_INTERACT node in short",
    )
    env_seed: str = key(
        "sample",
        "whether each episode draws an instance of its own, or all of a prompt the same",
        choices=("sample", "prompt"),
        when="env_path",
    )
    obs_with_env: bool = key(False, "agents read what it shows", when="env_path")
    rewards_with_env: bool = key(False, "its rewards count for the turns", when="env_path")
    share_instance: int | None = key(
        None,
        "agent whose model is used: its policy, by an agent of the same interaction that has no further "
        "nodes; its frozen base, by an agent with an ACTOR node and model.lora_rank; what an ACTOR "
        "node below a rollout of name=dataset trains",
        low=0,
    )
    first_step: int = key(1, "first step of the run in which the agent's nodes run", low=1)
    last_step: int | None = key(None, "the last one; null: that of the run", low=1)
    branch: BranchConfig = group(BranchConfig, "several candidates of a turn in an interaction")
    pool: PoolConfig = group(PoolConfig, "an opponent pool of an agent's own older versions (league)")
    endpoint: AgentEndpointConfig = group(AgentEndpointConfig, "an external agent's service", when=EXTERNAL)
    max_turn_tokens: int | None = key(
        None, "most tokens of one turn in an interaction; null: what response_length leaves", low=1
    )
    long_context: str = key(
        "end",
        "a message that does not fit into prompt_length: end the episode, or truncate the message",
        choices=("end", "truncate"),
    )
    heard_text: str = key(
        "whole",
        "what other agents, environments and post_process get of a turn: all of it with its special tokens, "
        "but for the one that ended it; or the answer, without reasoning and tool calls",
        choices=("whole", "answer"),
    )
    history: str = key(
        "as_template",
        "what becomes of a row where the chat template writes earlier turns anew (it drops their reasoning): "
        "the conversation goes on in a new row, as the template has it; or the row grows and keeps them",
        choices=("as_template", "grow"),
    )


@dataclass(frozen=True)
class RolloutConfig:
    """The sampler: engine, sampling parameters, lengths."""

    name: str = key(
        "vllm",
        "rollout engine; dataset: none, the responses are those of data.response_keys",
        choices=("vllm", "sglang", "hf", "replay", "dataset", "openai"),
    )
    replay_dir: str | None = key(
        None, "trainer.dump_rollouts_dir of the run whose rollouts are replayed", when="name=replay"
    )
    temperature: float = key(1.0, "sampling temperature; log-probs are taken at it", low=0, excluded=0)
    top_k: int = key(-1, "sample among the k likeliest tokens; -1: all", low=-1, excluded=0, when="do_sample")
    top_p: float = key(
        1.0,
        "sample among the likeliest tokens of this total probability",
        low=0,
        high=1,
        excluded=0,
        when="do_sample",
    )
    prompt_length: int = key(None, "most tokens of a prompt", low=1)
    response_length: int = key(None, "most tokens of a response", low=1)
    dtype: str = key(
        "bfloat16",
        "number type of the rollout's weights; auto: that of the model directory",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = key(
        None,
        "fp8: linear layers multiply in FP8 (e4m3), by weights that each sync rounds, with a scale for each "
        "feature and token; needs max_log_prob_diff",
        choices=("fp8",),
        when="name=vllm",
    )
    max_log_prob_diff: float | None = key(
        None,
        "most of the mean distance between the trainer's log-probs and the engine's, in nats: after a step "
        "beyond it the run ends (actor/rollout_log_prob_diff); null: any",
        low=0,
        excluded=0,
    )
    merge_lora: bool = key(
        True,
        "send an engine the model with the LoRA adapter merged into it; false: the frozen model once, then "
        "in each sync the adapter alone, which the engine computes beside it (as for agents on one base)",
        when="actor_rollout_ref.model.lora_rank",
    )
    gpu_memory_utilization: float = key(
        0.5,
        "share of device memory for the rollout (hf: of the free memory, for the KV cache of one pass; "
        "engines of one conversation divide it)",
        low=0,
        high=1,
        excluded=0,
        auto=True,
    )
    ignore_eos: bool = key(False, "never stop before response_length")
    enforce_eager: bool = key(
        True, "run without CUDA graphs (vLLM: and torch.compile)", when="name=vllm|sglang", auto=True
    )
    free_cache_engine: bool = key(
        True,
        "sleep mode: device memory is given back between rollouts (hf: the weights move to host memory); "
        "false: the engine stays resident",
        auto=True,
    )
    tensor_model_parallel_size: int = key(1, "ranks that share one engine", low=1)
    max_num_batched_tokens: int = key(
        8192, "most tokens of an engine step (hf: padded prompt tokens of one prefill)", low=1, auto=True
    )
    max_model_len: int | None = key(None, "most tokens of prompt and response together", low=1)
    max_num_seqs: int = key(1024, "most sequences generated at once on each rank", low=1, auto=True)
    do_sample: bool = key(True, "sample; False: greedy")
    n: int = key(None, "responses of each prompt; the group of group-relative advantages", low=1)
    log_prob_micro_batch_size_per_gpu: int = key(
        1,
        "rows of a micro-batch on each rank when the actor computes old log-probs",
        when="log_prob_use_dynamic_bsz=false",
        low=1,
    )
    log_prob_max_token_len_per_gpu: int = key(
        None, "its token budget on each rank", when="log_prob_use_dynamic_bsz", low=1, auto=True
    )
    log_prob_use_dynamic_bsz: bool = key(None, "fill those micro-batches up to a token budget", auto=True)
    disable_log_stats: bool = key(True, "no statistics of the engine among the metrics", when="name=vllm")
    enable_chunked_prefill: bool = key(
        True,
        "read a prompt in several steps where it does not fit in one; on a CPU never (vLLM's seeds)",
        when="name=vllm|sglang",
    )
    val_kwargs: ValKwargs = group(ValKwargs, "sampling of validation")
    seed: int = seed_key(0, "seed of sampling, combined with trainer.seed, step and prompt")
    mode: str = key(
        "sync",
        "generate in step with training",
        choices=("sync",),
        later_choices={"async": "asynchronous rollouts"},
    )
    multi_turn: MultiTurnConfig = group(MultiTurnConfig, "tools of the agent")
    micro_batch_size: int | None = key(
        None, "prompts generated at once on each rank; null: max_num_seqs decides", low=1
    )
    engine_kwargs: EngineKwargs = group(EngineKwargs, "arguments of the engine")
    agent: AgentConfig = group(AgentConfig, "agents that talk to others, to tools, or act in environments")
    weight_link: str = key(
        "auto",
        "how the trainer's weights reach the engine; auto: shared memory where colocated, NCCL or gloo to "
        "others, from one rank; checkpoint: a folder in trainer.output_dir that all ranks must see, of which "
        "each keeps the last weights in host memory, as only what has changed is written",
        choices=("auto", "checkpoint"),
    )
    replace_weights: str = key(
        "auto",
        "how weights get into an engine's parameters; by_loaders: vLLM's loaders take each tensor; in_place: "
        "from its second sync on they are written where the first one put them, by a few copies, and samples "
        "of the bytes are compared; in_place_checked: all bytes are compared; auto: in_place for the models "
        "of which it was held against vLLM's loaders, else by_loaders",
        choices=("auto", "by_loaders", "in_place", "in_place_checked"),
        when="name=vllm",
    )
    weight_buffer_gib: float | None = key(
        None,
        "GiB of the device at most through which weights are written in place; null: 0.5. Where all of them "
        "fit in, those that come from other ranks are copied to host memory (max_engine_restarts) after a "
        "sync, not within it: for engines on devices without a trainer",
        low=0,
        excluded=0,
        when="replace_weights=auto|in_place|in_place_checked",
    )
    max_engine_restarts: int = key(
        2,
        "how often within an hour an engine is started again whose process died or fell silent, on each "
        "rank; its weights are kept in host memory for that. 0: the run ends, as with "
        "tensor_model_parallel_size above 1",
        low=0,
        when="name=vllm|sglang",
    )
    max_lag: int = key(
        0,
        "asynchronous (partial) rollouts, with a staleness of at most so many training steps: so much older "
        "may the oldest token of a row be than the weights that it trains; responses may take so many steps "
        "more, and go on where they stopped",
        low=0,
    )
    surplus: float = key(
        None,
        "over-sampling: prompts in flight besides those of a batch, as a share of it; unset: max_lag",
        when="max_lag",
        low=0,
    )
    stale: str = key(
        "wait",
        "staleness policy: what becomes of a prompt whose responses would be older than max_lag in the next "
        "step; wait: the step waits for them; restart: it does not, and they restart in the next one; drop: "
        "it does not, they are given up, and others loaded in their place",
        choices=("wait", "restart", "drop"),
        when="max_lag",
    )
    stop_token_ids: tuple[int, ...] = key((), "token ids that end a response, besides the model's own", low=0)
    stop_sources: tuple[str, ...] = key(
        STOP_SOURCES,
        "what says which tokens of the model's own end a response: the eos tokens of its tokenizer, "
        "config.json and generation_config.json, and the end of a turn in its chat template",
        choices=STOP_SOURCES,
    )
    reasoning_marks: tuple[str, ...] | None = key(
        None,
        "begin and end of the model's reasoning, e.g. [<think>,</think>]; []: it has none; null: as its chat "
        "template and its family say (docs/model_turns.md)",
    )

    @property
    def device_share(self) -> float:
        """The share of a device that a vLLM engine takes; its own argument wins."""
        own = self.engine_kwargs.vllm.get("gpu_memory_utilization")
        return float(self.gpu_memory_utilization if own is None else own)

    @property
    def weight_buffer_bytes(self) -> int | None:
        """weight_buffer_gib, in bytes."""
        return None if self.weight_buffer_gib is None else int(self.weight_buffer_gib * 2**30)

    @property
    def gives_data(self) -> bool:
        """Whether responses are those of the dataset."""
        return not is_broken(self.name) and self.name == "dataset"

    @property
    def replays(self) -> bool:
        """Whether responses are those that another run recorded."""
        return not is_broken(self.name) and self.name == "replay"

    @property
    def in_fp8(self) -> str:
        """The key, with its value, that has the engine's weights or its KV cache in FP8; "": none."""
        if is_broken(self.name) or self.name != "vllm":
            return ""
        if self.quantization:
            return f"quantization={self.quantization}"
        cache = self.engine_kwargs.vllm.get("kv_cache_dtype", "auto")
        return f"engine_kwargs.vllm.kv_cache_dtype={cache}" if str(cache).startswith("fp8") else ""

    @property
    def trained_temperature(self) -> float:
        """That at which the trainer computes log-probs: responses of a dataset were sampled at none."""
        return 1.0 if self.gives_data else self.temperature
