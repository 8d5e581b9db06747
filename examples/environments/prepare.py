"""Make what the examples train on, from scratch: a tiny model, a tokenizer of words, and prompts.

Run from the root of the repository: python -m examples.environments.prepare NAME --out FOLDER
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.multi_agent.prepare import CHAT_TEMPLATE, ROLES, call, row
from examples.quickstart.prepare import make_model, make_tokenizer

ITEMS = ["apple", "lime", "pea", "corn"]


@dataclass(frozen=True)
class Example:
    """What an example needs. words: gives those of the tokenizer; all others are <unk>."""

    words: Callable[[], list[str]]
    models: int = 1
    prompts: tuple[tuple[str, dict], ...] = ()
    """What episodes begin with, and extra_info."""


def legs() -> list[str]:
    """The last word of each animal that the package knows, and its numbers of legs."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    return [
        *(f"{name.split()[-1]}?" for name in ANIMALS),
        *sorted({str(number) for number in ANIMALS.values()}),
    ]


EXAMPLES = {
    "reasoning_gym": Example(legs),
    "lake": Example(
        lambda: ["walk", *map(str, range(6)), "left", "down", "right", "up"], prompts=(("walk", {}),)
    ),
    "nim": Example(
        lambda: ["play", "piles", *"0123", *(f"{pile}-{count}" for pile in (0, 1) for count in (1, 2, 3))],
        models=2,
        prompts=(("play", {}),),
    ),
    "guess": Example(
        lambda: ["number", "?", "guess", "higher", "lower", "right", *"0123456"], prompts=(("number ?", {}),)
    ),
    "verifiers": Example(lambda: ["number", "?", "guess", "higher", "lower", *"0123456"]),
    "shop": Example(
        lambda: ["price", "of", "?", *"012345", *ITEMS, *(call("price", item=item) for item in ITEMS)],
        prompts=tuple((f"price of {item} ?", {"wanted": item}) for item in ITEMS),
    ),
}


def write(name: str, out: Path) -> None:
    """The models of an example, model_0, ..., and train.parquet and test.parquet if it has prompts."""
    example = EXAMPLES[name]
    words = ["<unk>", *ROLES, *example.words()]
    tokenizer = make_tokenizer(words, CHAT_TEMPLATE, max_length=128, unknown="<unk>")
    for number in range(example.models):
        make_model(tokenizer, number, initializer_range=0.06).save_pretrained(out / f"model_{number}")
        tokenizer.save_pretrained(out / f"model_{number}")
    if example.prompts:
        for split, times in (("train", 1600), ("test", 16)):
            kinds = itertools.islice(itertools.cycle(example.prompts), times)
            rows = [row(name, prompt, "", **extra) for prompt, extra in kinds]
            pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=EXAMPLES)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write(args.name, args.out)


if __name__ == "__main__":
    main()
