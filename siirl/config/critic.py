"""Group critic."""

from dataclasses import dataclass

from siirl.config.common import ModelConfig, TrainedConfig
from siirl.config.keys import group, key


@dataclass(frozen=True)
class CriticModelConfig(ModelConfig):
    """ModelConfig of the value model."""

    path: str = key(
        None, "directory of a Hugging Face model; without a value head (score) it gets a random one"
    )


@dataclass(frozen=True)
class CriticConfig(TrainedConfig):
    """The value model of PPO: used with algorithm.adv_estimator=gae."""

    use_dynamic_bsz: bool = key(None, "fill micro-batches up to a token budget", auto=True)
    ppo_max_token_len_per_gpu: int = key(
        32768, "token budget of a training micro-batch on each rank", when="use_dynamic_bsz", low=1, auto=True
    )
    forward_max_token_len_per_gpu: int = key(
        32768, "token budget of a forward micro-batch on each rank", when="use_dynamic_bsz", low=1, auto=True
    )
    share_instance: int | None = key(
        None, "in the config of a CRITIC node: the agent whose value model it uses and trains; null: its own"
    )
    model: CriticModelConfig = group(CriticModelConfig, "value model")
    cliprange_value: float = key(
        0.5, "how far a value may move from the one before the step without being clipped", low=0
    )
