"""Without a GPU a run is held against the memory of the host, as check and plan say before it starts."""

import re

import pytest
from test_engine_starts import QWEN_72B, command

from siirl.cli import main
from siirl.launch import devices
from siirl.launch.devices import DEVICES

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
HOST_GIB = 32.0


@pytest.fixture
def laptop(monkeypatch):
    """A machine without GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(devices, "_host_gib", lambda: HOST_GIB)


def words(folder, sizes, verb, *keys):
    """Nothing says on how many devices the run is."""
    said = command(folder, sizes, 1, None)[2:]
    return [verb, *(word for word in said if not word.startswith((DEVICES, "trainer.device="))), *keys]


@pytest.mark.parametrize(
    "keys", [(), ("trainer.device=cpu", f"{DEVICES}=1"), ("trainer.device=cpu", f"{DEVICES}=2")]
)
def test_a_model_of_70b_is_refused_on_a_laptop_with_numbers(tmp_path, laptop, capsys, keys):
    for verb in ("check", "plan"):
        assert main(words(tmp_path, QWEN_72B, verb, *keys)) == 2
        said = capsys.readouterr().err
        needs = re.search(
            r"does not fit the 32 GiB of this machine, which has no GPU: (\d+) GiB in actor_train", said
        )
        assert needs, said
        assert int(needs[1]) > 72e9 * 16 / 2**30, "fp32 weights, gradients and both moments of Adam"


def test_a_small_model_fits_and_the_plan_is_that_of_the_run(tmp_path, laptop, capsys):
    assert main(words(tmp_path, SMALL, "plan")) == 0
    said = capsys.readouterr().out
    assert "on 1 rank\n" in said and "fits the 32 GiB of this machine, which has no GPU: yes" in said
    assert "GiB is assumed" not in said and "share of the device" not in said


@pytest.mark.parametrize("keys", [(f"{DEVICES}=8",), ("trainer.device_memory_gib=80",)])
def test_gpus_of_another_machine_are_planned_for_where_keys_name_them(tmp_path, laptop, capsys, keys):
    assert main(words(tmp_path, SMALL, "plan", *keys)) == 0
    said = capsys.readouterr().out
    assert "on 8 ranks\n" in said and "fits 80 GiB: yes" in said
