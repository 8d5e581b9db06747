"""A vLLM engine on the CPU whose weights are written in place answers as one that vLLM's loaders updated."""

import logging

import pytest
import torch
from updated_engines import IN_PLACE, build, by_loaders, note_calls, samples, versions, write_model

from siirl.engines.weights import in_place
from siirl.engines.weights.bucket import LiveWeights
from siirl.engines.weights.in_place import WeightWriter
from siirl.errors import WeightSyncError

KINDS = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},  # with biases
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"tie_word_embeddings": False},
    "gemma3_text": {"vocab_size": 70},  # rows of padding in vLLM
}
SLOW = ("llama", "qwen2", "qwen3", "gemma3_text")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in SLOW else []) for kind in KINDS]
)
def test_each_update_in_place_is_that_of_the_loaders(kind, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    write_model(tmp_path, kind, **KINDS[kind])
    sets = versions(tmp_path, 4)
    methods = note_calls(monkeypatch)
    engine = build(tmp_path)
    try:
        expected = []
        for version, weights in enumerate(sets):
            by_loaders(engine, weights, version)
            expected.append(samples(engine))
        assert "write" not in methods and len({str(one) for one in expected}) == len(sets)
        engine.load_weights(sets[0].items(), 10)
        methods.clear()
        monkeypatch.setattr(in_place, "BUCKET_BYTES", 9000)  # large tensors are cut, small ones joined
        for version, weights in enumerate(sets[1:], 1):
            monkeypatch.setattr(engine._weights._writer, "_whole", version == 2)
            if version == 3:
                methods.clear()
                engine.expect_weights()
                assert methods == ["begin_writing"]
            engine.load_weights(LiveWeights(weights) if version == 3 else weights.items(), 10 + version)
            assert samples(engine) == expected[version]
        assert set(methods) == set(IN_PLACE), caplog.text
        assert methods.count("write") > 6
        check_what_is_wrong(engine, sets, expected, monkeypatch)
    finally:
        engine.close()


def check_what_is_wrong(engine, sets, expected, monkeypatch):
    """Weights that do not arrive as they were sent, or not all, fail the update; the next one is whole."""
    fillings = WeightWriter.fillings

    def damaged(writer, weights, live):
        for number, (filling, told) in enumerate(fillings(writer, weights, live)):
            if number == 1:
                writer.buffer().data[filling.begin : filling.end] ^= 1
            yield filling, told

    def lacking(writer, weights, live):
        return (item for number, item in enumerate(fillings(writer, weights, live)) if number != 1)

    for wrong, words in ((damaged, "not those that were put there"), (lacking, "were not written once")):
        with monkeypatch.context() as patch, pytest.raises(WeightSyncError, match=words):
            patch.setattr(WeightWriter, "fillings", wrong)
            engine.load_weights(sets[0].items(), 20)
        assert engine.weight_version == -1
    less = dict(list(sets[0].items())[:-1])
    with pytest.raises(WeightSyncError, match="did not arrive"):
        engine.load_weights(less.items(), 21)
    engine.load_weights(sets[1].items(), 22)
    assert samples(engine) == expected[1]


def test_live_weights_wait_for_their_readers_once():
    weights, waited = LiveWeights({"a": torch.ones(3, 2), "b": torch.ones(2, dtype=torch.int64)}), []
    weights.read_until(lambda: waited.append(1))
    weights.settle()
    weights.settle()
    assert waited == [1]
    assert weights.num_bytes(torch.bfloat16) == 6 * 2 + 2 * 8 and weights.num_bytes(None) == 6 * 4 + 2 * 8
