"""A reward model that cannot score these rows is refused from its files, before a worker starts."""

import json

import pytest
from fixtures_tiny import make_tiny_model_dir, make_tiny_reward_model, make_tiny_tokenizer

from siirl import cli
from siirl.config import load_config
from siirl.errors import DataError
from siirl.model_files.directory import check_model_files


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_model_dir(tmp_path_factory.mktemp("policy"), weights=False)


def config(policy, reward, *more: str):
    return load_config(
        [
            f"actor_rollout_ref.model.path={policy}",
            "reward_model.enable=True",
            f"reward_model.model.path={reward}",
            *more,
        ]
    )


def test_a_sequence_classifier_passes(policy, tmp_path):
    check_model_files(config(policy, make_tiny_reward_model(tmp_path)), "reward")


def test_a_language_model_has_no_head(policy, tmp_path):
    with pytest.raises(DataError, match=r"have no score\.weight.*ForSequenceClassification"):
        check_model_files(config(policy, make_tiny_model_dir(tmp_path)), "reward")


def test_a_classifier_of_two_labels_gives_no_score(policy, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    file = make_tiny_reward_model(tmp_path) / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"] = torch.cat([weights["score.weight"]] * 2)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match="gives 2 numbers for a conversation"):
        check_model_files(config(policy, tmp_path), "reward")


@pytest.mark.parametrize("own", [True, False], ids=["its own tokenizer", "the policy's tokenizer"])
def test_tokens_beyond_the_vocabulary_are_refused(policy, tmp_path, own, capsys):
    reward = make_tiny_reward_model(tmp_path / "reward", vocab=40)
    more = []
    if own:
        more = [f"reward_model.model.rm_tokenizer={make_tiny_tokenizer(tmp_path / 'large', vocab=70)}"]
    else:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (reward / name).unlink()
    largest = 69 if own else 63
    with pytest.raises(DataError, match=f"token ids up to {largest}, but the reward model .* knows 0 to 39"):
        check_model_files(config(policy, reward, *more), "reward")
    arguments = [
        "check",
        "--elsewhere",
        f"actor_rollout_ref.model.path={policy}",
        "actor_rollout_ref.rollout.n=2",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        "data.train_files=t.parquet",
        "data.val_files=v.parquet",
        "algorithm.adv_estimator=grpo",
        "reward_model.enable=True",
        f"reward_model.model.path={reward}",
        *more,
    ]
    assert cli.main(arguments) == 2
    assert f"token ids up to {largest}" in capsys.readouterr().err


def test_a_missing_tokenizer_directory_is_named(policy, tmp_path):
    reward = make_tiny_reward_model(tmp_path)
    with pytest.raises(DataError, match="rm_tokenizer=/no/such: there is no such directory"):
        check_model_files(config(policy, reward, "reward_model.model.rm_tokenizer=/no/such"), "reward")


def test_a_missing_model_names_its_key(policy):
    with pytest.raises(DataError, match=r"/no/rm does not exist\. Set reward_model\.model\.path"):
        check_model_files(config(policy, "/no/rm"), "reward")


def test_the_head_is_read_from_the_files_header(tmp_path):
    from siirl.model_files.directory import weight_shapes

    shapes = weight_shapes(make_tiny_reward_model(tmp_path))
    hidden = json.loads((tmp_path / "config.json").read_text())["hidden_size"]
    assert shapes["score.weight"] == [1, hidden] and len(shapes) > 10
