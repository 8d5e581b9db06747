r"""DeepScaleR (40,000 competition problems): write train.parquet and test.parquet for training.

python examples/data_preprocess/deepscaler.py --local_dir DIR [--source hub|modelscope|PATH]

The dataset has no test split: 500 evenly spaced problems, a tenth at most, are held out.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # this folder has a math.py, which would hide the standard one
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from examples.data_preprocess.common import Problem, RawDataset, Row, main
from siirl.command_line import user_errors


def read_row(row: Row) -> Problem | None:
    """The answer has a column of its own."""
    answer = str(row["answer"] if row["answer"] is not None else "").strip()
    return Problem(row["problem"], answer, row.get("solution") or "") if answer else None


DATASET = RawDataset(
    data_source="agentica-org/DeepScaleR-Preview-Dataset",
    hub_id="agentica-org/DeepScaleR-Preview-Dataset",
    modelscope_id="agentica-org/DeepScaleR-Preview-Dataset",
    patterns=("deepscaler.json", "data/{split}-*.parquet", "{split}*.*"),
    instruction=r"Think step by step, and give the final answer inside \boxed{}.",
    read_row=read_row,
    held_out=500,
)

if __name__ == "__main__":
    with user_errors() as outcome:
        main(DATASET, __doc__)
    sys.exit(outcome.code)
