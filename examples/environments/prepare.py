"""Make what the examples train on, from scratch: a tiny model, a tokenizer of words, and prompts.

Run from the root of the repository: python -m examples.environments.prepare NAME --out FOLDER
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from examples.multi_agent.prepare import CHAT_TEMPLATE, ROLES
from examples.quickstart.prepare import make_model, make_tokenizer

ANIMALS = [
    *[
        "snake",
        "slug",
        "jellyfish",
        "flatworm",
        "leech",
        "chicken",
        "bird",
        "human",
        "duck",
        "dog",
        "cat",
        "cow",
    ],
    *[
        "horse",
        "lion",
        "elephant",
        "giraffe",
        "tiger",
        "deer",
        "sheep",
        "starfish",
        "insect",
        "ant",
        "beetle",
    ],
    *["butterfly", "bee", "wasp", "grasshopper", "cricket", "cockroach", "mantis", "firefly", "spider"],
    *["scorpion", "crab", "lobster", "shrimp", "woodlouse"],
]
LEGS = ["0", "2", "4", "5", "6", "8", "10", "14"]


@dataclass(frozen=True)
class Example:
    """What an example needs. words: of the tokenizer; all others are <unk>."""

    words: list[str]
    models: int = 1


EXAMPLES = {
    "reasoning_gym": Example(
        ["0", "2", "4", "5", "6", "8", "10", "14", *(f"{name}?" for name in ANIMALS.split())]
    ),
}


def write(name: str, out: Path) -> None:
    """The models of an example: model_0, ..."""
    example = EXAMPLES[name]
    tokenizer = make_tokenizer(
        ["<unk>", *ROLES, *example.words], CHAT_TEMPLATE, max_length=128, unknown="<unk>"
    )
    for number in range(example.models):
        make_model(tokenizer, number, initializer_range=0.06).save_pretrained(out / f"model_{number}")
        tokenizer.save_pretrained(out / f"model_{number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=EXAMPLES)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write(args.name, args.out)


if __name__ == "__main__":
    main()
