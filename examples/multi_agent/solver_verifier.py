"""Two policies that need each other: the larger of two numbers, of which each sees one.

The solver reads "larger of 3 ?" and proposes a word; the verifier reads "larger of PROPOSAL 5 ?", where 5 is
the number that it alone sees, and answers.
"""

import argparse
import random
from pathlib import Path


def pre_process(messages, episode):
    """The solver sees the question as it is, the verifier what the solver said beside its own number."""
    if episode.speaker == 0:
        return messages
    number = episode.task["extra_info"]["numbers"][1]
    return [{"role": "user", "content": f"larger of {episode.last_turn(0).content} {number} ?"}]


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The verifier: 1 for the right answer. The solver: half for that, half for saying its number, without
    which it would have no signal for as long as the verifier does not listen."""
    proposal, answer = (said["content"] for said in extra_info["conversation"] if said["agent"] is not None)
    team, own = float(answer == ground_truth), float(proposal == str(extra_info["numbers"][0]))
    if extra_info["agent"] == 0:
        return {"score": (own + team) / 2, "accuracy": own}
    return {"score": team, "accuracy": team}


def alone(data_source, solution_str, ground_truth, extra_info):
    """The reward of a single agent that sees what the solver sees, and answers."""
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "accuracy": right}


def write(folder, num_rows, seed, numbers=6):
    """Two models and their tokenizer, training data, and all pairs of the first numbers for validation."""
    import pyarrow as pa  # here, since reward processes import this file
    import pyarrow.parquet as pq
    from prepare import make_model, make_tokenizer, row

    tokenizer = make_tokenizer(["larger", "of", "?", "first", "second", *map(str, range(numbers))])
    for number in (0, 1):
        make_model(tokenizer, 2 * seed + number).save_pretrained(folder / f"model_{number}")
        tokenizer.save_pretrained(folder / f"model_{number}")
    pairs = [(first, second) for first in range(numbers) for second in range(numbers)]
    rng = random.Random(seed)
    train = [rng.choice(pairs) for _ in range(num_rows)]
    for name, chosen in (("train", train), ("test", pairs)):
        rows = [row("numbers", f"larger of {pair[0]} ?", max(pair), numbers=pair) for pair in chosen]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def main():
    parser = argparse.ArgumentParser(
        description="Write the models and the data of both examples with numbers."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=3200, help="training rows")
    parser.add_argument("--seed", type=int, default=0, help="of the models and the data")
    args = parser.parse_args()
    write(args.out, args.rows, args.seed)


if __name__ == "__main__":
    main()
