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
    in_rounds: bool
    """With dynamic sampling."""
    round_prompts: int | None
    """Prompts of one round, if these are not as many."""

    @property
    def generated(self) -> int:
        """Prompts that one rollout samples: those of the step, or of one round."""
        return (self.in_rounds and self.round_prompts) or self.prompts

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
    return BatchArithmetic(
        prompts=cfg.data.train_batch_size,
        samples=cfg.actor_rollout_ref.rollout.n,
        mini_prompts=group.ppo_mini_batch_size,
        epochs=group.ppo_epochs,
        in_rounds=cfg.algorithm.filter_groups.enable,
        round_prompts=cfg.data.gen_batch_size,
    )
