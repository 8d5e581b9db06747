"""Batch arithmetic: how many prompts, responses, mini-batches and optimizer steps a training step has."""

from dataclasses import dataclass

from siirl.config.roles import trained_group
from siirl.config.root import Config


@dataclass(frozen=True)
class BatchArithmetic:
    """The batch of a training step, over all ranks, as an actor or critic trains on it."""

    prompts: int
    samples: int
    """Responses of each prompt."""
    mini_prompts: int
    """Prompts of one optimizer step."""
    epochs: int
    """Passes over the batch."""

    @property
    def rows(self) -> int:
        """Responses of the batch; in an interaction, its episodes."""
        return self.prompts * self.samples

    @property
    def mini_rows(self) -> int:
        """Responses of one optimizer step."""
        return self.mini_prompts * self.samples

    @property
    def mini_batches(self) -> int:
        return self.prompts // self.mini_prompts

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps on each batch."""
        return self.mini_batches * self.epochs


def batch_of(cfg: Config, role: str = "actor") -> BatchArithmetic:
    """The batch of a training step for a model of that role."""
    group = trained_group(cfg, role)
    prompts, samples = cfg.data.train_batch_size, cfg.actor_rollout_ref.rollout.n
    return BatchArithmetic(prompts, samples, group.ppo_mini_batch_size, group.ppo_epochs)


def generated_prompts(cfg: Config) -> int:
    """Prompts that one rollout samples: those of the step, or with dynamic sampling those of one round."""
    if not cfg.algorithm.filter_groups.enable:
        return cfg.data.train_batch_size
    return cfg.data.gen_batch_size or cfg.data.train_batch_size
