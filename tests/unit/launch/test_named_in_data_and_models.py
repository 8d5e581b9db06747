"""What a configuration names of the data's rows and of the model's tokens is there: `siirl check` looks."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_harness import Inputs, overrides

from siirl import check
from siirl.config import load_config
from siirl.errors import UserError

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


def with_difficulty(inputs: Inputs, folder: Path, values: list) -> Path:
    """The training rows with numbers in extra_info."""
    rows = pq.read_table(inputs.train).to_pylist()
    for row, value in zip(rows, values, strict=False):
        row["extra_info"]["difficulty"] = value
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


@pytest.mark.parametrize(
    ("values", "keys", "said"),
    [
        (range(32), [], None),
        ([*range(5), None, *range(5, 31)], [], "train.parquet, row 5 has None under this name"),
        ([*range(5), float("nan"), *range(5, 31)], [], "train.parquet, row 5 has nan under this name"),
        (range(31), [], "row 31 has None"),
        (["easy"] * 32, [], "row 0 has 'easy'"),
        (range(31), ["data.filter_overlong_prompts=true"], None),  # row 31 may be dropped
        ([], ["trainer.val_only=true"], None),
    ],
)
def test_every_prompt_of_a_curriculum_has_its_number(inputs, tmp_path, values, keys, said):
    train = with_difficulty(inputs, tmp_path, list(values))
    wanted = [f"data.train_files={train}", "data.curriculum_key=difficulty", *keys]
    cfg = load_config(overrides(inputs, tmp_path / "out", *wanted))
    if said is None:
        check(cfg)
        return
    with pytest.raises(UserError, match=f"curriculum_key=difficulty: .*{said}"):
        check(cfg)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([f"{ACTOR}.strategy=megatron"], 1),
        ([f"{ACTOR}.strategy=megatron", "dag.workflow_path=/no/such.yaml"], 1),  # no node has asked yet
        ([f"{ACTOR}.strategy=megatron", f"{ACTOR}.use_kl_loss=true"], 2),  # two strategies are to be changed
        (["actor_rollout_ref.model.lora_rank=4"], 1),
    ],
)
def test_a_model_that_is_not_trained_is_refused_once(inputs, tmp_path, keys, said):
    """By the node, or by the run where the workflow cannot be read."""
    shutil.copytree(inputs.model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "gpt2"}))
    wanted = [f"actor_rollout_ref.model.path={tmp_path}/model", *keys]
    with pytest.raises(UserError) as caught:
        check(load_config(overrides(inputs, tmp_path / "out", *wanted)))
    lines = [line for line in str(caught.value).splitlines() if "gpt2" in line]
    assert len(lines) == said and len(set(lines)) == said


def test_the_tokens_that_end_responses_are_tokens_of_the_model(inputs, tmp_path):
    key = "actor_rollout_ref.rollout.stop_token_ids"
    vocab = 64
    check(load_config(overrides(inputs, tmp_path, f"{key}=[3,{vocab - 1}]")))
    with pytest.raises(UserError, match=rf"stop_token_ids=\[3,{vocab}\]: .*tokens 0 to {vocab - 1}"):
        check(load_config(overrides(inputs, tmp_path, f"{key}=[3,{vocab}]")))
