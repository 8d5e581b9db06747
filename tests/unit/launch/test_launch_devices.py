"""Counting GPUs without torch, and what a rank tells CUDA before it starts."""

import megatron_cases
import pytest
from fixtures_tiny import arithmetic_rows, make_tiny_model_dir, write_parquet
from plan_cases import config

from siirl.cli import main
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


TASK = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=8")
DEVICES = "trainer.n_gpus_per_node"


def told(capsys, command: str, *keys: str) -> tuple[int, str]:
    code = main([command, *TASK, *keys])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize(
    ("world", "local", "keys", "ranks"),
    [
        (2, 2, (), 2),
        (6, 3, (), 6),
        (6, 3, ("trainer.nnodes=2",), 6),
        (6, 3, (f"{DEVICES}=3",), 6),
        (6, 3, ("trainer.nnodes=1:4",), 6),
        (2, 2, (f"{DEVICES}=1",), None),
        (2, 2, ("trainer.nnodes=2",), None),
        (4, 2, ("trainer.nnodes=4", f"{DEVICES}=1"), None),
        (4, 2, ("trainer.nnodes=1",), None),
        (7, 3, (), None),
    ],
)
def test_under_torchrun_check_plan_and_run_are_for_the_processes_that_it_started(
    tmp_path, monkeypatch, capsys, world, local, keys, ranks
):
    monkeypatch.chdir(tmp_path)
    env = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "h"}
    for name, value in {**env, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    refused = f"torchrun started {world} processes, {local} on this machine"
    for command in ("check", "run"):  # which miss the data, whatever the world
        code, said = told(capsys, command, *keys)
        assert code == 2 and (refused in said) == (ranks is None), said
    if ranks:
        assert f"on {ranks} ranks" in told(capsys, "plan", *keys)[1]


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_job_of_this_machine_alone_is_one_process_without_a_gpu(monkeypatch, capsys, tmp_path, launcher):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    code, said = told(capsys, "plan", f"trainer.launcher={launcher}")
    assert code == 0 and "on 1 rank" in said and "assumed" not in said


def test_a_plan_for_a_cluster_whose_devices_nobody_counted_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    code, said = told(capsys, "plan", "trainer.nnodes=2")
    assert code == 0 and "trainer.n_gpus_per_node is not set: 8 devices on each machine of the Ray" in said
    assert "assumed" not in told(capsys, "plan", "trainer.nnodes=2", f"{DEVICES}=8")[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model_dir(tmp_path_factory.mktemp("model"), max_positions=2048)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ((f"{DEVICES}=4", "trainer.device=cuda"), "this machine offers 0 GPU(s)"),
        (("trainer.nnodes=2", f"{DEVICES}=2"), "no Ray cluster was found"),
        (("trainer.launcher=ray", "ray_init.address=h"), "no Ray cluster answers there"),
        ((f"{DEVICES}=4",), ""),
    ],
)
def test_check_warns_of_what_a_start_on_this_machine_refuses(monkeypatch, capsys, tmp_path, model, keys, why):
    rows = write_parquet(tmp_path / "rows.parquet", arithmetic_rows(8))
    (tmp_path / "reward.py").write_text("def compute_score(**sample):\n    return 0.0\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    inputs = (f"data.train_files={rows}", f"data.val_files={rows}", "data.train_batch_size=8")
    inputs += (
        f"actor_rollout_ref.model.path={model}",
        f"custom_reward_function.path={tmp_path}/reward.py",
    )
    code, said = told(capsys, "check", *inputs, *keys)
    assert code == 0 and "ok: DAG" in said, said
    assert ("a run that is started on this machine is refused: " in said) == bool(why) and why in said


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
