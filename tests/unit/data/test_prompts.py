"""Where prompts end, and what counts in their length."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel

from siirl.config import load_config
from siirl.data.chat import encode_prompts, load_tokenizer
from siirl.data.dataset import PromptDataset
from siirl.data.prompt_lengths import PromptLengths
from siirl.data.row_values import JSON_TYPE, as_json_cell, chat_of
from siirl.dialect.file_vocabulary import FileVocabulary
from siirl.dialect.template import chosen_template
from siirl.errors import DataError
from siirl.show.dialect_text import TOOL
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


def save(folder, *, named=None, model_type="llama"):
    """A tokenizer's directory, with templates by name where they are given."""
    tokenizer_of(CHATML).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if named:
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("named", "keys", "template"),
    [
        (None, (), CHATML),
        ({"default": "a", "tool_use": "b"}, (), "a"),
        ({"default": "a", "tool_use": "b"}, ("actor_rollout_ref.rollout.multi_turn.enable=true",), "b"),
        ({"rag": "a", "tool_use": "b"}, ("data.chat_template=rag",), "a"),
        (None, ("data.chat_template=FOLDER/own.jinja",), "c"),
    ],
)
def test_the_template_is_the_tokenizers_one_of_its_named_ones_or_a_file(tmp_path, named, keys, template):
    save(tmp_path, named=named)
    (tmp_path / "own.jinja").write_text("c")
    keys = [key.replace("FOLDER", str(tmp_path)) for key in keys]
    cfg = load_config([f"actor_rollout_ref.model.path={tmp_path}", *keys])
    assert load_tokenizer(cfg).chat_template == template
    found = FileVocabulary(tmp_path).chat_template
    assert chosen_template(found, cfg, "a model") == template


@pytest.mark.parametrize(
    ("named", "key", "why"),
    [
        ({"rag": "a"}, "data.seed=1", "chat templates called rag, and none called default"),
        ({"rag": "a"}, "data.chat_template=tools", "no such file; .* names rag"),
        (None, "data.chat_template=nowhere.jinja", "no such file"),
    ],
)
def test_a_template_that_is_not_there_is_refused(tmp_path, named, key, why):
    save(tmp_path, named=named)
    with pytest.raises(DataError, match=why):
        load_tokenizer(load_config([f"actor_rollout_ref.model.path={tmp_path}", key]))


@pytest.mark.parametrize(
    ("file", "why"), [("tekken.json", "as tekken.json alone"), ("tokenizer.model", "tokenizer.model alone")]
)
def test_a_tokenizer_in_another_form_is_named(tmp_path, file, why):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / file).write_text("abc")
    with pytest.raises(DataError, match=why):
        load_tokenizer(load_config([f"actor_rollout_ref.model.path={tmp_path}"]))


def test_arguments_of_the_tokenizer_are_handed_on(tmp_path):
    save(tmp_path)
    keys = [f"actor_rollout_ref.model.path={tmp_path}", "+data.tokenizer_kwargs.pad_token=<|im_end|>"]
    assert load_tokenizer(load_config(keys)).pad_token == "<|im_end|>"


HALF = "\ud83d"


def test_half_a_character_in_a_chat_is_made_printable_wherever_it_stands(tmp_path):
    tools = [{"type": "function", "function": {"name": "look", "description": HALF, "parameters": {}}}]
    chat = [{"role": "user", "content": f"? {HALF}"}]
    template = (
        "{{ tools[0].function.description if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer = tokenizer_of(template)
    (ids,) = encode_prompts(tokenizer, [chat], {}, tools)
    assert tokenizer.decode(ids) == "\\ud83d? \\ud83d"
    assert chat_of(chat, "a row") == [{"role": "user", "content": "? \\ud83d"}]
    tokenizer.save_pretrained(tmp_path)
    cfg = load_config([f"actor_rollout_ref.model.path={tmp_path}", "data.max_prompt_length=3"])
    lengths = PromptLengths.of(cfg)
    assert lengths is not None
    found = lengths.overlong(pa.chunked_array([pa.array([as_json_cell(chat)], JSON_TYPE)]))
    assert found is not None and found[0][1] > 3


def test_whatever_a_template_raises_is_its_refusal():
    for template in ("{{ 1 / 0 }}", "{{ messages[0].nope.x }}", "{% for %}", "{{ raise_exception('no') }}"):
        with pytest.raises(DataError, match="refuses a prompt"):
            encode_prompts(tokenizer_of(template), [[{"role": "user", "content": "?"}]], {})


def test_a_text_that_has_no_tokens_is_named_with_the_tokenizer(tmp_path):
    """A vocabulary of words, as those of small models, without a token for others."""
    Tokenizer(WordLevel({"larger": 0, "of": 1})).save(str(tmp_path / "tokenizer.json"))
    vocabulary = FileVocabulary(tmp_path)
    with pytest.raises(DataError, match=r"no tokens for 'What is 1 \+ 2\?'.*UNK.*data\.tokenizer"):
        vocabulary.encode("What is 1 + 2?")
