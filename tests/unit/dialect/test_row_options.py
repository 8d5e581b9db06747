"""What rows say of turns: arguments of the chat template, and responses with an end or without."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from episode_cases import play, speaker, stage
from template_cases import TemplateTokenizer
from template_cases import dialect_of as spoken_by
from test_dialect import CHATML, tokenizer_of

from siirl.agents.renderer import ChatRenderer
from siirl.config import load_config
from siirl.data.completions import Completion
from siirl.data.dataset import PromptDataset
from siirl.data.rows import make_rows
from siirl.data.said import said_in
from siirl.dialect.dialect import derive
from siirl.dialect.template import ChatTemplate, row_options
from siirl.errors import DataError

THINKING = CHATML.replace(
    "assistant\n{% endif",
    "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif",
)
OPTIONS = ({"enable_thinking": False}, {"enable_thinking": None}, None, {"enable_thinking": True})
ENDS = ("</think>\n\n", "<think>\n", "<think>\n", "<think>\n")


def saved(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_each_prompt_ends_as_the_template_has_it_with_the_arguments_of_its_row(name, tmp_path):
    rows = [
        {
            "data_source": "s",
            "prompt": [{"role": "user", "content": "?"}],
            "reward_model": {"ground_truth": "4"},
            "extra_info": {"index": index, "chat_template_kwargs": options},
        }
        for index, options in enumerate(OPTIONS)
    ]
    tokenizer = tokenizer_of(THINKING)
    file = saved(tmp_path / name, rows)
    read = PromptDataset(file, tokenizer, max_prompt_length=100).rows(range(4))
    texts = [tokenizer.decode(row["prompt_ids"]) for row in read]
    assert [text.endswith(end) for text, end in zip(texts, ENDS, strict=True)] == [True] * 4
    longest = max(row["prompt_length"] for row in read)
    few = PromptDataset(file, tokenizer, max_prompt_length=longest - 1, filter_overlong=True)
    assert [row["sample_index"] for row in few.rows(range(len(few)))] == [1, 2, 3]


def test_a_response_is_taken_apart_by_what_its_own_prompt_opened():
    tokenizer = tokenizer_of(THINKING)
    dialect = derive(tokenizer, ChatTemplate(tokenizer, {}), {})
    ids = tokenizer.encode("4<|im_end|>")
    rows = make_rows(
        {
            "response_ids": [ids] * 4,
            "response_length": [len(ids)] * 4,
            "extra_info": [{"chat_template_kwargs": options} for options in OPTIONS],
        }
    )
    said = said_in(rows, tokenizer, dialect)
    assert [one.answer for one in said] == ["4", "", "", ""]
    assert [one.reasoning for one in said] == [None, "4", "4", "4"]


def test_an_agent_reads_and_speaks_as_its_row_says():
    vocabulary, read = TemplateTokenizer(THINKING), []

    class Says:
        async def generate(self, prompt, params, seed, seen=None):
            read.append(vocabulary.decode(prompt))
            return Completion(vocabulary.encode("4<|im_end|>"), [-1.0] * 2, "stop", 0)

    renderer = ChatRenderer(vocabulary, {}, dialect=spoken_by(vocabulary))
    one = speaker(Says())
    one = type(one)(one.policy, one.params, renderer, one.limits)
    stages = [stage("a", 0, back_to="a", max_turns=2)]
    (played,) = play(stages, {"a": one}, extra_info={"chat_template_kwargs": {"enable_thinking": False}})
    assert played.kind is None, played.episode.error
    assert read[1].endswith(ENDS[0])
    assert [message.said.answer for message in played.episode.messages if message.said] == ["4", "4"]


def test_arguments_that_are_no_mapping_are_refused():
    with pytest.raises(DataError, match="arguments of the chat template, by name"):
        row_options({"chat_template_kwargs": "enable_thinking"})
    assert row_options(None) == row_options({}) == {}


ENDED = {
    "12": "12E",
    "12E": "12E",
    "12<eos>": "12<eos>",  # another token by which the model ends
    "12E\n": "12E",  # as a template writes it
    "12 E<eos>\n": "12 E",  # as a template, and who adds the end of a text to it
    "12\n": "12\nE",
    "1E2": "1E2E",
    "E": "E",
    "": "E",
}
"""What is written -> what is trained; E: as the template ends a turn, <eos>: as the tokenizer does."""


def test_a_response_that_is_written_with_an_end_of_the_model_gets_no_second_one(tmp_path):
    vocabulary = tokenizer_of(CHATML)
    rows = [{"prompt": "q", "response": text.replace("E", "<|im_end|>")} for text in ENDED]
    file = saved(tmp_path / "a.jsonl", rows)
    keys = [
        "actor_rollout_ref.rollout.name=dataset",
        f"data.train_files={file}",
        "data.max_response_length=16",
    ]
    cfg = load_config([*keys, "trainer.test_freq=-1"])
    dataset = PromptDataset.from_config(cfg, "train", vocabulary)
    (texts,) = zip(*[row["given_responses"] for row in dataset.rows(range(len(rows)))], strict=True)
    found = [vocabulary.decode(ids).replace("<|im_end|>", "E") for ids in texts]
    assert dict(zip(ENDED, found, strict=True)) == ENDED
