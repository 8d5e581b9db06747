import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from siirl.data.assign import split_groups
from siirl.data.rows import make_rows, objects
from siirl.data.store import FieldStore
from siirl.errors import DagError, DeadlineError
from siirl.types import FieldKey

ROW_ID, SCORE, INFO = FieldKey(0, "row_id"), FieldKey(0, "score"), FieldKey(0, "reward_info")


def filled_store(deadline_s: float = 5) -> FieldStore:
    store = FieldStore(deadline_s)
    store.put(
        make_rows({"row_id": [0, 1], "score": [0.5, 1.0], "value": [[1.0], [2.0]]}),
        0,
        "a",
        ["row_id", "score"],
    )
    return store


def test_a_view_has_the_columns_asked_for_and_no_others():
    store = filled_store()
    rows = store.view([SCORE], "a")
    assert list(rows.keys()) == ["score"] and rows["score"].tolist() == [0.5, 1.0]
    assert (FieldKey(0, "value"), "a") not in store, "columns that are not named are not kept"
    assert store.view([], "a").batch_size == (2,)


def test_the_same_field_lives_in_two_layouts_with_different_rows():
    store = filled_store()
    store.put(make_rows({"score": [7.0]}), 0, "b", ["score"])
    assert (store.num_rows("a"), store.num_rows("b"), store.num_rows("c")) == (2, 1, None)
    store.drop([(SCORE, "a")])
    assert store.view([SCORE], "b")["score"].tolist() == [7.0]


def test_a_layout_whose_columns_are_all_dropped_takes_another_number_of_rows():
    store = filled_store()
    store.drop([(SCORE, "a"), (ROW_ID, "a")])
    store.put(make_rows({"score": [1.0, 2.0, 3.0]}), 0, "a", ["score"])
    assert store.num_rows("a") == 3


def test_missing_repeated_and_uneven_columns_are_refused_by_name():
    store = filled_store()
    with pytest.raises(
        DagError, match=r"agent_0.score is not in layout 'b', which has: nothing. It is in layout a"
    ):
        store.view([SCORE], "b")
    with pytest.raises(
        DagError, match=r"agent_0.value is not in layout 'a', which has: agent_0.row_id, agent_0.score"
    ):
        store.view([FieldKey(0, "value")], "a")
    with pytest.raises(DagError, match=r"agent_0.score is written twice in layout 'a'"):
        store.put(make_rows({"score": [1.0, 2.0]}), 0, "a", ["score"])
    with pytest.raises(
        DagError, match=r"agent_1.value have 3 rows, but layout 'a' has 2 \(agent_0.row_id, agent_0.score\)"
    ):
        store.put(make_rows({"value": [[1.0]] * 3}), 1, "a", ["value"])
    with pytest.raises(DagError, match=r"lack agent_1.score; they hold \['value'\]"):
        store.put(make_rows({"value": [[1.0]] * 2}), 1, "a", ["score"])
    for rows, given in (({}, "dict"), (None, "NoneType"), (TensorDict({}), r"batch size \[\]")):
        with pytest.raises(DagError, match=f"are a TensorDict with one batch dimension, not {given}: an"):
            store.put(rows, 1, "a", [])


def test_a_field_of_another_agent_is_named_in_full():
    store = filled_store()
    store.put(make_rows({"score": [3.0, 4.0]}), 1, "a", ["score"])
    keys = [SCORE, FieldKey(1, "score")]
    assert store.view(keys, "a", agent=1)["agent_0.score"].tolist() == [0.5, 1.0]
    with pytest.raises(DagError, match="would both be called 'score'"):
        store.view(keys, "a")


def test_a_future_is_waited_for_when_first_read():
    store = filled_store()
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(
            lambda: (time.sleep(0.1), make_rows({"score": [1.0, 2.0], "reward_info": [{}, {"a": 1}]}))[1]
        )
        store.put(later, 1, "a", ["score", "reward_info"])
        assert not later.done()
        assert store.view([FieldKey(1, "score")], "a")["score"].tolist() == [1.0, 2.0]
    assert objects(store.view([FieldKey(1, "reward_info")], "a"), "reward_info") == [{}, {"a": 1}]


def test_a_future_that_fails_or_never_comes_is_an_error_when_read_or_dropped():
    failed: Future = Future()
    failed.set_exception(ValueError("the cause"))
    for use in (lambda store: store.view([INFO], "a"), lambda store: store.drop([(INFO, "a")])):
        store = filled_store()
        store.put(failed, 0, "a", ["reward_info"])
        with pytest.raises(ValueError, match="the cause"):
            use(store)
    store = filled_store(deadline_s=0.01)
    store.put(Future(), 0, "a", ["reward_info"])
    with pytest.raises(DeadlineError, match=r"waited 0.01 s for agent_0.reward_info in 'a'"):
        store.view([INFO], "a")


def test_dropping_one_column_of_pending_rows_does_not_wait_for_them():
    store, later = filled_store(deadline_s=0.01), Future()
    store.put(later, 1, "a", ["score", "reward_info"])
    store.drop([(FieldKey(1, "reward_info"), "a")])
    later.set_result(make_rows({"score": [1.0, 2.0], "reward_info": [{}, {}]}))
    assert store.view([FieldKey(1, "score")], "a")["score"].tolist() == [1.0, 2.0]
    assert (FieldKey(1, "reward_info"), "a") not in store


def test_bytes_count_each_tensor_once():
    store = filled_store()
    assert store.num_bytes() == 2 * 8 + 2 * 4
    store.put(store.view([SCORE], "a"), 0, "b", ["score"])
    assert store.num_bytes() == 2 * 8 + 2 * 4


@pytest.mark.parametrize(
    ("sizes", "num_shards", "rows_of_shard"),
    [
        ([1] * 8, 2, [4, 4]),
        ([4] * 3, 2, [4, 8]),  # as a loader splits 3 prompts over 2 shards
        ([6, 4], 2, [6, 4]),
        ([1, 8, 1], 2, [1, 9]),
        ([9, 1, 1, 1], 2, [9, 3]),
        ([5], 3, [0, 5, 0]),
        ([], 2, [0, 0]),
    ],
)
def test_groups_are_cut_into_even_runs(sizes, num_shards, rows_of_shard):
    group_id = np.repeat(np.arange(len(sizes))[::-1], sizes)
    shard = split_groups(group_id, num_shards)
    assert np.bincount(shard, minlength=num_shards).tolist() == rows_of_shard
    assert (np.diff(shard) >= 0).all()


def test_equal_groups_are_split_as_a_loader_splits_prompts():
    for num_groups in range(20):
        for num_shards in (1, 2, 3, 4, 8):
            counts = np.bincount(
                split_groups(np.repeat(np.arange(num_groups), 3), num_shards), minlength=num_shards
            )
            assert counts.max(initial=0) - counts.min(initial=99) <= 3


def test_rows_of_a_group_stay_together_when_they_are_not_adjacent():
    shard = split_groups(np.array([5, 2, 5, 2, 7, 7]), 3)
    assert shard.tolist() == [0, 1, 0, 1, 2, 2]


def test_the_sum_of_tensors_in_a_view_is_not_a_copy():
    store = filled_store()
    assert store.view([SCORE], "a")["score"].data_ptr() == store.column(SCORE, "a").data_ptr()
    assert isinstance(store.column(SCORE, "a"), torch.Tensor)


def test_columns_of_tokens_that_a_node_reads_have_one_width():
    """One of them has been on other ranks, whose longest row was longer."""
    store = FieldStore(1.0)
    columns = {"response_ids": torch.tensor([[5, 6]]), "ref_log_prob": torch.tensor([[-1.0, -2.0, 0.0]])}
    columns["weight_version"] = torch.tensor([[3, 3]])
    for name, column in columns.items():
        store.put(TensorDict({name: column}, batch_size=[1]), 0, "x", [name])
    rows = store.view([FieldKey(0, name) for name in columns], "x", 0)
    assert rows["response_ids"].tolist() == [[5, 6, 0]] and rows["ref_log_prob"].shape == (1, 3)
    assert rows["weight_version"].tolist() == [[3, 3, -1]]
