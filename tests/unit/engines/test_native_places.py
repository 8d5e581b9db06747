"""Weights are written where vLLM's loaders put them, and nowhere else: a toy model under vLLM's reload."""

import functools
from unittest.mock import Mock

import pytest
import torch
from later import Later, needed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from siirl.engines.rollout.vllm.placed_pieces import Piece
from siirl.engines.weights.bucket import room
from siirl.engines.weights.shared_buffer import SharedBuffer, sampled_sum

layerwise = Later("vllm.model_executor.model_loader.reload.layerwise")
native = Later("siirl.engines.rollout.vllm.native")
native_places = Later("siirl.engines.rollout.vllm.native_places")
needed("vllm")

CPU = torch.device("cpu")
FILES = {"q": (6, 4), "k": (2, 4), "table": (5, 4), "norm": (4,)}
"""Tensors of the files: q and k are one parameter of the model, whose table has two rows of padding."""


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.weight.weight_loader = self.load

    def load(self, param, loaded, first):
        param.data.narrow(0, first, len(loaded)).copy_(loaded)


class Toy(nn.Module):
    def __init__(self, load=None):
        super().__init__()
        self.joined, self.table, self.norm = Joined(), nn.Module(), nn.Module()
        self.table.weight = nn.Parameter(torch.zeros(7, 4), requires_grad=False)
        self.norm.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.table.weight.weight_loader = load or self.load_rows
        self.norm.weight.weight_loader = load or self.load_rows

    def load_rows(self, param, loaded):
        param.data[: len(loaded)].copy_(loaded)

    def load_weights(self, weights):
        first = {"q": 0, "k": 6}
        for name, tensor in weights:
            if name in first:
                param = self.joined.weight
                param.weight_loader(param, tensor, first[name])
            else:
                param = getattr(self, name).weight
                param.weight_loader(param, tensor)


CUTS = {"q": (1, 2, 2), "table": (0, 3, 2), "norm": (0, 0, 4)}
"""What the second of two workers has: columns of q, the last rows of the table, all of norm, nothing of k."""


class Share(nn.Module):
    def __init__(self):
        super().__init__()
        for name, cut in CUTS.items():
            layer = nn.Module()
            held = torch.zeros(FILES[name]).narrow(*cut).clone()
            layer.weight = nn.Parameter(held, requires_grad=False)
            layer.weight.weight_loader = functools.partial(self.load, cut)
            layer.weight.weight_loader.__name__ = "load"
            self.add_module(name, layer)

    @staticmethod
    def load(cut, param, loaded):
        param.data.copy_(loaded.narrow(*cut))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in CUTS:
                param = getattr(self, name).weight
                param.weight_loader(param, tensor)


def a_set(seed):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in FILES.items()}


def learned(model, weights):
    """Places of a model that has been loaded with weights."""
    layerwise.record_metadata_for_reloading(model)
    layerwise.initialize_layerwise_reload(model)
    names = list(FILES)
    places = native_places.ParameterMap(
        model, CPU, names, [list(FILES[name]) for name in names], ["float32"] * len(names)
    )
    with torch.no_grad():
        places.learn()
        for name, tensor in weights.items():
            places.saw(name, tensor)
        model.load_weights(list(weights.items()))
        layerwise.finalize_layerwise_reload(model, None)
        places.check()
    return places


def write(places, weights, buffer, at_once=99):
    """at_once: rows of a tensor that come together."""
    places.begin()
    entries, start = [], 0
    for number, tensor in enumerate(weights.values()):
        for first, part in zip(range(0, 99, at_once), tensor.split(at_once), strict=False):
            buffer.data[start : start + part.nbytes].view(torch.float32).copy_(part.flatten())
            entries += [number, first, len(part), start]
            start += room(part.nbytes)
    total = int(sampled_sum(buffer.data[:start], 1, True))
    place = buffer.place | {"size": buffer.size}
    told = {"entries": entries, "begin": 0, "end": start, "number": 1, "whole": True, "sum": total}
    places.write(told | {"place": place})
    places.finish()


def holds(model, weights):
    joined = torch.cat([weights["q"], weights["k"]])
    return (
        torch.equal(model.joined.weight, joined)
        and torch.equal(model.table.weight[:5], weights["table"])
        and torch.equal(model.norm.weight, weights["norm"])
    )


def bits(tensor):
    return tensor.detach().clone().view(torch.int32)


@pytest.fixture
def buffer():
    made = SharedBuffer(4096, CPU)
    yield made
    made.close()


def test_what_an_update_outdates_is_forgotten_once_it_is_answered_and_before_anything_is_sampled():
    """A walk over all blocks of a cache of a GPU takes milliseconds, for which no sync waits."""
    engine = native.NativeEngine.__new__(native.NativeEngine)
    engine._engine, engine._images, engine._is_outdated, forget = Mock(), None, False, Mock()
    engine._engine.reset_prefix_cache = forget
    engine.finish_writing({})
    assert not forget.called
    engine.rest()
    engine.rest()
    assert forget.call_count == 1
    engine.finish_writing({})
    engine.add_scored(0, [1, 2], 1)
    assert forget.call_count == 2
    assert [call[0] for call in engine._engine.method_calls][-2:] == ["reset_prefix_cache", "add_request"]


def test_writes_land_where_the_loaders_put_the_same_tensors(buffer):
    model = Toy()
    places = learned(model, a_set(0))
    assert places.why_not == "" and holds(model, a_set(0))
    padding = bits(model.table.weight[5:])  # whatever was in the memory that the reload took, maybe NaN
    for seed in (1, 2):
        model.table.weight.data[5:] = 9.0  # as after a sleep, which forgets all values
        write(places, a_set(seed), buffer)
        assert holds(model, a_set(seed)) and torch.equal(bits(model.table.weight[5:]), padding)


@pytest.mark.parametrize("at_once", [99, 2])
def test_a_worker_writes_its_own_columns_and_rows_of_whole_tensors(at_once, buffer):
    model = Share()
    places = learned(model, a_set(0))
    assert places.why_not == ""
    write(places, a_set(1), buffer, at_once)
    for name, cut in CUTS.items():
        assert torch.equal(getattr(model, name).weight, a_set(1)[name].narrow(*cut)), name


@pytest.mark.parametrize("model", [Toy, Share])
def test_parts_of_what_a_worker_keeps_are_written_by_themselves(model, buffer):
    """Cut along both axes; nothing else comes, and whole tensors do again once no parts are expected."""
    made = model()
    places, names, kept = learned(made, a_set(0)), list(FILES), CUTS if model is Share else {}
    boxes = places.boxes()
    for number, box in boxes:
        axis, first, count = kept.get(names[number], (0, 0, FILES[names[number]][0]))
        assert box[axis] == (first, first + count) and len(box) == len(FILES[names[number]])
    parts = [(number, cell) for number, box in boxes for cell in cells(box)]
    for seed in (1, 2):
        places.take_parts(parts)
        weights = a_set(seed)
        write(places, {part: values_of(weights[names[part[0]]], part[1]) for part in parts}, buffer)
        assert all(torch.equal(*pair) for pair in held_pairs(made, weights))
    places.take_parts(parts)
    with pytest.raises(RuntimeError, match="1 weights were not written once, as"):
        write(places, {part: values_of(a_set(3)[names[part[0]]], part[1]) for part in parts[:-1]}, buffer)
    places.take_parts(None)
    write(places, a_set(4), buffer)
    assert all(torch.equal(*pair) for pair in held_pairs(made, a_set(4)))


def cells(box):
    """Of one row, and of up to two columns."""
    found = [()]
    for axis, (begin, end) in enumerate(box):
        step = 2 if axis else 1
        found = [(*cell, (at, min(at + step, end))) for cell in found for at in range(begin, end, step)]
    return found


def values_of(tensor, box):
    return tensor[tuple(slice(*ends) for ends in box)].contiguous()


def held_pairs(model, weights):
    if isinstance(model, Share):
        return [(getattr(model, name).weight, weights[name].narrow(*cut)) for name, cut in CUTS.items()]
    joined = torch.cat([weights["q"], weights["k"]])
    rows = len(weights["table"])
    return [
        (model.joined.weight, joined),
        (model.table.weight[:rows], weights["table"]),
        (model.norm.weight, weights["norm"]),
    ]


@pytest.mark.parametrize("reasons", [["", ""], ["", "the second cannot"]])
def test_the_worker_that_cannot_speaks_for_its_engine(reasons):
    engine = native.NativeEngine.__new__(native.NativeEngine)
    engine._engine, engine._images, engine._learns = Mock(), None, True
    engine._engine.collective_rpc.side_effect = {"check_places": reasons}.get
    assert engine.finish_update() == reasons[1]


class Watched(nn.Parameter):
    """As a parameter of vLLM's linear layers."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_are_written_without_python_around_each_look_at_a_tensor():
    """A default device, or the class of vLLM's parameters, was most of a sync's time on the host."""
    worker, held, seen = native.WorkerExtension(), Watched(torch.zeros(3), requires_grad=False), []
    worker.device, worker.model_runner, worker._places = CPU, Mock(), Mock(packs=False)
    worker.model_runner.model = nn.Module()
    for method in (worker._places.begin, worker._places.write):
        method.side_effect = lambda *_: seen.append(
            (torch._C._len_torch_function_stack(), torch.is_grad_enabled(), type(held.data), held.stride())
        )
    worker.begin_places()
    worker.write_places({})
    worker.finish_places({})
    assert seen == [(0, False, torch.Tensor, (1,))] * 3 and Watched.seen == 0
    assert worker._places.finish.call_count == 1
    assert held.stride() == (1,) and Watched.seen == 1


def test_views_follow_a_parameter_that_lies_elsewhere_and_another_layout_is_an_error(buffer):
    model = Toy()
    places = learned(model, a_set(0))
    write(places, a_set(1), buffer)
    old = model.joined.weight.data
    model.joined.weight.data = torch.zeros(8, 4)
    write(places, a_set(2), buffer)
    assert holds(model, a_set(2)) and torch.equal(old, torch.cat([a_set(1)["q"], a_set(1)["k"]]))
    model.joined.weight.data = torch.zeros(4, 8).t()
    with pytest.raises(RuntimeError, match="weight of a Joined has another layout"):
        places.begin()
    with pytest.raises(RuntimeError, match="the begin of this update has failed"):
        places.write({})  # it was on its way


def doubled(param, loaded):
    param.data[: len(loaded)].copy_(loaded * 2)


def doubled_later(param, loaded):
    param.data[: len(loaded)].copy_(loaded)
    if not param.is_meta:
        param.data.mul_(2)


@pytest.mark.parametrize(
    ("load", "words"),
    [(doubled, "values that are computed"), (doubled_later, "is changed after it is loaded")],
)
def test_what_is_computed_from_the_files_is_not_written_in_place(load, words):
    assert words in learned(Toy(load), a_set(0)).why_not


def test_a_layer_that_keeps_another_tensor_is_not_written_in_place():
    model = Toy()
    model.joined.turned = torch.zeros(4, 8)
    assert "turned of a Joined may be made of its weights" in learned(model, a_set(0)).why_not


def test_what_a_restarted_engine_reads_from_the_host_is_compared_on_the_device():
    """A GPU that is not there: operations on tensors of two devices are errors all the same."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.zeros(3, 2, device="cuda"), requires_grad=False)
        places = native_places.ParameterMap(layer, torch.device("cuda", 0), ["w"], [[3, 2]], ["float32"])
        places._pieces = {"w": [Piece(layer, "weight", 0, (2, 1), (3, 2), 0, (2, 1))]}
        places.saw("w", torch.zeros(3, 2))
        names, differ = places._compared()
    assert names == ["w"] and differ.device.type == "cuda"
