"""What a refusal says to set is accepted: the problem is gone then, and none takes its place."""

import re

import pytest
import yaml

from siirl.compiler.compile import TEMPLATES
from siirl.config.load import read_config
from siirl.config.root import all_keys
from siirl.errors import UserError
from siirl.findings import Findings
from siirl.launch.survey import survey

pytestmark = pytest.mark.heavy

BASE = [
    "actor_rollout_ref.model.path=nobody/model",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
]
POLICY, ROLLOUT = "actor_rollout_ref", "actor_rollout_ref.rollout"
REFUSED = [
    [f"{POLICY}.actor.ppo_mini_batch_size=7"],
    ["data.train_batch_size=12", f"{POLICY}.actor.ppo_mini_batch_size=8"],
    [f"{ROLLOUT}.temperature=0"],
    [f"{ROLLOUT}.top_k=0"],
    [f"{ROLLOUT}.top_p=0"],
    [f"{ROLLOUT}.do_sample=false"],
    [f"{ROLLOUT}.val_kwargs.n=4"],
    [f"{ROLLOUT}.val_kwargs.do_sample=true"],
    [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.tensor_model_parallel_size=2"],
    [f"{ROLLOUT}.name=replay", "data.val_files=v.parquet"],
    ["algorithm.filter_groups.enable=true", "trainer.dump_rollouts_dir=x"],
    ["algorithm.filter_groups.enable=true", f"{ROLLOUT}.n=1"],
    ["trainer.critic_warmup=3"],
    ["trainer.resume_mode=resume_path"],
    ["trainer.test_freq=5"],
    [f"{POLICY}.actor.fsdp_config.fsdp_size=0"],
    [f"{POLICY}.actor.use_dynamic_bsz=true", f"{POLICY}.actor.ppo_max_token_len_per_gpu=100"],
    ["algorithm.filter_groups.enable=true", "dag.workflow_path=dag_templates/grpo.yaml"],
]  # fmt: skip
ADVICE = re.compile(r"\b([a-z_]+(?:\.[a-z_]+)+)=([\w./\[\]-]+)")


def problems(overrides: list[str]) -> list[str]:
    found = Findings()
    try:
        survey(read_config(overrides, "ppo_dag_trainer", found), found)
    except UserError as error:
        found.add(error)
    return [str(problem) for problem in found.problems]


def advised(message: str) -> list[list[str]]:
    """The settings that the last sentences of a message name, those joined by "or" each by itself."""
    fix = re.split(r"(?<=[.:]) (?=Set |Add |Remove |Or )", message, maxsplit=1)[-1]
    choices = []
    for part in re.split(r",? or |; or ", fix):
        settings = [f"{key}={value.rstrip('.')}" for key, value in ADVICE.findall(part) if key in all_keys()]
        if settings and part.lstrip().lower().startswith(
            ("set", "trainer", "data", "actor", "algorithm", "reward", "critic")
        ):
            choices.append(settings)
    return choices


@pytest.mark.parametrize("wrong", REFUSED, ids=lambda wrong: wrong[0].rpartition(".")[2])
def test_what_a_refusal_says_to_set_is_accepted(wrong):
    said = problems([*BASE, *wrong])
    choices = [(message, settings) for message in said for settings in advised(message)]
    assert choices, f"refused with a setting that mends it: {said}"
    for message, settings in choices:
        after = problems([*BASE, *wrong, *settings])
        assert message not in after, (settings, message)
        assert not set(after) - set(said), (settings, message, after)


def test_a_field_that_two_nodes_write_is_mended_by_what_the_message_says(tmp_path):
    """A built-in op writes what it writes: other writes are refused, so they are not advised."""
    spec = yaml.safe_load((TEMPLATES / "grpo.yaml").read_text())
    reference = next(node for node in spec["nodes"] if node["node_role"] == "REFERENCE")
    file, kl = tmp_path / "dag.yaml", f"{POLICY}.actor.use_kl_loss=true"
    for again, wrong in (
        ({}, True),
        ({"writes": ["other"]}, True),
        (None, False),
    ):
        nodes = (
            spec["nodes"] if again is None else [*spec["nodes"], {**reference, "node_id": "again", **again}]
        )
        file.write_text(yaml.safe_dump(spec | {"nodes": nodes}))
        said = problems([*BASE, kl, f"dag.workflow_path={file}"])
        assert bool(said) == wrong, (again, said)
        if again == {}:
            assert ["remove one. Models that it learns from" in message for message in said] == [True]
