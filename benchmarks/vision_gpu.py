"""GRPO of a vision model on GPUs: the main job on workload A of grpo_gpu.py with an image in each prompt.

    python benchmarks/vision_gpu.py [--gpus 1] [--steps 5] [--side 448] [--freeze] [key=value ...]

The shape of Qwen3-VL-2B (the text model is that of workload A), random weights; 32 prompts x 8 samples on
each GPU, of an image of side x side pixels (196 tokens at 448) and 60 tokens of text, responses of 1,024
tokens (ignore_eos), a reference model, two optimizer steps a step, FSDP2 and vLLM on the same GPUs. Layers
are compiled on a GPU, as siirl chooses. --freeze leaves the vision tower as it is. --small: two layers and
responses of 16 tokens, to try the script (with --prompts 2 --side 64 also on a CPU).

The first steps are not counted. Writes benchmarks/results/vision_gpu_<gpus>.json (--out for another place),
after every counted step as grpo_gpu.py does.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import grpo_gpu
from grpo_gpu import COMMON, HERE, SHAPES, WARM_UP_STEPS, machine, run_counted
from report_file import Report, end_by_signals

TEXT_TOKENS = 60
SPECIAL = ("<pad>", "<eos>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "deepstack_visual_indexes": [5, 11, 17],
    "num_position_embeddings": 2304,
}
SMALL_TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
PATCH, MERGE = 16, 2


def make_model(path: Path, small: bool) -> int:
    """A directory with random weights, a tokenizer and a processor of images; the size of its vocabulary."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    sizes = COMMON | {key: value for key, value in SHAPES["A"].items() if key != "prompts"}
    tower = TOWER
    if small:
        sizes |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        tower = SMALL_TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    rope = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
    spread = 0.64 * sizes["hidden_size"] ** -0.5
    config = Qwen3VLConfig(
        text_config=sizes | {"rope_parameters": rope, "initializer_range": spread, "dtype": "bfloat16"},
        vision_config=tower
        | {"out_hidden_size": sizes["hidden_size"], "patch_size": PATCH, "spatial_merge_size": MERGE},
        tie_word_embeddings=True,
        vision_start_token_id=2,
        image_token_id=3,
        vision_end_token_id=4,
        video_token_id=5,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e9:.2f} billion parameters, {sizes['vocab_size']} tokens", flush=True)
    model.save_pretrained(path)
    _make_tokenizer(sizes["vocab_size"]).save_pretrained(path)
    pixels = (PATCH * MERGE) ** 2
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": pixels, "longest_edge": 1024 * pixels},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return sizes["vocab_size"]


def _make_tokenizer(vocabulary: int):
    """One that has a word for every token, as that of grpo_gpu.py."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(_word(index) for index in range(vocabulary - len(SPECIAL)))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _word(index: int) -> str:
    return f"{chr(97 + index % 26)}{index:x} "


def make_data(path: Path, count: int, side: int, vocabulary: int) -> None:
    """Prompts of an image of noise and TEXT_TOKENS random tokens."""
    import io
    import random

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    rng, draw, rows = random.Random(0), np.random.default_rng(0), []
    for index in range(count):
        held = io.BytesIO()
        noise = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((side, side)).save(held, format="PNG")
        text = "".join(_word(rng.randrange(vocabulary - len(SPECIAL))) for _ in range(TEXT_TOKENS))
        rows.append(
            {
                "data_source": "random",
                "prompt": [{"role": "user", "content": f"<image>{text}"}],
                "images": [{"bytes": held.getvalue(), "path": None}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


def overrides(args: argparse.Namespace, folder: Path, prompts: int) -> list[str]:
    """The main job's keys: those of workload A, and what images change."""
    import torch

    image_tokens = (args.side // (PATCH * MERGE)) ** 2
    args.tensor_parallel, args.best_flags, more, args.keys = 1, False, args.keys, []
    return [
        *grpo_gpu.overrides(args, folder, prompts),
        "data.dataset_type=vlm",
        f"data.max_prompt_length={image_tokens + TEXT_TOKENS + 2}",
        "actor_rollout_ref.model.use_liger=False",
        f"actor_rollout_ref.model.compile_layers={torch.cuda.is_available()}",
        f"actor_rollout_ref.actor.freeze_vision_tower={args.freeze}",
        *(["data.max_response_length=16"] if args.small else []),
        *more,
    ]


def main() -> int:
    end_by_signals()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--side", type=int, default=448)
    parser.add_argument("--prompts", type=int, default=SHAPES["A"]["prompts"])
    parser.add_argument("--freeze", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--train-tokens", type=int, default=30720)
    parser.add_argument("--forward-tokens", type=int, default=61440)
    parser.add_argument("--gpu-memory", type=float, default=0.5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--label", default="")
    parser.add_argument("keys", nargs="*")
    args = parser.parse_args()
    prompts = args.prompts * args.gpus
    label = f"_{args.label}" if args.label else ""
    out = args.out or HERE / "results" / f"vision_gpu_{args.gpus}{label}.json"
    report = Report(
        out,
        {"vision": args.steps - WARM_UP_STEPS},
        workload="vision",
        side=args.side,
        prompts=prompts,
        freeze_vision_tower=args.freeze,
        small=args.small,
        gpus=args.gpus,
        keys=args.keys,
        metrics={},
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        vocabulary = make_model(folder / "model", args.small)
        make_data(folder / "train.parquet", prompts * args.steps, args.side, vocabulary)
        report["machine"] = machine()
        return run_counted(report, "vision", overrides(args, folder, prompts), folder)


if __name__ == "__main__":
    sys.exit(main())
