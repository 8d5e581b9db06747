"""docs/messages.md: what it has of `siirl check` is told to settings, its other messages are in the code."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from package_sources import texts

from siirl.checkpoint import files
from siirl.cli import main
from siirl.config import load_config
from siirl.launch.run_folder import held

pytestmark = pytest.mark.heavy
PAGE = (Path(__file__).parents[3] / "docs" / "messages.md").read_text()
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", f"{ROLLOUT}.name=hf", "trainer.output_dir=new"]
BATCH = ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8"]

MESSAGES = {
    "unknown key ...: no key": ["data.train_file=a.parquet"],
    "is not an override": ["nonsense"],
    "expected an integer": ["data.max_prompt_length=long"],
    "unknown name; the known ones": ["algorithm.adv_estimator=gea"],
    "not supported yet": [f"{ROLLOUT}.mode=async"],
    "this key is not used": [f"{ACTOR}.ppo_micro_batch_size=4"],
    "has no effect": ["--elsewhere", *BATCH, "trainer.n_gpus_per_node=1", f"{ACTOR}.kl_loss_coef=0.1"],
    "the advantage is relative": [f"{ROLLOUT}.n=1"],
    "does not divide data.train_batch_size": ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=64"],
    "some would be empty": ["data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4"],
    "which starts processes on one machine only": ["trainer.launcher=local", "trainer.nnodes=2"],
    "a row is never split": [f"{ACTOR}.ppo_max_token_len_per_gpu=100", f"{ACTOR}.use_dynamic_bsz=true"],
    "does not divide its": [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=3"],
    "DAG file": ["dag.workflow_path=nowhere.yaml"],
    "has no such node": ["dag.workflow_path=unknown_parent.yaml"],
    "form a cycle": ["dag.workflow_path=cycle.yaml"],
    "has the unknown key": ["dag.workflow_path=key.yaml"],
    "which no node writes": ["dag.workflow_path=no_advantage.yaml"],
    "it could run first": ["dag.workflow_path=order.yaml"],
    "has a rollout but no training": [
        *BATCH,
        "trainer.n_gpus_per_node=1",
        "dag.workflow_path=untrained.yaml",
    ],
    "dataset file": ["data.train_files=nowhere.parquet"],
    "has no column": ["data.train_files=rows.parquet", "data.prompt_key=question"],
    "a prompt is a list of": ["data.train_files=rows.parquet", "data.prompt_key=ability"],
    "there is not one full batch": ["data.train_files=rows.parquet", "data.val_files=rows.parquet"],
    "has no reward function": [*BATCH, "data.train_files=rows.parquet", "data.val_files=rows.parquet"],
    "model directory ... does not exist": ["actor_rollout_ref.model.path=nowhere"],
    "has no config.json: a Hugging Face": ["actor_rollout_ref.model.path=empty"],
    "has no tokenizer": ["actor_rollout_ref.model.path=model"],
    "max_position_embeddings": ["actor_rollout_ref.model.path=model"],
    "there is no such file": ["custom_reward_function.path=nowhere.py"],
    "cannot be called as": ["custom_reward_function.path=reward.py"],
    "of an earlier run": ["trainer.output_dir=used"],
    "two would write the same files": ["trainer.output_dir=busy"],
    "is no checkpoint": ["trainer.resume_mode=resume_path", "trainer.resume_from_path=empty"],
    "no complete checkpoint": ["trainer.output_dir=damaged"],
    "was made with other settings": ["trainer.output_dir=saved"],
}
"""Words of a message -> settings, in the folder below, to which `siirl check` says it."""

ROW = {"data_source": "my/task", "prompt": [{"role": "user", "content": "1 + 1 ?"}], "ability": 1}
NONE: list[dict] = []
GRPO_NODES = {
    "rollout": ("MODEL_INFERENCE", "ROLLOUT", []),
    "reward": ("COMPUTE", "REWARD", ["rollout"]),
    "advantage": ("COMPUTE", "ADVANTAGE", ["reward"]),
    "train": ("MODEL_TRAIN", "ACTOR", ["advantage"]),
}


def write_workflow(path: Path, without: str = "", more: list[dict] = NONE, **changes: dict) -> None:
    """GRPO's nodes as a DAG file: one left out, some with other keys, and further ones."""
    nodes = [
        {"node_id": name, "node_type": kind, "node_role": role, "dependencies": parents}
        | changes.get(name, {})
        for name, (kind, role, parents) in GRPO_NODES.items()
        if name != without
    ]
    path.write_text(json.dumps({"dag_id": "mine", "nodes": nodes + more}))  # JSON is YAML


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data, a model without a tokenizer, DAGs with a mistake each, and folders that runs have left."""
    root = tmp_path_factory.mktemp("messages")
    pq.write_table(
        pa.Table.from_pylist([ROW | {"reward_model": {"ground_truth": "2"}}] * 8), root / "rows.parquet"
    )
    for name in ("empty", "model", "used/hf_model", "damaged/checkpoints/global_step_4", "saved/checkpoints"):
        (root / name).mkdir(parents=True)
    (root / "model/config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 64}')
    (root / "used/hf_model/config.json").write_text("{}")
    (root / "reward.py").write_text("def compute_score(response):\n    return 1.0\n")
    write_workflow(root / "unknown_parent.yaml", reward={"dependencies": ["rolout"]})
    write_workflow(root / "cycle.yaml", rollout={"dependencies": ["train"]})
    write_workflow(root / "key.yaml", rollout={"temperature": 1.0})
    write_workflow(root / "no_advantage.yaml", without="advantage", train={"dependencies": ["reward"]})
    write_workflow(root / "order.yaml", advantage={"dependencies": ["rollout"]})
    second = {"agent_group": 1, "dependencies": ["rollout"], "node_id": "second"}
    second |= {"node_type": "MODEL_INFERENCE", "node_role": "ROLLOUT"}
    scored = second | {"dependencies": ["second"], "node_id": "score", "node_type": "COMPUTE"}
    more = [second, scored | {"node_role": "REWARD"}]
    write_workflow(root / "untrained.yaml", more=more, reward={"dependencies": ["second"]})
    write_checkpoint(root / "saved/checkpoints")
    return root


def write_checkpoint(root: Path) -> None:
    """A complete checkpoint of a run with another learning rate, as small as one can be."""
    aside = files.prepare_aside(root, 4)
    extra, state = aside / files.EXTRA_FILE, aside / "agent_0.actor" / files.STATE_FILE
    ranks = [aside / "ranks" / f"rank_0{suffix}" for suffix in (".json", ".safetensors")]
    for path in (extra, state, *ranks):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    extra.write_text(json.dumps({"settings": {f"{ACTOR}.optim.lr": 0.5}}))
    records = files.records_of(aside, [extra, state, *ranks])
    files.write_manifest(aside, 4, records, {"models": ["agent_0.actor"], "world_size": 1})
    files.publish(aside, root, 4)


def section(name: str) -> list[str]:
    """The messages that begin the items of a section."""
    items = re.findall(r"^- (`.*`)\\$", PAGE.partition(f"## {name}\n")[2].partition("\n## ")[0], re.M)
    return [message for item in items for message in re.findall(r"`([^`]+)`", item)]


def told(keys: list[str], capsys) -> str:
    main(["check", *GRPO, "trainer.n_gpus_per_node=8", *keys])
    printed = capsys.readouterr()
    return printed.out + printed.err


def pattern(message: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in message.split("...")))


@pytest.mark.parametrize("words", MESSAGES)
def test_what_the_page_says_of_siirl_check_is_what_it_says(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (message,) = [text for text in section("From siirl check") if words in text]
    with held(load_config(["trainer.output_dir=busy"]), "another run"):
        printed = told(MESSAGES[words], capsys)
    assert any(pattern(message).search(line) for line in printed.splitlines()), f"{message}\n{printed}"


def test_each_message_of_siirl_check_on_the_page_is_asked_for_and_told_only_then(capsys):
    messages = section("From siirl check")
    assert len(messages) >= 30
    assert [[text for text in messages if words in text] for words in MESSAGES] == [
        [text] for text in messages
    ]
    right = told(["--elsewhere", *BATCH, "trainer.n_gpus_per_node=1"], capsys)
    assert "ok: DAG" in right and not any(pattern(message).search(right) for message in messages)


def test_the_other_messages_are_in_the_code():
    names = re.findall(r"^## (.*)$", PAGE, re.M)
    messages = [text for name in names if name != "From siirl check" for text in section(name)]
    assert len(messages) >= 20
    for message in messages:
        fixed = [part.strip(" :;,.=()") for part in message.split("...")]
        fixed = [part for part in fixed if len(part.split()) > 1]
        assert fixed, message
        assert not [part for part in fixed if part not in texts()], message
