"""Make what the examples train on, from scratch: tiny Qwen3 models, a tokenizer of words, and the tasks."""

import argparse
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WANTED = {
    "red fruit": "apple",
    "green fruit": "lime",
    "yellow fruit": "banana",
    "red vegetable": "tomato",
    "green vegetable": "pea",
    "yellow vegetable": "corn",
}
ROLES = ["system:", "user:", "assistant:", "tool:", "Error:"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token for each word; others are <unk>."""
    vocab = {token: index for index, token in enumerate(["<eos>", "<unk>", *ROLES, *words])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["<eos>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<eos>", eos_token="<eos>", unk_token="<unk>", model_max_length=128
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, initializer_range: float = 0.02
) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers and width 128 with random weights."""
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


def call(name: str, **arguments: str) -> str:
    """A tool call in the format hermes, without spaces: one token of the tokenizer."""
    words = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>{words}</tool_call>"


def row(source: str, prompt: str, truth: object, **extra: object) -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": source,
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
        "extra_info": {"source": source, **extra},
    }


def doors(rng: random.Random) -> list[dict]:
    """Two rooms of four doors each."""
    return [row("reasoner_actor", "play", f"{a} {b}") for a in range(4) for b in range(4)]


def shop(rng: random.Random) -> list[dict]:
    """A request and the prices of today: different digits."""
    days = [(request, rng.sample(range(6), len(WANTED))) for request in WANTED for _ in range(10)]
    tasks = []
    for request, digits in days:
        prices, wanted = dict(zip(WANTED.values(), digits, strict=True)), WANTED[request]
        tasks.append(row("planner_worker", request, prices[wanted], wanted=wanted, prices=prices))
    return tasks


def nim(rng: random.Random) -> list[dict]:
    """A pile from which the first player can win."""
    return [row("self_play", "play", pile) for pile in (2, 4, 5, 7, 8)]


TASKS = {"reasoner_actor": doors, "planner_worker": shop, "self_play": nim}
WORDS = {
    "reasoner_actor": ["play", "door", "?", *"0123"],
    "planner_worker": ["red", "green", "yellow", "fruit", "vegetable", "?", *"012345", *WANTED.values()]
    + [call("price", item=item) for item in WANTED.values()],
    "self_play": ["play", "pile", *"12345678"],
}


WEIGHTS = {"reasoner_actor": 0.06, "planner_worker": 0.06, "self_play": 0.02}
"""Deviation of random weights: models of this width learn to read in fewer steps if it is above 0.02."""


def write(name: str, out: Path, num_rows: int, seed: int) -> None:
    """Models of both agents and the data of an example: model_0, model_1, train.parquet, test.parquet."""
    rng = random.Random(seed)
    tokenizer = make_tokenizer(WORDS[name])
    for number in (0, 1):
        model = make_model(tokenizer, 2 * seed + number, WEIGHTS[name])
        model.save_pretrained(out / f"model_{number}")
        tokenizer.save_pretrained(out / f"model_{number}")
    make = TASKS[name]
    train = [task for _ in range(-(-num_rows // len(make(rng)))) for task in make(rng)]
    rng.shuffle(train)
    for split, tasks in (("train", train), ("test", make(rng))):
        pq.write_table(pa.Table.from_pylist(tasks), out / f"{split}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=3200, help="training rows")
    parser.add_argument("--seed", type=int, default=0, help="of the models and the data")
    args = parser.parse_args()
    write(args.name, args.out, args.rows, args.seed)


if __name__ == "__main__":
    main()
