r"""MATH (competition problems): write train.parquet and test.parquet for training.

python examples/data_preprocess/math.py --local_dir DIR [--source hub|modelscope|PATH]

PATH may be the original release (train/SUBJECT/NUMBER.json) or files train.* and test.*.
"""

import re
import sys
from pathlib import Path

if __name__ == "__main__":  # else `import math` would find this file
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from examples.data_preprocess.common import Problem, RawDataset, Row, main
from siirl.command_line import user_errors
from siirl.rewards.rules import last_boxed

WITHOUT_BRACES = re.compile(r"\\boxed\s+([^\s${}]+)")


def read_row(row: Row) -> Problem | None:
    r"""The answer is the content of the last \boxed{...}; a few solutions write \boxed 5."""
    answer = last_boxed(row["solution"])
    if answer is None:
        bare = WITHOUT_BRACES.findall(row["solution"])
        answer = bare[-1] if bare else None
    return Problem(row["problem"], answer.strip(), row["solution"]) if answer else None


DATASET = RawDataset(
    data_source="DigitalLearningGmbH/MATH-lighteval",
    hub_id="DigitalLearningGmbH/MATH-lighteval",
    modelscope_id="swift/MATH-lighteval",
    patterns=(
        "data/{split}-*.parquet",
        "default/{split}-*.parquet",
        "{split}*.*",
        "{split}/**/*.json",
    ),
    instruction=r"Think step by step, and give the final answer inside \boxed{}.",
    read_row=read_row,
)

if __name__ == "__main__":
    with user_errors() as outcome:
        main(DATASET, __doc__)
    sys.exit(outcome.code)
