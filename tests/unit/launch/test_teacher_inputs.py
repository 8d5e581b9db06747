"""Before a run starts: teachers have the policy's tokens, and each row of the data has a teacher."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl.config import Config, load_config
from siirl.errors import ConfigError, DataError
from siirl.launch.input_checks import check_routes
from siirl.model_files.directory import check_lengths
from siirl.model_files.vocabulary import check_distributions, check_pieces, check_same_words

WORDS = {"a": 0, "b": 1, "c": 2}


def model(folder: Path, words: dict[str, int] | None, size: int, added: str = "<eos>") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": size}))
    if words is not None:
        tokens = {"model": {"vocab": words}, "added_tokens": [{"id": 3, "content": added}]}
        (folder / "tokenizer.json").write_text(json.dumps(tokens))
    return folder


def keys(policy: Path, teacher: Path, *more: str) -> Config:
    return load_config([f"actor_rollout_ref.model.path={policy}", f"teacher.model.path={teacher}", *more])


@pytest.mark.parametrize(
    ("words", "size", "added", "top_k", "wrong"),
    [
        (WORDS, 4, "<eos>", 0, None),
        (WORDS, 8, "<eos>", 0, None),  # embeddings are padded, and sampled tokens do not mind
        (WORDS, 8, "<eos>", 5, "vocab_size is 8 in .* with distill.top_k=5"),
        (WORDS, 8, "<eos>", -1, "vocab_size is 8 in"),
        (WORDS | {"b": 2, "c": 1}, 4, "<eos>", 0, "4 and 4 tokens, and 4 differ, e.g. 'b' = 1 of the policy"),
        (WORDS, 4, "<end>", 0, "2 differ, e.g. '<end>' = 3 of the teacher"),
        (None, 4, "", 0, None),
        (None, 8, "", 0, "vocab_size is 8 in"),
    ],
)  # fmt: skip
def test_a_teacher_has_the_tokens_of_the_policy(tmp_path, words, size, added, top_k, wrong):
    policy, teacher = model(tmp_path / "policy", WORDS, 4), model(tmp_path / "t", words, size, added)
    cfg = keys(policy, teacher, f"actor_rollout_ref.actor.distill.top_k={top_k}")
    if wrong is None:
        check_same_words(cfg, "agent_0.teacher.t")
        return
    with pytest.raises(DataError, match=wrong):
        check_same_words(cfg, "agent_0.teacher.t")


def test_distributions_over_a_large_vocabulary_are_refused_with_their_size(tmp_path):
    paths = (model(tmp_path / "policy", None, 151_936), model(tmp_path / "t", None, 151_936))
    whole = ("actor_rollout_ref.actor.distill.top_k=-1", "data.max_response_length=1024")
    cfg = keys(*paths, *whole)
    check_distributions(cfg, "agent_0.teacher.t", rows=27)  # 15.7 GiB
    with pytest.raises(
        ConfigError, match=r"151,936 words, at 1,024 tokens of 64 rows, are 37 GiB .*64 \(0.0"
    ):
        check_distributions(cfg, "agent_0.teacher.t", rows=64)
    with pytest.raises(ConfigError, match=r"303,872 words, at 1,024 tokens of 27 rows, are 31 GiB"):
        check_distributions(keys(*paths, *whole, "teacher.tokenizer=own"), "agent_0.teacher.t", rows=27)
    check_distributions(keys(*paths, *whole[1:]), "agent_0.teacher.t", rows=64)
    check_distributions(
        keys(*paths, "actor_rollout_ref.actor.distill.top_k=64"), "agent_0.teacher.t", rows=64
    )


def test_vllm_is_asked_for_no_more_tokens_than_there_are(tmp_path):
    paths = (model(tmp_path / "policy", WORDS, 4), model(tmp_path / "t", WORDS, 4))
    for top_k in (4, 5):
        cfg = keys(*paths, f"actor_rollout_ref.actor.distill.top_k={top_k}")
        check_distributions(cfg, "agent_0.teacher.t", rows=2)
    check_distributions(keys(*paths, "teacher.strategy=vllm"), "agent_0.scoring_teacher.t", rows=2)
    cfg = keys(*paths, "teacher.strategy=vllm", "actor_rollout_ref.actor.distill.top_k=5")
    with pytest.raises(ConfigError, match=r"top_k=5 vLLM is asked for more tokens than the 4 .* Set"):
        check_distributions(cfg, "agent_0.scoring_teacher.t", rows=2)


def test_an_engine_that_scores_needs_a_position_more_than_the_longest_row(tmp_path):
    folder = model(tmp_path / "t", WORDS, 4)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 48}))
    cfg = keys(folder, folder, "data.max_prompt_length=40", "data.max_response_length=8")
    check_lengths(cfg, folder, "teacher")
    with pytest.raises(ConfigError, match=r"max_response_length \+ 1 that its engine samples = 49 tokens"):
        check_lengths(cfg, folder, "scoring_teacher")


def test_of_models_that_are_not_here_nothing_is_said(tmp_path):
    check_same_words(keys(model(tmp_path / "policy", WORDS, 4), "ORG/NAME"), "agent_0.teacher.t")


@pytest.mark.parametrize(
    ("decoder", "wrong"),
    [
        ({"type": "ByteLevel"}, None),
        (None, None),
        (
            {
                "type": "Sequence",
                "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}],
            },
            None,
        ),
        ({"type": "WordPiece"}, "no parts of a text .WordPiece., and teacher.tokenizer=own"),
        ({"type": "Sequence", "decoders": [{"type": "BPEDecoder"}]}, "no parts of a text .BPEDecoder."),
        ("no file", "none in tokenizer.json"),
    ],
)
def test_tokens_of_a_teacher_with_another_tokenizer_are_parts_of_a_text(tmp_path, decoder, wrong):
    policy, teacher = (model(tmp_path / name, WORDS, 4) for name in ("policy", "t"))
    content = json.loads((teacher / "tokenizer.json").read_text()) | {"decoder": decoder}
    (teacher / "tokenizer.json").write_text(json.dumps(content))
    if decoder == "no file":
        (teacher / "tokenizer.json").unlink()
    for cfg in (
        keys(policy, teacher, "teacher.tokenizer=own"),
        keys(teacher, policy, "teacher.tokenizer=own"),
    ):
        if wrong is None:
            check_pieces(cfg, "agent_0.teacher.t")
        else:
            with pytest.raises(ConfigError, match=f"'agent_0.teacher.t': the tokenizer of .*/t: .*{wrong}"):
                check_pieces(cfg, "agent_0.teacher.t")
    check_pieces(keys(policy, "ORG/NAME", "teacher.tokenizer=own"), "agent_0.teacher.t")


def test_a_row_without_a_teacher_is_refused_by_its_number(tmp_path):
    rows = [
        {"prompt": "x", "data_source": s, "extra_info": {"topic": t}} for s, t in ("ma", "cb", "ma", "pc")
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    cfg = load_config([f"data.train_files={tmp_path}/train.parquet"])
    check_routes(cfg, "data_source", {"m", "c", "p"}, "agent 0")
    check_routes(cfg, "extra_info.topic", {"a", "b", "c"}, "agent 0")
    with pytest.raises(
        DataError, match=r"row 3 has data_source='p': no teacher of agent 0 takes it.* c, m\."
    ):
        check_routes(cfg, "data_source", {"m", "c"}, "agent 0")
    with pytest.raises(DataError, match=r"row 1 has extra_info.topic='b'"):
        check_routes(cfg, "extra_info.topic", {"a", "c"}, "agent 0")
    with pytest.raises(DataError, match=r"row 0 has extra_info.level=None"):
        check_routes(cfg, "extra_info.level", {"a"}, "agent 0")
