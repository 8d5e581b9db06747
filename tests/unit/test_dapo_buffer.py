"""The rows that dynamic sampling keeps: order, numbering, padding, checkpoints on other numbers of shards."""

import pytest
import torch

from siirl.data.buffer import RowBuffer, concat_rows
from siirl.data.rows import make_rows, objects
from siirl.errors import RewardError
from siirl.nodes.dynamic_sampling import metric_of


def rows_of(groups: list[int], n: int = 2, width: int = 3, source: str = "a"):
    """n rows for each group; the score tells group and sample."""
    count = len(groups) * n
    group_id = torch.tensor(groups).repeat_interleave(n)
    return make_rows(
        {
            "row_id": group_id * n + torch.arange(count) % n,
            "group_id": group_id,
            "score": group_id.float() + torch.arange(count) % n / 10,
            "prompt_ids": torch.full((count, width), 7),
            "response_ids": torch.full((count, width + 1), 8),
            "data_source": [source] * count,
        },
        num_rows=count,
    )


def test_groups_leave_in_the_order_in_which_they_came_with_new_numbers():
    buffer = RowBuffer()
    buffer.add(rows_of([1, 4]))
    buffer.add(rows_of([0, 2], source="b"))
    orders = buffer.orders()
    assert len(orders) == 4
    out = buffer.take(orders[:3])
    assert out["group_id"].tolist() == [0, 0, 1, 1, 2, 2] and out["row_id"].tolist() == list(range(6))
    assert out["score"].tolist() == pytest.approx([1, 1.1, 4, 4.1, 0, 0.1])
    assert objects(out, "data_source") == ["a"] * 4 + ["b"] * 2
    buffer.add(rows_of([0]))
    rest = buffer.take(buffer.orders())
    assert rest["score"].tolist() == pytest.approx([2, 2.1, 0, 0.1])


def test_a_rank_numbers_its_groups_among_those_of_all_ranks():
    buffer = RowBuffer()
    buffer.add(rows_of([0, 2]))
    other = RowBuffer()
    other.add(rows_of([1, 3]))
    orders = torch.cat([buffer.orders(), other.orders()]).sort().values[:3]
    assert buffer.take(orders)["row_id"].tolist() == [0, 1, 4, 5]
    assert other.take(orders)["row_id"].tolist() == [2, 3]
    assert len(other.orders()) == 1


def test_rows_of_different_width_are_padded_on_their_own_side():
    both = concat_rows([rows_of([0], 1, 2), rows_of([1], 1, 4)])
    assert both["prompt_ids"].tolist() == [[0, 0, 7, 7], [7, 7, 7, 7]]
    assert both["response_ids"].tolist() == [[8, 8, 8, 0, 0], [8, 8, 8, 8, 8]]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_a_checkpoint_deals_whole_groups_to_any_number_of_shards(num_shards):
    import json

    states = []
    for groups in ([0, 3], [1, 2], []):
        buffer = RowBuffer()
        buffer.add(rows_of(groups))
        states.append(json.loads(json.dumps(buffer.state())))
    found = []
    for shard in range(num_shards):
        restored = RowBuffer()
        restored.load_state(states, shard, num_shards)
        assert restored.num_rounds == 1
        found += restored.orders().tolist()
        if len(restored.orders()):
            taken = restored.take(restored.orders())
            assert taken["score"].dtype == torch.float32 and objects(taken, "data_source")[0] == "a"
    assert found == [0, 1, 2, 3]


def test_the_metric_is_the_score_or_a_number_of_the_reward_function():
    rows = make_rows(
        {
            "row_id": [5, 6],
            "score": [0.0, 1.0],
            "reward_info": [{"acc": 1, "text": "x"}, {"acc": 0, "text": "y"}],
        }
    )
    assert metric_of(rows, "score").tolist() == [0, 1]
    assert metric_of(rows, "acc").tolist() == [1, 0]
    with pytest.raises(RewardError, match=r"metric=text.*row 5.*acc, text"):
        metric_of(rows, "text")
    rows = make_rows({"row_id": [5, 6], "score": [0.0, 1.0], "reward_info": [{}, None]})
    assert metric_of(rows, "acc").tolist() == [0, 1]
