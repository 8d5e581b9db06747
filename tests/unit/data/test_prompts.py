"""Where prompts end, and what counts in their length."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import processors

from siirl.data.chat import encode_prompts
from siirl.data.dataset import PromptDataset
from siirl.dialect.dialect import TOOL
from siirl.errors import DataError
from tests.unit.dialect.test_dialect import CHATML, tokenizer_of

ASKED, BEGUN = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}
OPEN = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
AGAIN = OPEN + "It is<|im_end|>\n<|im_start|>assistant\n"
WITH_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(CHATML)


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        ([ASKED], {}, OPEN),
        ([ASKED, BEGUN], {}, OPEN + "It is"),
        ([ASKED, {**BEGUN, "content": "It is "}], {}, OPEN + "It is "),
        ([ASKED, BEGUN], {"continue_final_message": True}, OPEN + "It is"),
        (
            [ASKED, BEGUN],
            {"continue_final_message": False},
            AGAIN,
        ),
        ([ASKED, BEGUN], {"add_generation_prompt": True}, AGAIN),
        ([ASKED], {"add_generation_prompt": False}, OPEN.removesuffix("<|im_start|>assistant\n")),
        ([ASKED], {"continue_final_message": True}, "<|im_start|>user\n2+2?"),
    ],
)
def test_a_prompt_ends_where_the_model_goes_on(tokenizer, messages, options, text):
    assert tokenizer.decode(encode_prompts(tokenizer, [messages], options)[0]) == text


def test_a_prompt_cannot_both_be_continued_and_open_a_turn(tokenizer):
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(DataError, match="the model can do one of both"):
        encode_prompts(tokenizer, [[ASKED, BEGUN]], both)


@pytest.mark.parametrize(
    ("single", "text", "expected"),
    [
        ("<s> $A", "ab", "<s>ab"),
        ("<s> $A", "<s>ab", "<s>ab"),  # was rendered already
        ("<s> $A <eos>", "ab", "<s>ab"),
        ("<s> $A <eos>", "ab<eos>", "<s>ab<eos>"),
        ("$A", "ab", "ab"),
    ],
)
def test_a_text_begins_once_and_ends_where_it_ends(single, text, expected):
    tokenizer = tokenizer_of(None, added=("<s>",))
    tokenizer.bos_token = "<s>"
    ids = tokenizer.convert_tokens_to_ids
    special = [(mark, ids(mark)) for mark in ("<s>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=special
    )
    assert tokenizer.decode(encode_prompts(tokenizer, [text], {})[0]) == expected


def write(folder, contents):
    rows = [
        {
            "data_source": "s",
            "prompt": [{"role": "user", "content": content}],
            "reward_model": {"ground_truth": "1"},
        }
        for content in contents
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("right", "<|im_start|>user\nabcdef<|im_start|>assistant\n"),
        ("left", "uvwxyz<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_prompt_that_is_cut_keeps_its_generation_prompt(tmp_path, tokenizer, side, expected):
    file = write(tmp_path, ["abcdefghijklmnopqrstuvwxyz"])
    limit = len(tokenizer.encode(expected, add_special_tokens=False))
    dataset = PromptDataset(file, tokenizer, max_prompt_length=limit, truncation=side)
    assert tokenizer.decode(dataset.rows([0])[0]["prompt_ids"]) == expected


def test_what_a_template_tells_of_tools_counts_in_the_length(tmp_path):
    tokenizer, file = tokenizer_of(WITH_TOOLS), write(tmp_path, ["a", "b" * 100])
    plain = PromptDataset(file, tokenizer, max_prompt_length=200, filter_overlong=True)
    assert len(plain) == 2
    told = PromptDataset(file, tokenizer, max_prompt_length=260, filter_overlong=True, tools=[TOOL])
    assert len(told) == 1 and '"look"' in tokenizer.decode(told.rows([0])[0]["prompt_ids"])
    with pytest.raises(DataError, match="max_prompt_length is 260"):
        PromptDataset(file, tokenizer, max_prompt_length=260, tools=[TOOL])
