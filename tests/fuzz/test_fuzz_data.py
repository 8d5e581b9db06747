"""Whatever a dataset file or recorded rollouts hold: rows, or an error in words that names the file."""

import datetime
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fixtures_tiny import arithmetic_rows, make_tiny_tokenizer
from fuzzing import NASTY, NUMBERS, PLAIN, WORDS, cases, command, explore, mangled
from hypothesis import strategies as st
from transformers import AutoTokenizer

from siirl.data.dataset import PromptDataset
from siirl.data.replayed_rows import conditions, record, recorded_rows
from siirl.data.rows import make_rows
from siirl.errors import DataError, UserError

pytestmark = pytest.mark.heavy
ROLES = st.sampled_from(["user", "system", "assistant", "tool", "", "nobody"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES | st.none(), "content": WORDS | st.none()}), max_size=3
)
ODD = st.one_of(
    st.binary(max_size=4),
    st.datetimes(max_value=datetime.datetime(2200, 1, 1)),
    st.lists(NUMBERS, max_size=2),
    st.fixed_dictionaries({"ground_truth": WORDS | NUMBERS | st.none()}),
    MESSAGES,
    PLAIN,
)
COLUMNS = {
    "prompt": st.one_of(MESSAGES, WORDS, ODD),
    "data_source": st.one_of(st.just("openai/gsm8k"), WORDS, ODD),
    "reward_model": st.one_of(st.fixed_dictionaries({"ground_truth": WORDS}), ODD),
    "extra_info": st.one_of(st.dictionaries(st.sampled_from("ab"), NUMBERS | WORDS, max_size=2), ODD),
}


def written(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


@st.composite
def columns(draw) -> bytes:
    """A file with a column or two of its own kind; the others as they should be."""
    rows = arithmetic_rows(8)
    made: dict[str, pa.Array] = {name: pa.array([row[name] for row in rows]) for name in rows[0]}
    for name in draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=2)):
        one = COLUMNS[name]
        values = draw(st.one_of(st.lists(one, min_size=8, max_size=8), one.map(lambda value: [value] * 8)))
        try:
            column = pa.array(values)
            made[name] = column.dictionary_encode() if draw(st.integers(0, 5)) == 0 else column
            written(pa.table(made))
        except (pa.ArrowException, OverflowError, ValueError, TypeError):  # pyarrow writes no such column
            made[name] = pa.array([str(value) for value in values])
    if draw(st.integers(0, 9)) == 0:
        made.pop(draw(st.sampled_from(sorted(made))))
    return written(pa.table(made))


GOOD = written(pa.Table.from_pylist(arithmetic_rows(8)))
JSON_LINES = b'{"prompt": "1+1=", "data_source": "a"}\n'
FILES = st.one_of(
    columns(), columns(), mangled(GOOD), mangled(JSON_LINES), st.sampled_from(NASTY).map(str.encode)
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@cases(30)
def test_any_dataset_gives_rows_or_an_error_in_words(num_cases, good, deep, tokenizer):
    path = Path(deep) / "rows.parquet"

    def check(content: bytes, by_command: bool) -> None:
        path.write_bytes(content)
        if by_command:
            command(["check", f"--config-name={good}", f"data.train_files={path}"], deep)
            return
        try:
            dataset = PromptDataset(path.as_posix(), tokenizer, max_prompt_length=64, truncation="left")
            rows = dataset.rows(range(len(dataset)))
        except UserError as error:
            assert str(path) in str(error)
        else:
            assert rows and all(len(row["prompt_ids"]) <= 64 for row in rows)

    explore(num_cases, check, FILES, st.sampled_from([True, *[False] * 9]))


N = 2


def recorded(folder: Path, made_under: dict[str, str]) -> tuple[Path, object]:
    """Rows of two prompts, as a part of a step; and what a rank asks for."""
    prompts = [[7, 8], [7, 8], [9], [9]]
    rows = make_rows(
        {
            "row_id": [0, 1, 2, 3],
            "group_id": [0, 0, 1, 1],
            "prompt_ids": prompts,
            "prompt_length": [len(ids) for ids in prompts],
            "raw_prompt": [[{"role": "user", "content": "q"}]] * 4,
            "ground_truth": ["1"] * 4,
            "response_ids": [[10], [11, 12], [13], [14]],
            "response_length": [1, 2, 1, 1],
            "response_mask": [[1], [1, 1], [1], [1]],
            "finish_reason": [0, 0, 0, 0],
            "weight_version": [[1], [1, 1], [1], [1]],
            "rollout_log_prob": [[-1.0], [-1.0, -2.0], [-1.0], [-1.0]],
        }
    )
    record(folder, rows, made_under)
    (part,) = folder.glob("*.safetensors")
    return part, rows[torch.tensor([0, 2])]


@cases(120)
def test_any_recorded_rollouts_give_rows_or_an_error_in_words(num_cases, tokenizer, deep):
    under = conditions(tokenizer, N, 1.0)
    part, prompts = recorded(Path(deep) / "agent_0" / "step_1", under)

    def check(content: bytes) -> None:
        part.write_bytes(content)
        try:
            columns = recorded_rows(part.parent, prompts, N, under)
        except UserError as error:
            assert str(part.parent) in str(error)
        else:
            assert len(columns["response_ids"]) == 2 * N

    explore(num_cases, check, st.one_of(mangled(part.read_bytes()), st.binary(max_size=64)))


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        (b'"finish_reason":', b'"finish reason":'),
        (b'"row_id":', b'"row_iD":'),
        (b'"group_id":{"dtype":"I64"', b'"group_id":{"dtype":"F64"'),
        (b'"rollout_log_prob":{"dtype":"F32"', b'"rollout_log_prob":{"dtype":"I32"'),
    ],
)
def test_recorded_rollouts_without_a_column_or_with_another_kind_of_it_are_refused(
    written, instead, tokenizer, tmp_path
):
    """A byte of the header is another one."""
    under = conditions(tokenizer, N, 1.0)
    part, prompts = recorded(tmp_path / "agent_0" / "step_1", under)
    content = part.read_bytes()
    assert content.count(written) == 1
    part.write_bytes(content.replace(written, instead))
    with pytest.raises(DataError, match=f"{part} cannot be read.*Record the step again"):
        recorded_rows(part.parent, prompts, N, under)
