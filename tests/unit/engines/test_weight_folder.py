"""The folder of weights: what readers hold is bit for bit what was exported, or they have failed."""

import random

import pytest
import torch

from siirl.engines.weights import folder
from siirl.engines.weights.folder import WeightFolder

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.bool)


def drawn(rng, draw):
    dtype = rng.choice(DTYPES)
    shape = rng.choice([(), (0, 3), (1,), (7, 5), (300, 4), (9000,)])
    most = 2 if dtype == torch.bool else 256
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(most, (size,), dtype=torch.uint8, generator=draw).view(dtype).reshape(shape)


def draw_byte(rng):
    return rng.choice([1, 1, 3, 128, 255])


def moved(tensor, rng, draw):
    """Some bytes of it are others: none, few, most, all."""
    new = tensor.clone()
    data = new.reshape(-1).view(torch.uint8)
    share = rng.choice([0.0, 0.0, 0.001, 0.01, 0.3, 1.0])
    where = torch.rand(len(data), generator=draw) < share
    data[where] ^= 1 if tensor.dtype == torch.bool else draw_byte(rng)
    return new


def damaged(root, rng):
    path = rng.choice(sorted(path for path in root.glob("version_*/*")))
    data = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        data = data[: rng.randrange(len(data))]
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def same(held, exported):
    return list(held) == list(exported) and all(
        (x.dtype, x.shape) == (held[name].dtype, held[name].shape)
        and torch.equal(held[name].reshape(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8))
        for name, x in exported.items()
    )


@pytest.mark.parametrize("seed", range(20))
def test_readers_hold_what_was_exported_whatever_they_missed_or_fail(seed, tmp_path, monkeypatch):
    """Readers that start anew, miss versions, or find a byte that is another one, or files that are cut."""
    monkeypatch.setattr(folder, "FILE_BYTES", 2000)
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    writer, readers = WeightFolder(tmp_path), [WeightFolder(tmp_path) for _ in range(3)]
    exported = {f"w{n}": drawn(rng, draw) for n in range(8)}
    for version in range(8):
        exported = {name: moved(x, rng, draw) for name, x in exported.items()}
        if rng.random() < 0.2:
            exported.pop(rng.choice(list(exported)))
            exported[f"v{version}"] = drawn(rng, draw)
        if rng.random() < 0.2:
            exported[rng.choice(list(exported))] = drawn(rng, draw)
        if rng.random() < 0.2:
            readers[rng.randrange(3)] = WeightFolder(tmp_path)
        digests = {rank.digest for rank in (writer, *readers)}
        digest, size = writer.write(version, exported.items(), digests.pop() if len(digests) == 1 else 0)
        assert same(dict(writer.tensors()), exported) and writer.digest == digest
        assert size == sum(path.stat().st_size for path in tmp_path.glob("**/*") if path.is_file())
        if is_damaged := rng.random() < 0.3:
            damaged(tmp_path, rng)
        for reader in readers:
            if rng.random() < 0.1:
                continue
            try:
                reader.read(version, digest)
            except OSError:
                assert is_damaged and reader.digest == 0 and not dict(reader.tensors())
            else:
                assert same(dict(reader.tensors()), exported) and reader.digest == digest


def test_few_changes_are_few_bytes_and_a_reader_of_another_version_takes_none(tmp_path):
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(400_000, generator=draw).bfloat16()
    writer, reader, late = (WeightFolder(tmp_path) for _ in range(3))
    digest, whole = writer.write(0, [("w", weights)], 0)
    assert 800_000 < whole < 801_000
    reader.read(0, digest)
    changed = weights.clone()
    changed.view(torch.int16)[::100] += 1
    digest, size = writer.write(1, [("w", changed)], digest)
    assert size < 9 * len(changed) // 800 + 600, "a byte for each distance, and a bit for each step"
    reader.read(1, digest)
    assert torch.equal(dict(reader.tensors())["w"], changed)
    with pytest.raises(OSError, match="changes to weights that this rank does not hold"):
        late.read(1, digest)
    with pytest.raises(OSError, match="another index than was written"):
        reader.read(1, digest + 1)


def test_what_is_held_is_not_the_trainers_memory_and_a_failed_export_leaves_nothing(tmp_path):
    live = torch.ones(5)
    writer = WeightFolder(tmp_path)
    writer.write(0, [("w", live)], 0)
    live.zero_()
    assert dict(writer.tensors())["w"].tolist() == [1.0] * 5

    def failing():
        yield "w", live
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        writer.write(1, failing(), writer.digest)
    assert writer.digest == 0 and not dict(writer.tensors())
    assert [path.name for path in tmp_path.glob("version_*")] == ["version_0"]
