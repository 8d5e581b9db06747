import pytest
import torch
from tensordict import NonTensorData

from siirl.data.buffer import concat_rows
from siirl.data.header import ColumnSpec
from siirl.data.parcels import _to_bytes
from siirl.data.rows import make_rows, object_column, object_element, objects, pad_stack, take_rows
from siirl.types import FIELDS


def example_rows():
    return make_rows(
        {
            "row_id": [0, 1, 2],
            "prompt_ids": [[1], [2, 3], []],
            "response_ids": [[1], [2, 3], []],
            "score": [0.5, 1, 0],
            "data_source": ["a", "a", "b"],
            "extra_info": [None, {"k": [1]}, {}],
            "custom": [[1, 2], "x", None],
        }
    )


def test_columns_get_the_dtype_and_padding_side_that_fields_declare():
    rows = example_rows()
    assert rows.batch_size == (3,)
    assert rows["prompt_ids"].tolist() == [[0, 1], [2, 3], [0, 0]]
    assert rows["response_ids"].tolist() == [[1, 0], [2, 3], [0, 0]]
    assert rows["prompt_ids"].dtype == torch.int64
    assert rows["score"].dtype == torch.float32
    assert objects(rows, "extra_info") == [None, {"k": [1]}, {}]
    assert objects(rows, "custom") == [[1, 2], "x", None]
    assert rows["data_source"] == ["a", "a", "b"]


def test_pad_stack_honours_side_and_value_of_the_padding():
    assert pad_stack([[1], [], [2, 3]], FIELDS["prompt_ids"]).tolist() == [[0, 1], [0, 0], [2, 3]]
    assert pad_stack([], FIELDS["response_mask"]).shape == (0, 0)
    assert pad_stack([torch.tensor([True])], FIELDS["response_mask"]).dtype == torch.bool


@pytest.mark.parametrize("name", [name for name, spec in FIELDS.items() if len(spec.dims) == 1])
def test_rows_that_meet_wider_ones_are_filled_up_as_if_they_had_been_made_with_them(name):
    draw = torch.Generator().manual_seed(len(name))
    lists = [torch.randint(1, 9, (int(w),), generator=draw).tolist() for w in (3, 1, 0, 5, 2)]
    whole = pad_stack(lists, FIELDS[name])
    narrow, wide = (make_rows({name: part}) for part in (lists[:3], lists[3:]))
    assert torch.equal(concat_rows([narrow, wide])[name], whole)
    sent = [_to_bytes(part[name], ColumnSpec.of(name, whole)) for part in (narrow, wide)]
    assert torch.equal(torch.cat(sent).view(whole.dtype).view(whole.shape), whole)


def test_zero_rows_can_be_made_set_and_concatenated():
    empty = make_rows({"row_id": [], "prompt_ids": [], "data_source": []})
    assert empty.batch_size == (0,)
    assert objects(empty, "data_source") == []
    copy = make_rows({"data_source": empty.get("data_source")}, num_rows=0)
    names = ("row_id", "data_source")
    joined = torch.cat([empty.select(*names), example_rows().select(*names), empty.select(*names)])
    assert objects(joined, "data_source") == ["a", "a", "b"]
    assert objects(take_rows(joined, []), "data_source") == objects(copy, "data_source") == []
    assert make_rows({}, num_rows=0).batch_size == (0,)


@pytest.mark.parametrize("index", [[2, 0, 0], torch.tensor([True, False, True]), torch.tensor([1]), []])
def test_take_rows_picks_the_same_rows_of_every_column(index):
    rows = example_rows()
    taken = take_rows(rows, index)
    positions = torch.arange(3)[torch.as_tensor(index, dtype=torch.long if index == [] else None)].tolist()
    assert taken["row_id"].tolist() == positions
    assert objects(taken, "custom") == [objects(rows, "custom")[i] for i in positions]
    assert torch.equal(taken["prompt_ids"], rows["prompt_ids"][positions])
    assert set(taken.keys()) == set(rows.keys())


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match=r"score.*2.*3 were expected"):
        make_rows({"row_id": [0, 1, 2], "score": [1.0, 2.0]})


def test_object_values_are_not_merged_when_they_are_equal():
    assert object_column(["s", "s"]).tolist() == ["s", "s"]
    assert object_column([[1], [1]]).tolist() == [[1], [1]]


def test_an_element_of_an_object_column_is_what_tensordict_itself_would_make():
    value = {"messages": [{"role": "user", "content": "hello"}]}
    ours, theirs = object_element(value), NonTensorData(value)
    assert ours.data is value and ours.batch_size == theirs.batch_size and ours.device == theirs.device
    assert ours.__dict__["_non_tensordict"] == theirs.__dict__["_non_tensordict"]
