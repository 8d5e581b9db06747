"""Recorded rollouts: what is written comes back, on any ranks, and nothing else does."""

import json

import pytest
import torch
from fixtures_tiny import make_tiny_tokenizer
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.data.recorded_rollouts import check_recorded, describe_steps, recorded_steps, step_folder
from siirl.data.replayed_rows import conditions, record, recorded_rows
from siirl.data.rows import make_rows, take_rows
from siirl.errors import ConfigError, DataError
from siirl.types import ROLLOUT_FIELDS

N = 2
UNDER = {"format": "2", "n": "2", "temperature": "1", "vocabulary": "64 tokens", "tokenizer": "abc"}


def sampled(num_prompts: int, seed: int = 0):
    """Rows of a rollout: N samples of each prompt, of 1 to 7 tokens; prompts of 2 to 5."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [int(x) for x in torch.randint(1, 8, (num_prompts * N,), generator=draw)]
    prompts = [[10 + group] * (2 + group % 4) for group in range(num_prompts) for _ in range(N)]
    return make_rows(
        {
            "row_id": list(range(num_prompts * N)),
            "group_id": [row // N for row in range(num_prompts * N)],
            "prompt_ids": prompts,
            "prompt_length": [len(ids) for ids in prompts],
            "raw_prompt": [[{"role": "user", "content": f"\u00e9 {len(ids)}"}] for ids in prompts],
            "ground_truth": [str(length) for length in lengths],
            "response_ids": [[60 - i for i in range(length)] for length in lengths],
            "response_length": lengths,
            "response_mask": [[i != 1 for i in range(length)] for length in lengths],
            "finish_reason": [length % 2 for length in lengths],
            "weight_version": [[3 + 4 * i // length for i in range(length)] for length in lengths],
            "rollout_log_prob": [torch.randn(length, generator=draw).tolist() for length in lengths],
        }
    )


def prompts_of(rows, groups):
    return take_rows(rows, [group * N for group in groups])


def recorded(folder, rows, *parts, made_under=UNDER):
    for groups in parts:
        record(folder, take_rows(rows, torch.isin(rows["group_id"], torch.tensor(groups))), made_under)


@pytest.mark.parametrize("parts", [[(0, 1, 2, 3, 4)], [(0, 1), (2,), (3, 4)]])
@pytest.mark.parametrize("groups", [(0, 1, 2, 3, 4), (3, 4), (2,), (4, 0)])
def test_rows_come_back_bit_for_bit_from_any_parts_for_any_prompts(tmp_path, parts, groups):
    rows = sampled(5)
    recorded(tmp_path, rows, *parts)
    columns = recorded_rows(tmp_path, prompts_of(rows, groups), N, UNDER)
    wanted = take_rows(rows, [group * N + sample for group in groups for sample in range(N)])
    width = int(wanted["response_length"].max())
    assert tuple(columns) == ROLLOUT_FIELDS
    for name, column in columns.items():
        expected = wanted[name][:, :width] if wanted[name].dim() == 2 else wanted[name]
        assert column.dtype == expected.dtype and torch.equal(column, expected), name


def test_a_rank_without_prompts_gets_no_rows(tmp_path):
    rows = sampled(2)
    recorded(tmp_path, rows, (0, 1), ())
    columns = recorded_rows(tmp_path, prompts_of(rows, ()), N, UNDER)
    assert {len(column) for column in columns.values()} == {0}
    assert columns["response_ids"].shape == (0, 0)


def test_what_rewards_need_lies_beside_the_tensors_as_json(tmp_path):
    rows = sampled(2)
    recorded(tmp_path, rows, (0, 1))
    (file,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["row_id"] for line in lines] == [0, 1, 2, 3]
    assert lines[2]["raw_prompt"] == [{"role": "user", "content": "\u00e9 3"}]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n", "4", r"recorded with n 2, this run has 4\. Set actor_rollout_ref\.rollout\.n"),
        ("temperature", "0.7", r"recorded with temperature 1, this run has 0\.7"),
        ("vocabulary", "65 tokens", r"vocabulary 64 tokens, this run has 65 tokens\..*model directory"),
        ("tokenizer", "def", r"tokenizer abc, this run has def\..*other texts"),
    ],
)
def test_rows_made_under_other_conditions_are_refused(tmp_path, key, value, message):
    rows = sampled(2)
    recorded(tmp_path, rows, (0, 1))
    with pytest.raises(DataError, match=message):
        recorded_rows(tmp_path, prompts_of(rows, (0,)), N, UNDER | {key: value})


def test_other_prompts_are_refused(tmp_path):
    rows = sampled(3)
    recorded(tmp_path, rows, (0, 1, 2))
    others = prompts_of(rows, (0, 1, 2))
    others["prompt_ids"][1, -1] = 9
    with pytest.raises(DataError, match=r"prompt 1 of the step was.*another one.*data\.\*"):
        recorded_rows(tmp_path, others, N, UNDER)
    shorter = prompts_of(rows, (0, 1, 2))
    shorter["prompt_length"][2] -= 1
    with pytest.raises(DataError, match="prompt 2 of the step"):
        recorded_rows(tmp_path, shorter, N, UNDER)


def test_missing_doubled_and_damaged_parts_are_named(tmp_path):
    rows = sampled(4)
    recorded(tmp_path, rows, (0, 1))
    with pytest.raises(DataError, match="has 0 rows of prompt 3 of its step, not 2"):
        recorded_rows(tmp_path, prompts_of(rows, (3,)), N, UNDER)
    recorded(tmp_path, rows, (0, 1, 2, 3))
    with pytest.raises(DataError, match=r"has 4 rows of prompt 0.*two runs"):
        recorded_rows(tmp_path, prompts_of(rows, (0,)), N, UNDER)
    assert recorded_rows(tmp_path, prompts_of(rows, (2, 3)), N, UNDER)
    (tmp_path / "prompts_0_to_1.safetensors").write_bytes(b"\x08")
    with pytest.raises(DataError, match=r"prompts_0_to_1\.safetensors cannot be read"):
        recorded_rows(tmp_path, prompts_of(rows, (2,)), N, UNDER)


def test_a_step_that_was_not_recorded_is_named_with_those_that_were(tmp_path):
    rows = sampled(2)
    for step in (1, 2, 10):
        recorded(step_folder(tmp_path, 0, step), rows, (0, 1))
    assert recorded_steps(tmp_path, 0) == [1, 2, 10] and describe_steps(tmp_path, 1) == "no step"
    with pytest.raises(DataError, match=r"step_11 has no recorded rollouts; there is steps 1 to 10"):
        recorded_rows(step_folder(tmp_path, 0, 11), prompts_of(rows, (0,)), N, UNDER)


@pytest.mark.parametrize(
    ("steps", "agent", "missing"), [(2, 0, None), (3, 0, 3), (1, 1, 1)], ids=["there", "short", "no agent"]
)
def test_missing_steps_are_found_before_the_start(tmp_path, steps, agent, missing):
    for step in (1, 2):
        recorded(step_folder(tmp_path, 0, step), sampled(1), (0,))
    cfg = load_config(
        [f"actor_rollout_ref.rollout.replay_dir={tmp_path}", f"trainer.total_training_steps={steps}"]
    )
    if missing is None:
        check_recorded(cfg, agent)
    else:
        with pytest.raises(ConfigError, match=rf"no rollouts of step {missing} of agent {agent}"):
            check_recorded(cfg, agent)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"dump_rollouts_dir: .*file/step"):
        recorded(tmp_path / "file" / "step", sampled(1), (0,))


def test_conditions_tell_tokenizers_apart(tmp_path):
    one, same, other = (
        AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path / name, vocab))
        for name, vocab in (("one", 64), ("same", 64), ("other", 65))
    )
    assert (
        conditions(one, 2, 1.0)
        == conditions(same, 2, 1.0)
        == UNDER | {"tokenizer": conditions(one, 2, 1.0)["tokenizer"]}
    )
    assert conditions(one, 2, 1.0)["tokenizer"] != conditions(other, 2, 1.0)["tokenizer"]
