"""What `siirl serve` cannot do yet is refused by the commands that start nothing."""

from pathlib import Path

import pytest
from fixtures_tiny import make_tiny_model_dir

from siirl.cli import main

SERVE = Path(__file__).parents[3] / "dag_templates" / "serve.yaml"
ONE = ("data.max_prompt_length=32", "data.max_response_length=32", "trainer.n_gpus_per_node=1")
REFUSED = [
    ("check", (), None),
    ("check", ("trainer.n_gpus_per_node=2",), None),
    ("check", ("actor_rollout_ref.model.lora_rank=0",), "lora_rank=0: clients train adapters"),
    (
        "check",
        ("--elsewhere", "service.enable=false", f"dag.workflow_path={SERVE}"),
        "service.enable=false: its keys would do nothing",
    ),
    ("check", ("actor_rollout_ref.model.compile_layers=true",), None),
    ("check", ("actor_rollout_ref.actor.strategy=megatron",), "megatron"),
    ("check", ("actor_rollout_ref.rollout.name=vllm",), None),
    ("check", ("actor_rollout_ref.rollout.name=sglang",), "from vllm and hf"),
    ("test", (), "siirl test of a job with service.enable=true"),
]


@pytest.mark.parametrize(
    ("command", "keys", "told"), REFUSED, ids=[f"{x[0]} {' '.join(x[1])}" for x in REFUSED]
)
def test_a_service_is_refused_what_it_has_not_learnt(command, keys, told, tmp_path, capsys):
    model = make_tiny_model_dir(tmp_path / "model")
    code = main([command, "-cn", "serve", f"actor_rollout_ref.model.path={model}", *ONE, *keys])
    said = capsys.readouterr()
    assert code == (0 if told is None else 2), said
    assert told is None or told in said.err, said


def test_check_says_what_a_service_needs(tmp_path, capsys):
    model = make_tiny_model_dir(tmp_path / "model")
    keys = ("actor_rollout_ref.model.lora_rank=8", "service.max_models=3", "service.max_disk_gb=2")
    assert main(["check", "-cn", "serve", f"actor_rollout_ref.model.path={model}", *ONE, *keys]) == 0
    device, host, disk = (x for x in capsys.readouterr().out.splitlines() if x.startswith("service: "))
    assert " for 3, beside the base" in device and "sampling client" in host and "2 GB a tenant" in disk
