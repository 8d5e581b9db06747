"""GSM8K (grade-school problems): write train.parquet and test.parquet for training.

python examples/data_preprocess/gsm8k.py --local_dir DIR [--source hub|modelscope|PATH]
"""

import re
import sys
from pathlib import Path

if __name__ == "__main__":  # this folder has a math.py, which would hide the standard one
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from examples.data_preprocess.common import Problem, RawDataset, Row, main
from siirl.command_line import user_errors

ANSWER = re.compile(r"####\s*(-?[\d.,]*\d)")


def read_row(row: Row) -> Problem | None:
    """The answer is the number after "####", without its thousands separators."""
    found = ANSWER.search(row["answer"])
    return Problem(row["question"], found[1].replace(",", ""), row["answer"]) if found else None


DATASET = RawDataset(
    data_source="openai/gsm8k",
    hub_id="openai/gsm8k",
    modelscope_id="modelscope/gsm8k",
    patterns=("main/{split}-*.parquet", "{split}*.*"),
    instruction='Think step by step, and end with the answer, a number, after "####".',
    read_row=read_row,
)

if __name__ == "__main__":
    with user_errors() as outcome:
        main(DATASET, __doc__)
    sys.exit(outcome.code)
