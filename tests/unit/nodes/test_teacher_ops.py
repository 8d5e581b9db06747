"""What teachers say of the rows that they take, and what the policy learns of each row."""

import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from siirl.config import load_config
from siirl.data.rows import make_rows
from siirl.errors import DataError
from siirl.nodes.scoring_teacher import teacher_scores
from siirl.nodes.teacher_rows import taught, teacher_log_prob
from siirl.observe.metrics import Metrics

DISTILL = "actor_rollout_ref.actor.distill"
WIDTH = 3


class Engine:
    """A model that says the same of each token, and notes which rows it got."""

    def __init__(self):
        self.seen: list[int] = []

    def compute(self, rows: TensorDict, outputs: tuple[str, ...], temperature: float) -> TensorDict:
        self.seen = rows["row_id"].tolist()
        shape = rows["response_ids"].shape
        made = {
            "log_prob": torch.full(shape, -1.5),
            "top_log_prob": torch.full((*shape, 2), -0.5),
            "top_ids": torch.full((*shape, 2), 7),
        }
        return TensorDict({name: made[name] for name in outputs}, batch_size=rows.batch_size)

    def flops(self, rows: TensorDict, backward: bool) -> float:
        return 10.0 * len(rows)


def context(node: str, *overrides: str) -> SimpleNamespace:
    return SimpleNamespace(cfg=load_config(list(overrides)), node_id=node, metrics=Metrics())


def four_rows() -> TensorDict:
    return make_rows(
        {
            "row_id": torch.arange(4),
            "sample_index": torch.arange(4) + 70,
            "response_ids": torch.ones(4, WIDTH, dtype=torch.int64),
            "data_source": ["math", "code", "math", "poems"],
            "extra_info": [{"topic": {"name": x}} for x in ("a", "b", "b", "a")],
        }
    )


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        ((), [0, 1, 2, 3]),
        (("teacher.takes=[math]",), [0, 2]),
        (("teacher.takes=[code,poems]",), [1, 3]),
        (("teacher.takes=[b]", "teacher.by=extra_info.topic.name"), [1, 2]),
        (("teacher.takes=[nothing]",), []),
    ],
)
def test_a_teacher_computes_the_rows_that_it_takes_and_no_others(keys, taken):
    engine, ctx = Engine(), context("t", "teacher.weight=2.5", *keys)
    found = teacher_log_prob(ctx, four_rows(), engine)
    assert engine.seen == taken and ctx.metrics.values()["flops/forward"] == 10 * len(taken)
    assert found["t_teacher_weight"].tolist() == [2.5 if row in taken else 0 for row in range(4)]
    assert found["t_teacher_log_prob"].tolist() == [[-1.5 if r in taken else 0] * WIDTH for r in range(4)]


def test_a_teacher_says_as_much_as_the_loss_reads():
    assert set(teacher_log_prob(context("t", f"{DISTILL}.top_k=2"), four_rows(), Engine()).keys()) == {
        *("t_teacher_weight", "t_teacher_top_log_prob", "t_teacher_top_ids")
    }
    whole = teacher_log_prob(context("t", f"{DISTILL}.top_k=-1"), four_rows(), Engine())
    assert whole.keys() == {"t_teacher_weight", "t_teacher_top_log_prob"}


class Scorer:
    """A rollout engine that finds each token as likely as its id says, and its neighbours a bit less."""

    weight_version = 0

    def __init__(self):
        self.asked: list[tuple[list[int], int]] = []

    def score(self, rows, starts, top_k):
        self.asked = list(zip(rows, starts, strict=True))
        ids = [torch.tensor(row[start:])[:, None] + torch.arange(1 + top_k) for row, start in self.asked]
        return [(ids_TK, -ids_TK / 100) for ids_TK in ids]


def padded_rows() -> TensorDict:
    """Prompts to the right, responses to the left, one of them empty."""
    return make_rows(
        {
            "prompt_ids": torch.tensor([[0, 0, 5], [6, 7, 8], [0, 9, 4], [0, 0, 3]]),
            "prompt_length": torch.tensor([1, 3, 2, 1]),
            "response_ids": torch.tensor([[11, 12, 0], [13, 0, 0], [0, 0, 0], [14, 15, 16]]),
            "response_length": torch.tensor([2, 1, 0, 3]),
            "data_source": ["math", "math", "math", "poems"],
        }
    )


def test_a_rollout_engine_scores_whole_rows_and_says_it_where_responses_lie():
    engine, ctx = (
        Scorer(),
        context("t", "teacher.strategy=vllm", "teacher.takes=[math]", f"{DISTILL}.top_k=2"),
    )
    found = teacher_scores(ctx, padded_rows(), engine)
    assert engine.asked == [([5, 11, 12], 1), ([6, 7, 8, 13], 3)], "of no empty response, and no poem"
    assert found["t_teacher_weight"].tolist() == [1, 1, 1, 0]
    assert found["t_teacher_top_ids"].tolist()[0] == [[12, 13], [13, 14], [0, 0]]
    assert found["t_teacher_top_ids"].dtype == torch.int64
    torch.testing.assert_close(found["t_teacher_top_log_prob"][1, 0], torch.tensor([-0.14, -0.15]))
    assert not found["t_teacher_top_log_prob"][2:].any() and "t_teacher_log_prob" not in found.keys()
    sampled = teacher_scores(context("t", "teacher.strategy=vllm"), padded_rows(), engine)
    want = [[-0.11, -0.12, 0], [-0.13, 0, 0], [0, 0, 0], [-0.14, -0.15, -0.16]]
    torch.testing.assert_close(sampled["t_teacher_log_prob"], torch.tensor(want))
    nobody = context("t", "teacher.strategy=vllm", "teacher.takes=[x]", f"{DISTILL}.top_k=2")
    assert teacher_scores(nobody, padded_rows(), engine)["t_teacher_top_ids"].shape == (4, WIDTH, 2)


def said(name: str, weight: list[float], **columns: torch.Tensor) -> dict[str, torch.Tensor]:
    fields = {"weight": torch.tensor(weight), **columns}
    return {f"{name}_teacher_{field}": value for field, value in fields.items()}


def with_said(*teachers: dict[str, torch.Tensor]) -> TensorDict:
    rows = four_rows()
    for name, column in (item for teacher in teachers for item in teacher.items()):
        rows[name] = column
    return rows


def test_rows_get_their_teachers_mixed_by_weight_whatever_their_columns_widths():
    one = said("one", [1, 0, 1, 1], log_prob=torch.full((4, 2), math.log(0.5)))
    two = said("two", [0, 2, 3, 0], log_prob=torch.full((4, WIDTH), math.log(0.1)))
    found = taught(context("train"), with_said(one, two))
    want = torch.tensor([0.5, 0.1, 0.25 * 0.5 + 0.75 * 0.1, 0.5])
    torch.testing.assert_close(found["teacher_log_prob"][:, 0].exp(), want)
    assert found["teacher_log_prob"].shape == (4, WIDTH) and not any("_teacher_" in x for x in found.keys())


def test_likeliest_words_are_those_of_the_rows_own_teacher():
    top = {"top_log_prob": torch.full((4, WIDTH, 2), -1.0), "top_ids": torch.full((4, WIDTH, 2), 1)}
    one = said("one", [1, 0, 0, 1], **top)
    two = said("two", [0, 1, 1, 0], **{name: 2 * column for name, column in top.items()})
    found = taught(context("train", f"{DISTILL}.top_k=2"), with_said(one, two))
    assert found["top_ids"][:, 0, 0].tolist() == [1, 2, 2, 1]
    assert found["teacher_top_log_prob"][:, 0, 0].tolist() == [-1, -2, -2, -1]


def test_a_row_that_no_teacher_takes_is_named():
    one = said("one", [1, 1, 0, 1], log_prob=torch.zeros(4, WIDTH))
    with pytest.raises(DataError, match="'train': no teacher takes the row of sample 72"):
        taught(context("train"), with_said(one))
