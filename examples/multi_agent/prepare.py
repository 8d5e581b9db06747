"""Make what the examples train on, from scratch: tiny Qwen3 models, a tokenizer of words, and the tasks.

Run from the root of the repository: python -m examples.multi_agent.prepare TASKS --out FOLDER
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

from examples.quickstart.prepare import make_model, make_tokenizer

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


@dataclass(frozen=True)
class Tasks:
    """What there is to do. draw: (training rows, validation rows), about as many training rows as asked for.

    words: of the tokenizer. deviation: of random weights; above 0.02 models of this width learn to read in
    fewer steps.
    """

    words: list[str]
    draw: Callable[[random.Random, int], tuple[list[dict], list[dict]]]
    deviation: float = 0.02


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


def numbers(below: int) -> Tasks:
    """Pairs of numbers below a bound. The prompt has the first; the validation is all pairs."""

    def rows(pairs: list[tuple[int, int]]) -> list[dict]:
        return [row("numbers", f"larger of {pair[0]} ?", max(pair), numbers=pair) for pair in pairs]

    def draw(rng: random.Random, num_rows: int) -> tuple[list[dict], list[dict]]:
        pairs = [(first, second) for first in range(below) for second in range(below)]
        return rows([rng.choice(pairs) for _ in range(num_rows)]), rows(pairs)

    return Tasks(["larger", "of", "?", "first", "second", *map(str, range(below))], draw)


def shuffled(make: Callable[[random.Random], list[dict]]) -> Callable:
    """Training on all that `make` makes, as often as it takes; validation on all of it once."""

    def draw(rng: random.Random, num_rows: int) -> tuple[list[dict], list[dict]]:
        train = [task for _ in range(-(-num_rows // len(make(rng)))) for task in make(rng)]
        rng.shuffle(train)
        return train, make(rng)

    return draw


def doors(rng: random.Random) -> list[dict]:
    """Two rooms of four doors each."""
    pairs = [(a, b) for a in range(4) for b in range(4)]
    return [row("reasoner_actor", "play", f"{a} {b}", first=str(a), second=str(b)) for a, b in pairs]


def luck(rng: random.Random) -> list[dict]:
    """The same task sixty times: its worlds are drawn by seed."""
    return [row("tree", "play", number) for number in range(60)]


def cycle(rng: random.Random, num_rows: int) -> tuple[list[dict], list[dict]]:
    """The same game again and again; the validation is 100 games against each word."""
    train = [row("league", "play", "")] * num_rows
    against = [(word, number) for word in ("rock", "paper", "scissors") for number in range(100)]
    return train, [row(f"against_{word}", "play", number, opponent=word) for word, number in against]


def shop(rng: random.Random) -> list[dict]:
    """A request and the prices of today: different digits."""
    days = [(request, rng.sample(range(6), len(WANTED))) for request in WANTED for _ in range(10)]
    tasks = []
    for request, digits in days:
        prices, wanted = dict(zip(WANTED.values(), digits, strict=True)), WANTED[request]
        tasks.append(row("planner_worker", request, prices[wanted], wanted=wanted, prices=prices))
    return tasks


def nim(rng: random.Random, num_rows: int) -> tuple[list[dict], list[dict]]:
    """Piles from which the first player can win. The validation has games against scripted opponents, too:
    from each pile that the policy's side can win, ten against one that moves at random."""
    first, second = (2, 4, 5, 7, 8), (3, 6)
    train, test = shuffled(lambda rng: [row("self_play", "play", pile) for pile in first])(rng, num_rows)
    for opponent, times in (("random", 10), ("perfect", 1)):
        for side, (name, piles) in enumerate({"first": first, "second": second}.items()):
            source, extra = f"{name}_against_{opponent}", {"opponent": opponent, "side": side}
            test += [row(source, "play", pile, **extra) for pile in piles for _ in range(times)]
    return train, test


TASKS = {
    "numbers": numbers(6),
    "reasoner_actor": Tasks(["play", "door", "?", *"0123"], shuffled(doors), 0.06),
    "tree": Tasks(["play", "door", "?", *"0123"], shuffled(luck), 0.06),
    "league": Tasks(["play", "rock", "paper", "scissors"], cycle, 0.06),
    "planner_worker": Tasks(
        ["red", "green", "yellow", "fruit", "vegetable", "?", *"012345", *WANTED.values()]
        + [call("price", item=item) for item in WANTED.values()],
        shuffled(shop),
        0.06,
    ),
    "self_play": Tasks(["play", "pile", *"12345678"], nim),
}


def tokenizer_of(tasks: Tasks) -> PreTrainedTokenizerFast:
    """One token for each word; others are <unk>."""
    return make_tokenizer(["<unk>", *ROLES, *tasks.words], CHAT_TEMPLATE, max_length=128, unknown="<unk>")


def write(tasks: Tasks, out: Path, num_rows: int, seed: int) -> None:
    """Models of two agents and data: model_0, model_1, train.parquet, test.parquet."""
    tokenizer = tokenizer_of(tasks)
    for number in (0, 1):
        make_model(tokenizer, 2 * seed + number, tasks.deviation).save_pretrained(out / f"model_{number}")
        tokenizer.save_pretrained(out / f"model_{number}")
    for split, rows in zip(("train", "test"), tasks.draw(random.Random(seed), num_rows), strict=True):
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=3200, help="training rows")
    parser.add_argument("--seed", type=int, default=0, help="of the models and the data")
    args = parser.parse_args()
    write(TASKS[args.tasks], args.out, args.rows, args.seed)


if __name__ == "__main__":
    main()
