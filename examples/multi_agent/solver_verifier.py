"""Two agents that need each other: the larger of two numbers, of which each sees one.

The solver reads "larger of 3 ?" and proposes an answer; the verifier reads "larger of PROPOSAL 7 ?", where 7
is the number that it alone sees, and gives the answer. This file is the workflow's data, what the verifier
gets to read, and the reward of each agent.
"""

import argparse
import random
from pathlib import Path


def pre_process(messages, episode):
    """What the verifier sees of the conversation: the solver's proposal beside its own number."""
    proposal = episode.last_turn(0).content
    _, number = episode.task["extra_info"]["numbers"]
    return [{"role": "user", "content": f"larger of {proposal} {number} ?"}]


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The verifier: 1 for the right answer. The solver: half for the verifier's success, half for saying its
    number. Any single digit earns a tenth, a first step to climb."""
    proposal, answer = (said["content"].strip() for said in extra_info["conversation"] if said["node"])
    team = answer == ground_truth
    if extra_info["agent"] == 1:
        return {"score": max(float(team), is_digit(answer) / 10), "accuracy": float(team)}
    right = proposal == str(extra_info["numbers"][0])
    own = max(float(right), is_digit(proposal) / 10)
    return {"score": (own + team) / 2, "accuracy": float(right)}


def alone(data_source, solution_str, ground_truth, extra_info):
    """The reward of a single agent that sees what the solver sees, and answers."""
    answer = solution_str.strip()
    right = answer == ground_truth
    return {"score": max(float(right), is_digit(answer) / 10), "accuracy": float(right)}


def is_digit(text):
    return len(text) == 1 and text.isdigit()


def make_rows(pairs, source):
    """Rows whose prompt shows the first number; extra_info has both."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"larger of {first} ?"}],
            "ability": "arithmetic",
            "reward_model": {"style": "rule", "ground_truth": str(max(first, second))},
            "extra_info": {"index": index, "numbers": [first, second]},
        }
        for index, (first, second) in enumerate(pairs)
    ]


def write(folder, num_rows):
    """Training data, and all 100 pairs for validation."""
    import pyarrow as pa  # here, since reward processes import this file
    import pyarrow.parquet as pq

    pairs = [(first, second) for first in range(10) for second in range(10)]
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    train = [rng.choice(pairs) for _ in range(num_rows)]
    for name, chosen in (("train", train), ("test", pairs)):
        pq.write_table(pa.Table.from_pylist(make_rows(chosen, "numbers")), folder / f"{name}.parquet")


def main():
    parser = argparse.ArgumentParser(description="Write the training and validation data.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=6400, help="training rows")
    args = parser.parse_args()
    write(args.out, args.rows)


if __name__ == "__main__":
    main()
