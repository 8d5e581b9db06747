"""The rows that dynamic sampling keeps: order, numbering, padding, checkpoints on other numbers of shards."""

import json

import pytest
import torch

from siirl.algorithms.episode_credit import rows_of_episode, turn_rows
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
    assert out["group_id"].tolist() == [0, 0, 1, 1, 2, 2]
    assert out["row_id"].argsort().tolist() == list(range(6)) and len(out["row_id"].unique()) == 6
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
    one, two = buffer.take(orders), other.take(orders)
    assert [rows["group_id"].tolist() for rows in (one, two)] == [[0, 0, 2, 2], [1, 1]]
    assert torch.cat([one["row_id"], two["row_id"]]).argsort().tolist() == [0, 1, 4, 5, 2, 3]
    assert len(other.orders()) == 1


def test_ranks_whose_groups_have_different_numbers_of_rows_number_them_apart():
    ranks = [RowBuffer(), RowBuffer()]
    for buffer, groups, n in zip(ranks, ([0, 2], [1]), (2, 3), strict=True):
        buffer.add(rows_of(groups, n))
    orders = torch.cat([buffer.orders() for buffer in ranks]).sort().values
    rows = concat_rows([buffer.take(orders) for buffer in ranks])
    assert len(rows["row_id"].unique()) == 7
    assert rows["group_id"][rows["row_id"].argsort()].tolist() == [0, 0, 1, 1, 1, 2, 2]


def episodes_of(group: int, rewards: list[list[float]], rank: int = 0):
    """A group of episodes of an interaction, which have a row of one turn for each reward."""
    n = len(rewards)
    rows = [(group * n + sample, turn, r) for sample, row in enumerate(rewards) for turn, r in enumerate(row)]
    return make_rows(
        {
            "row_id": [episode * 8 + turn for episode, turn, _ in rows],
            "group_id": [group] * len(rows),
            "episode_id": [episode for episode, _, _ in rows],
            "speaker": [0] * len(rows),
            "turn_id": torch.tensor([[turn] for _, turn, _ in rows]),
            "env_reward": torch.tensor([[r] for _, _, r in rows]),
            "extra_info": [{"episode_id": episode, "agent": 0} for episode, _, _ in rows],
        }
    )


def test_episodes_of_different_rounds_steps_and_ranks_stay_apart():
    """Equal ids: of one group in two rounds, and of what an earlier step left and the next one made."""
    ranks, rounds = [RowBuffer(), RowBuffer()], ([[1.0, 2.0], [3.0]], [[10.0], [20.0, 30.0]])
    for rewards in rounds:
        ranks[0].add(episodes_of(3, rewards))
        ranks[1].add(episodes_of(4, rewards))
    orders = torch.cat([buffer.orders() for buffer in ranks]).sort().values
    steps = [concat_rows([buffer.take(orders[:3]) for buffer in ranks])]
    ranks[1].add(episodes_of(4, [[100.0], [200.0, 300.0]]))
    steps.append(ranks[1].take(ranks[1].orders()))
    to_go = ([3, 2, 3, 10, 50, 30, 3, 2, 3], [10, 50, 30, 100, 500, 300])
    num_rows = ([2, 2, 1, 1, 2, 2, 2, 2, 1], [1, 2, 2, 1, 2, 2])
    for rows, want, sizes in zip(steps, to_go, num_rows, strict=True):
        ids = rows["episode_id"]
        cut = turn_rows(rows["env_reward"], rows["turn_id"], ids, rows["speaker"], gamma=1.0)
        assert cut.reward_UL.sum(-1).tolist() == want
        assert rows_of_episode(ids, rows["speaker"]).tolist() == sizes
        assert [info["episode_id"] for info in objects(rows, "extra_info")] == ids.tolist()
        assert len(rows["row_id"].unique()) == len(rows)


def test_rows_of_different_width_are_padded_on_their_own_side():
    both = concat_rows([rows_of([0], 1, 2), rows_of([1], 1, 4)])
    assert both["prompt_ids"].tolist() == [[0, 0, 7, 7], [7, 7, 7, 7]]
    assert both["response_ids"].tolist() == [[8, 8, 8, 0, 0], [8, 8, 8, 8, 8]]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_a_checkpoint_deals_whole_groups_to_any_number_of_shards(num_shards):
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
    assert sorted(found) == [0, 1, 2, 3]


def test_as_many_shards_as_before_go_on_with_the_rows_that_each_had():
    """Dealt anew, rows would be in other micro-batches, and a resumed run not bit for bit the same."""
    before = []
    for groups, width in (([0, 3, 4, 5], 2), ([1], 6), ([], 3)):
        buffer = RowBuffer()
        buffer.add(rows_of(groups, width=width))
        before.append(buffer)
    states = [json.loads(json.dumps(buffer.state())) for buffer in before]
    for shard, buffer in enumerate(before):
        resumed = RowBuffer()
        resumed.load_state(states, shard, 3)
        chosen = torch.tensor([0, 1, 3])
        ours, theirs = resumed.take(chosen), buffer.take(chosen)
        assert ours["score"].tolist() == theirs["score"].tolist()
        if len(theirs):
            assert ours["prompt_ids"].tolist() == theirs["prompt_ids"].tolist()
        assert resumed.orders().tolist() == buffer.orders().tolist()


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
