"""Make what the examples train on, from scratch: tiny Qwen3 models, a tokenizer of words, and the tasks."""

import argparse
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

STORIES = {
    "plus": ("found", "won"),
    "minus": ("lost", "sold"),
    "times": ("bags", "rows"),
    "over": ("shared", "split"),
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


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
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
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def row(source: str, prompt: str, truth: object, **extra: object) -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": source,
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
        "extra_info": {"source": source, **extra},
    }


def all_tasks() -> dict[str, list[dict]]:
    """Every task of each example, once."""
    operations = {
        "plus": lambda a, b: a + b,
        "minus": lambda a, b: a - b,
        "times": lambda a, b: a * b,
        "over": lambda a, b: a // b,
    }
    # numbers whose four results differ, so that only one operation is right
    pairs = [
        (a, b)
        for a in range(2, 10)
        for b in range(2, a)
        if len({operation(a, b) for operation in operations.values()}) == 4
    ]
    stories = [
        row("planner_worker", f"{word} {a} {b}", operations[name](a, b), numbers=[a, b])
        for name, words in STORIES.items()
        for word in words
        for a, b in pairs
    ]
    doors = [row("reasoner_actor", "play", f"{a} {b}") for a in range(4) for b in range(4)]
    piles = [row("self_play", "play", pile) for pile in (2, 4, 5, 7, 8)]
    return {"planner_worker": stories, "reasoner_actor": doors, "self_play": piles}


def words_of(tasks: list[dict]) -> list[str]:
    """What is said in an example: words of its prompts and answers, of its environment or tool."""
    said = {word for task in tasks for message in task["prompt"] for word in message["content"].split()}
    said |= {word for task in tasks for word in task["reward_model"]["ground_truth"].split()}
    spoken = {
        "planner_worker": {"call", *STORIES},
        "reasoner_actor": {"door"},
        "self_play": {"pile", *map(str, range(1, 9))},
    }
    return sorted(said | spoken[tasks[0]["data_source"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/multi_agent"))
    parser.add_argument("--rows", type=int, default=6400, help="training rows of each example")
    args = parser.parse_args()

    rng = random.Random(0)
    for name, tasks in all_tasks().items():
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = make_tokenizer(words_of(tasks))
        for number in (0, 1):
            make_model(tokenizer, number).save_pretrained(folder / f"model_{number}")
            tokenizer.save_pretrained(folder / f"model_{number}")
        train = [rng.choice(tasks) for _ in range(args.rows)]
        test = tasks if len(tasks) >= 32 else tasks * (32 // len(tasks))
        pq.write_table(pa.Table.from_pylist(train), folder / "train.parquet")
        pq.write_table(pa.Table.from_pylist(test[:64]), folder / "test.parquet")
        print(f"{folder}: {len(train)} training rows of {len(tasks)} tasks")


if __name__ == "__main__":
    main()
