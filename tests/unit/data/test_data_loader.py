import itertools

import pytest
import torch
from fixtures_tiny import make_arithmetic_parquet, make_tiny_tokenizer
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.data.dataset import PromptDataset
from siirl.data.loader import PromptLoader, make_loader
from siirl.data.rows import objects
from siirl.errors import DataError
from siirl.types import PROMPT_FIELDS


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, tokenizer_dir):
    file = make_arithmetic_parquet(tmp_path_factory.mktemp("data") / "a.parquet", 23)
    return PromptDataset(str(file), AutoTokenizer.from_pretrained(tokenizer_dir))


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def drawn(loader, num_batches):
    """sample_index of each of the next batches."""
    return [loader.next_batch()["sample_index"].tolist() for _ in range(num_batches)]


def test_a_batch_holds_every_prompt_field_padded_left(dataset):
    rows = PromptLoader(dataset, 5, shuffle=False).next_batch()
    assert set(rows.keys()) == set(PROMPT_FIELDS)
    assert rows.batch_size == (5,)
    assert rows["row_id"].tolist() == rows["group_id"].tolist() == [0, 1, 2, 3, 4]
    widths = (rows["prompt_ids"] != 0).sum(1)
    assert torch.equal(widths, rows["prompt_length"])
    assert (rows["prompt_ids"][:, -1] == 5).all()
    assert objects(rows, "data_source") == ["arithmetic"] * 5


@pytest.mark.parametrize("num_shards", [2, 3, 8])
@pytest.mark.parametrize("batch_size", [7, 4])
def test_the_global_batch_is_the_same_for_any_number_of_shards(dataset, batch_size, num_shards):
    whole = PromptLoader(dataset, batch_size, seed=3)
    shards = [PromptLoader(dataset, batch_size, shard, num_shards, seed=3) for shard in range(num_shards)]
    for _ in range(7):
        expected, parts = whole.next_batch(), [loader.next_batch() for loader in shards]
        assert joined(part["sample_index"].tolist() for part in parts) == expected["sample_index"].tolist()
        assert joined(part["row_id"].tolist() for part in parts) == list(range(batch_size))
        assert max(len(part) for part in parts) - min(len(part) for part in parts) <= 1


@pytest.mark.parametrize(("batch_size", "mini", "num_shards"), [(8, 4, 2), (8, 2, 4), (8, 2, 3), (7, 3, 2)])
def test_every_shard_has_prompts_of_every_mini_batch_and_each_prompt_keeps_its_place(
    dataset, batch_size, mini, num_shards
):
    whole = PromptLoader(dataset, batch_size, seed=3).next_batch()
    parts = [
        PromptLoader(dataset, batch_size, shard, num_shards, mini_batch_size=mini, seed=3).next_batch()
        for shard in range(num_shards)
    ]
    places = joined(part["row_id"].tolist() for part in parts)
    assert sorted(places) == list(range(batch_size))
    samples = whole["sample_index"][torch.tensor(places)].tolist()
    assert joined(part["sample_index"].tolist() for part in parts) == samples, "same prompt at each place"
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for part in parts:
        assert part["row_id"].tolist() == sorted(part["row_id"].tolist())
        of_batch = torch.bincount(part["row_id"] // mini, minlength=-(-batch_size // mini))
        assert of_batch.max() - of_batch[: batch_size // mini].min() <= 1


def test_a_shard_reads_only_its_own_rows(dataset, monkeypatch):
    read = []
    rows = dataset.rows
    monkeypatch.setattr(dataset, "rows", lambda indices: read.extend(indices) or rows(indices))
    batch = PromptLoader(dataset, 8, 1, 4, shuffle=False).next_batch()
    assert batch["sample_index"].tolist() == [int(index) for index in read] == [2, 3]


def test_a_shard_may_hold_no_rows(dataset):
    batch = PromptLoader(dataset, 1, 0, 4).next_batch()
    assert batch.batch_size == (0,)
    assert set(batch.keys()) == set(PROMPT_FIELDS)
    assert objects(batch, "raw_prompt") == []


def test_every_epoch_has_its_own_order_and_repeats_no_prompt(dataset):
    loader = PromptLoader(dataset, 5, seed=1)
    assert loader.steps_per_epoch == 4
    first, second = joined(drawn(loader, 4)), joined(drawn(loader, 4))
    assert len(set(first)) == len(set(second)) == 20
    assert first != second
    assert first != joined(drawn(PromptLoader(dataset, 5, seed=2), 4))
    assert first == joined(drawn(PromptLoader(dataset, 5, seed=1), 4))


def test_without_shuffle_prompts_come_in_file_order(dataset):
    assert drawn(PromptLoader(dataset, 10, shuffle=False), 3) == [
        list(range(10)),
        list(range(10, 20)),
        list(range(10)),
    ]


@pytest.mark.parametrize("batches_before", [0, 1, 4, 5, 11])
def test_a_resumed_loader_continues_exactly_on_another_number_of_shards(dataset, batches_before):
    loader = PromptLoader(dataset, 5, seed=1)
    drawn(loader, batches_before)
    resumed = [PromptLoader(dataset, 5, shard, 3, seed=1) for shard in range(3)]
    for other in resumed:
        other.load_state_dict(loader.state_dict())
    for expected in drawn(loader, 6):
        assert joined(drawn(other, 1)[0] for other in resumed) == expected


def test_resuming_on_another_dataset_is_refused(dataset):
    loader = PromptLoader(dataset, 5)
    with pytest.raises(DataError, match="22 prompts, the dataset has 23"):
        loader.load_state_dict({**loader.state_dict(), "num_prompts": 22})


def test_validation_goes_once_through_everything_and_starts_again(dataset):
    for _ in range(2):
        loader = PromptLoader(dataset, 10, shuffle=False, drop_last=False)
        assert loader.steps_per_epoch == 3
        for _ in range(2):
            assert joined(drawn(loader, 3)) == list(range(23))
    whole = PromptLoader(dataset, None, shuffle=False, drop_last=False)
    assert (whole.steps_per_epoch, drawn(whole, 2)) == (1, [list(range(23))] * 2)


def test_a_batch_larger_than_the_dataset_is_refused_in_training_only(dataset):
    with pytest.raises(DataError, match=r"23 prompts.*train_batch_size is 24"):
        PromptLoader(dataset, 24)
    assert len(PromptLoader(dataset, 24, drop_last=False).next_batch()) == 23


def test_loaders_are_made_from_the_configuration(tmp_path, tokenizer_dir):
    train, val = (make_arithmetic_parquet(tmp_path / f"{n}.parquet", n, seed=n) for n in (9, 5))
    cfg = load_config(
        [
            f"data.train_files={train}",
            f"data.val_files={val}",
            "data.train_batch_size=4",
            "data.val_batch_size=3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        ]
    )
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    assert make_loader(cfg, "train", tokenizer).steps_per_epoch == 2
    assert drawn(make_loader(cfg, "val", tokenizer), 2) == [[0, 1, 2], [3, 4]]
    seeded = make_loader(cfg, "train", tokenizer, 0, 1)
    assert drawn(seeded, 2) == drawn(PromptLoader(seeded.dataset, 4, seed=cfg.trainer.seed), 2)
