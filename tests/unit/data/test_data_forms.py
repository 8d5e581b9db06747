"""Files and rows in the forms in which people have them: read as what they mean, or refused with the fix."""

import bz2
import csv
import datetime
import decimal
import gzip
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fixtures_tiny import make_tiny_tokenizer, write_parquet
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.data.check_files import inspect_data
from siirl.data.curriculum import check_difficulties
from siirl.data.dataset import PromptDataset
from siirl.data.row_checks import count_rows
from siirl.data.rows import make_rows, objects
from siirl.errors import DataError
from siirl.rewards.by_data_source import RewardChooser
from siirl.rewards.reward_registry import REWARDS

CHAT = [{"role": "user", "content": "1+2="}]
ROWS = [
    {"prompt": CHAT, "data_source": "math", "reward_model": {"ground_truth": "3"}, "extra_info": {"n": 1}},
    {
        "prompt": [{"role": "system", "content": "7"}, {"role": "user", "content": "4+5="}],
        "data_source": "gsm8k",
        "reward_model": {"ground_truth": "9"},
        "extra_info": {"n": 2},
    },
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def config(*more):
    few = ["data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    return load_config([*few, "trainer.val_before_train=False", "trainer.test_freq=-1", *more])


def checked(file, *more):
    """What check says of the rows of a file of training prompts."""
    cfg = config(f"data.train_files={file}", *more)
    inspect_data(cfg)
    (counts,) = count_rows(cfg, RewardChooser(cfg).check_truth)
    return cfg, counts


def read(file, tokenizer, *more):
    """The rows of a file that check has passed."""
    cfg, counts = checked(file, *more)
    dataset = PromptDataset.from_config(cfg, "train", tokenizer)
    assert len(dataset) == sum(counts.rows.values())
    return dataset.rows(range(len(dataset)))


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_arrow_stream(path, rows):
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table)


def as_csv(path, rows, delimiter=","):
    cells = [
        {name: json.dumps(v) if isinstance(v, list | dict) else v for name, v in row.items()} for row in rows
    ]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(cells[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(cells)


def saved_by_datasets(path, rows):
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(str(path), num_shards=2)


JSON_CELLS = "data.json_columns=[prompt,extra_info]"
WRITERS = {
    "rows.parquet": write_parquet,
    "rows.jsonl": lambda path, rows: path.write_text(lines(rows)),
    "rows.ndjson": lambda path, rows: path.write_text("\n" + lines(rows) + "\n\n"),
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "lines.json": lambda path, rows: path.write_text(lines(rows)),
    "named.json": lambda path, rows: path.write_text(json.dumps({"version": 1, "data": rows})),
    "bom.jsonl": lambda path, rows: path.write_text(lines(rows), encoding="utf-8-sig"),
    "rows.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows).encode())),
    "rows.json.bz2": lambda path, rows: path.write_bytes(bz2.compress(json.dumps(rows).encode())),
    "rows.csv": as_csv,
    "rows.tsv": lambda path, rows: as_csv(path, rows, "\t"),
    "stream.arrow": as_arrow_stream,
    "file.arrow": lambda path, rows: pa.feather.write_feather(pa.Table.from_pylist(rows), str(path)),
    "saved": saved_by_datasets,
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_rows_are_read_from_files_of_every_format(tmp_path, tokenizer, name):
    import pyarrow.feather  # noqa: F401 - pa.feather

    WRITERS[name](tmp_path / name, ROWS)
    more = [JSON_CELLS] if name.endswith(("csv", "tsv")) else []
    rows = read(tmp_path / name, tokenizer, *more)
    assert [row["raw_prompt"] for row in rows] == [row["prompt"] for row in ROWS]
    assert [row["ground_truth"] for row in rows] == ["3", "9"]
    assert [row["extra_info"] for row in rows] == [{"n": 1}, {"n": 2}]
    assert [row["data_source"] for row in rows] == ["math", "gsm8k"]


def test_a_pattern_or_a_folder_stands_for_its_files_in_the_order_of_their_names(tmp_path, tokenizer):
    for number in (2, 0, 1):
        row = {**ROWS[0], "extra_info": {"n": number}}
        (tmp_path / f"train-{number}.jsonl").write_text(lines([row]))
    for name in (tmp_path / "train-*.jsonl", tmp_path, tmp_path / "train-[0-9].jsonl"):
        assert [row["extra_info"]["n"] for row in read(name, tokenizer)] == [0, 1, 2]
    (tmp_path / "test-0.jsonl").write_text(lines(ROWS))
    with pytest.raises(DataError, match=r"files of several splits: test, train\. Name one of them"):
        inspect_data(config(f"data.train_files={tmp_path}"))
    with pytest.raises(DataError, match=r"no dataset file matches .*valid\*.*Files there: test-0"):
        inspect_data(config(f"data.train_files={tmp_path}/valid*.jsonl"))


def test_a_folder_of_several_data_sets_is_refused_with_the_name_of_one(tmp_path):
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS)}).save_to_disk(
        str(tmp_path / "d")
    )
    with pytest.raises(DataError, match=r"several data sets: train, test\. Name one, as .*/d/train"):
        inspect_data(config(f"data.train_files={tmp_path}/d"))
    assert checked(tmp_path / "d" / "train")[1].rows == {"math": 1, "gsm8k": 1}


OTHER_NAMES = {
    "question and answer": ({"question": "1+2=", "answer": 3}, "{prompt: question, ground_truth: answer}"),
    "a name within": ({"prompt": "1+2=", "meta": {"key": {"answer": 3}}}, "{ground_truth: meta.key.answer}"),
    "a name with a dot": ({"prompt": "1+2=", "meta.answer": 3}, "{ground_truth: meta.answer}"),
    "top level": ({"prompt": "1+2=", "ground_truth": 3}, "{}"),
    "beside a style": ({"prompt": "1+2=", "reward_model": {"style": "rule"}, "ground_truth": 3}, "{}"),
    "JSON text": ({"prompt": "1+2=", "reward_model": '{"style": "rule", "ground_truth": 3}'}, "{}"),
    "a list": ({"prompt": "1+2=", "answers": [3, 4]}, "{ground_truth: answers}"),
}


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_columns_of_other_names_are_read(tmp_path, tokenizer, name, ending):
    row, columns = OTHER_NAMES[name]
    file = tmp_path / f"rows.{ending}"
    WRITERS[file.name](file, [row])
    (got,) = read(file, tokenizer, f"data.columns={columns}", "data.data_source=math")
    assert got["ground_truth"] == ([3, 4] if name == "a list" else 3)
    assert (got["data_source"], got["raw_prompt"][0]["content"]) == ("math", "1+2=")


def test_the_right_answer_may_stand_within_json_text(tmp_path, tokenizer):
    as_csv(tmp_path / "a.csv", [{"prompt": "1+2=", "meta": {"answer": "3", "n": [1]}, "data_source": "math"}])
    keys = ["data.columns={ground_truth: meta.answer, extra_info: meta}", "data.json_columns=[meta]"]
    (row,) = read(tmp_path / "a.csv", tokenizer, *keys)
    assert (row["ground_truth"], row["extra_info"]) == ("3", {"answer": "3", "n": [1]})


WRONG_NAMES = [
    (
        "data.columns={ground_truth: anwser}",
        "no column 'anwser', which data.columns.ground_truth .*'answer'",
    ),
    ("data.columns={ground_truth: meta.label}", "column 'meta' has no 'label', it has answer"),
    ("data.columns={extra_info: info}", "no column 'info', which data.columns.extra_info names"),
    ("data.json_columns=[nothing]", "no column 'nothing', which data.json_columns names"),
    ("data.columns={prompt: qestion}", "no column 'qestion', which data.prompt_key names.*'question'"),
]


@pytest.mark.parametrize(("key", "message"), WRONG_NAMES)
def test_a_column_that_is_not_there_is_named_with_the_nearest(tmp_path, key, message):
    row = {"question": "1", "answer": "3", "meta": {"answer": 1}, "data_source": "math", "prompt": "1"}
    with pytest.raises(DataError, match=message):
        checked(write_parquet(tmp_path / "rows.parquet", [row]), key)


def test_a_message_lists_the_columns_that_the_file_has(tmp_path):
    """Not those that the configuration makes: the data source of all rows, the boxed right answer."""
    file = write_parquet(tmp_path / "rows.parquet", [{"question": "1", "answer": "3"}])
    with pytest.raises(DataError, match=r"it has question, answer\. Name the column of the prompts"):
        checked(file, "data.data_source=math", "data.columns={ground_truth: answer}")


CHATS = {
    "parts": [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2="}]}],
    "ShareGPT": [{"from": "system", "value": "7"}, {"from": "human", "value": "1+2="}],
    "a map of messages": {"messages": CHAT},
    "a map of a conversation": {"conversations": [{"from": "human", "value": "1+2="}]},
    "other roles": [{"role": "human", "content": "1+2="}],
    "other names of the content": [{"from": "user", "text": "1+2="}],
    "roles and values": [{"role": "user", "value": "1+2="}],
    "text": "1+2=",
}
READ_AS = {"parts": CHAT, "ShareGPT": [{"role": "system", "content": "7"}, *CHAT]}


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
@pytest.mark.parametrize("name", CHATS)
def test_chats_are_read_in_the_forms_that_people_have(tmp_path, tokenizer, name, ending):
    if ending == "parquet" and name not in ("parts", "ShareGPT", "text", "other roles"):
        pytest.skip("another struct is refused by its type")
    file = tmp_path / f"rows.{ending}"
    WRITERS[file.name](file, [{**ROWS[0], "prompt": CHATS[name]}])
    (row,) = read(file, tokenizer)
    assert row["raw_prompt"] == READ_AS.get(name, CHAT)


BAD_CHATS = {
    "JSON text": (
        json.dumps(CHAT),
        r"row 0: .* is the JSON text.*json_columns=\[prompt\]",
    ),
    "Python text": (str(CHAT), r"is a chat as Python prints it: .*json\.dumps.*json_columns=\[prompt\]"),
    "answered": (
        [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}],
        "ends with the answer",
    ),
    "unknown speaker": (
        [{"from": "narrator", "value": "1"}],
        "message 1 is from 'narrator'",
    ),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "part of type",
    ),
    "no place for images": ([{"role": "user", "content": [{"type": "image"}]}], "dataset_type=vlm"),
    "no content": ([{"role": "user", "content": None}], "message 1, of user, has no content"),
    "no role": ([{"role": None, "content": "1"}], "message 1 has no role"),
    "nothing": ([], "row 0: the prompt in column 'prompt' is empty"),
    "no text": ("", "row 0: the prompt in column 'prompt' is empty"),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_a_chat_that_would_not_be_read_as_meant_is_a_finding_of_check(tmp_path, name):
    prompt, message = BAD_CHATS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(lines([{**ROWS[0], "prompt": prompt}]))
    with pytest.raises(DataError, match=message):
        checked(path)
    if name not in ("an image", "no place for images", "nothing", "no role", "no content"):
        return  # what Arrow's types do not hold
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    if name in ("nothing", "no role", "no content"):
        table = pa.table({"prompt": pa.array([prompt], kind), "data_source": ["math"], "ground_truth": ["3"]})
        pq.write_table(table, tmp_path / "rows.parquet")
        with pytest.raises(DataError, match=message):
            checked(tmp_path / "rows.parquet")


def test_text_that_only_looks_like_a_chat_is_a_prompt(tmp_path, tokenizer):
    texts = ["[1, 2, 3]", '[{"role": "user"', "{'role'}", '[{"x": 1}]', '{"content": 1}']
    rows = [{**ROWS[0], "prompt": text} for text in texts]
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    got = read(tmp_path / "rows.jsonl", tokenizer)
    assert [row["raw_prompt"][0]["content"] for row in got] == texts


def call(**arguments):
    return [{"type": "function", "function": {"name": "f", "arguments": arguments}}]


def test_nulls_that_a_column_of_structs_fills_in_do_not_reach_the_prompt_at_any_depth(tmp_path, tokenizer):
    def chat(*calls):
        return [*CHAT, {"role": "assistant", "content": "", "tool_calls": list(calls[0])}, *CHAT]

    prompts = [chat(call(a=1)), chat(call(b={"c": [1, 2]}))]
    file = write_parquet(tmp_path / "rows.parquet", [{**ROWS[0], "prompt": prompt} for prompt in prompts])
    assert [row["raw_prompt"] for row in read(file, tokenizer)] == prompts


@pytest.mark.parametrize("text", ["7", "7.00", "7.000", "7E+0"])
@pytest.mark.parametrize("nested", [True, False], ids=["in reward_model", "a column"])
@pytest.mark.parametrize("listed", [True, False], ids=["a list", "one"])
def test_a_decimal_that_a_file_holds_is_right_for_its_number(tmp_path, tokenizer, text, nested, listed):
    truth = [decimal.Decimal(text)] if listed else decimal.Decimal(text)
    where = {"reward_model": {"ground_truth": truth}} if nested else {"ground_truth": truth}
    columns = {name: value for name, value in ROWS[0].items() if name != "reward_model"}
    (row,) = read(write_parquet(tmp_path / "a.parquet", [columns | where]), tokenizer)
    rows = make_rows({"row_id": torch.zeros(1).long(), "ground_truth": [row["ground_truth"]]})
    (found,) = objects(rows, "ground_truth")  # as it has travelled
    for name, said in {"exact_match": "7", "search_qa": "<answer>7</answer>", "math": r"\boxed{7}"}.items():
        assert REWARDS[name].fn("s", said, found, None) == 1


def test_dates_times_and_decimals_of_extra_info_are_json(tmp_path, tokenizer):
    when = datetime.datetime(2024, 5, 1, 12, 30)
    info = {
        "at": when,
        "day": when.date(),
        "cost": decimal.Decimal("1.50"),
        "took": datetime.timedelta(0, 90),
    }
    (row,) = read(write_parquet(tmp_path / "a.parquet", [{**ROWS[0], "extra_info": info}]), tokenizer)
    assert row["extra_info"] == {
        "at": "2024-05-01T12:30:00",
        "day": "2024-05-01",
        "cost": 1.5,
        "took": 90.0,
    }
    json.dumps(row["extra_info"])


def test_a_curriculum_is_read_from_files_of_json(tmp_path):
    (tmp_path / "rows.jsonl").write_text(lines(ROWS))
    check_difficulties(config(f"data.train_files={tmp_path}/rows.jsonl", "data.curriculum_key=n"))
    with pytest.raises(DataError, match="has None under this name"):
        check_difficulties(config(f"data.train_files={tmp_path}/rows.jsonl", "data.curriculum_key=m"))


NO_TRUTHS = {
    "null": None,
    "an empty text": " ",
    "NaN": float("nan"),
    "nothing": [],
    "a list of nothing": [None],
}


@pytest.mark.parametrize("name", NO_TRUTHS)
def test_rows_without_ground_truth_are_a_finding_by_row_and_source(tmp_path, name):
    truth = NO_TRUTHS[name]
    good = 1.5 if name == "NaN" else [2] if isinstance(truth, list) else "2"
    rows = [{**ROWS[0], "reward_model": {"ground_truth": value}} for value in (good, truth, good, truth)]
    file = write_parquet(tmp_path / "rows.parquet", rows)
    with pytest.raises(DataError, match=r"row 1, of data source 'math': .*\(as in 1 other rows\)"):
        checked(file)
    cfg, _ = checked(file, "custom_reward_function.path=mine.py")  # whose affair it is
    (counts,) = count_rows(cfg, None)
    assert str(counts) == "train: 4 rows (math 4); 2 without ground truth (math 2)"


ODD_FILES = {
    "columns.json": json.dumps(
        {"prompt": ["1+2="] * 2, "data_source": ["math"] * 2, "ground_truth": ["3", "4"]}
    ),
    "pandas.json": json.dumps(
        {name: {"0": value, "1": value} for name, value in {"prompt": "1+2=", "data_source": "math"}.items()}
        | {"ground_truth": {"0": "3", "1": "4"}}
    ),
    "bom.csv": "\ufeffprompt,data_source,ground_truth\r\n1+2=,math,3\r\n1+2=,math,4\r\n",
    "old.csv": "prompt,data_source,ground_truth\r1+2=,math,3\r1+2=,math,4\r",
    "crlf.jsonl": "".join(
        json.dumps({"prompt": "1+2=", "data_source": "math", "ground_truth": truth}) + "\r\n"
        for truth in "34"
    ),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_rows_are_read_whatever_programs_write_around_them(tmp_path, tokenizer, name):
    (tmp_path / name).write_bytes(ODD_FILES[name].encode())
    rows = read(tmp_path / name, tokenizer)
    assert [row["raw_prompt"] for row in rows] == [CHAT] * 2
    assert [row["ground_truth"] for row in rows] == ["3", "4"]


def test_numbers_of_32_bits_are_read_as_they_are_written_at_any_depth(tmp_path, tokenizer):
    cells = [7.1, 0.1, None]
    single = pa.array(cells, pa.float32())
    columns = {
        "prompt": ["1+2="] * 3,
        "data_source": ["math"] * 3,
        "ground_truth": pa.array(["3", "4", "5"]).dictionary_encode(),
        "extra_info": pa.StructArray.from_arrays(
            [single, pa.array([[7.1]] * 3, pa.list_(pa.float32()))], ["a", "b"]
        ),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    rows = read(tmp_path / "rows.parquet", tokenizer)
    assert [row["extra_info"] for row in rows] == [{"a": cell, "b": [7.1]} for cell in cells]


@pytest.mark.parametrize("sources", [[5, 5], [["math"], ["math"]], ["math", 5]], ids=str)
def test_a_data_source_that_is_no_text_is_a_finding(tmp_path, sources):
    rows = [{"prompt": "1+2=", "data_source": source, "ground_truth": "3"} for source in sources]
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    with pytest.raises(DataError, match=r"'data_source' has .*the data source of a row is a text"):
        checked(tmp_path / "rows.jsonl")


def test_rows_are_counted_by_source_in_each_step_as_check_counts_those_of_the_files(tmp_path, tokenizer):
    longer = [{"role": "user", "content": "1+2=" * 9}]
    rows = [ROWS[0], {**ROWS[1], "prompt": longer}, {**ROWS[1], "reward_model": {"ground_truth": ""}}]
    file = write_parquet(tmp_path / "rows.parquet", rows)
    keys = ["custom_reward_function.path=mine.py", "data.max_prompt_length=20"]

    def counted(*more):
        cfg = config(f"data.train_files={file}", *keys, *more)
        (counts,) = count_rows(cfg, None)
        assert counts.without_truth == Counter(gsm8k=1, math=0)
        dataset = PromptDataset.from_config(cfg, "train", tokenizer)
        for _ in range(2):  # each time those that were read since
            dataset.rows(range(len(dataset)))
            told = dataset.drain_counts()
        return told

    seen = {"math/prompts": 1, "gsm8k/prompts": 2, "gsm8k/without_truth": 1}
    assert counted("data.truncation=left") == seen | {"gsm8k/truncated": 1}
    dropped = seen | {"gsm8k/prompts": 1, "gsm8k/dropped": 1}
    assert counted("data.filter_overlong_prompts=True") == dropped


def test_a_list_of_truths_leaves_out_those_that_are_missing():
    from siirl.rewards.reward_registry import accepted_answers

    assert accepted_answers([None, 2, float("nan")]) == ["2"]


BAD_FILES = {
    "a.jsonl": ('{"prompt": "1"}\n{"prompt": \n', r"a\.jsonl, line 2 is no JSON"),
    "b.jsonl": ('"1"\n', "line 1 is str: each line is one object"),
    "c.json": ("[1, 2]", "is no list of objects"),
    "d.json": ("[{", "is no JSON"),
    "e.jsonl": (
        '{"prompt": "\\ud800", "data_source": "math"}\n',
        "row 0: column 'prompt' holds half a char",
    ),
    "f.csv": ("", "cannot be read as csv"),
    "g.csv": ("prompt,data_source\n1\n", "cannot be read as csv"),
    "h.arrow": ("xyz", "cannot be read as arrow"),
    "i.jsonl": ("", "has no rows: it is empty"),
    "j.json": ("[]", "has no rows: it is empty"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_damaged_file_is_refused_by_its_place(tmp_path, name):
    text, message = BAD_FILES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        checked(tmp_path / name)


def test_a_cell_that_is_no_json_is_refused_by_its_row(tmp_path):
    rows = [{**ROWS[0], "prompt": text} for text in (json.dumps(CHAT), "[{")]
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: the prompt in column 'prompt' is no JSON"):
        checked(tmp_path / "rows.jsonl", "data.json_columns=[prompt]")


def test_columns_of_categories_and_views_are_read_as_their_values(tmp_path, tokenizer):
    for kind in (pa.dictionary(pa.int32(), pa.string()), pa.large_string()):
        table = pa.Table.from_pylist([{**ROWS[0], "prompt": "1+2="}])
        table = table.set_column(0, "prompt", table["prompt"].cast(kind))
        pq.write_table(table, tmp_path / "rows.parquet")
        assert read(tmp_path / "rows.parquet", tokenizer)[0]["raw_prompt"] == CHAT


def test_prompts_of_json_that_are_too_long_are_found_whatever_their_form(tmp_path, tokenizer):
    chats = [[{"from": "human", "value": "1" * length}] for length in (3, 40)]
    (tmp_path / "rows.jsonl").write_text(lines([{**ROWS[0], "prompt": chat} for chat in chats]))
    with pytest.raises(DataError, match="row 1: the prompt has 43 tokens"):
        PromptDataset(str(tmp_path / "rows.jsonl"), tokenizer, max_prompt_length=20)
    kept = PromptDataset(str(tmp_path / "rows.jsonl"), tokenizer, max_prompt_length=20, filter_overlong=True)
    assert len(kept) == 1


def test_a_response_that_is_written_with_its_end_gets_no_second_one(tmp_path, tokenizer):
    rows = [{"prompt": CHAT, "response": text} for text in ("3<eos>", "3")]
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    dataset = PromptDataset(
        str(tmp_path / "rows.jsonl"),
        tokenizer,
        response_keys=("response",),
        max_response_length=9,
    )
    assert [tokenizer.decode(row["given_responses"][0]) for row in dataset.rows([0, 1])] == [
        "3<eos>",
        "3<eos>",
    ]


def test_check_counts_prompts_that_are_too_long_by_source_as_the_run_does(tmp_path, tokenizer):
    texts = ["1" * length for length in (3, 40, 9, 50)]
    rows = [{**ROWS[n % 2], "prompt": [{"role": "user", "content": text}]} for n, text in enumerate(texts)]
    model = make_tiny_tokenizer(tmp_path / "model")
    keys = [f"actor_rollout_ref.model.path={model}", "data.max_prompt_length=20"]
    for file in (write_parquet(tmp_path / "rows.parquet", rows), tmp_path / "rows.jsonl"):
        if file.suffix == ".jsonl":
            file.write_text(lines(rows))
        with pytest.raises(DataError, match=r"row 1: the prompt has 43 tokens.*1 other rows.*to 53, drop"):
            checked(file, *keys)
        cfg, counts = checked(file, *keys, "data.filter_overlong_prompts=True")
        assert str(counts).endswith("rows (math 2, gsm8k 2); 2 dropped as too long (gsm8k 2)")
        assert len(PromptDataset.from_config(cfg, "train", tokenizer)) == 2
        _, counts = checked(file, *keys, "data.truncation=left")
        assert str(counts).endswith("; 2 cut as too long (gsm8k 2)")
    few = ["data.train_batch_size=3", "actor_rollout_ref.actor.ppo_mini_batch_size=3"]
    with pytest.raises(DataError, match=r"drops 2 of 4 prompts of data\.train_files.*2 are left, and 3 are"):
        checked(file, *keys, *few, "data.filter_overlong_prompts=True")


def test_check_finds_prompts_that_the_chat_template_needs_and_does_not_have(tmp_path):
    model = make_tiny_tokenizer(tmp_path / "model", chat_template=False)
    keys = [f"actor_rollout_ref.model.path={model}", "data.max_prompt_length=3"]
    with pytest.raises(DataError, match="has no chat template"):
        checked(write_parquet(tmp_path / "rows.parquet", ROWS), *keys)
