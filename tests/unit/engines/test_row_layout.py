"""A layout of rows: pieces of ranks in buckets, and the tensors of the files that they make."""

import json

import torch

from siirl.engines.weights.row_layout import RowLayout, Whole, whole_at_first
from siirl.model_files.file_parts import FilePart

TENSORS = {
    "even": torch.arange(12.0).view(4, 3),
    "odd": torch.arange(10.0).view(5, 2),
    "one": torch.tensor([[7.0, 8.0]]),
    "fused": torch.arange(24.0).view(2, 4, 3),
    "count": torch.tensor(3),
}
RANKS = (4, 6, 7)


def layout():
    tensors = []
    for name, tensor in list(TENSORS.items())[:-1]:
        parts = [FilePart(name, tuple(tensor.shape), tensor.stride(), 0)]
        if name == "fused":  # as experts: the second half of each, in the files
            parts = [FilePart(f"{name}.{place}", (2, 3), (3, 1), 12 * place + 6) for place in range(2)]
        sizes = tuple(len(piece) for piece in pieces(tensor))
        tensors.append(Whole(name, tuple(tensor.shape), "torch.float32", sizes, tuple(parts)))
    tensors.append(whole_at_first("count", TENSORS["count"], RANKS))
    return RowLayout(RANKS, "cpu", tuple(tensors))


def pieces(tensor):
    row, rows = tensor[0].numel(), -(-len(tensor) // len(RANKS))
    flat = tensor.reshape(-1)
    return [flat[place * rows * row : (place + 1) * rows * row] for place in range(len(RANKS))]


def test_pieces_in_the_order_of_the_buckets_make_the_tensors_of_the_files():
    found = RowLayout.from_json(json.loads(json.dumps(layout())))
    assert found == layout()
    sent = []
    for number, bucket in enumerate(found.buckets(limit=40)):
        for entry in bucket:
            cut = (
                pieces(TENSORS[entry.name])
                if entry.name != "count"
                else [TENSORS["count"].view(1)] + [torch.zeros(0, dtype=torch.int64)] * 2
            )
            piece = cut[number % len(RANKS)]
            assert entry.shape == tuple(piece.shape) and entry.dtype == str(piece.dtype)
            sent.append((entry.name, piece))
    joined = dict(found.joined(iter(sent)))
    expected = {name: tensor for name, tensor in TENSORS.items() if name != "fused"}
    expected |= {f"fused.{place}": TENSORS["fused"][place, 2:] for place in range(2)}
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], expected[name]) for name in expected)


def test_a_bucket_has_about_the_limit_of_each_rank_and_each_rank_a_bucket_in_turn():
    buckets = layout().buckets(limit=40)
    assert len(buckets) % len(RANKS) == 0 and len(buckets) > len(RANKS)
    names = [[entry.name for entry in bucket] for bucket in buckets]
    for place in range(0, len(names), len(RANKS)):
        assert names[place] == names[place + 1] == names[place + 2]
    assert [name for bucket in names[:: len(RANKS)] for name in bucket] == list(TENSORS)
    for bucket in buckets:
        assert sum(entry.num_bytes for entry in bucket) <= 40 or len(bucket) == 1
