"""What a Ray run asks of a cluster, without one: sizes, addresses, the environment that travels."""

import os
import re
import socket
from types import SimpleNamespace

import pytest
from held_ports import held_port

from siirl.config import load_config
from siirl.errors import ConfigError
from siirl.launch import ray as ray_module
from siirl.launch.ray import RayTrainer, _of_machines
from siirl.launch.ray_actor import forwarded_environment, interface_to
from siirl.launch.ray_cluster import MachineLost, Need, Node, connected, find_address, shortage

NEED = Need(nnodes=2, workers_per_node=8, cpus_per_worker=2, device="auto")
BIG = Node("a", "10.0.0.1", "node-a", 64, 8)
CASES = {
    "enough": ([BIG, Node("b", "10.0.0.2", "node-b", 16, 8)], ""),
    "one machine too few": ([BIG], r"it has 1, of which 1 will do:\n  node-a \(10.0.0.1\): 8 GPUs.*: enough"),
    "GPUs": (
        [BIG, Node("b", "10.0.0.2", "node-b", 64, 4)],
        r"node-b \(10.0.0.2\): 4 GPUs, 64 .*: too few GPUs",
    ),
    "CPUs": ([BIG, Node("b", "10.0.0.2", "node-b", 15, 8)], "8 GPUs, 15 logical CPUs: too few logical CPUs"),
    "both": ([BIG, Node("b", "10.0.0.2", "b", 1, 0)], "too few GPUs and logical CPUs"),
    "none": ([], "it has 0, of which 0 will do"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_shortage_is_told_with_the_numbers_of_each_machine(case):
    nodes, pattern = CASES[case]
    told = shortage(NEED, nodes)
    assert bool(told) == bool(pattern)
    assert re.search(pattern, told, re.S)


def test_gpus_are_needed_where_there_are_some():
    cpu = Node("c", "10.0.0.3", "node-c", 64, 0)
    assert NEED.bundle([cpu, cpu]) == {"CPU": 16.0}
    assert NEED.bundle([cpu, BIG]) == {"CPU": 16.0, "GPU": 8.0}
    assert Need(1, 8, 2, "cpu").bundle([BIG]) == {"CPU": 16.0}
    assert Need(1, 8, 2, "cuda").bundle([cpu]) == {"CPU": 16.0, "GPU": 8.0}


def test_an_address_where_nothing_listens_is_refused_at_once(tmp_path):
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"RAY_ADDRESS={address}: no Ray cluster answers there"):
            find_address(load_config([]), {"RAY_ADDRESS": address})
    with pytest.raises(
        ConfigError, match=r"ray_init.address=h: no Ray cluster answers there: it is not host:port"
    ):
        find_address(load_config(["ray_init.address=h"]), {})
    with pytest.raises(ConfigError, match="Ray Client is not supported"):
        find_address(load_config(["ray_init.address=ray://h:10001"]), {})


def test_the_cluster_of_this_machine_is_found_while_it_runs(tmp_path):
    record = tmp_path / "ray" / "ray_current_cluster"
    record.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        record.write_text(address)
        env = {"RAY_TMPDIR": str(tmp_path)}
        assert find_address(load_config([]), env) == address
        assert find_address(load_config([]), env | {"RAY_ADDRESS": "local"}) is None
    assert find_address(load_config([]), env) is None, "a record of a cluster that has ended"
    assert find_address(load_config([]), {"RAY_TMPDIR": str(tmp_path / "none")}) is None


STRANGERS = {
    "of another user": lambda record, other: os.chown(other, 12345, 12345) or other.rename(record),
    "a link": lambda record, other: record.symlink_to(other),
    "a pipe": lambda record, other: os.mkfifo(record),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
@pytest.mark.parametrize("kind", STRANGERS)
def test_who_writes_into_the_shared_folder_does_not_choose_the_cluster(tmp_path, caplog, kind):
    """All users may write where Ray notes which cluster runs here."""
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "other").write_text(address)
        STRANGERS[kind](tmp_path / "ray" / "ray_current_cluster", tmp_path / "other")
        assert find_address(load_config([]), {"RAY_TMPDIR": str(tmp_path)}) is None
    assert (f"set ray_init.address={address}" in caplog.text) == ("user" in kind)


def test_several_machines_without_a_cluster_are_refused(tmp_path):
    cfg = load_config(["trainer.nnodes=2"])
    with (
        pytest.raises(ConfigError, match=r"trainer\.nnodes=2, but no Ray cluster was found"),
        connected(cfg, {"RAY_TMPDIR": str(tmp_path)}),
    ):
        pass


def test_settings_travel_and_places_do_not():
    env = {
        "HF_HOME": "/hf",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "TENSORBOARD_DIR": "t",
        "SIIRL_X": "1",
    }
    places = {
        "HOME": "/root",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
        "SIIRL_STORE_FD": "3",
        "RANK": "0",
    }
    assert forwarded_environment(env | places) == env


def test_what_all_machines_lack_is_told_once():
    assert _of_machines({"a (1)": "no data", "b (2)": "no data"}) == "on all machines: no data"
    assert _of_machines({"a (1)": "", "b (2)": "no data"}) == "on b (2): no data"
    assert _of_machines({"a (1)": "no data"}) == "on a (1): no data"


def test_the_interface_to_this_machine_is_the_loopback():
    assert interface_to("127.0.0.1") in ("lo", "lo0")
    assert interface_to("no such address") == ""


def test_an_actor_that_is_not_reached_is_waited_for_until_it_is_known_that_its_machine_is_gone(monkeypatch):
    """Under load Ray hears of it late; it is the machine that is named, not its actor."""
    import ray
    from ray.exceptions import ActorUnavailableError

    looks = []

    def require_alive(nodes, what):
        looks.append(what)
        if len(looks) > 3:
            raise MachineLost(f"its machine left when it was to {what}", BIG)

    def unreached(_):
        raise ActorUnavailableError("socket closed", b"0" * 16)

    monkeypatch.setattr(ray, "get", unreached)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setattr(ray_module, "require_alive", require_alive)
    monkeypatch.setattr(ray_module, "NOTICED_S", ray_module.TICK_S)
    trainer = object.__new__(RayTrainer)
    trainer._stop = SimpleNamespace(numbers=())
    with pytest.raises(MachineLost, match="its machine left when it was to check its files"):
        trainer._gather("check its files", [BIG], ["ref"], 1)
