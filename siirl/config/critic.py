"""Group critic: refused until there is a critic; its keys and defaults are known."""

from dataclasses import dataclass
from typing import Any

from siirl.config.common import CheckpointConfig, FSDPConfig, MegatronConfig, ModelConfig, OptimConfig
from siirl.config.keys import group, key


@dataclass(frozen=True)
class CriticConfig:
    """The value model of PPO."""

    strategy: str = key("fsdp", "training backend")
    optim: OptimConfig = group(OptimConfig, "optimizer and schedule")
    model: ModelConfig = group(ModelConfig, "value model")
    fsdp_config: FSDPConfig = group(FSDPConfig, "sharding and offload under fsdp")
    megatron: MegatronConfig = group(MegatronConfig, "Megatron-Core")
    ppo_mini_batch_size: int = key(256, "prompts of one optimizer step, over all ranks", low=1)
    ppo_micro_batch_size: int | None = key(None, "rows of a micro-batch over all ranks")
    ppo_micro_batch_size_per_gpu: int | None = key(None, "rows of a micro-batch on each rank")
    use_dynamic_bsz: bool = key(False, "fill micro-batches up to a token budget")
    ppo_epochs: int = key(1, "passes over each rollout batch", low=1)
    shuffle: bool = key(False, "shuffle rows before they are cut into mini-batches")
    grad_clip: float = key(1.0, "largest gradient norm", low=0)
    cliprange_value: float = key(0.5, "clip range of the value loss", low=0)
    ulysses_sequence_parallel_size: int = key(1, "ranks that share one sequence")
    forward_max_token_len_per_gpu: int = key(32768, "token budget of a forward micro-batch")
    load_weight: bool = key(True, "load the weights")
    rollout_n: int = key(1, "responses of each prompt")
    checkpoint: CheckpointConfig = group(CheckpointConfig, "contents of checkpoints")
    ppo_max_token_len_per_gpu: int = key(32768, "token budget of a training micro-batch")
    loss_agg_mode: str = key("token-mean", "how token losses become one number")
    profile: dict[str, Any] = key({}, "profiler of this role")
    data_loader_seed: int | None = key(None, "seed of shuffle")
