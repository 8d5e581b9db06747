"""The port at which ranks meet: nobody gets it between the moment it is known and the moment it is served."""

import os
import socket
from datetime import timedelta

import pytest

from siirl.cli import main
from siirl.errors import ConfigError
from siirl.launch import doctor
from siirl.launch.rendezvous import STORE_FD, check_port, open_socket, store_of_ranks


@pytest.mark.heavy
def test_the_port_of_doctors_two_processes_is_nobody_elses_while_they_start():
    with open_socket("127.0.0.1") as server:
        address = server.getsockname()
        both = [doctor._start_gloo_probe(0, address[1], server.fileno())]
    try:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)  # closed here, and rank 0 has not come to its store
        both.append(doctor._start_gloo_probe(1, address[1]))
        assert [process.communicate(timeout=120)[1] for process in both] == ["", ""]
        assert [process.returncode for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
            process.wait()


def test_rank_0_serves_the_store_on_the_socket_that_it_inherited(monkeypatch):
    server = open_socket("127.0.0.1")
    port = server.getsockname()[1]
    monkeypatch.setenv(STORE_FD, str(server.detach()))
    store = store_of_ranks("127.0.0.1", port, 0, 1, timedelta(seconds=10))
    assert STORE_FD not in os.environ, "what this process starts has no such descriptor"
    assert store.port == port
    reader = store_of_ranks("127.0.0.1", port, 1, 1, timedelta(seconds=10))
    store.set("key", "told")
    assert reader.get("key") == b"told"


def test_without_an_inherited_socket_rank_0_opens_the_port_that_it_is_told(monkeypatch):
    monkeypatch.delenv(STORE_FD, raising=False)
    store = store_of_ranks("127.0.0.1", 0, 0, 1, timedelta(seconds=10))
    assert store.port > 0


def test_a_port_that_is_taken_is_named_with_its_variable():
    """Who starts ranks without torchrun got a traceback of torch's."""
    with open_socket("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"MASTER_PORT={port} is in use .* Set another MASTER_PORT"):
            store_of_ranks("127.0.0.1", port, 0, 1, timedelta(seconds=5))


@pytest.mark.parametrize("command", ["check", "run"])
def test_check_and_a_start_say_that_the_port_of_rank_0_is_taken(command, tmp_path, monkeypatch, capsys):
    """Beside what else is wrong; that of torchrun's agent is held by it, and other ranks open none."""
    with open_socket("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        there = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        for name, value in {**there, "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}.items():
            monkeypatch.setenv(name, value)
        keys = ["algorithm.adv_estimator=grpo", f"trainer.output_dir={tmp_path}", "trainer.n_gpus_per_node=1"]
        said = []
        for more in ({}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"RANK": "1"}):
            with monkeypatch.context() as one:
                for name, value in more.items():
                    one.setenv(name, value)
                assert main([command, *keys]) == 2
                said.append(capsys.readouterr().err)
    assert f"MASTER_PORT={port} is in use by another program on " in said[0]
    assert "Set another MASTER_PORT for all ranks" in said[0]
    assert all("torchrun started 2 processes" in told and "data.train_files" in told for told in said)
    assert "MASTER_PORT" not in said[1] + said[2]


def test_what_is_no_port_is_refused():
    with pytest.raises(ConfigError, match="MASTER_PORT='none' is no port"):
        check_port({"RANK": "0", "MASTER_PORT": "none"})
