"""What the dataset scripts share: raw rows from a hub or local files, and the columns that siirl reads.

Raw files are parquet, JSON (one list, or one object) or JSON lines. A script says where the rows of a split
lie and how one of them becomes a Problem; the columns are those of docs/data.md.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from siirl.errors import DataError
from siirl.model_files.hub import HubRepo, fetch

Row = dict[str, Any]
ENDINGS = (".parquet", ".jsonl", ".json")


@dataclass(frozen=True)
class Problem:
    """One problem of a dataset. solution: the worked solution, kept in extra_info."""

    question: str
    answer: str
    solution: str


@dataclass(frozen=True)
class RawDataset:
    """Where a dataset lies and what its rows mean.

    data_source: the value of that column, which selects the reward function. patterns: globs of the files of
    a split below the repository or folder, with {split}; the first that matches anything counts. read_row:
    gives None for a row without an answer. held_out: rows of the test split, if the dataset has none.
    """

    data_source: str
    hub_id: str
    modelscope_id: str
    patterns: tuple[str, ...]
    instruction: str
    read_row: Callable[[Row], Problem | None]
    held_out: int = 0


def main(dataset: RawDataset, about: str) -> None:
    """Read the arguments, and write train.parquet and test.parquet to --local_dir."""
    args = _arguments(about)
    splits = read_splits(dataset, args.source, args.dataset_id)
    limits = {"train": args.train_limit, "test": args.test_limit}
    folder = Path(args.local_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for split, raw in splits.items():
        problems = map(dataset.read_row, raw)
        rows = [as_row(dataset, problem, split, i) for i, problem in enumerate(problems) if problem]
        skipped = len(raw) - len(rows)
        rows = rows[: limits[split]]
        if not rows:
            raise DataError(
                f"the {split} split has {len(raw)} rows, and none with an answer. Check --source."
            )
        path = folder / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows)} rows" + (f"; {skipped} without an answer left out" if skipped else ""))


def read_splits(dataset: RawDataset, source: str, dataset_id: str | None = None) -> dict[str, list[Row]]:
    """{"train": raw rows, "test": raw rows} from "hub", "modelscope", or a local folder or file."""
    if source in ("hub", "modelscope"):
        name = dataset_id or (dataset.modelscope_id if source == "modelscope" else dataset.hub_id)
        wanted = [pattern.format(split=split) for pattern in dataset.patterns for split in ("train", "test")]
        root = fetch(HubRepo(name, "dataset"), wanted, modelscope=source == "modelscope")
    else:
        root = Path(source).expanduser()
    if not root.exists():
        raise DataError(
            f"--source {source} is neither hub, nor modelscope, nor a folder or file that exists."
        )
    if dataset.held_out:
        return hold_out(_read_all(_files(root, dataset.patterns, "train")), dataset.held_out)
    return {split: _read_all(_files(root, dataset.patterns, split)) for split in ("train", "test")}


def hold_out(rows: list[Row], count: int) -> dict[str, list[Row]]:
    """A test split of evenly spaced rows, at most a tenth of all: the same for every run."""
    count = max(1, min(count, len(rows) // 10))
    chosen = {index * len(rows) // count for index in range(count)}
    return {
        "train": [row for index, row in enumerate(rows) if index not in chosen],
        "test": [row for index, row in enumerate(rows) if index in chosen],
    }


def as_row(dataset: RawDataset, problem: Problem, split: str, index: int) -> Row:
    """The columns of one prompt."""
    return {
        "data_source": dataset.data_source,
        "prompt": [{"role": "user", "content": f"{problem.question.strip()} {dataset.instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {
            "split": split,
            "index": index,
            "question": problem.question,
            "answer": problem.solution,
        },
    }


def _arguments(about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--local_dir", required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument(
        "--source", default="hub", help="hub (Hugging Face), modelscope, or a folder or file [hub]"
    )
    parser.add_argument("--dataset_id", help="another repository of the same format on the hub")
    parser.add_argument("--train_limit", type=int, help="at most so many training rows")
    parser.add_argument("--test_limit", type=int, help="at most so many test rows")
    return parser.parse_args()


def _files(root: Path, patterns: Iterable[str], split: str) -> list[Path]:
    if root.is_file():
        return [root]
    tried = [pattern.format(split=split) for pattern in patterns]
    for pattern in tried:
        found = [path for path in sorted(root.glob(pattern)) if path.suffix in ENDINGS]
        if found:
            return found
    raise DataError(
        f"{root} has no files of the {split} split: looked for {', '.join(tried)}. Check --source."
    )


def _read_all(files: Iterable[Path]) -> list[Row]:
    return [row for path in files for row in _read(path)]


def _read(path: Path) -> list[Row]:
    try:
        if path.suffix == ".parquet":
            return pq.read_table(path).to_pylist()
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        content = json.loads(text)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}. Download it again.") from error
    return content if isinstance(content, list) else [content]
