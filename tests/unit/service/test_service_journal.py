"""What a server has answered is there when it begins again, wherever it was killed."""

import mmap
import os
import random
import resource
import shutil
import signal
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from siirl.engines.train.base import AdamStep
from siirl.errors import ConfigError
from siirl.service import request_journal as journal
from siirl.service.commands import (
    AdapterSpec,
    CreateModel,
    Datum,
    ForwardBackward,
    LoadState,
    OptimStep,
    Refused,
    SaveSampler,
    SaveState,
)
from siirl.service.desk import Ticket
from siirl.service.request_journal import Journal, Kept

pytestmark = pytest.mark.heavy
MODELS = ("a:train:0", "b:train:0")
ADAM = AdamStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0)


def drawn(draw: random.Random, model: str, count: int):
    """A command of a model."""
    tokens = [draw.randrange(2, 64) for _ in range(draw.randrange(2, 9))]
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    data = [Datum(tokens[:-1], inputs)]
    train = ForwardBackward(model, "cross_entropy", {}, data, forward_only=draw.random() < 0.2)
    refused = ForwardBackward(model, "gspo", {}, data, False)
    endless = [Datum(tokens[:-1], inputs | {"weights": np.full(len(tokens) - 1, 3e38, np.float32)})]
    kinds = [train] * 4 + [OptimStep(model, ADAM)] * 4 + [refused]
    kinds.append(ForwardBackward(model, "cross_entropy", {}, endless, False))
    kinds.append(SaveSampler(model, None, f"{model[0]}:sample:{count}"))
    kinds.append(SaveState(model, f"tinker://{model}/weights/s{count}", True))
    kinds.append(LoadState(model, f"tinker://{model}/weights/first", True, False))
    return draw.choice(kinds)


def carried_out(service, command, number: int):
    """The command's answer, which the journal has by then."""
    tenants = service.tenants
    kinds = {CreateModel: "create", SaveState: "save", SaveSampler: "save_sampler"}
    try:
        if isinstance(command, ForwardBackward):
            (found,) = tenants.train([command])
            answer = found if isinstance(found, Refused) else np.float64(found.loss).tobytes()
        elif isinstance(command, OptimStep):
            (norm,) = tenants.step([command])
            answer = norm if isinstance(norm, Refused) else {"told": norm}
        else:
            answer = {"told": getattr(tenants, (kinds | {LoadState: "load"})[type(command)])(command)}
    except Refused as error:
        answer = error
    service.keep([Ticket(f"{command.model}:{number}", command, command.model)], [command], [answer])
    return answer


def state(service) -> dict[str, torch.Tensor]:
    """All that the models are, to the last bit."""
    found = {}
    for model in service.tenants._tenants:
        spec, version, tensors = service.tenants.state_of(model)
        sums = service.tenants._tenants[model].trained.sums
        found |= {f"{model} {name}": one for name, one in tensors.items()}
        found |= {f"{model} version": torch.tensor(version), f"{model} rank": torch.tensor(spec.rank)}
        if sums is not None:
            found[f"{model} sums"] = sums.clone()
    return found


def begun_again(service, folder) -> tuple[dict[str, torch.Tensor], dict[str, int], dict[str, list]]:
    """State, next numbers and answers of a server that has nothing but these files."""
    service.journal.close()
    service.tenants._tenants.clear()
    service.journal = Journal(folder)
    kept = service.journal.kept()
    for one in kept:
        service._restore(one)
    return state(service), {one.model: one.number for one in kept}, {one.model: one.answers for one in kept}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """To the last bit; what is not a number, too."""
    pairs = ((one.numpy().tobytes(), wanted[name].numpy().tobytes()) for name, one in found.items())
    return found.keys() == wanted.keys() and all(one == other for one, other in pairs)


class Gated(dict):
    """A state of which a thread writes as many tensors as it is let."""

    def __init__(self, state) -> None:
        super().__init__(state)
        self.may = threading.Semaphore(0)

    def items(self):
        for pair in super().items():
            self.may.acquire()
            yield pair


def plain(answer) -> str:
    return f"{type(answer).__name__} {answer}"


@pytest.mark.parametrize("seed", [3])
def test_nothing_that_was_answered_is_lost_wherever_the_server_is_killed(
    service, tenants, tmp_path, monkeypatch, seed
):
    monkeypatch.setattr(journal, "MOST_AGE_S", 0.0)
    monkeypatch.setattr(journal, "MOST_SHARE", 1e9)
    draw, numbers = random.Random(seed), dict.fromkeys(MODELS, 0)
    service.journal = Journal(tmp_path / "journal")
    begin, written, points = service.journal.begin, [], []

    def begin_gated(model, spec, version, state, at_once):
        written.append(Gated(state))
        begin(model, spec, version, state if at_once else written[-1], at_once)
        while not at_once and not list((tmp_path / "journal").glob("*.new")):
            time.sleep(0.001)  # the thread has not begun

    service.journal.begin = begin_gated
    for count in range(15):
        model = draw.choice(MODELS)
        if not numbers[model]:
            command = CreateModel(model, AdapterSpec(2, seed))
        elif numbers[model] == 1:
            command = SaveState(model, f"tinker://{model}/weights/first", True)
        else:
            command = drawn(draw, model, count)
        for one in written:
            one.may.release(1000 if isinstance(command, LoadState) else draw.choice((1, 1, 5, 1000)))
        time.sleep(0.01)  # in which a thread writes what it may
        answer = carried_out(service, command, numbers[model])
        numbers[model] += 1
        shutil.copytree(tmp_path / "journal", folder := tmp_path / f"killed after {count}")
        points.append((folder, state(service), dict(numbers), (model, plain(answer))))
    for one in written:
        one.may.release(1000)
    service.journal.close()
    left = [[file.suffix for file in folder.iterdir()] for folder, *_ in points]
    assert any(".new" in names for names in left), "killed while a thread writes a state"
    for number, (folder, wanted, told, (model, answer)) in enumerate(points):
        found, next_numbers, answers = begun_again(service, folder)
        assert same(found, wanted), f"after {number + 1} commands"
        assert next_numbers == {name: one for name, one in told.items() if one}
        assert (told[model] - 1, answer) in [(n, plain(one)) for n, one in answers[model]]
    # what was being written when the process ended was not answered: it is as if it had never come
    for before, after in reversed(list(pairwise(points))):
        file = after[0] / f"{after[3][0]}.journal"
        old = before[0] / file.name
        if old.exists() and (whole := file.read_bytes()).startswith(old.read_bytes()):
            file.write_bytes(whole[: draw.randrange(old.stat().st_size, len(whole))])
            assert same(begun_again(service, after[0])[0], before[1])


def test_snapshots_of_sampling_sessions_outlive_the_server_and_go_with_their_session(
    service, tenants, tmp_path
):
    service.journal = Journal(tmp_path / "journal")
    carried_out(service, CreateModel("a:train:0", AdapterSpec(2, 1)), 0)
    carried_out(service, SaveSampler("a:train:0", None, "a:sample:0"), 1)
    before = tenants.snapshot("a:sample:0")
    tenants._snapshots.clear()
    after = tenants.snapshot("a:sample:0")
    assert after.rank == before.rank == 2 and same(after.weights, before.weights)
    tenants.release("a")
    with pytest.raises(Refused):
        tenants.snapshot("a:sample:0")


def three_steps(service, folder) -> None:
    service.journal = Journal(folder)
    carried_out(service, CreateModel("a:train:0", AdapterSpec(2, 1)), 0)
    for number in range(3):
        carried_out(service, OptimStep("a:train:0", ADAM), number + 1)


def test_a_model_that_the_configuration_has_no_room_for_is_the_operators_error(service, tenants):
    kept = Kept("a:train:0", 1, commands=[CreateModel("a:train:0", AdapterSpec(1000, 1))])
    with pytest.raises(ConfigError, match=r"a:train:0, .* cannot go on: rank 1000.*lora_rank"):
        service._restore(kept)


@pytest.mark.parametrize("place", [8, 40, -3])
def test_a_file_that_is_damaged_says_so_and_its_model_is_refused(service, tenants, tmp_path, caplog, place):
    three_steps(service, tmp_path)
    file = tmp_path / "a:train:0.journal"
    data = bytearray(file.read_bytes())
    data[place] ^= 255
    file.write_bytes(data)
    assert begun_again(service, tmp_path)[1] == {}
    assert "a:train:0 is lost" in caplog.text and (tmp_path / "a:train:0.damaged").exists()
    assert "damaged" in service.journal.problem(OptimStep("a:train:0", ADAM))
    assert service.journal.problem(OptimStep("a:train:1", ADAM)) is None
    service.journal.forget("a")
    assert not service.journal.lost


def test_a_full_disk_is_an_error_of_the_request_and_changes_nothing(service, tenants, tmp_path, monkeypatch):
    three_steps(service, tmp_path)
    file = tmp_path / "a:train:0.journal"
    before, size = state(service), file.stat().st_size
    service.desk.open_lane("a:train:0", 4)
    with monkeypatch.context() as full:
        full.setattr(journal.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
        ticket = service.desk.submit("a:train:0", 4, lambda: OptimStep("a:train:0", ADAM))
        assert service.next() == ([], [])
    assert isinstance(ticket.answer, Refused) and "disk is full" in str(ticket.answer)
    assert same(state(service), before) and file.stat().st_size == size
    service.desk.submit("a:train:0", 5, lambda: OptimStep("a:train:0", ADAM))
    assert service.next()[1] == [OptimStep("a:train:0", ADAM)]
    service.desk.close_lanes("a:")

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # a disk that fills up in the middle of an entry
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        step = OptimStep("a:train:0", ADAM)
        (told,) = service.keep([Ticket("a:train:0:4", step, "a:train:0")], [step], [{}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "could not keep" in str(told) and "lost" in service.journal.problem(step)
    assert file.stat().st_size == size, "what was written of it is gone"


def steps(folder, answered) -> None:
    """Answer steps without an end, and say in shared memory which was the last.

    The numbers of a state say of which step it is.
    """
    kept = Journal(folder)
    kept.add(MODELS[0], 0, CreateModel(MODELS[0], AdapterSpec(2, 1)), {})
    for number in range(1, 1 << 20):
        if kept.add(MODELS[0], number, OptimStep(MODELS[0], ADAM), {}):
            state = {f"{part}": torch.from_numpy(np.full(1 << 17, number)) for part in range(8)}
            kept.begin(MODELS[0], AdapterSpec(2, 1), number, state)
        answered[:8] = number.to_bytes(8, "little")
        time.sleep(0.0005)


def test_a_process_that_is_killed_while_it_writes_states_has_kept_each_step(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MOST_AGE_S", 0.0)
    monkeypatch.setattr(journal, "MOST_SHARE", 1e9)
    draw, cut, began = random.Random(5), 0, 0
    for number in range(12):
        folder, answered = tmp_path / f"{number}", mmap.mmap(-1, 8)
        if (child := os.fork()) == 0:
            try:
                steps(folder, answered)
            finally:
                os._exit(1)
        target, end_s = draw.randrange(2, 100), time.monotonic() + 60
        while int.from_bytes(answered[:8], "little") < target and time.monotonic() < end_s:
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.002))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        last = int.from_bytes(answered[:8], "little")
        cut += any(folder.glob("*.new"))
        (found,) = Journal(folder).kept()
        version = 0 if found.state is None else found.state["version"]
        began += version > 0
        again = [one for one in found.commands if isinstance(one, OptimStep)]
        assert version + len(again) == found.number - 1 >= last
        if found.state is not None:
            assert all((one == version).all() for one in found.state["tensors"].values())
        assert last in dict(found.answers) and not list(folder.glob("*.new"))
    assert cut > 2 and began > 2, (cut, began)
