"""What the function of a user's op returns is held against what its node writes."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from siirl.errors import DagError
from siirl.nodes.function_reward import custom_op

ROWS = TensorDict({"response_length": torch.ones(2)}, batch_size=[2])


def ran(returned, *writes: str):
    plan = SimpleNamespace(executable="mine.py:bonus")
    ctx = SimpleNamespace(node_id="mine", writes=writes, node=SimpleNamespace(plan=plan))
    return custom_op(lambda context, rows: returned)(ctx, ROWS)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (ROWS, "a TensorDict with response_length, and not score, bonus, which"),
        (
            TensorDict({"score": torch.ones(2)}, batch_size=[2]),
            "a TensorDict with score, and not bonus, which",
        ),
        ({"score": torch.ones(2)}, "<class 'dict'>, and not score, bonus, which"),
        (None, "<class 'NoneType'>, and not score, bonus, which"),
    ],
)
def test_a_declared_field_that_is_not_written_is_named_with_its_node_and_a_fix(returned, said):
    with pytest.raises(DagError) as raised:
        ran(returned, "score", "bonus")
    fix = 'Return TensorDict({"score": ..., "bonus": ...}, batch_size=rows.batch_size)'
    told = str(raised.value)
    assert told.startswith(f"node 'mine': mine.py:bonus returned {said} the node writes. {fix}"), told


def test_a_node_that_writes_nothing_may_return_nothing():
    assert ran(None) is ROWS and ran(ROWS) is ROWS
    with pytest.raises(DagError, match="returned <class 'int'>, and not rows"):
        ran(3)
