"""The dataset scripts on small raw files: our dataset loads what they write, and our rewards score it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fixtures_tiny import make_tiny_tokenizer, write_parquet
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.data.check_files import inspect_data
from siirl.data.dataset import PromptDataset
from siirl.rewards.by_data_source import RewardChooser
from siirl.rewards.reward_registry import REWARDS

pytestmark = pytest.mark.heavy

SCRIPTS = Path(__file__).parents[3] / "examples" / "data_preprocess"

GSM8K = [
    {
        "question": "A boat carries 12 crates of 100 plums and 34 loose plums. How many plums is that?",
        "answer": "12 * 100 = <<12*100=1200>>1200 plums.\n1200 + 34 = <<1200+34=1234>>1234.\n#### 1,234",
    },
    {"question": "It was 3 degrees, and fell by 8. What is it now?", "answer": "3 - 8 = -5\n#### -5"},
    {"question": "Half of five?", "answer": "5 / 2 = 2.5\n#### 2.5"},
    {"question": "Nobody knows?", "answer": "There is no answer."},
]
MATH = [
    {
        "problem": r"Simplify $\frac{6}{8}$.",
        "solution": r"Divide by $2$: not $\boxed{6}$, but $\boxed{\frac{3}{\sqrt{16}}}$.",
        "level": "Level 1",
        "type": "Prealgebra",
    },
    {"problem": "Name the set of roots of $x^2=1$.", "solution": r"They are $\boxed{\{-1, 1\}}$."},
    {"problem": "What is $2+3$?", "solution": r"It is $\boxed 5$."},
    {"problem": "A proof?", "solution": "Obvious."},
]
DEEPSCALER = [
    {"problem": f"What is ${n}/7$?", "answer": rf"\frac{{{n}}}{{7}}", "solution": r"So \boxed{x}."}
    for n in range(20)
] + [
    {"problem": "Twenty-six?", "answer": "26", "solution": ""},
    {"problem": "?", "answer": "", "solution": ""},
]


def run_script(name: str, source: Path, out: Path, *more: str) -> subprocess.CompletedProcess:
    """Started as a user would, in another folder and without the package on the path."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, SCRIPTS / f"{name}.py", "--local_dir", out, "--source", source, *more]
    return subprocess.run(command, cwd=out.parent, env=env, capture_output=True, text=True, timeout=60)


def write_gsm8k(folder: Path) -> Path:
    write_parquet(folder / "main" / "train-00000-of-00001.parquet", GSM8K)
    write_parquet(folder / "main" / "test-00000-of-00001.parquet", GSM8K[:1])
    write_parquet(folder / "socratic" / "train-00000-of-00001.parquet", GSM8K * 2)
    return folder


def write_math(folder: Path) -> Path:
    for split, rows in (("train", MATH), ("test", MATH[:2])):
        for number, row in enumerate(rows):
            path = folder / split / "prealgebra" / f"{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(row))
    return folder


def write_deepscaler(folder: Path) -> Path:
    (folder / "deepscaler.json").write_text(json.dumps(DEEPSCALER))
    return folder


CASES = {
    "gsm8k": (write_gsm8k, ["1234", "-5", "2.5"], ["1234"]),
    "math": (write_math, [r"\frac{3}{\sqrt{16}}", r"\{-1, 1\}", "5"], [r"\frac{3}{\sqrt{16}}", r"\{-1, 1\}"]),
    "deepscaler": (
        write_deepscaler,
        [rf"\frac{{{n}}}{{7}}" for n in range(20) if n not in (0, 11)] + ["26"],
        [r"\frac{0}{7}", r"\frac{11}{7}"],
    ),
}


def reference_response(name: str, row: dict) -> str:
    """What a model would write that copies the reference solution."""
    if name == "deepscaler":
        return rf"So the answer is \boxed{{{row['reward_model']['ground_truth']}}}."
    return row["extra_info"]["answer"]


@pytest.mark.parametrize("name", CASES)
def test_raw_files_become_prompts_that_load_and_reference_solutions_that_score_1(name, tmp_path):
    write, train_answers, test_answers = CASES[name]
    source, out = tmp_path / "raw", tmp_path / "out"
    source.mkdir()
    done = run_script(name, write(source), out)
    assert done.returncode == 0, done.stderr
    assert "1 without an answer left out" in done.stdout
    cfg = load_config(
        [
            f"data.train_files={out}/train.parquet",
            f"data.val_files={out}/test.parquet",
            "data.train_batch_size=1",
        ]
    )
    assert inspect_data(cfg) == {"train": len(train_answers), "val": len(test_answers)}
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path / "tokenizer", vocab=128))
    loaded = PromptDataset.from_config(cfg, "train", tokenizer)
    rows = loaded.rows(range(len(loaded)))
    assert [row["ground_truth"] for row in rows] == train_answers
    assert all(row["prompt_length"] > 20 for row in rows)
    for split, answers in (("train", train_answers), ("test", test_answers)):
        table = pq.read_table(out / f"{split}.parquet").to_pylist()
        assert [row["reward_model"] for row in table] == [
            {"style": "rule", "ground_truth": a} for a in answers
        ]
        for row in table:
            assert row["extra_info"]["split"] == split and row["prompt"][0]["role"] == "user"
            ((reward, _),) = RewardChooser(cfg).parts(row["data_source"])
            truth = row["reward_model"]["ground_truth"]
            for response, score in ((reference_response(name, row), 1.0), ("no idea", 0.0)):
                assert REWARDS[reward].fn(row["data_source"], response, truth, {}) == score


@pytest.mark.real_starts  # a math.py beside the script would hide Python's own
def test_limits_cut_the_splits_and_json_lines_are_read(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    out = tmp_path / "out"
    done = run_script("gsm8k", tmp_path, out, "--train_limit", "2", "--test_limit", "1")
    assert done.returncode == 0, done.stderr
    assert [pq.read_metadata(out / f"{split}.parquet").num_rows for split in ("train", "test")] == [2, 1]


def test_a_wrong_source_is_one_message_that_names_what_was_looked_for(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for source, message in ((tmp_path / "absent", "neither hub"), (empty, "looked for data/train-*.parquet")):
        done = run_script("math", source, tmp_path / "out")
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
