"""Counting GPUs without torch, and what a rank tells CUDA before it starts."""

import megatron_cases
import pytest
from plan_cases import config

from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import load_config
from siirl.errors import ConfigError
from siirl.launch.devices import check_gpus, count_gpus
from siirl.launch.worker_entry import cuda_variables


@pytest.mark.parametrize(
    ("visible", "files", "count"),
    [
        (None, [], 0),
        (None, ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], 2),
        (None, ["kfd"], None),
        ("", ["nvidia0"], 0),
        ("-1", ["nvidia0"], 0),
        ("0,2,-1,3", ["nvidia0"], 2),
        ("GPU-8f2a", ["nvidia0", "nvidia1"], 1),
    ],
)
def test_gpus_are_counted_from_the_environment_or_the_device_files(tmp_path, visible, files, count):
    for name in files:
        (tmp_path / name).touch()
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == count


@pytest.mark.parametrize(
    ("device", "num_gpus", "fits"),
    [("cuda", 0, False), ("cuda", 2, True), ("auto", 1, False), ("auto", 0, True), ("cpu", 1, True)],
)
def test_too_few_gpus_are_refused_before_the_start(tmp_path, device, num_gpus, fits):
    for index in range(num_gpus):
        (tmp_path / f"nvidia{index}").touch()
    cfg = load_config([f"trainer.device={device}", "trainer.n_gpus_per_node=2"])
    if fits:
        check_gpus(cfg, {}, tmp_path)
    else:
        with pytest.raises(
            ConfigError, match=rf"this machine offers {num_gpus} GPU.*trainer\.device=cpu"
        ) as told:
            check_gpus(cfg, {}, tmp_path)
        fewer = str(told.value).rpartition(" Set ")[2]
        assert fewer == ("trainer.n_gpus_per_node=1, or " if num_gpus else "") + "trainer.device=cpu."


def megatron_ranks(*overrides: str) -> list[dict[str, str]]:
    plan, _ = megatron_cases.megatron_plan(2, *overrides)
    return [cuda_variables(plan, rank, {}) for rank in (0, 1)]


def test_cuda_gets_one_queue_where_a_megatron_model_overlaps_tensor_or_context_parallel_messages():
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert megatron_ranks(*megatron_cases.sizes(tp=2)) == [one, one]
    assert megatron_ranks(*megatron_cases.sizes(cp=2)) == [one, one]
    assert megatron_ranks() == [{}, {}], "data parallel alone"
    fsdp, _ = compile_plan(load_dag(config()), config(), 2)
    assert cuda_variables(fsdp, 0, {}) == {}
    plan, _ = megatron_cases.megatron_plan(2, *megatron_cases.sizes(tp=2))
    assert cuda_variables(plan, 0, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}) == {}, "the user's word stands"
    assert cuda_variables(plan, 5, {}) == {}, "a rank without such a model"
