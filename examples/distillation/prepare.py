"""Two teachers that know half of a task each, a student that knows nothing, and the prompts of both halves.

"larger of 3 7 ?" and "smaller of 3 7 ?": the teacher `larger` was trained on the first alone, `smaller` on
the second. Nothing is downloaded. The column data_source says which half a row is of.
"""

import argparse
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.quickstart.prepare import CHAT_TEMPLATE, WORDS, make_model, make_tokenizer

HALVES = {"larger": max, "smaller": min}


def make_rows(pairs: list[tuple[int, int]], half: str) -> list[dict]:
    return [
        {
            "data_source": half,
            "prompt": [{"role": "user", "content": f"{half} of {a} {b} ?"}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": str(HALVES[half](a, b))},
            "extra_info": {"index": index},
        }
        for index, (a, b) in enumerate(pairs)
    ]


def teach(tokenizer: PreTrainedTokenizerFast, rows: list[dict], seed: int, steps: int) -> Qwen3ForCausalLM:
    """A model that answers the rows, by plain supervised steps on the two tokens of each answer."""
    model = make_model(tokenizer, seed)
    texts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        + f" {row['reward_model']['ground_truth']} <eos>"
        for row in rows
    ]
    ids = torch.tensor([tokenizer(text)["input_ids"] for text in texts])  # all are of one length
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = ids[torch.randint(len(ids), (64,), generator=draws)]
        logits = model(batch[:, :-1]).logits[:, -2:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, -2:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def write(out: Path, num_rows: int = 6400, steps: int = 300) -> None:
    """student/, larger/, smaller/ (models), train.parquet and test.parquet (both halves)."""
    tokenizer = make_tokenizer(["smaller", *WORDS], CHAT_TEMPLATE, max_length=64)
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    models = {"student": make_model(tokenizer)}
    for seed, half in enumerate(HALVES, 1):
        models[half] = teach(tokenizer, make_rows(pairs, half), seed, steps)
    for name, model in models.items():
        model.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    rng = random.Random(0)
    train = [make_rows([rng.choice(pairs)], rng.choice(list(HALVES)))[0] for _ in range(num_rows)]
    test = [row for half in HALVES for row in make_rows(pairs, half)]
    for name, rows in (("train", train), ("test", test)):
        pq.write_table(pa.Table.from_pylist(rows), out / f"{name}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/distillation"))
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
