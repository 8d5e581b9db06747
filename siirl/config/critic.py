"""Group critic."""

from dataclasses import dataclass

from siirl.config.actor import AGGREGATIONS, STRATEGIES
from siirl.config.common import CheckpointConfig, FSDPConfig, MegatronConfig, ModelConfig, OptimConfig
from siirl.config.keys import group, key


@dataclass(frozen=True)
class CriticModelConfig(ModelConfig):
    """ModelConfig of the value model."""

    path: str = key(
        None, "directory of a Hugging Face model; without a value head (score) it gets a random one"
    )


@dataclass(frozen=True)
class CriticConfig:
    """The value model of PPO: used with algorithm.adv_estimator=gae."""

    strategy: str = key(
        "fsdp",
        "training backend",
        choices=STRATEGIES,
        synonyms={"fsdp2": "fsdp"},
    )
    share_instance: int | None = key(
        None, "in the config of a CRITIC node: the agent whose value model it uses and trains; null: its own"
    )
    optim: OptimConfig = group(OptimConfig, "optimizer and schedule")
    model: CriticModelConfig = group(CriticModelConfig, "value model")
    fsdp_config: FSDPConfig = group(FSDPConfig, "sharding and offload under fsdp", when="strategy=fsdp")
    megatron: MegatronConfig = group(
        MegatronConfig, "sizes and options under megatron", when="strategy=megatron"
    )
    ppo_mini_batch_size: int = key(None, "prompts of one optimizer step, over all ranks", low=1)
    ppo_micro_batch_size_per_gpu: int = key(
        None,
        "rows of a micro-batch on each rank, unless use_dynamic_bsz",
        when="use_dynamic_bsz=false",
        low=1,
    )
    use_dynamic_bsz: bool = key(False, "fill micro-batches up to a token budget")
    ppo_epochs: int = key(1, "passes over each rollout batch", low=1)
    shuffle: bool = key(False, "shuffle the rows of a rollout batch before it is cut into mini-batches")
    grad_clip: float = key(1.0, "largest gradient norm; larger ones are scaled down", low=0)
    cliprange_value: float = key(
        0.5, "how far a value may move from the one before the step without being clipped", low=0
    )
    forward_max_token_len_per_gpu: int = key(
        32768, "token budget of a forward micro-batch on each rank", when="use_dynamic_bsz", low=1
    )
    checkpoint: CheckpointConfig = group(CheckpointConfig, "contents of checkpoints")
    ppo_max_token_len_per_gpu: int = key(
        32768, "token budget of a training micro-batch on each rank", when="use_dynamic_bsz", low=1
    )
    loss_agg_mode: str = key("token-mean", "how token losses become one number", choices=AGGREGATIONS)
    data_loader_seed: int = key(None, "seed of shuffle", when="shuffle")
