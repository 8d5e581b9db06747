"""Prompts that reasoning-gym makes: its rows, its scores, and what is refused before a run."""

import ast
import importlib.util
import subprocess
import sys

import pytest
from fixtures_tiny import make_tiny_tokenizer
from later import needed
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.data.check_files import data_sources, inspect_data
from siirl.data.dataset import PromptDataset
from siirl.data.reasoning_gym_rows import GeneratedRows, dataset_of
from siirl.errors import ConfigError, DataError
from siirl.rewards.countdown import reasoning_gym as score

gym = needed("reasoning_gym", "pip install 'siirl[reasoning-gym]'")

SUMS = "reasoning_gym:chain_sum?size=64&seed=3&max_terms=3"


def config(*more: str, train: str = SUMS, val: str = "reasoning_gym:chain_sum?size=16&seed=1000&max_terms=3"):
    return load_config(
        [f"data.train_files={train}", f"data.val_files={val}", "data.train_batch_size=8", *more]
    )


def test_rows_are_those_of_the_package(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path / "tokenizer", vocab=110))
    cfg = config(f"data.train_files=[{SUMS},reasoning_gym:gcd?size=4&seed=1&system_prompt=direct]")
    assert inspect_data(cfg) == {"train": 68, "val": 16}
    assert data_sources(cfg) == {"reasoning_gym/chain_sum", "reasoning_gym/gcd"}
    rows = PromptDataset(cfg.data.train_files, tokenizer, truncation="left").rows(range(68))
    theirs = gym.create_dataset("chain_sum", size=64, seed=3, max_terms=3)
    for row, entry in zip(rows, theirs, strict=False):
        assert row["raw_prompt"] == [{"role": "user", "content": entry["question"]}]
        assert row["ground_truth"] == entry["answer"] and row["data_source"] == "reasoning_gym/chain_sum"
        assert ast.literal_eval(row["extra_info"]["entry"]) == entry
    assert [message["role"] for message in rows[64]["raw_prompt"]] == ["system", "user"]
    assert "<answer>" in rows[64]["raw_prompt"][0]["content"]


SAID = {
    "{}": "{}",
    "It is <answer>0</answer>, no: <answer> {} </answer>": "{}",
    "about {}.": "about {}.",
    "": "",
}
"""What a model says of the right answer -> the answer in it."""


def test_scores_of_64_answers_are_those_of_the_package():
    table, theirs = GeneratedRows(SUMS).table("prompt", "data_source").to_pylist(), dataset_of(SUMS)
    seen = set()
    for row, entry in zip(table, theirs, strict=True):
        for said, answer in SAID.items():
            wanted = theirs.score_answer(answer.format(entry["answer"]), entry)
            truth = row["reward_model"]["ground_truth"]
            assert score(row["data_source"], said.format(entry["answer"]), truth, row["extra_info"]) == wanted
            seen.add(wanted)
    assert {0.0, 1.0} < seen  # a right one that is not all is worth a part


def test_another_tag_may_hold_the_answer():
    (row,) = GeneratedRows("reasoning_gym:gcd?size=1&seed=0").table("prompt", "data_source").to_pylist()
    truth = row["reward_model"]["ground_truth"]
    said = f"<out>{truth}</out><answer>x</answer>"
    assert score("", said, truth, row["extra_info"], answer_tag="out") == 1.0
    assert score("", said, truth, row["extra_info"]) < 1.0


def test_a_row_of_a_file_is_no_row_of_the_package():
    with pytest.raises(DataError, match="lacks dataset and entry"):
        score("mine", "1", "1", None)


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - some of its scorers raise: the run counts such answers as 0
        return type(error).__name__


@pytest.mark.slow
def test_rows_of_all_data_sets_survive_the_way_to_the_score():
    from reasoning_gym.factory import DATASETS

    for task in sorted(set(DATASETS) - {"composite"}):
        made = GeneratedRows(f"reasoning_gym:{task}?size=3&seed=11")
        table, theirs = made.table("prompt", "data_source").to_pylist(), dataset_of(made.text)
        for row, entry in zip(table, theirs, strict=True):
            assert row["prompt"][0]["content"] == entry["question"], task
            for answer in (str(entry["answer"]), "1", "no"):
                ours = outcome(score, made.data_source, answer, entry["answer"], row["extra_info"])
                assert ours == outcome(theirs.score_answer, answer, entry), (task, answer)


@pytest.mark.parametrize(
    "train, words",
    [
        ("reasoning_gym:chain_sun?size=4&seed=0", "no data set 'chain_sun'. Did you mean 'chain_sum'"),
        ("reasoning_gym:composite?size=4&seed=0", "Name several data sets in a list"),
        (
            "reasoning_gym:chain_sum?size=16",
            r"seed = None .* write reasoning_gym:chain_sum\?size=1000&seed=0",
        ),
        ("reasoning_gym:chain_sum?size=0&seed=1", "size = 0 is no whole number above 0"),
        ("reasoning_gym:chain_sum?size=16&seed=0&terms=3", "unexpected keyword.* Its options: min_terms, "),
        ("reasoning_gym:chain_sum?size=16&seed=0&min_terms=0", "min_terms must be positive"),
        ("reasoning_gym:chain_sum?size=4&seed=0", "hold 4 prompts, data.train_batch_size is 8"),
        ("reasoning_gym:chain_sum?size=64&seed=999&max_terms=3", "Set a seed of at least 1063"),
    ],
)
def test_a_name_that_no_rows_can_be_made_of_is_refused(train, words):
    with pytest.raises(DataError, match=words):
        inspect_data(config(train=train))


def test_the_same_data_set_may_be_validated_on():
    assert inspect_data(config(train=SUMS, val=SUMS)) == {"train": 64, "val": 64}


def test_a_missing_package_is_one_line_with_the_command(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else find(name)
    )
    dataset_of.cache_clear()
    with pytest.raises(DataError) as refused:
        inspect_data(config(train=SUMS, val=SUMS))
    lines = set(str(refused.value).splitlines())
    assert lines == {
        f"{SUMS}: the package reasoning-gym is not installed. Install it: pip install 'siirl[reasoning-gym]'."
    }


def test_an_unknown_answer_tag_key_is_refused():
    with pytest.raises(ConfigError, match="answer_tags"):
        from siirl.rewards.by_data_source import RewardChooser

        RewardChooser(config("+reward_model.reward_kwargs.answer_tags=x"))


def test_other_reward_workers_do_not_read_the_package():
    words = (
        "import sys, siirl.rewards.scoring_process; print({'reasoning_gym', 'pyarrow'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", words], text=True).strip() == "set()"
