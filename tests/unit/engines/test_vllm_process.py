"""The engine process without vLLM in it: answers, errors, death, silence; and what vLLM is started with."""

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from launch_jobs import wait_until_dead

from siirl.config import load_config
from siirl.data.completions import Completion, Request, SamplingParams
from siirl.engines.rollout.channel import Channel, ChannelClosed
from siirl.engines.rollout.served import engine_process
from siirl.engines.rollout.served.engine_process import EngineLost, EngineProcess
from siirl.engines.rollout.served.engine_shard import physical_gpu
from siirl.engines.rollout.served.messages import (
    Abort,
    Answer,
    Beat,
    Call,
    Done,
    Finished,
    FromEngine,
    FromWorker,
    Submit,
)
from siirl.engines.rollout.served.server import BeatingChannel
from siirl.engines.rollout.vllm.arguments import engine_arguments, engine_environment, tokens_of_a_step
from siirl.engines.weights.shared_buffer import SharedBuffer, open_buffer
from siirl.errors import RolloutError
from siirl.model_files.hf_config import load_hf_config
from siirl.observe.heartbeat import FD_VARIABLE as HEARTBEAT

pytestmark = pytest.mark.heavy

ROLLOUT = "actor_rollout_ref.rollout"
LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "CUDA_DEVICE_MAX_CONNECTIONS"),
    HEARTBEAT,
)
PARAMS = SamplingParams(max_tokens=1)


@pytest.fixture
def process(tmp_path):
    engine = EngineProcess("agent_0.rollout", {}, tmp_path / "logs" / "vllm.log", deadline_s=120.0)
    engine.silence_s = math.inf  # while it starts, as `ask` has it
    yield engine
    engine.close()


def await_started(process):
    with pytest.raises(RolloutError, match="AttributeError"):
        process.call("sleep")


def stop(process):
    """Return when none of its threads goes on: the one that reads could still have answered."""
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while any(state != "T" for state in states_of_threads(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def states_of_threads(pid):
    return [path.read_text().rpartition(") ")[2][0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]


def test_an_error_of_the_engine_names_it_and_the_request(process):
    with pytest.raises(RolloutError, match=r"'agent_0.rollout', sleep: AttributeError"):
        process.call("sleep")
    with pytest.raises(RolloutError, match=r"'agent_0.rollout', wake: AttributeError"):
        process.call("wake", part="weights")
    process.send(Submit([Request("0", [5], SamplingParams(max_tokens=1), 0)], None))
    with pytest.raises(RolloutError, match=r"'agent_0.rollout', stream: AttributeError"):
        process.listen(60.0)
    assert process.listen(0.0) == []


def test_what_was_posted_fails_for_who_asks_next_and_each_answer_is_that_of_its_question(process):
    await_started(process)
    for method in ("begin_writing", "write"):
        process.post(Call(method, {}))
    with pytest.raises(RolloutError, match="begin_writing: AttributeError"):
        process.ask(Abort())
    assert process.ask(Abort()) == Done(None)
    process.post(Abort())
    with pytest.raises(RolloutError, match="rest: AttributeError"):
        process.call("rest")
    process.post(Call("stats", {}))
    with pytest.raises(RolloutError, match="stats: AttributeError"):
        process.listen(0.0)
    for method in ("write", "rest", "stats"):
        process.post(Call(method, {}))
    with pytest.raises(RolloutError, match="write: AttributeError"):
        process.settle(but_last=2)
    with pytest.raises(RolloutError, match="rest: AttributeError"):
        process.settle(but_last=1)
    process.settle(but_last=1)
    with pytest.raises(RolloutError, match="stats: AttributeError"):
        process.settle()


def test_what_streams_finish_while_another_answer_is_awaited_is_kept_until_it_is_given_up(
    process, monkeypatch
):
    finished = Finished([Answer("0", Completion([5], [-1.0], "stop", 0), 0)], {})
    messages = [finished, Done(3)]
    monkeypatch.setattr(process, "send", lambda message: None)
    monkeypatch.setattr(process, "_receive", lambda *how: messages.pop(0) if messages else None)
    assert process.call("stats") == 3
    assert process.listen(0.0) == [finished] and process.listen(0.0) == []
    messages += [finished, Done(4)]
    assert process.call("stats") == 4
    process.forget()
    assert process.listen(0.0) == []


def test_an_engine_sees_nothing_of_the_launchers_variables_and_what_is_its_own(monkeypatch, tmp_path):
    """Of our process group, of Megatron, and descriptors, which other files may have there."""
    seen = []

    class Child:
        pid = os.getpid()

        def __init__(self, environment, connection, log):
            seen.append(environment)

    monkeypatch.setattr(engine_process, "EngineChild", Child)
    for name in LAUNCHERS:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("HOME", str(tmp_path))
    EngineProcess("engine", {"VLLM_PORT": "1"}, tmp_path / "vllm.log", deadline_s=1.0)
    (environment,) = seen
    assert not set(LAUNCHERS) & set(environment)
    assert environment == {k: v for k, v in os.environ.items() if k not in LAUNCHERS} | {"VLLM_PORT": "1"}


HANDS_OVER = """
import os, subprocess, sys
fd = int(sys.argv[1])
words = [sys.executable, "-m", "siirl.engines.rollout.served.server", str(fd)]
print(subprocess.Popen(words, pass_fds=[fd]).pid, flush=True)
sys.stdin.read()
"""


def test_an_engine_ends_with_its_worker_also_where_its_connection_lasts(tmp_path):
    """A process that the worker had started may hold it, and an engine that computes does not look."""
    ours, theirs = socket.socketpair()
    held = theirs.dup()
    with ours, theirs, held:
        words = [sys.executable, "-c", HANDS_OVER, str(theirs.fileno())]
        worker = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]
        )
        engine = int(worker.stdout.readline())
        channel = Channel(ours, FromEngine)
        channel.send(Abort())
        while not isinstance(channel.receive(), Done):
            pass  # beats
        worker.kill()
        worker.communicate()
        wait_until_dead([engine], 20)


def test_an_engine_that_cannot_read_a_message_ends_and_shows_why(process):
    process.send(Done())
    with pytest.raises(RolloutError, match=r"died during 'sleep': exit code 0(?s:.*)Invalid value 'done'"):
        process.call("sleep")


def test_an_error_shows_what_was_logged_without_lines_of_pages(process, tmp_path):
    with (tmp_path / "logs" / "vllm.log").open("a") as log:
        log.write("the cause\nstate: " + 50_000 * "x" + "\n")
    with pytest.raises(RolloutError, match=r"\| the cause\n  \| state: x{393} \.\.\.") as caught:
        process.call("sleep")
    assert len(str(caught.value)) < 10_000


def test_a_killed_engine_is_named_with_its_signal(process):
    await_started(process)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match="died during 'stream': killed by SIGKILL"):
        process.listen(60.0)
    with pytest.raises(RolloutError, match=rf"pid {process.pid}\) died during 'sleep': killed by SIGKILL"):
        process.call("sleep")


def test_a_silent_engine_is_noticed_within_the_deadline(process):
    await_started(process)
    stop(process)
    process.deadline_s = 1.0
    with pytest.raises(RolloutError, match=r"hangs: no word in 1 s .*'sleep'"):
        process.call("sleep")
    process.expect()
    with pytest.raises(RolloutError, match=r"hangs: no word in 1 s .*'stream'"):
        process.listen(60.0)


def test_a_process_that_is_stopped_is_noticed_long_before_the_deadline(process):
    await_started(process)
    stop(process)
    process.silence_s = 1.0
    with pytest.raises(EngineLost, match=r"is silent: no heartbeat in 1 s of waiting for 'sleep'"):
        process.call("sleep")


@pytest.mark.slow
def test_a_process_that_lives_is_not_silent_and_does_not_hide_an_engine_that_hangs(process):
    await_started(process)
    process.silence_s = 3.0
    assert process.listen(5.0) == []
    process.deadline_s = 3.0
    process.expect()
    with pytest.raises(EngineLost, match=r"hangs: no word in 3 s"):
        process.listen(10.0)


def test_what_a_worker_did_not_listen_to_is_not_silence(process):
    await_started(process)
    process.silence_s = 1.5
    stop(process)
    time.sleep(1.6)
    assert process.listen(0.8) == []
    os.kill(process.pid, signal.SIGCONT)
    assert process._channel.ready(60.0), "a heartbeat"
    assert process.listen(0.8) == []


def test_a_process_that_reads_nothing_or_stops_within_a_message_holds_nobody(monkeypatch, tmp_path):
    monkeypatch.setattr(engine_process, "SILENCE_S", 1.0)
    popen = subprocess.Popen

    def instead(command, **options):
        return popen([sys.executable, "-c", HALF_A_MESSAGE, command[-1]], **options)

    monkeypatch.setattr(engine_process.subprocess, "Popen", instead)
    for waits in (
        lambda process: process.send(Submit([Request("0", range(1 << 20), PARAMS, 0)], None)),
        lambda process: process.listen(60.0),
    ):
        process = EngineProcess("agent_0.rollout", {}, tmp_path / "vllm.log", deadline_s=120.0)
        process.silence_s = 60.0
        began_s = time.monotonic()
        with pytest.raises(EngineLost, match="stands still within a message"):
            waits(process)
        assert time.monotonic() - began_s < 20
        process.kill()


HALF_A_MESSAGE = """
import socket, struct, sys, time
sock = socket.socket(fileno=int(sys.argv[1]))
sock.sendall(struct.pack("<Q", 1000) + b"half")
time.sleep(600)
"""


def test_beats_wait_for_nobody():
    """A worker that reads nothing for hours finds few of them, and the engine's own messages go through."""
    large = Finished([Answer("0", Completion([5] * 1_000_000, [-1.0] * 1_000_000, "stop", 0), 0)], {})
    ours, theirs = socket.socketpair()
    channel = BeatingChannel(theirs, FromWorker)
    reader = Channel(ours, FromEngine)
    assert reader.ready(60.0) and reader.receive() == Beat()
    sender = threading.Thread(target=channel.send, args=(large,))
    sender.start()
    time.sleep(2.5)  # beats are due while the message is on its way
    found = []
    while not found or isinstance(found[-1], Beat):
        found.append(reader.receive())
    sender.join()
    assert found[-1] == large and len(found) < 4
    reader.close()


def test_samples_of_a_prompt_carry_it_once():
    one, other = (Channel(end, FromWorker) for end in socket.socketpair())
    prompts = ([5] * 1000, [6] * 1000, [6] * 1000, [7])
    requests = [
        Request(f"s_{p}.{i}", prompt, PARAMS, p, i) for p, prompt in enumerate(prompts) for i in range(3)
    ]
    one.send(Submit(requests, "adapter").packed())
    sent = other.receive()
    assert sum(len(request.prompt) for request in sent.requests) == 3001
    assert sent.unpacked() == requests and sent.adapter == "adapter"
    one.close()


def test_messages_carry_their_fields_exactly():
    one, other = (Channel(end, FromWorker) for end in socket.socketpair())
    rng = random.Random(0)
    params = SamplingParams(max_tokens=3, temperature=rng.random(), stop_token_ids=(4, 9))
    requests = [
        Request(key, [rng.randrange(1 << 32) for _ in range(size)], params, rng.randrange(1 << 63))
        for key, size in [("ö", 5), (-3, 0), ("long", 100_000)]
    ]
    threading.Thread(target=one.send, args=(Submit(requests, None),), daemon=True).start()
    assert other.receive() == Submit(requests, None)
    call = Call("update", {"shapes": [[2, 0], []], "handle": [None, True, {"bytes": "00ff"}]})
    one.send(call)
    assert other.receive() == call
    one.close()
    with pytest.raises(ChannelClosed):
        other.receive()


@pytest.mark.parametrize("prompt", [np.arange(3), torch.arange(3), [np.int64(0), 1, 2], range(3), (0, 1, 2)])
def test_a_prompt_may_be_any_sequence_of_numbers(prompt):
    one, other = (Channel(end, FromWorker) for end in socket.socketpair())
    one.send(Submit([Request(0, prompt, SamplingParams(max_tokens=1), np.int64(7))], "adapter"))
    assert other.receive() == Submit([Request(0, [0, 1, 2], SamplingParams(max_tokens=1), 7)], "adapter")


def test_numbers_that_are_none_arrive_as_such():
    one, other = (Channel(end, FromEngine) for end in socket.socketpair())
    values = [math.nan, -math.inf, -0.1, np.float32(-0.1).item()]
    one.send(Finished([Answer("x_0", Completion([1, 2, 3, 4], values, "stop", 0), 0)], {"gauge": 0.5}))
    (response,) = other.receive().answers
    got = response.completion.log_probs
    assert math.isnan(got[0]) and got[1:] == values[1:]


def test_a_host_buffer_is_seen_by_who_opens_its_place_and_leaves_nothing_behind():
    buffer = SharedBuffer(1024, torch.device("cpu"))
    opened = open_buffer(buffer.place, 1024, torch.device("cpu"))
    buffer.data[7] = 42
    assert opened[7] == 42
    buffer.close()
    opened[8] = 43
    assert opened[:9].tolist() == [0] * 7 + [42, 43], "who has opened it keeps it"
    buffer.close()


OWNER = """
import json, time, torch
from siirl.engines.weights.shared_buffer import SharedBuffer
buffer = SharedBuffer(1 << 20, torch.device("cpu"))
buffer.data[:] = 7
print(json.dumps(buffer.place), flush=True)
time.sleep(600)
"""


def test_the_memory_of_a_killed_process_goes_with_it(tmp_path):
    """It has a name nowhere, so that nobody can forget to remove it, and is opened by its place."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    before = {path for folder in folders for path in folder.glob("*siirl*weights*")}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        place = json.loads(owner.stdout.readline())
        assert open_buffer(place, 1 << 20, torch.device("cpu"))[-1] == 7
        assert {path for folder in folders for path in folder.glob("*siirl*weights*")} <= before
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert not os.path.exists(place["path"])
    assert {path for folder in folders for path in folder.glob("*siirl*weights*")} <= before


def arguments(tmp_path, device, *overrides, tensor_parallel=1):
    path = make_tiny_model_dir(tmp_path / "model", tokenizer=False)
    keys = [
        f"actor_rollout_ref.model.path={path}",
        "data.max_prompt_length=100",
        "data.max_response_length=28",
    ]
    cfg = load_config([*keys, *overrides])
    hf_config = load_hf_config(cfg.actor_rollout_ref.model)
    return engine_arguments(cfg, str(path), hf_config, tensor_parallel, torch.device(device))


def test_keys_become_arguments_of_the_engine(tmp_path):
    got = arguments(
        tmp_path,
        "cuda",
        f"{ROLLOUT}.dtype=float16",
        f"{ROLLOUT}.gpu_memory_utilization=0.3",
        f"{ROLLOUT}.max_num_seqs=7",
        f"{ROLLOUT}.max_num_batched_tokens=512",
        f"{ROLLOUT}.enforce_eager=False",
        f"{ROLLOUT}.disable_log_stats=False",
        f"{ROLLOUT}.free_cache_engine=False",
        f"+{ROLLOUT}.engine_kwargs.vllm.enable_prefix_caching=False",
        f"+{ROLLOUT}.engine_kwargs.vllm.swap_space=2",
        tensor_parallel=2,
    )
    expected = {
        "tensor_parallel_size": 2,
        "dtype": "float16",
        "gpu_memory_utilization": 0.3,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 512,
        "max_model_len": 128,
        "enforce_eager": False,
        "disable_log_stats": False,
        "enable_sleep_mode": False,
        "enable_prefix_caching": False,
        "swap_space": 2,
        "load_format": "dummy",
    }
    assert {name: got[name] for name in expected} == expected


def test_on_the_cpu_there_is_neither_sleep_nor_a_share_of_device_memory(tmp_path):
    got = arguments(tmp_path, "cpu", f"{ROLLOUT}.enforce_eager=False")
    assert got["enforce_eager"] is True and got["enable_chunked_prefill"] is False
    assert not {"enable_sleep_mode", "gpu_memory_utilization"} & set(got)
    assert got["kv_cache_memory_bytes"] >= 64 << 20


def test_without_chunked_prefill_a_step_holds_the_longest_row(tmp_path):
    overrides = (f"{ROLLOUT}.max_num_batched_tokens=64", f"{ROLLOUT}.enable_chunked_prefill=False")
    assert arguments(tmp_path, "cuda", *overrides)["max_num_batched_tokens"] == 128


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ((f"{ROLLOUT}.max_num_seqs=16",), 16 * 128),
        ((f"+{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=3",), 3 * 128),
        ((f"+{ROLLOUT}.engine_kwargs.vllm={{max_num_seqs: 3, max_num_batched_tokens: 500}}",), 500),
        ((f"+{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=null",), 8192),
        ((f"{ROLLOUT}.max_num_seqs=500",), 16 * 500),  # vLLM's warm-up would give the last row 16 + 192
        ((f"{ROLLOUT}.max_num_seqs=128",), 8192),
    ],
    ids=str,
)
def test_a_step_has_no_more_tokens_than_its_rows(tmp_path, keys, tokens):
    assert arguments(tmp_path, "cuda", *keys)["max_num_batched_tokens"] == tokens


def test_no_row_of_the_warm_up_is_longer_than_rows_can_be():
    draw = random.Random(5)
    for _ in range(2000):
        longest, rows = draw.randint(1, 300), draw.randint(1, 80)
        most = draw.randint(max(rows, longest), 9000)
        tokens = tokens_of_a_step(most, rows, longest)
        last = tokens // rows + tokens % rows  # as vLLM deals them
        assert last <= longest, (most, rows, longest)
        assert longest <= tokens <= most and rows <= tokens
        assert tokens > most - rows or tokens == rows * longest, "fewer than need be"


def test_an_engine_sees_the_gpus_of_its_shard_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert physical_gpu(torch.device("cuda", 1)) == "5"
    env = engine_environment(2, torch.device("cuda", 1), ["5", "6"])
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == "5,6" and "VLLM_ENABLE_V1_MULTIPROCESSING" not in env
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert physical_gpu(torch.device("cuda", 1)) == "1"


def test_wishes_of_the_environment_win(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert "VLLM_LOGGING_LEVEL" not in engine_environment(1, torch.device("cpu"), [])
