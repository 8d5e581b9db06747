"""pass@k, and whose responses are whose."""

import itertools
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl.commands import evaluate
from siirl.commands.evaluate import pass_at_k, results, summary, table_text
from siirl.commands.recorded_run import RecordedRun, from_here
from siirl.config import load_config
from siirl.config.resolve import is_changed
from siirl.errors import ConfigError


@pytest.mark.parametrize("seed", range(10))
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(seed):
    dice = random.Random(seed)
    scores = [dice.choice([0.0, 1.0]) for _ in range(dice.randrange(1, 8))]
    for k in range(1, len(scores) + 1):
        draws = list(itertools.combinations(scores, k))
        assert pass_at_k(len(scores), scores.count(1.0), k) == pytest.approx(
            sum(1.0 in draw for draw in draws) / len(draws)
        )


def test_pass_at_k_goes_as_far_as_every_prompt_has_responses():
    found = summary([[1.0, 0.0, 0.0], [0.5, 0.5, 0.5, 1.0]], right=1.0)
    assert found["pass_at"] == {
        "1": pytest.approx((1 / 3 + 1 / 4) / 2),
        "2": pytest.approx((2 / 3 + 1 / 2) / 2),
        "3": pytest.approx((1.0 + 3 / 4) / 2),
    }
    assert (found["prompts"], found["responses"], found["reward"]) == (2, 7, pytest.approx(3.5 / 7))


def test_responses_are_told_apart_by_file_source_and_agent(tmp_path):
    for name, rows in (("a", 3), ("b", 2)):
        pq.write_table(pa.table({"x": list(range(rows))}), tmp_path / f"{name}.parquet")
    files = [str(tmp_path / f"{name}.parquet") for name in ("a", "b")]
    (tmp_path / "job.json").write_text(json.dumps({"config": {"data": {"val_files": files}}}))
    rows = [
        {"sample_index": 2, "data_source": "sums", "rewards": {"agent 0": 1.0, "agent 1": 0.0}},
        {"sample_index": 3, "data_source": "sums", "rewards": {"agent 0": 0.0, "agent 1": 0.5}},
        {"sample_index": 4, "data_source": "words", "node": "agent_1.reward", "score": 0.25},
    ]
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses" / "step_7.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = results(tmp_path, right=0.5)
    assert [(row["file"], row["data_source"], row["agent"], row["reward"]) for row in found["results"]] == [
        (files[0], "sums", "agent 0", 1.0),
        (files[0], "sums", "agent 1", 0.0),
        (files[1], "sums", "agent 0", 0.0),
        (files[1], "sums", "agent 1", 0.5),
        (files[1], "words", "agent 1", 0.25),
    ]
    assert "b.parquet  sums" in table_text({**found, "right_from": 0.5, "output": "there"})


def test_values_that_name_files_are_taken_from_where_the_user_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").touch()
    here = str(tmp_path / "a.parquet")
    assert from_here(["data.val_files=[a.parquet,/b.parquet]", "x.y=1.0", "z=a.parquet"]) == [
        f"data.val_files=[{here},/b.parquet]",
        "x.y=1.0",
        f"z={here}",
    ]


def test_a_run_without_checkpoints_is_evaluated_by_the_model_that_it_exported(tmp_path):
    run = RecordedRun(tmp_path, tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match="neither checkpoints nor hf_model"):
        evaluate._weights(str(tmp_path), tmp_path, run)
    (exported := tmp_path / "hf_model").mkdir()
    (exported / "config.json").write_text("{}")
    keys = evaluate._weights(str(tmp_path), tmp_path, run)
    assert keys["actor_rollout_ref.model.path"] == str(exported)
    (exported / "agent_1").mkdir()
    (exported / "config.json").rename(exported / "agent_1" / "config.json")
    with pytest.raises(ConfigError, match=r"several models \(agent_1\)"):
        evaluate._weights(str(tmp_path), tmp_path, run)


def test_a_model_of_a_run_is_evaluated_without_a_word_about_the_critic_of_that_run(tmp_path):
    keys = evaluate._weights("org/model", tmp_path / "org" / "model", None)
    told = [f"{name}={value}" for name, value in keys.items() if name.endswith("model.path")]
    assert not is_changed(load_config(told), "critic.model.path") and len(told) == 2
    assert is_changed(load_config([told[0], "critic.model.path=old"]), "critic.model.path")
