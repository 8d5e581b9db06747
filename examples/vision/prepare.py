"""Make everything the colour-naming task trains on, from scratch: a tiny vision model, images, a dataset.

The task is verifiable: an image of one colour, with noise, and "colour ?", answered by its name. Nothing is
downloaded. The dataset has the column format of verl and siiRL: prompt (chat messages, with <image> where the
image belongs), images, data_source, ability, reward_model, extra_info.
"""

import argparse
import io
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (40, 60, 220),
    "yellow": (230, 220, 40),
    "purple": (150, 40, 170),
    "white": (235, 235, 235),
    "black": (25, 25, 25),
    "orange": (240, 130, 20),
}
SPECIAL = ["<eos>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
WORDS = ["user:", "assistant:", "colour", "?", *COLOURS]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }} {% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ part.text }} "
    "{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
SIDE, PATCH = 64, 16


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer with the tokens that mark images."""
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate([*SPECIAL, *WORDS])}))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<eos>", eos_token="<eos>", model_max_length=64
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """A Qwen3-VL with two layers and a vision tower of two, all random: about 0.8 million parameters."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config)


def write_processor(folder: Path) -> None:
    """How images become patches: a model's preprocessor_config.json."""
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": SIDE**2},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))


def make_image(colour: str, rng: random.Random) -> bytes:
    """An image of a colour: another shade, size and noise each time."""
    height, width = (rng.choice([32, 48, 64]) for _ in range(2))
    shade = torch.tensor([channel + rng.randint(-15, 15) for channel in COLOURS[colour]])
    draw = torch.Generator().manual_seed(rng.randrange(1 << 30))
    pixels = shade + torch.randint(-20, 21, (height, width, 3), generator=draw)
    held = io.BytesIO()
    Image.fromarray(pixels.clamp(0, 255).byte().numpy()).save(held, format="PNG")
    return held.getvalue()


def make_rows(count: int, seed: int) -> list[dict]:
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        colour = rng.choice(list(COLOURS))
        rows.append(
            {
                "data_source": "colours",
                "prompt": [{"role": "user", "content": "<image>colour ?"}],
                "images": [{"bytes": make_image(colour, rng), "path": None}],
                "ability": "vision",
                "reward_model": {"style": "rule", "ground_truth": colour},
                "extra_info": {"index": index},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/vision"))
    parser.add_argument("--rows", type=int, default=2400, help="training rows")
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    make_model(tokenizer).save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    write_processor(args.out / "model")
    data = args.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(make_rows(args.rows, 0)), data / "train.parquet")
    pq.write_table(pa.Table.from_pylist(make_rows(160, 1)), data / "test.parquet")
    print(
        f"model {args.out / 'model'}, data {data}: {args.rows} images to train on, 160 others to validate on"
    )


if __name__ == "__main__":
    main()
