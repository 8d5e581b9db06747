"""Make everything that the example trains on, from scratch: a tiny model, its tokenizer, and questions.

The prices are different in each row, so that only the tool of agent.py knows them.
"""

import argparse
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.multi_agent.prepare import CHAT_TEMPLATE, ROLES, call, row
from examples.quickstart.prepare import make_model, make_tokenizer

ITEMS = ["apple", "lime", "pea", "corn"]
WORDS = [
    "<unk>",
    *ROLES,
    "price",
    "of",
    "?",
    *"012345",
    *ITEMS,
    *(call("price", item=item) for item in ITEMS),
]


def make_rows(rng: random.Random, num_rows: int) -> list[dict]:
    rows = []
    for _ in range(num_rows):
        prices, wanted = {item: rng.randrange(6) for item in ITEMS}, rng.choice(ITEMS)
        rows.append(row("shop", f"price of {wanted} ?", prices[wanted], wanted=wanted, prices=prices))
    return rows


def write(out: Path, num_rows: int) -> None:
    """The model, train.parquet and test.parquet."""
    tokenizer = make_tokenizer(WORDS, CHAT_TEMPLATE, max_length=128, unknown="<unk>")
    make_model(tokenizer, initializer_range=0.06).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    rng = random.Random(0)
    for name, number in (("train", num_rows), ("test", 32)):
        pq.write_table(pa.Table.from_pylist(make_rows(rng, number)), out / f"{name}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/agents_elsewhere"))
    parser.add_argument("--rows", type=int, default=1000, help="training rows")
    args = parser.parse_args()
    write(args.out, args.rows)
    print(f"model and data: {args.out}")


if __name__ == "__main__":
    main()
