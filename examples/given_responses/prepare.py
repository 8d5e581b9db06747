"""The quickstart's model and data, with given responses: demonstrations, and a right and a wrong answer.

Columns: prompt; response (the right digit); chosen and rejected (the right digit, and the smaller one). In
preferences.parquet the rejected one is any other token: what a policy may come up with.
"""

import argparse
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.quickstart.prepare import CHAT_TEMPLATE, WORDS, make_model, make_rows, make_tokenizer


def with_responses(row: dict) -> dict:
    """The columns of a row of the quickstart that given responses need; nothing scores them."""
    right = row["reward_model"]["ground_truth"]
    wrong = str(min(row["extra_info"]["digits"]))
    return {"prompt": row["prompt"], "response": right, "chosen": right, "rejected": wrong}


def with_any_wrong(row: dict, rng: random.Random) -> dict:
    """The columns of a preference whose worse response is any token but the right one."""
    right = row["reward_model"]["ground_truth"]
    wrong = rng.choice([word for word in ("<eos>", *WORDS) if word != right])
    return {"prompt": row["prompt"], "chosen": right, "rejected": wrong}


def write(out: Path, num_rows: int = 6400) -> None:
    """model/, train.parquet and test.parquet as in the quickstart, given.parquet and preferences.parquet."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(WORDS, CHAT_TEMPLATE, max_length=64)
    make_model(tokenizer).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")

    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    rng = random.Random(0)
    rng.shuffle(pairs)
    unseen, seen = pairs[:9], pairs[9:]
    train = make_rows([rng.choice(seen) for _ in range(num_rows)], "seen")
    test = make_rows(seen, "seen") + make_rows(unseen, "unseen")
    given = [with_responses(row) for row in make_rows([rng.choice(seen) for _ in range(num_rows)], "seen")]
    asked = make_rows([rng.choice(pairs) for _ in range(num_rows)], "any")
    preferences = [with_any_wrong(row, rng) for row in asked]
    files = {"train": train, "test": test, "given": given, "preferences": preferences}
    for name, rows in files.items():
        pq.write_table(pa.Table.from_pylist(rows), out / f"{name}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/given_responses"))
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
