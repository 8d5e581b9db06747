import logging
import random

import pytest
from fixtures_tiny import arithmetic_rows, make_arithmetic_parquet, make_tiny_tokenizer, write_parquet
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from siirl.config import load_config
from siirl.data import dataset as datasets
from siirl.data.chat import encode_prompts, load_tokenizer
from siirl.data.check_files import inspect_data, inspect_files
from siirl.data.dataset import PromptDataset
from siirl.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def chat(*contents, **more):
    roles = ["user", "assistant"] * len(contents)
    prompt = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return {"prompt": prompt, "data_source": "s", "reward_model": {"ground_truth": "1"}, **more}


def test_a_row_holds_the_templated_tokens_and_the_columns_of_the_file(tmp_path, tokenizer):
    rows = [chat("1+2=", extra_info={"index": 7, "tags": ["a"]}), chat("ab", "cd", "ef")]
    dataset = PromptDataset(str(write_parquet(tmp_path / "a.parquet", rows)), tokenizer)
    first, second = dataset.rows([0, 1])
    assert tokenizer.decode(first["prompt_ids"]) == "<user>1+2=<eos><assistant>"
    assert tokenizer.decode(second["prompt_ids"]) == "<user>ab<eos><assistant>cd<eos><user>ef<eos><assistant>"
    assert first["prompt_length"] == len(first["prompt_ids"])
    assert first["raw_prompt"] == [{"role": "user", "content": "1+2="}]
    assert (first["data_source"], first["ground_truth"]) == ("s", "1")
    assert first["extra_info"] == {"index": 7, "tags": ["a"]}
    assert second["extra_info"] is None


def test_several_files_are_read_one_after_the_other(tmp_path, tokenizer):
    files = [make_arithmetic_parquet(tmp_path / f"{n}.parquet", n, seed=n) for n in (3, 1, 4)]
    dataset = PromptDataset([str(file) for file in files], tokenizer)
    expected = [row for n in (3, 1, 4) for row in arithmetic_rows(n, seed=n)]
    rows = dataset.rows(range(8))
    assert len(dataset) == inspect_files([str(file) for file in files]) == 8
    assert [row["raw_prompt"] for row in rows] == [row["prompt"] for row in expected]
    assert [row["sample_index"] for row in rows] == list(range(8))
    assert [dataset.where(i).rsplit("/", 1)[1] for i in (2, 3, 4, 7)] == [
        "3.parquet, row 2",
        "1.parquet, row 0",
        "4.parquet, row 0",
        "4.parquet, row 3",
    ]


def test_a_plain_string_prompt_is_continued_without_a_template(tmp_path, tokenizer):
    file = write_parquet(tmp_path / "a.parquet", [{"prompt": "12+3=", "data_source": "s"}])
    (row,) = PromptDataset(str(file), tokenizer).rows([0])
    assert tokenizer.decode(row["prompt_ids"]) == "12+3="
    assert row["raw_prompt"] == [{"role": "user", "content": "12+3="}]
    assert row["ground_truth"] is None


def test_chat_messages_need_a_chat_template(tmp_path):
    bare = AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path, chat_template=False))
    with pytest.raises(DataError, match="no chat template"):
        encode_prompts(bare, [[{"role": "user", "content": "1"}]], {})
    assert encode_prompts(bare, ["12"], {}) == [[7, 8]]


def test_special_tokens_come_from_the_template_or_from_the_tokenizer_not_from_both(tmp_path):
    adds_system = AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path))
    adds_system.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<system> $A", special_tokens=[("<system>", 3)]
    )
    chat_ids, text_ids = encode_prompts(adds_system, [[{"role": "user", "content": "1"}], "1"], {})
    assert adds_system.decode(chat_ids) == "<user>1<eos><assistant>"
    assert adds_system.decode(text_ids) == "<system>1"


def test_template_kwargs_reach_the_template(tokenizer):
    (ids,) = encode_prompts(tokenizer, [[{"role": "user", "content": "1"}]], {"chat_template": "7"})
    assert tokenizer.decode(ids) == "7"


def test_keys_absent_from_a_message_are_not_filled_with_null(tmp_path, tokenizer):
    rows = [chat("1"), chat("2")]
    rows[0]["prompt"][0]["name"] = "ann"
    dataset = PromptDataset(str(write_parquet(tmp_path / "a.parquet", rows)), tokenizer)
    assert [row["raw_prompt"][0] for row in dataset.rows([0, 1])] == [
        {"role": "user", "content": "1", "name": "ann"},
        {"role": "user", "content": "2"},
    ]


@pytest.mark.parametrize(
    ("truncation", "expected"), [("left", "6789"), ("right", "0123"), ("middle", "0189")], ids=str
)
def test_truncation_keeps_the_named_part(tmp_path, tokenizer, truncation, expected):
    file = write_parquet(tmp_path / "a.parquet", [{"prompt": "0123456789", "data_source": "s"}])
    dataset = PromptDataset(str(file), tokenizer, max_prompt_length=4, truncation=truncation)
    (row,) = dataset.rows([0])
    assert tokenizer.decode(row["prompt_ids"]) == expected
    assert row["prompt_length"] == 4


def test_middle_truncation_of_an_odd_limit_keeps_one_more_token_of_the_end(tmp_path, tokenizer):
    file = write_parquet(tmp_path / "a.parquet", [{"prompt": "0123456789", "data_source": "s"}])
    dataset = PromptDataset(str(file), tokenizer, max_prompt_length=5, truncation="middle")
    assert tokenizer.decode(dataset.rows([0])[0]["prompt_ids"]) == "01789"


def test_an_overlong_prompt_is_refused_at_once_with_file_row_and_lengths(tmp_path, tokenizer):
    write_parquet(tmp_path / "a.parquet", [chat("1")])
    write_parquet(tmp_path / "b.parquet", [chat("2"), chat("3" * 150), chat("4")])
    files = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]
    with pytest.raises(
        DataError, match=r"b\.parquet, row 1: .*153 tokens.*max_prompt_length is 152"
    ) as caught:
        PromptDataset(files, tokenizer, max_prompt_length=152)
    assert "filter_overlong_prompts" in str(caught.value)
    assert len(PromptDataset(files, tokenizer, max_prompt_length=153)) == 4


def test_filtering_drops_exactly_the_overlong_prompts_and_says_how_many(tmp_path, tokenizer, caplog):
    lengths = [10, 200, 3, 201, 199, 400]
    rows = [{"prompt": "1" * length, "data_source": "s"} for length in lengths]
    file = write_parquet(tmp_path / "a.parquet", rows, row_group_size=2)
    with caplog.at_level(logging.INFO):
        dataset = PromptDataset(str(file), tokenizer, max_prompt_length=200, filter_overlong=True)
    assert [row["sample_index"] for row in dataset.rows(range(len(dataset)))] == [0, 1, 2, 4]
    assert "kept 4 of 6 prompts" in caplog.text
    with pytest.raises(DataError, match="all 6 prompts"):
        PromptDataset(str(file), tokenizer, max_prompt_length=2, filter_overlong=True)


def test_byte_length_is_no_reason_to_drop_a_prompt_of_few_tokens(tmp_path, tokenizer):
    file = write_parquet(tmp_path / "a.parquet", [chat("\u4e2d" * 50)])  # 150 bytes, 53 tokens
    assert len(PromptDataset(str(file), tokenizer, max_prompt_length=53, filter_overlong=True)) == 1


def bad_file(tmp_path, kind):
    path = tmp_path / f"{kind}.parquet"
    match kind:
        case "empty":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist([chat("1")]).slice(0, 0), path)
        case "zero_bytes":
            path.write_bytes(b"")
        case "not_parquet":
            path.write_bytes(b"PAR1 this is no parquet file")
        case "cut_short":
            make_arithmetic_parquet(path, 50)
            path.write_bytes(path.read_bytes()[:-100])
        case "no_prompt":
            write_parquet(path, [{"prompts": "1", "data_source": "s"}])
        case "no_source":
            write_parquet(path, [{"prompt": "1"}])
        case "number_prompt":
            write_parquet(path, [{"prompt": 1, "data_source": "s"}])
        case "image_prompt":
            write_parquet(path, [{"prompt": [{"role": "user", "content": ["x"]}], "data_source": "s"}])
        case "bytes_extra":
            write_parquet(path, [chat("1", extra_info={"blob": b"1"})])
    return str(path)


BAD_FILES = {
    "empty": "the dataset is empty",
    "missing": "does not exist",
    "zero_bytes": "cannot be read as parquet",
    "not_parquet": "cannot be read as parquet",
    "cut_short": "cannot be read as parquet",
    "no_prompt": "no column 'prompt'.*Did you mean 'prompts'",
    "no_source": r"no column .data_source., which data\.reward_fn_key names: .* by data\.columns",
    "number_prompt": "'prompt' has type int64",
    "image_prompt": "'prompt' has type list",
    "bytes_extra": r"extra_info\.blob has type binary",
}


@pytest.mark.parametrize(("kind", "message"), BAD_FILES.items(), ids=BAD_FILES)
def test_a_bad_file_is_refused_before_and_after_launch(tmp_path, tokenizer, kind, message):
    file = bad_file(tmp_path, kind)
    with pytest.raises(DataError, match=message):
        inspect_files(file)
    if kind == "no_source":  # only a scorer asks for it
        PromptDataset(file, tokenizer)
        return
    with pytest.raises(DataError, match=message):
        PromptDataset(file, tokenizer)


def test_a_file_of_another_format_is_told_the_formats(tmp_path):
    (tmp_path / "rows.xlsx").write_text("1")
    with pytest.raises(DataError, match=r"as parquet: .*Formats: \.parquet, .*docs/data\.md\.$"):
        inspect_files(str(tmp_path / "rows.xlsx"))


def test_a_file_that_is_not_there_is_told_what_is(tmp_path, monkeypatch):
    make_arithmetic_parquet(tmp_path / "train.parquet", 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    for name, words in (
        ("trian.parquet", r"Did you mean 'train\.parquet'\?"),
        ("train.parquet train.parquet", r"Several files are a list: \[train\.parquet,train\.parquet\]\.$"),
        ("x.parquet", r"Files there: train\.parquet"),
        ("bare/x.parquet", f"{tmp_path}/bare has no file of rows"),
        ("away/x.parquet", f"{tmp_path}/away is no folder"),
    ):
        with pytest.raises(DataError, match=words):
            inspect_files(name)


def test_an_empty_directory_or_list_is_no_dataset(tmp_path):
    with pytest.raises(DataError, match=r"is a directory without a file of rows"):
        inspect_files(str(tmp_path))
    with pytest.raises(DataError, match="names no file"):
        inspect_files([])


def test_a_damaged_page_is_reported_when_the_file_is_read(tmp_path, tokenizer):
    path = make_arithmetic_parquet(tmp_path / "a.parquet", 2000)
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396  # the first pages; the footer stays whole
    path.write_bytes(bytes(data))
    assert inspect_files(str(path)) == 2000
    with pytest.raises(DataError, match=r"a\.parquet"):
        PromptDataset(str(path), tokenizer)


def test_an_empty_prompt_is_refused_by_file_and_row(tmp_path, tokenizer):
    file = write_parquet(tmp_path / "a.parquet", [{"prompt": x, "data_source": "s"} for x in ("1", "")])
    with pytest.raises(DataError, match="row 1: the prompt in column 'prompt' is empty"):
        PromptDataset(str(file), tokenizer).rows([0, 1])


def test_inspect_data_reads_what_the_run_reads(tmp_path):
    train, val = (
        make_arithmetic_parquet(tmp_path / f"{name}.parquet", n) for name, n in (("t", 9), ("v", 4))
    )
    keys = [f"data.train_files={train}", f"data.val_files={val}", "data.train_batch_size=8"]
    batches = ["actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    assert inspect_data(load_config(keys + batches)) == {"train": 9, "val": 4}
    no_val = ["trainer.val_before_train=False", "data.val_files=/nowhere.parquet"]
    assert inspect_data(load_config(keys + batches + no_val)) == {"train": 9}
    larger = ["data.train_batch_size=10", "actor_rollout_ref.actor.ppo_mini_batch_size=10"]
    with pytest.raises(DataError, match=r"hold 9 prompts.*train_batch_size is 10"):
        inspect_data(load_config(keys[:2] + larger))


def test_ground_truth_may_be_missing_only_with_the_users_own_reward(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", [{"prompt": "1", "data_source": "s"}])
    keys = [f"data.train_files={file}", f"data.val_files={file}", "data.train_batch_size=1"]
    keys.append("actor_rollout_ref.actor.ppo_mini_batch_size=1")
    with pytest.raises(DataError, match=r"no column 'reward_model', where .*custom_reward_function\.path"):
        inspect_data(load_config(keys))
    own = [*keys, "custom_reward_function.path=/my/reward.py"]
    assert inspect_data(load_config(own)) == {"train": 1, "val": 1}


def test_a_name_that_no_hub_is_reached_for_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_tokenizer(load_config(["actor_rollout_ref.model.path=nowhere"]))
    told = str(caught.value)
    assert "from nowhere: it is no directory here, and as a name on a hub: " in told and "\n" not in told


def test_a_model_directory_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="has no tokenizer"):
        load_tokenizer(load_config([f"actor_rollout_ref.model.path={tmp_path}"]))
    make_tiny_tokenizer(tmp_path / "good")
    tokenizer = load_tokenizer(load_config([f"actor_rollout_ref.model.path={tmp_path / 'good'}"]))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def byte_level(normalizer=None) -> PreTrainedTokenizerFast:
    """A byte-level BPE with tokens of several letters."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"])
    bpe.train_from_iterator(["abcabcabc abc cab"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<eos>")


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Strip()])
def test_the_same_prompts_are_overlong_whether_characters_tell_it_or_tokens(tmp_path, normalizer):
    draw, tokenizer = random.Random(15), byte_level(normalizer)
    texts = [
        "".join(draw.choices(["abc", "e\u0301", " ", "\u4e2d", "x"], k=draw.randint(1, 400)))
        for _ in range(60)
    ]
    file = write_parquet(tmp_path / "a.parquet", [{"prompt": text, "data_source": "s"} for text in texts])
    kept = PromptDataset(str(file), tokenizer, max_prompt_length=20, filter_overlong=True)
    exact = [index for index, ids in enumerate(tokenizer(texts)["input_ids"]) if len(ids) <= 20]
    assert 0 < len(exact) < 60
    assert [row["sample_index"] for row in kept.rows(range(len(kept)))] == exact


def test_prompts_of_megabytes_are_too_long_without_being_tokenised(tmp_path, monkeypatch):
    rows = [{"prompt": "a" * 2**20, "data_source": "s"}, {"prompt": "abc", "data_source": "s"}]
    file = write_parquet(tmp_path / "a.parquet", rows * 16)
    seen: list[str] = []

    def encode(tokenizer, prompts, template_kwargs):
        seen.extend(prompts)
        return encode_prompts(tokenizer, prompts, template_kwargs)

    monkeypatch.setattr(datasets, "encode_prompts", encode)
    with pytest.raises(DataError, match=r"row 0: the prompt has at least \d{5,} tokens"):
        PromptDataset(str(file), byte_level(), max_prompt_length=512)
    assert len(PromptDataset(str(file), byte_level(), max_prompt_length=512, filter_overlong=True)) == 16
    assert not seen
