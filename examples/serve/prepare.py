"""Make what recipes of the cookbook train on, from scratch: tiny models, and data sets under the names that
they load. Nothing is downloaded.

`letters` reads any text, a token for each byte. `words` knows the words of one task: which of two digits is
larger, answered by a number in a box, as the recipe for GSM8K grades it.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from prepare import make_model, make_tokenizer

DIGITS = "0123456789"
BOXES = [f"\\boxed{{{digit}}}" for digit in DIGITS]
WORDS = ["User:", "Assistant:", "larger", "of", "?", *DIGITS, *BOXES, "<other>"]
ASKED = " Provide a numerical answer without units, written inside \\boxed{}."
"""What the recipe for GSM8K adds to a question."""
SPELLED = (
    "Let's spell the word out and number all the letters: "
    "1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}"
)
CONTEXT = 2048
STEPS = 300
SPLITS = {"train": 256, "test": 16}


def make_letters(path: Path) -> None:
    """A Qwen3 of two layers over bytes, with random weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<eos>", *alphabet])}
    core = Tokenizer(models.BPE(vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<eos>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<eos>", eos_token="<eos>", model_max_length=CONTEXT
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def make_words(path: Path, rows: list[dict]) -> None:
    """A Qwen3 that answers with either of the two digits: what remains to be learnt is which."""
    template = (
        "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }} {% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    tokenizer = make_tokenizer(WORDS, template, 128, unknown="<other>")
    model = make_model(tokenizer)
    draw, boxes = torch.Generator().manual_seed(0), torch.tensor(tokenizer.convert_tokens_to_ids(BOXES))
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list(DIGITS)))
    prompts = torch.tensor(
        [
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
            for row in rows
        ]
    )
    asked = (
        (prompts[:, :, None] == digits)
        .float()
        .argmax(-1)[(prompts[:, :, None] == digits).any(-1)]
        .view(len(rows), 2)
    )
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        batch = torch.randint(len(rows), (32,), generator=draw)
        side = torch.randint(2, (32, 1), generator=draw)
        wanted = boxes[asked[batch].gather(1, side)[:, 0]]
        loss = torch.nn.functional.cross_entropy(model(prompts[batch]).logits[:, -1], wanted)
        adam.zero_grad()
        loss.backward()
        adam.step()
    print(f"words: the loss is {loss:.2f}, and ln 2 = 0.69 by a coin")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def sums(draw: random.Random, count: int) -> list[tuple[str, str, str]]:
    """Questions with a right answer and a wrong one."""
    found = []
    for _ in range(count):
        a, b = draw.randrange(10), draw.randrange(10)
        found.append((f"What is {a} + {b}?", str(a + b), str(a + b + draw.randrange(1, 5))))
    return found


def larger(draw: random.Random, count: int) -> list[dict[str, str]]:
    rows = []
    for _ in range(count):
        a, b = draw.randrange(10), draw.randrange(10)
        rows.append({"question": f"larger of {a} {b} ?", "answer": f"#### {max(a, b)}"})
    return rows


def as_prompts(rows: list[dict[str, str]]) -> list[dict]:
    """The same questions for a job of siirl, as the recipe renders them: after its example."""
    example = [
        {"role": "user", "content": "How many r's are in strawberry? Write your answer in \\boxed{} format."},
        {"role": "assistant", "content": SPELLED},
    ]
    return [
        {
            "data_source": "serve/larger",
            "prompt": [*example, {"role": "user", "content": row["question"] + ASKED}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"].removeprefix("#### ")},
        }
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/serve"))
    parser.add_argument("--letters", action="store_true", help="the first model alone")
    args = parser.parse_args()
    out, draw = args.out, random.Random(0)
    make_letters(out / "letters")
    if args.letters:
        return
    chat = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": right}]}
        for question, right, _ in sums(draw, 320)
    ]
    write(out / "chat.jsonl", chat)
    for split, count in SPLITS.items():
        pairs = [
            {
                name: f"\n\nHuman: {asked}\n\nAssistant: {told}"
                for name, told in (("chosen", a), ("rejected", b))
            }
            for asked, a, b in sums(draw, count)
        ]
        write(out / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", pairs)
        rows = larger(draw, 25 * count)
        write(out / "openai" / "gsm8k" / "main" / f"{split}.jsonl", rows)
        prompts = as_prompts(rows)
        pq.write_table(pa.Table.from_pylist(prompts), out / f"{split}.parquet")
        if split == "train":
            make_words(out / "words", prompts)
        questions = [{"question": asked} for asked, _, _ in sums(draw, count)]
        write(out / "zwhe99" / "DeepMath-103K" / f"{split}.jsonl", questions)
    card = {
        "configs": [
            {"config_name": "main", "data_files": [{"split": x, "path": f"main/{x}.jsonl"} for x in SPLITS]}
        ]
    }
    (out / "openai" / "gsm8k" / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    tools = [{"instruction": asked, "output": right} for asked, right, _ in sums(draw, 128)]
    write(out / "tangqiaoyu" / "ToolAlpaca" / "train.jsonl", tools)


if __name__ == "__main__":
    main()
