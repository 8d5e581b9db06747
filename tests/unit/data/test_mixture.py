"""data.mixture: shares of data sources, exact over a run, kept by checkpoints, refused if they fit none."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fixtures_tiny import make_tiny_tokenizer
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.config.checks import check_config
from siirl.data.loader import make_loader
from siirl.data.mixture import Mixture, check_mixture, parse_shares
from siirl.data.rows import objects
from siirl.errors import ConfigError, DataError

SOURCES = ["math"] * 17 + ["code"] * 5 + ["chat"] * 40
WEIGHTS = {"math": 3, "code": 1.5, "chat": 0.5}


def mixture(weights=None, batch_size=8, seed=1, shuffle=True, sources=SOURCES):
    return Mixture(parse_shares(weights or WEIGHTS), sources, batch_size, seed, shuffle)


@pytest.mark.parametrize("case", range(12))
def test_of_any_number_of_prompts_each_source_has_its_share_to_within_one(case):
    generator = np.random.default_rng(case)
    names = [f"source{k}" for k in range(generator.integers(1, 9))]
    weights = dict(zip(names, generator.uniform(0.01, 5, len(names)).tolist(), strict=True))
    sources = [name for name in names for _ in range(generator.integers(1, 30))]
    drawn = mixture(weights, sources=sources).take(1500)
    total = sum(weights.values())
    for name, weight in weights.items():
        so_far = np.cumsum([sources[prompt] == name for prompt in drawn])
        ideal = np.arange(1, len(drawn) + 1) * weight / total
        assert np.abs(so_far - ideal).max() < 1, name


def test_a_stream_gives_each_of_its_prompts_once_an_epoch_in_orders_of_its_own():
    drawn = [int(prompt) for prompt in mixture().take(400) if SOURCES[prompt] == "code"]
    epochs = [tuple(drawn[at : at + 5]) for at in range(0, len(drawn), 5)]
    whole = [epoch for epoch in epochs if len(epoch) == 5]
    assert all(sorted(epoch) == list(range(17, 22)) for epoch in whole) and len(set(whole)) > 5
    unshuffled = [int(prompt) for prompt in mixture(shuffle=False).take(60) if SOURCES[prompt] == "math"]
    assert unshuffled[:20] == [*range(17), 0, 1, 2]


def test_an_entry_with_a_pattern_is_one_stream_of_all_that_no_earlier_one_takes():
    drawn = mixture({"math": 1, "*": 1}).take(200)
    assert sum(SOURCES[prompt] == "math" for prompt in drawn) == 100
    others = [int(prompt) for prompt in drawn if SOURCES[prompt] != "math"]
    assert sorted(others[:45]) == list(range(17, 62))


def test_a_source_ends_after_its_steps_and_the_others_share_what_it_leaves():
    drawn = mixture({"math": {"weight": 6, "max_steps": 3}, "code": 1, "chat": 1}, batch_size=8).take(80)
    counts = [
        [sum(SOURCES[p] == name for p in drawn[at : at + 8]) for name in ("math", "code", "chat")]
        for at in range(0, 80, 8)
    ]
    assert counts[:3] == [[6, 1, 1]] * 3 and counts[3:] == [[0, 4, 4]] * 7


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("mixed"), []
    for name, count in (("easy", 24), ("hard", 8)):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"{number} + 1 ="}],
                "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            }
            for number in range(count)
        ]
        made.append(folder / f"{name}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), made[-1])
    return made


def config(files, tokenizer_dir, *overrides):
    listed = ",".join(map(str, files))
    return load_config(
        [
            f"data.train_files=[{listed}]",
            "data.data_source={easy.parquet: gsm8k, hard*: math}",
            "data.mixture={gsm8k: 1, math: 3}",
            "data.train_batch_size=8",
            f"actor_rollout_ref.model.path={tokenizer_dir}",
            *overrides,
        ]
    )


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def drawn_of(loader, steps):
    batches = [loader.next_batch() for _ in range(steps)]
    return [(objects(batch, "data_source"), batch["sample_index"].tolist()) for batch in batches]


def test_files_get_their_sources_by_name_and_every_batch_its_quota_over_shards_and_resumes(
    files, tokenizer_dir
):
    cfg = config(files, tokenizer_dir)
    check_mixture(cfg)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    whole = make_loader(cfg, "train", tokenizer)
    expected = drawn_of(whole, 12)
    assert [(sources.count("gsm8k"), sources.count("math")) for sources, _ in expected] == [(2, 6)] * 12
    shards = [make_loader(cfg, "train", tokenizer, shard, 3) for shard in range(3)]
    parts = [drawn_of(loader, 12) for loader in shards]
    assert [sorted(joined(part[step][1] for part in parts)) for step in range(12)] == [
        sorted(ids) for _, ids in expected
    ]
    half, other = make_loader(cfg, "train", tokenizer), make_loader(cfg, "train", tokenizer)
    drawn_of(half, 5)
    other.load_state_dict(half.state_dict())
    assert drawn_of(other, 7) == expected[5:]
    changed = config(files, tokenizer_dir, "data.train_batch_size=4")
    smaller = make_loader(changed, "train", tokenizer)
    smaller.load_state_dict(half.state_dict())
    assert joined(ids for _, ids in drawn_of(smaller, 14)) == joined(ids for _, ids in expected[5:])


def test_a_run_without_a_mixture_draws_as_before(files, tokenizer_dir):
    cfg = config(files, tokenizer_dir, "data.mixture={}")
    loader = make_loader(cfg, "train", AutoTokenizer.from_pretrained(tokenizer_dir))
    assert "mixture" not in loader.state_dict()
    ids = joined(ids for _, ids in drawn_of(loader, 4))
    assert sorted(ids) == list(range(32))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{gsm8k: 1}", "no entry for the data source 'math'"),
        ("{gsm8k: 1, math: 1, code: 1}", "['code'] fits no data source"),
        ("{*: 1, math: 1}", "['math'] fits no data source of the training files that an earlier entry"),
        ("{gsm8k: 0, math: 1}", "weight 0: it must be a number above 0"),
        ("{gsm8k: x, math: 1}", "weight 'x'"),
        ("{gsm8k: {weight: 1, steps: 3}, math: 1}", "no option 'steps'. Known: weight, max_steps"),
        ("{gsm8k: {max_steps: 0}, math: 1}", "max_steps 0"),
        ("{gsm8k: {max_steps: 3}, math: {max_steps: 9}}", "the last (math) after step 9"),
    ],
)
def test_shares_that_cannot_be_are_refused_with_what_the_files_hold(files, tokenizer_dir, value, said):
    with pytest.raises((ConfigError, DataError)) as caught:
        check_mixture(config(files, tokenizer_dir, f"data.mixture={value}"))
    assert said in str(caught.value)


def test_a_mixture_and_a_curriculum_are_not_taken_together(files, tokenizer_dir):
    with pytest.raises(ConfigError, match="both say which prompt comes next"):
        check_config(config(files, tokenizer_dir, "data.curriculum_key=level"))


def test_a_dataset_that_lost_a_source_to_the_length_filter_is_refused():
    with pytest.raises(DataError, match="fits no data source"):
        mixture({"math": 1, "chat": 1}, sources=["math"] * 8)
