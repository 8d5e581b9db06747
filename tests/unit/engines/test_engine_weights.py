"""The weights of an engine's process are those that were sent, by loaders or in place, whenever it is lost.

The process is a model of the real one. It reads the very memory that the worker fills.
"""

import random
import time

import pytest
import torch

from siirl.engines.rollout.served import recovery
from siirl.engines.rollout.served.engine_process import EngineLost
from siirl.engines.rollout.served.engine_shard import EngineShard
from siirl.engines.rollout.served.messages import Call, Done, Start
from siirl.engines.rollout.served.recovery import RecoveringEngine
from siirl.engines.weights import in_place as writing
from siirl.engines.weights import kept as keeping
from siirl.engines.weights.bucket import LiveWeights
from siirl.engines.weights.engine_loader import EngineWeights
from siirl.engines.weights.in_place import WeightsInPlace
from siirl.engines.weights.shared_buffer import fingerprint, open_buffer, sampled_sum
from siirl.errors import RolloutError

CPU = torch.device("cpu")
SPECS = {
    "large": ((70, 6), torch.bfloat16),
    "odd": ((3, 5), torch.float32),
    "vector": ((33,), torch.bfloat16),
    "one": ((), torch.float32),
    "counts": ((4,), torch.int64),
}


class ModelProcess:
    writes_in_place = False

    def __init__(self, rng, mean):
        self.rng, self.left = rng, rng.expovariate(1 / mean) if mean else float("inf")
        self.weights, self.updating, self.asked, self.knows = {}, "", False, False
        self.learns, self.dead, self.owed = True, False, []

    def post(self, message):
        """It works on it whenever it comes to that."""
        self.owed.append(message)
        if self.rng.random() < 0.3:
            self.owed = [self.result_of(one) for one in self.owed]

    def settle(self, but_last=0):
        until = len(self.owed) - but_last
        owed, self.owed = self.owed[:until], self.owed[until:]
        answers = [self.result_of(one) for one in owed]
        for one in answers:
            if isinstance(one, Exception):
                raise one

    def result_of(self, message):
        if isinstance(message, Done | Exception):
            return message
        try:
            return self.answer(message)
        except (EngineLost, RolloutError) as error:
            return error

    def ask(self, message):
        self.settle()
        return self.answer(message)

    def answer(self, message):
        late = self.rng.random() < 0.5
        self.left -= 1
        lost = self.left < 0
        if self.dead or (lost and not late):
            self.dead = True
            raise EngineLost("it died.", "")
        result = None
        if isinstance(message, Call):
            result = getattr(self, message.method)(**message.arguments)
        else:
            assert isinstance(message, Start)
        if lost:
            self.dead = True
            raise EngineLost("it died.", "")
        return Done(result)

    def call(self, method, **arguments):
        return self.ask(Call(method, arguments)).result

    def forget(self):
        return []

    def kill(self):
        self.left = -1

    def expect(self):
        pass

    def idle(self):
        pass

    def begin_update(self, tensors=None):
        self.updating, self.weights = "loaders", {}
        self.asked = tensors is not None

    def update(self, bucket):
        assert self.updating == "loaders"
        data = open_buffer(bucket["place"], bucket["size"], CPU)
        for name, dtype, shape, start in zip(
            bucket["names"], bucket["dtypes"], bucket["shapes"], bucket["starts"], strict=True
        ):
            found = SPECS[name]
            assert (tuple(shape), getattr(torch, dtype)) == found and name not in self.weights
            size = found[1].itemsize * torch.Size(shape).numel()
            self.weights[name] = data[start : start + size].view(found[1]).view(shape).clone()

    def finish_update(self):
        assert self.updating == "loaders"
        self.updating = ""
        if self.asked:
            self.knows = self.learns
        return "" if self.knows or not self.asked else "it does not know"

    def begin_writing(self):
        assert self.knows
        self.updating, self.weights = "in place", {}

    def write(self, filling):
        if self.updating == "failed":
            raise RolloutError("the begin of this update has failed")
        assert self.updating == "in place"
        data = open_buffer(filling["place"], filling["place"]["size"], CPU)
        part = data[filling["begin"] : filling["end"]]
        assert int(sampled_sum(part, filling["number"], filling["whole"])) == filling["sum"]
        names = list(SPECS)
        for index, first, rows, start in zip(*[iter(filling["entries"])] * 4, strict=True):
            shape, dtype = SPECS[names[index]]
            rest = shape[1:] if shape else ()
            size = rows * torch.Size(rest).numel() * dtype.itemsize
            values = data[start : start + size].view(dtype)
            whole = self.weights.setdefault(names[index], torch.empty(shape, dtype=dtype))
            if shape:
                whole[first : first + rows] = values.view(rows, *rest)
            else:
                whole.copy_(values[0])

    def finish_writing(self, filling):
        self.write(filling)
        self.updating = ""


def a_set(rng):
    draw = torch.Generator().manual_seed(rng.randrange(1 << 30))
    made = {}
    for name, (shape, dtype) in SPECS.items():
        values = torch.randn(shape, generator=draw) * 100
        made[name] = values.to(dtype) if not dtype.is_floating_point else values
    return made


def holds(process, weights):
    wanted = {name: tensor.to(SPECS[name][1]) for name, tensor in weights.items()}
    return process.weights.keys() == wanted.keys() and all(
        torch.equal(process.weights[name], wanted[name]) for name in wanted
    )


def ways_of(process, log):
    """Notes the calls of a process."""
    ask, post = process.ask, process.post
    process.ask = lambda message: (log.append(message.kind), ask(message))[1]
    process.post = lambda message: (log.append(message.kind), post(message))[1]


def in_place(keeps):
    return WeightsInPlace("engine", SPECS, CPU, keeps, EngineShard((0,)), whole=False)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_a_process_has_the_weights_that_were_sent_last_whenever_it_is_lost(
    seed, keeps, tmp_path, monkeypatch
):
    lose_a_process(random.Random(seed), keeps, in_place(keeps), tmp_path, monkeypatch)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_elsewhere_is_copied_while_more_comes(seed, tmp_path, monkeypatch):
    """As on a GPU: nothing is put where bytes are that are still being copied."""
    sent, rng, copy = in_place(keeps=True), random.Random(seed), keeping._copy_aside

    def late(target, source):
        time.sleep(rng.choice([0.0, 0.003]))
        copy(target, source)

    monkeypatch.setattr(keeping, "_copy_aside", late)
    for part in (sent, sent._writer):
        monkeypatch.setattr(part, "_keeps_apart", True)
    lose_a_process(random.Random(seed), True, sent, tmp_path, monkeypatch, live_share=0.0)


def holding_all(monkeypatch):
    """As on a GPU whose buffer has room for all weights."""
    sent = WeightsInPlace("engine", SPECS, CPU, True, EngineShard((0,)), False, buffer_bytes=1 << 20)
    for part in (sent, sent._writer):
        monkeypatch.setattr(part, "_keeps_apart", True)
    return sent


@pytest.mark.parametrize("seed", range(20))
def test_what_a_buffer_holds_at_once_is_there_for_the_next_process_whenever_one_is_lost(
    seed, tmp_path, monkeypatch
):
    sent = holding_all(monkeypatch)
    lose_a_process(random.Random(seed), True, sent, tmp_path, monkeypatch, live_share=0.0)


@pytest.mark.parametrize("is_lost", ["before it is copied", "afterwards"])
def test_what_a_buffer_holds_at_once_is_written_at_once_and_copied_after_the_update(
    is_lost, tmp_path, monkeypatch
):
    sent, log, copy = holding_all(monkeypatch), [], keeping._copy_aside
    monkeypatch.setattr(keeping, "_copy_aside", lambda *args: (log.append("copy"), copy(*args)))
    rng, processes = random.Random(0), []

    def make():
        processes.append(ModelProcess(rng, 0))
        ways_of(processes[-1], log)
        return processes[-1]

    engine = RecoveringEngine(make, Start("", {}), tmp_path / "log", 9)
    for _ in range(2):
        now = a_set(rng)
        log.clear()
        sent.replace(engine, iter(now.items()))
        assert holds(processes[-1], now)
    assert log == ["begin_writing", "finish_writing"]
    if is_lost == "afterwards":
        sent.go_on_keeping()
        sent._kept.wait()
        assert log.pop() == "copy"
        sent._writer.buffer().data.zero_()  # the next update is on its way there
    processes[-1].left = -1
    engine.call("idle")
    sent.close()
    assert len(processes) == 2 and holds(processes[-1], now)
    assert ("copy" in log) == (is_lost != "afterwards")


def test_the_next_update_begins_when_all_of_the_one_before_is_copied(monkeypatch):
    """Else old bytes land where the loaders of the next one read."""
    copy = keeping._copy_aside
    monkeypatch.setattr(keeping, "_copy_aside", lambda *args: (time.sleep(0.1), copy(*args)))
    kept = keeping.KeptWeights(64, CPU)
    for begin in (0, 32):
        kept.copying(begin, torch.full((32,), 1, dtype=torch.uint8))
    kept.restart()
    assert torch.equal(kept.buffer.data, torch.ones(64, dtype=torch.uint8))
    kept.close()


@pytest.mark.parametrize("seed", range(10))
def test_by_default_the_loaders_take_each_tensor_and_nobody_asks_where_they_land(seed, tmp_path, monkeypatch):
    by_loaders = EngineWeights("engine", SPECS, CPU, True, EngineShard((0,)))
    log = lose_a_process(random.Random(seed), True, by_loaders, tmp_path, monkeypatch)
    assert not {"begin_writing", "write", "finish_writing"}.intersection(log) and not by_loaders.reads_live


def lose_a_process(rng, keeps, sent, tmp_path, monkeypatch, live_share=0.4):
    """Updates of all kinds into processes that are lost now and then; the calls that they got."""
    monkeypatch.setattr(writing, "BUCKET_BYTES", 200)  # the large tensor is cut
    processes, log = [], []

    def make():
        processes.append(ModelProcess(rng, rng.choice([0, 6, 25]) if keeps else 0))
        ways_of(processes[-1], log)
        return processes[-1]

    monkeypatch.setattr(recovery, "WINDOW_S", 0.0)
    engine = RecoveringEngine(lambda: _living(make), Start("", {}), tmp_path / "log", 10_000 if keeps else 0)
    live_sets = LiveWeights(a_set(rng))
    loaders = EngineWeights("engine", SPECS, CPU, keeps, EngineShard((0,)))
    try:
        for _ in range(12):
            now = a_set(rng)
            live = rng.random() < live_share
            if live:
                live_sets.settle()
                for name, tensor in live_sets:
                    tensor.copy_(now[name])
            way = sent
            if isinstance(sent, WeightsInPlace):
                way = loaders if rng.random() < 0.25 else sent
                sent._writer._whole = rng.random() < 0.5
            weights = iter(live_sets if live else now.items())
            way.replace(engine, weights, live_sets if live else None)
            assert holds(processes[-1], now)
            if keeps and rng.random() < 0.3:  # lost while it is used
                processes[-1].left = -1
                engine.call("idle")
                assert holds(processes[-1], now)
            if rng.random() < 0.2:  # an update fails, and the next one is whole
                with pytest.raises(ZeroDivisionError):
                    sent.replace(engine, failing(now))
    finally:
        sent.close()
        loaders.close()
    assert "update" in log and ("finish_writing" in log) == isinstance(sent, WeightsInPlace)
    return log


def _living(make):
    """A process that lives long enough to start: whose first one dies is not tried again."""
    process = make()
    process.left = max(process.left, 1.0)
    return process


def failing(weights):
    yield from list(weights.items())[:3]
    raise ZeroDivisionError


def test_what_a_process_cannot_learn_is_loaded_each_time_and_said_once(tmp_path, caplog):
    log, rng = [], random.Random(0)
    process = ModelProcess(rng, 0)
    process.learns = False
    ways_of(process, log)
    engine = RecoveringEngine(lambda: process, Start("", {}), tmp_path / "log", 0)
    sent = in_place(keeps=False)
    for _ in range(3):
        now = a_set(rng)
        sent.replace(engine, iter(now.items()))
        assert holds(process, now)
    sent.close()
    assert "write" not in log and caplog.text.count("it does not know") == 1


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("way", ["by loaders", "in place"])
def test_an_update_that_failed_is_finished_and_the_next_one_is_whole(way, before, tmp_path):
    log, rng = [], random.Random(0)
    process = ModelProcess(rng, 0)
    ways_of(process, log)
    engine = RecoveringEngine(lambda: process, Start("", {}), tmp_path / "log", 0)
    shard = EngineShard((0,))
    sent = in_place(False) if way == "in place" else EngineWeights("engine", SPECS, CPU, False, shard)
    now = a_set(rng)
    for _ in range(before):
        sent.replace(engine, iter(now.items()))
    log.clear()
    with pytest.raises(ZeroDivisionError):
        sent.replace(engine, failing(now))
    assert not process.owed and ("finish_update" in log or before)
    sent.replace(engine, iter(now.items()))
    sent.close()
    assert holds(process, now)


def test_a_begin_that_fails_is_an_error_of_its_update_and_the_next_one_is_whole(tmp_path):
    """Nobody waits for its answer before the first piece is there, and no other message gets it."""
    rng, log = random.Random(0), []
    process = ModelProcess(rng, 0)
    ways_of(process, log)
    engine, sent = RecoveringEngine(lambda: process, Start("", {}), tmp_path / "log", 0), in_place(False)
    sent.replace(engine, iter(a_set(rng).items()))
    begin = process.begin_writing

    def fails():
        process.updating = "failed"
        raise RolloutError("a parameter has another layout")

    for later in (lambda weights: iter(weights.items()), failing):
        process.begin_writing = fails
        log.clear()
        with pytest.raises((RolloutError, ZeroDivisionError), match=r"another layout|zero|^$"):
            sent.replace(engine, later(a_set(rng)))
        assert log[0] == "begin_writing" and not process.owed
        process.begin_writing = begin
        for _ in range(2):  # by loaders, then in place
            now = a_set(rng)
            sent.replace(engine, iter(now.items()))
            assert holds(process, now)
    sent.close()


def test_what_is_expected_has_begun_once_when_it_comes(tmp_path):
    """In place the process begins beside whatever else there is to do before."""
    rng, log = random.Random(0), []
    process = ModelProcess(rng, 0)
    ways_of(process, log)
    engine, sent = RecoveringEngine(lambda: process, Start("", {}), tmp_path / "log", 0), in_place(False)
    for begun in ([], ["begin_writing"]):
        log.clear()
        for _ in range(2):
            sent.expect(engine)
        assert log == begun
        now = a_set(rng)
        sent.replace(engine, iter(now.items()))
        assert holds(process, now) and log.count("begin_writing") == len(begun)
    sent.close()


def test_a_fingerprint_tells_values_and_their_order():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    other, swapped = values.clone(), values.clone()
    other[7] = torch.nextafter(other[7], torch.tensor(9.0))
    swapped[[3, 900]] = swapped[[900, 3]]
    same = values.view(20, 50).t().contiguous().t()
    assert int(fingerprint(same)) == int(fingerprint(values)) != int(fingerprint(other))
    assert int(fingerprint(swapped)) != int(fingerprint(values))
    assert int(fingerprint(torch.tensor([float("nan")]))) == int(fingerprint(torch.tensor([float("nan")])))


def test_a_lost_process_without_restarts_ends_the_update(tmp_path):
    process = ModelProcess(random.Random(0), 0)
    engine = RecoveringEngine(lambda: process, Start("", {}), tmp_path / "log", 0)
    sent = in_place(keeps=False)
    process.left = 1
    with pytest.raises(RolloutError, match="not started again"):
        sent.replace(engine, iter(a_set(random.Random(1)).items()))
    sent.close()
