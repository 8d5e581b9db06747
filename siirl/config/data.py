"""Group data."""

from dataclasses import dataclass
from typing import Any

from siirl.config.keys import group, key, seed_key

FILES = (
    "parquet, JSON, CSV or Arrow, one or a list; a pattern as data/train*.jsonl or a folder stands for its "
    "files; reasoning_gym:TASK?size=N&seed=N and verifiers:ENVIRONMENT make rows"
)


@dataclass(frozen=True)
class ColumnsConfig:
    """Columns of dataset files by what they hold, as {ground_truth=answer, extra_info=meta}."""

    ground_truth: str | None = key(
        None,
        "column of the right answer, or a dotted name within one, as meta.answer; null: "
        "reward_model.ground_truth, else ground_truth",
    )
    extra_info: str = key("extra_info", "column of what else a reward function gets")


@dataclass(frozen=True)
class DataConfig:
    """Prompts: files, columns, lengths, batch size, order."""

    dataset_type: str = key(
        "llm",
        "kind of dataset: vlm has images in its prompts, for a model that sees them",
        choices=("llm", "vlm"),
        later_choices={"embodied": "embodied agents"},
    )
    tokenizer: str | None = key(
        None, "directory of the tokenizer, or ORG/NAME on the hub; null: that of actor_rollout_ref.model.path"
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "arguments of the chat template, e.g. {enable_thinking: false}"
    )
    tokenizer_kwargs: dict[str, Any] = key(
        {}, "arguments with which the tokenizer is loaded, e.g. {use_fast: true, extra_special_tokens: [...]}"
    )
    chat_template: str | None = key(
        None,
        "file of a chat template (Jinja), or the name of one of the tokenizer's; null: the tokenizer's, of "
        "several that for tools (tool_use) where the model has some, else the default",
    )
    template_date: str | None = key(
        None,
        "the date (YYYY-MM-DD) that chat templates write where they tell the model of today's; null: that of "
        "the run's first start, which its record keeps",
    )
    train_files: tuple[str, ...] = key(
        (), f"files of training prompts, without which nothing is trained: {FILES}"
    )
    val_files: tuple[str, ...] = key((), f"files of validation prompts; none: no validation. {FILES}")
    prompt_key: str = key("prompt", "column of the prompt: chat messages [{role, content}, ...] or a string")
    image_key: str = key(
        "images",
        "column of the images of a prompt, for each <image> in it: bytes, a path, or {bytes, path}",
        when="data.dataset_type=vlm",
    )
    columns: ColumnsConfig = group(ColumnsConfig, "columns of dataset files")
    json_columns: tuple[str, ...] = key(
        (), "columns whose text is JSON, and is read as such: a chat in prompt, a map in extra_info"
    )
    response_keys: tuple[str, ...] = key(
        ("response",),
        "columns of the responses that rollout.name=dataset gives, one for each of rollout.n, the best "
        "first: texts, or lists of one message of the assistant",
        when="actor_rollout_ref.rollout.name=dataset",
    )
    max_prompt_length: int = key(512, "most tokens of a prompt", low=1)
    max_response_length: int = key(512, "most tokens of a response", low=1)
    train_batch_size: int = key(128, "prompts of a training step, over all ranks", low=1)
    gen_batch_size: int | None = key(
        None,
        "prompts of one round of dynamic sampling; null: train_batch_size. With rollout.max_lag, prompts "
        "that are loaded at once: a round then gives what the batch lacks, as groups left over would age",
        when="algorithm.filter_groups.enable",
        low=1,
    )
    val_batch_size: int | None = key(None, "prompts of a validation batch; null: all at once", low=1)
    filter_overlong_prompts: bool = key(False, "drop prompts longer than max_prompt_length before training")
    shuffle: bool = key(True, "draw training prompts in a new seeded order each epoch")
    curriculum_key: str | None = key(
        None,
        "number in extra_info by which training prompts are ordered, the least first; null: no curriculum",
    )
    curriculum_steps: int = key(
        0,
        "batches over which prompts become harder, from the easiest share of the data to all; 0: one epoch",
        when="curriculum_key",
        low=0,
    )
    truncation: str = key(
        "error", "what to do with a longer prompt", choices=("error", "left", "right", "middle")
    )
    mixture: dict[str, Any] = key(
        {},
        "share of each data source among the training prompts: data source, or pattern with *: weight, or "
        "{weight, max_steps: training steps after which it ends}; empty: the files one after the other",
    )
    reward_fn_key: str = key("data_source", "column that selects the reward function")
    data_source: str | dict[str, Any] | None = key(
        None,
        "data source of all rows of files without the column reward_fn_key, e.g. math; of several files each "
        "by its name or a pattern, {easy.jsonl: gsm8k, hard*: math}",
    )
    seed: int = seed_key(None, "seed of the order of prompts")

    @property
    def has_images(self) -> bool:
        """Whether prompts may have images."""
        return self.dataset_type == "vlm"
