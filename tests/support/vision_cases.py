"""Tiny vision models made from scratch, images, rows with them, and what plain Hugging Face says of a row."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.data.image_reader import ImageReader
from siirl.data.rows import make_rows, seen_of
from siirl.data.seen import Seen

KINDS = ("qwen2_5_vl", "qwen3_vl")
SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>", "<seen>", "</seen>", "<img>", "<video>")
WORDS = (*"0123456789", "colour", "?", "red", "green", "blue", "white", "and")
PAD, EOS, IMAGE = SPECIAL.index("<pad>"), SPECIAL.index("<eos>"), SPECIAL.index("<img>")
VOCAB = 64
TWIN = 63
"""A token that nothing has: references give it the embedding of IMAGE."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.content is string %}{{ m.content }} {% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<seen> <img> </seen> {% else %}{{ part.text }} "
    "{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_vision_model(
    path: Path,
    kind: str,
    layers: int = 3,
    noise: float = 0.1,
    seed: int = 0,
    tied: bool = False,
    window: int | None = None,
) -> Path:
    """Write a vision model of random weights with its tokenizer and its processor of images.

    tied: its embedding is its output head, too. window: tokens that each second layer sees.
    """
    from transformers import AutoModelForImageTextToText

    patch = 14 if kind == "qwen2_5_vl" else 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = _config(kind, layers, patch)
        config.tie_word_embeddings = tied
        if window is not None:
            kinds = ["full_attention", "sliding_attention"] * layers
            config.text_config.sliding_window, config.text_config.use_sliding_window = window, True
            config.text_config.layer_types = kinds[:layers]
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    pixels = patch * patch * 4
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": pixels, "longest_edge": 16 * pixels},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def _config(kind: str, layers: int, patch: int) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen3VLConfig

    text = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    tokens = {
        "image_token_id": IMAGE,
        "video_token_id": SPECIAL.index("<video>"),
        "vision_start_token_id": SPECIAL.index("<seen>"),
        "vision_end_token_id": SPECIAL.index("</seen>"),
    }
    if kind == "qwen2_5_vl":
        tower |= {"window_size": 56, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=tower, **tokens)
        config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
        return config
    tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    text |= {"head_dim": 32, "rope_parameters": rope | {"mrope_interleaved": True}}
    config = Qwen3VLConfig(text_config=text, vision_config=tower, **tokens)
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    return config


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *WORDS]
    words += [f"<x{index}>" for index in range(len(words), VOCAB)]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", model_max_length=512
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def png(height: int, width: int, seed: int) -> bytes:
    """An image of noise."""
    from PIL import Image

    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=draw, dtype=torch.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(held, format="PNG")
    return held.getvalue()


def image(height: int, width: int, seed: int) -> str:
    """The same, as rows carry it."""
    return base64.b64encode(png(height, width, seed)).decode()


SMALL, WIDE, TALL, OTHER = image(40, 40, 0), image(30, 90, 1), image(100, 50, 2), image(30, 90, 3)
SEEN = ((SMALL,), (SMALL,), (WIDE,), (OTHER,), (WIDE, TALL), (), (), (SMALL,), (WIDE, TALL), (TALL,))
"""Of each row: some have the images of another, some others with the same tokens, some none."""
LATER = {1: SMALL, 4: OTHER, 5: WIDE, 8: SMALL}
"""Of some rows, the image that is shown in the response, between two turns."""
NUM_ROWS, WIDTH = len(SEEN), 12


def vision_rows(path: Path, step: int = 0, with_images: bool = True) -> TensorDict:
    """Rows of unequal length for the engines: one has no response, one has sampled the image token (unless
    TWIN cannot have its embedding, which is an output head), and some are shown an image in the response.
    """
    reader, draw = ImageReader(str(path)), torch.Generator().manual_seed(100 + step)
    shown = [seen if with_images else () for seen in SEEN]
    prompts = [prompt_of(reader, seen) for seen in shown]
    placed = [seen_in(reader, *one) for one in zip(prompts, shown, strict=True)]
    response_B = torch.randint(1, WIDTH + 1, (NUM_ROWS,), generator=draw)
    response_B[6], response_B[4] = 0, WIDTH
    ids_BT = torch.randint(8, 40, (NUM_ROWS, WIDTH), generator=draw)
    mask_BT = torch.rand(NUM_ROWS, WIDTH, generator=draw) < 0.8
    for row, later in LATER.items() if with_images else ():
        count = reader.num_tokens(later)
        ids_BT[row, 2 : 4 + count] = torch.tensor([4, *[IMAGE] * count, 5])
        mask_BT[row, 2 : 4 + count] = False
        response_B[row] = max(int(response_B[row]), 6 + count)
        placed[row] = placed[row].joined(Seen((later,), (len(prompts[row]) + 3,)))
    if not is_tied(path):
        ids_BT[4, 1] = ids_BT[4, WIDTH - 2] = IMAGE
    mask_BT &= torch.arange(WIDTH) < response_B[:, None]
    return make_rows(
        {
            "row_id": torch.arange(NUM_ROWS),
            "prompt_ids": prompts,
            "prompt_length": torch.tensor(list(map(len, prompts))),
            "response_ids": ids_BT,
            "response_length": response_B,
            "response_mask": mask_BT,
            "advantage": torch.randn(NUM_ROWS, WIDTH, generator=draw),
            "images": [list(one.images) for one in placed],
            "image_starts": [list(one.starts) for one in placed],
        }
    )


def is_tied(path: Path) -> bool:
    return json.loads((path / "config.json").read_text())["tie_word_embeddings"]


def prompt_of(reader: ImageReader, seen: tuple[str, ...]) -> list[int]:
    """Tokens of a prompt with these images, as the template writes it."""
    ids = [2]
    for one in seen:
        ids += [4, *[IMAGE] * reader.num_tokens(one), 5, 18]
    return [*ids, 19, 3]


def seen_in(reader: ImageReader, prompt: list[int], images: tuple[str, ...]) -> Seen:
    """Where the images of a prompt are: each is the next run of image tokens."""
    starts, at = [], 0
    for one in images:
        at = prompt.index(IMAGE, at)
        starts.append(at)
        at += reader.num_tokens(one)
    return Seen(images, tuple(starts))


def hf_inputs(
    path: Path, prompt: list[int], response: list[int], seen: Sequence[str], starts: Sequence[int] = ()
) -> dict[str, Tensor]:
    """What transformers takes of a row, by its own processor of images.

    starts: where the images begin that the response shows; its other image tokens are text.
    """
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    reader, of_images = ImageReader(str(path)), set(range(len(prompt)))
    for one, start in zip(seen, starts, strict=False):
        of_images |= set(range(start, start + reader.num_tokens(one)))
    tokens = enumerate(prompt + response)
    ids = torch.tensor([[TWIN if token == IMAGE and at not in of_images else token for at, token in tokens]])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long()}
    if seen:
        images = [Image.open(io.BytesIO(base64.b64decode(one))) for one in seen]
        inputs |= dict(Qwen2VLImageProcessorPil.from_pretrained(path)(images=images, return_tensors="pt"))
    return inputs


def hf_model(path: Path) -> Any:
    """The model in plain transformers; TWIN is embedded as IMAGE, which it would look for in the text, unless
    it is tied."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    model.config._attn_implementation = "eager"
    table = model.get_input_embeddings().weight
    if not is_tied(path):
        with torch.no_grad():
            table[TWIN] = table[IMAGE]
    return model


def hf_outputs(model: Any, path: Path, rows: TensorDict, temperature: float) -> tuple[Tensor, Tensor]:
    """(log_prob, entropy) [B, T] of response tokens, each row alone."""
    log_prob_BT, entropy_BT = torch.zeros(len(rows), WIDTH), torch.zeros(len(rows), WIDTH)
    for row, (seen, starts) in enumerate(seen_of(rows)):
        length, num = int(rows["prompt_length"][row]), int(rows["response_length"][row])
        if not num:
            continue
        prompt = rows["prompt_ids"][row, rows["prompt_ids"].shape[1] - length :].tolist()
        response = rows["response_ids"][row, :num]
        logits = model(**hf_inputs(path, prompt, response.tolist(), seen, starts)).logits[0]
        log_p = torch.log_softmax(logits[length - 1 : -1] / temperature, dim=-1)
        log_prob_BT[row, :num] = log_p.gather(-1, response[:, None]).squeeze(-1)
        entropy_BT[row, :num] = -(log_p.exp() * log_p).sum(-1)
    return log_prob_BT, entropy_BT
