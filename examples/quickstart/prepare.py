"""Make everything the quickstart trains on, from scratch: a tiny Qwen3 model, its tokenizer, and a dataset.

The task is verifiable: "larger of 3 7 ?", answered by one digit. Nothing is downloaded. The dataset has
the column format of verl and siiRL: prompt (chat messages), data_source, ability, reward_model, extra_info.
"""

import argparse
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = ["user:", "assistant:", "larger", "of", "?", *"0123456789"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer(
    words: list[str], chat_template: str, max_length: int, unknown: str | None = None
) -> PreTrainedTokenizerFast:
    """A word-level tokenizer: <eos> and a token for each word; all others become `unknown`, one of them."""
    names = {"unk_token": unknown} if unknown else {}
    vocab = {token: index for index, token in enumerate(["<eos>", *words])}
    core = Tokenizer(models.WordLevel(vocab, **names))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<eos>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<eos>", eos_token="<eos>", model_max_length=max_length, **names
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_model(
    tokenizer: PreTrainedTokenizerFast, seed: int = 0, initializer_range: float = 0.02
) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers and width 128 with random weights: about 0.3 million parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=initializer_range,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def make_rows(pairs: list[tuple[int, int]], source: str) -> list[dict]:
    return [
        {
            "data_source": f"quickstart/{source}",
            "prompt": [{"role": "user", "content": f"larger of {a} {b} ?"}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": str(max(a, b))},
            "extra_info": {"index": index, "digits": [a, b]},
        }
        for index, (a, b) in enumerate(pairs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--rows", type=int, default=6400, help="training rows")
    args = parser.parse_args()

    tokenizer = make_tokenizer(WORDS, CHAT_TEMPLATE, max_length=64)
    model_dir = args.out / "model"
    make_model(tokenizer).save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)

    pairs = [(a, b) for a in range(10) for b in range(10)]
    rng = random.Random(0)
    rng.shuffle(pairs)
    unseen, seen = pairs[:10], pairs[10:]
    data_dir = args.out / "data"
    data_dir.mkdir(parents=True, exist_ok=True)
    train = make_rows([rng.choice(seen) for _ in range(args.rows)], "seen")
    test = make_rows(seen, "seen") + make_rows(unseen, "unseen")
    pq.write_table(pa.Table.from_pylist(train), data_dir / "train.parquet")
    pq.write_table(pa.Table.from_pylist(test), data_dir / "test.parquet")
    print(f"model {model_dir}, data {data_dir}: {len(train)} training rows; validation on {len(test)} pairs,")
    print(f"{len(unseen)} of them never trained on")


if __name__ == "__main__":
    main()
