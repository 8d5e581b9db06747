"""Make the tasks: python examples/real_model/prepare.py --out FOLDER

sums: two numbers below 100, after two examples. products: of three and of two digits, after an example that
calls the calculator. 10,000 rows to train on and 400 to validate with, none of which is among the others.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 345"}}</tool_call>'


def sums(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randrange(10, 100), draw.randrange(10, 100)
    return f"3 + 5 = 8\n41 + 27 = 68\n{a} + {b} =", a + b


def products(draw: random.Random) -> tuple[str, int]:
    a, b = draw.randrange(100, 1000), draw.randrange(10, 100)
    example = f"Question: 12 * 345\nCall: {CALL}\nResult: 4140\nAnswer: 4140"
    return f"{example}\n\nQuestion: {a} * {b}\nCall:", a * b


def rows(
    make: Callable[[random.Random], tuple[str, int]], train: int, val: int
) -> tuple[list[dict], list[dict]]:
    """Rows to train on and to validate with. Another seed of a run draws other samples, not other tasks."""
    draw, found = random.Random(0), {}
    while len(found) < val:
        found.update([make(draw)])
    validation, training = [row(*task) for task in found.items()], []
    while len(training) < train:
        prompt, truth = make(draw)
        if prompt not in found:
            training.append(row(prompt, truth))
    return training, validation


def row(prompt: str, truth: int) -> dict:
    chat = [{"role": "user", "content": prompt}]
    return {"prompt": chat, "data_source": "arithmetic", "reward_model": {"ground_truth": str(truth)}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for make in (sums, products):
        for split, found in zip(("train", "val"), rows(make, 10_000, 400), strict=True):
            lines = "".join(json.dumps(one) + "\n" for one in found)
            (args.out / f"{make.__name__}_{split}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
