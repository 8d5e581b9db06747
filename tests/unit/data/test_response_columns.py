"""Columns of given responses: the tokens that a rollout would have ended with, and what is refused by row."""

import re

import pytest
from fixtures_tiny import make_tiny_tokenizer, write_parquet
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.data.check_files import inspect_data
from siirl.data.dataset import PromptDataset
from siirl.data.loader import make_loader
from siirl.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def said(text, role="assistant"):
    return [{"role": role, "content": text}]


def given(tmp_path, tokenizer, rows, **options):
    options = {"response_keys": ("response",), "max_response_length": 4, **options}
    file = write_parquet(tmp_path / "given.parquet", [{"prompt": said("1+2=", "user")} | row for row in rows])
    return PromptDataset(str(file), tokenizer, **options)


def test_a_response_is_its_text_and_the_end_whether_it_is_a_string_or_a_message(tmp_path, tokenizer):
    rows = [{"text": "12", "chat": said("12")}, {"text": "", "chat": said("=")}]
    dataset = given(tmp_path, tokenizer, rows, response_keys=("text", "chat"))
    first, second = (
        [tokenizer.decode(ids) for ids in row["given_responses"]] for row in dataset.rows([0, 1])
    )
    assert first == ["12<eos>", "12<eos>"] and second == ["<eos>", "=<eos>"]
    assert dataset.rows([0])[0]["data_source"] == "no source"  # nothing scores


def test_prompt_and_response_are_the_conversation_of_the_chat_template(tmp_path, tokenizer):
    (row,) = given(tmp_path, tokenizer, [{"response": "3"}]).rows([0])
    whole = tokenizer.apply_chat_template([*said("1+2=", "user"), *said("3")])["input_ids"]
    assert [*row["prompt_ids"], *row["given_responses"][0]] == whole


def test_longer_responses_are_refused_by_row_dropped_or_cut(tmp_path, tokenizer):
    rows = [{"response": "123"}, {"response": "1234"}, {"response": said("1")[0]["content"]}]
    with pytest.raises(DataError, match=r"row 1: the response in column .response. has 5 tokens"):
        given(tmp_path, tokenizer, rows)
    kept = given(tmp_path, tokenizer, rows, filter_overlong=True)
    assert [row["sample_index"] for row in kept.rows(range(len(kept)))] == [0, 2]
    cut = given(tmp_path, tokenizer, rows, truncation="right").rows([1])[0]
    assert tokenizer.decode(cut["given_responses"][0]) == "1234"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"response": "1"}, {"response": None}], "row 1: column 'response' holds no response"),
        ([{"response": said("1")}, {"response": said("1") * 2}], "row 1: .* list of one message"),
        ([{"response": said("1")}, {"response": []}], "row 1: .* holds no response"),
    ],
)
def test_a_row_without_one_response_is_refused(tmp_path, tokenizer, rows, reason):
    with pytest.raises(DataError, match=reason):
        given(tmp_path, tokenizer, rows)


def test_a_message_of_another_role_is_refused(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"row 0: column 'response' holds a message of role 'user'"):
        given(tmp_path, tokenizer, [{"response": said("1", "user")}]).rows([0])


def config(file, *more: str):
    keys = ("actor_rollout_ref.rollout.name=dataset", "data.train_batch_size=1", "trainer.test_freq=-1")
    return load_config([*keys, f"data.train_files={file}", "data.val_files=/nowhere", *more])


def test_the_check_names_columns_that_are_missing_or_no_texts_and_needs_none_that_scores(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", [{"prompt": "1=", "responce": "1", "number": 3}])
    with pytest.raises(DataError, match=r"no column 'response' of responses.*Did you mean 'responce'"):
        inspect_data(config(file))
    with pytest.raises(DataError, match=r"column 'number' has type int64: a response is a string"):
        inspect_data(config(file, "data.response_keys=number"))
    assert inspect_data(config(file, "data.response_keys=responce")) == {"train": 1}
    both = "data.response_keys=[responce,prompt_]"
    with pytest.raises(DataError, match=re.escape("no column 'prompt_' of responses")):
        inspect_data(config(file, both, "actor_rollout_ref.rollout.n=2"))


def test_shards_without_a_row_have_the_column_too(tmp_path, tokenizer):
    file = write_parquet(tmp_path / "a.parquet", [{"prompt": "1=", "response": "1"}])
    loader = make_loader(config(file), "train", tokenizer, 0, 2)
    rows = loader.next_batch()
    assert len(rows) == 0 and "given_responses" in rows.keys()
