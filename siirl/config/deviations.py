"""Where a default of ours is not that of siiRL, and why; the documentation shows this table."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Deviation:
    """siiRL's default of a key, and why ours is another."""

    reference: Any
    reason: str


FILLED_IN = "the same when unset; ours is filled in when the configuration is read"

BY_NAME = "whose data and model a run takes is said by name"

ONE_STEP = "an optimizer step on each batch where nobody asks for more: 256 does not divide every batch"

SCHEDULE = "the schedule is warmup_style's under each strategy, so that changing the strategy changes nothing"

DEVIATIONS: dict[str, Deviation] = {
    "trainer.logger": Deviation(["console", "wandb"], "wandb needs an account and a package of its own"),
    "actor_rollout_ref.actor.optim.lr_decay_style": Deviation("linear", SCHEDULE),
    "critic.optim.lr_decay_style": Deviation("linear", SCHEDULE),
    "trainer.device": Deviation("cuda", "auto takes cuda where there is one, and runs without a GPU as well"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Deviation(256, ONE_STEP),
    "critic.ppo_mini_batch_size": Deviation(256, ONE_STEP),
    "data.train_batch_size": Deviation(1024, "a step of 1,024 prompts takes minutes where a task is begun"),
    "data.train_files": Deviation(["~/data/rlhf/gsm8k/train.parquet"], BY_NAME),
    "data.val_files": Deviation(["~/data/rlhf/gsm8k/test.parquet"], BY_NAME),
    "actor_rollout_ref.model.path": Deviation("~/models/deepseek-llm-7b-chat", BY_NAME),
    "critic.model.path": Deviation("~/models/deepseek-llm-7b-chat", BY_NAME),
    "reward_model.model.path": Deviation("~/models/deepseek-llm-7b-chat", BY_NAME),
    "trainer.project_name": Deviation("siirl_examples", "a run is named by what it does"),
    "trainer.experiment_name": Deviation("gsm8k", "a run is named by what it does"),
    "trainer.val_before_train": Deviation(True, "no validation without data.val_files"),
    "trainer.default_local_dir": Deviation(
        "checkpoints/siirl_examples/gsm8k", "everything that a run writes lies below trainer.output_dir"
    ),
    "profiler.save_path": Deviation(
        "./prof_data", "everything that a run writes lies below trainer.output_dir"
    ),
    "profiler.profile_steps": Deviation([0], "steps count from 1, and the first one is unlike the others"),
    "profiler.roles": Deviation(
        ["generate", "compute_reward"],
        "there they count with profiler.discrete=true only, and the whole step is recorded without; here "
        "they count whenever they are given",
    ),
    "actor_rollout_ref.rollout.multi_turn.format": Deviation(
        "hermes",
        "many families write tool calls otherwise; auto reads them as the chat template writes them",
    ),
    "actor_rollout_ref.rollout.prompt_length": Deviation(None, FILLED_IN),
    "actor_rollout_ref.rollout.response_length": Deviation(None, FILLED_IN),
    "actor_rollout_ref.actor.data_loader_seed": Deviation(None, FILLED_IN),
    "critic.data_loader_seed": Deviation(None, FILLED_IN),
    "critic.ppo_micro_batch_size_per_gpu": Deviation(None, FILLED_IN),
    "reward_model.micro_batch_size_per_gpu": Deviation(None, FILLED_IN),
}
