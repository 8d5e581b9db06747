"""Group data."""

from dataclasses import dataclass
from typing import Any

from siirl.config.common import MULTIMODAL
from siirl.config.keys import group, key

SFT = "supervised fine-tuning data"
STREAMING = "streaming datasets"
MIXING = "mixing datasets by probability"
ON_THE_FLY = "rows are tokenised when a step needs them; nothing is preprocessed or cached"


@dataclass(frozen=True)
class ProcessorConfig:
    """How images and videos are prepared."""

    image_max_pixels: int = key(589824, "largest image")
    image_min_pixels: int = key(1024, "smallest image")
    video_max_pixels: int = key(65536, "largest video frame")
    video_min_pixels: int = key(256, "smallest video frame")
    video_fps: float = key(2.0, "frames taken from each second of a video")
    video_maxlen: int = key(128, "most frames of a video")


@dataclass(frozen=True)
class DataConfig:
    """Prompts: files, columns, lengths, batch size, order."""

    dataset_type: str = key(
        "llm",
        "kind of dataset",
        choices=("llm",),
        later_choices={"vlm": MULTIMODAL, "embodied": "embodied agents"},
    )
    tokenizer: str | None = key(
        None, "directory of the tokenizer, or ORG/NAME on the hub; null: that of actor_rollout_ref.model.path"
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "arguments of the chat template, e.g. {enable_thinking: false}"
    )
    train_files: tuple[str, ...] = key(
        ("~/data/rlhf/gsm8k/train.parquet",), "parquet files of training prompts: one path or a list"
    )
    val_files: tuple[str, ...] = key(
        ("~/data/rlhf/gsm8k/test.parquet",), "parquet files of validation prompts: one path or a list"
    )
    prompt_key: str = key("prompt", "column of the prompt: chat messages [{role, content}, ...] or a string")
    max_prompt_length: int = key(512, "most tokens of a prompt", low=1)
    max_response_length: int = key(512, "most tokens of a response", low=1)
    train_batch_size: int = key(1024, "prompts of a training step, over all ranks", low=1)
    gen_batch_size: int | None = key(
        None,
        "prompts of one round of dynamic sampling; null: train_batch_size",
        when="algorithm.filter_groups.enable",
        low=1,
    )
    val_batch_size: int | None = key(None, "prompts of a validation batch; null: all at once", low=1)
    return_raw_input_ids: bool = key(False, "keep token ids", ignored="the batch always holds prompt_ids")
    return_raw_chat: bool = key(False, "keep chat messages", ignored="the batch always holds raw_prompt")
    return_full_prompt: bool = key(
        False, "keep the prompt's text", ignored="raw_prompt holds the whole prompt"
    )
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
    image_key: str = key("images", "column of images", later=MULTIMODAL)
    video_key: str = key("videos", "column of videos", later=MULTIMODAL)
    truncation: str = key(
        "error", "what to do with a longer prompt", choices=("error", "left", "right", "middle")
    )
    train_on_prompt: bool = key(False, "train on prompt tokens", later=SFT)
    mask_history: bool = key(False, "train on the last turn only", later=SFT)
    tool_format: str | None = key(None, "format of tool calls", ignored="rollout.multi_turn.format decides")
    tokenized_path: str | None = key(None, "directory of tokenised data", later=SFT)
    dataset_cache_dir: str = key("/tmp/.cache/siirl/rlhf", "cache of prepared datasets", ignored=ON_THE_FLY)
    filter_overlong_prompt: bool = key(False, "older name of filter_overlong_prompts")
    serialize_dataset: bool = key(
        False, "keep the dataset in checkpoints", ignored="a checkpoint holds the position in the files"
    )
    streaming: bool = key(False, "read files as a stream", later=STREAMING)
    preprocessing_num_workers: int | None = key(None, "processes of preprocessing", ignored=ON_THE_FLY)
    overwrite_cache: bool = key(False, "prepare again", ignored=ON_THE_FLY)
    preprocessing_batch_size: int = key(1000, "rows prepared at once", ignored=ON_THE_FLY)
    mix_strategy: str = key(
        "concat",
        "how several files are mixed",
        choices=("concat",),
        later_choices=dict.fromkeys(("interleave_under", "interleave_over"), MIXING),
    )
    interleave_probs: str | None = key(None, "probability of each file", later=MIXING)
    buffer_size: int = key(16384, "shuffle buffer of a stream", later=STREAMING)
    cutoff_len: int = key(2048, "longest row of supervised data", later=SFT)
    reward_fn_key: str = key("data_source", "column that selects the reward function")
    multi_agent: bool = key(
        False, "prompts of several agents", ignored="the DAG's rollout nodes say which agents there are"
    )
    auto_repeat: bool = key(False, "repeat a dataset that is smaller than a batch", later="repeated datasets")
    num_loader_workers: int = key(
        8, "processes of the loader", ignored="each rank tokenises its own rows in its own process"
    )
    force_on_the_fly: bool = key(False, "tokenise when needed", ignored=ON_THE_FLY)
    processor: ProcessorConfig = group(ProcessorConfig, "images and videos", later=MULTIMODAL)
    seed: int = key(None, "seed of the order of prompts")
