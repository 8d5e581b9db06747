"""Which keys may change when a run goes on from a checkpoint, and what is said of the others."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.resume_settings import FREE, differing, is_free, settings_of
from siirl.config import load_config
from siirl.config.root import all_keys
from siirl.errors import ConfigError
from siirl.launch.preflight import check_settings

WORKFLOW = Path(__file__).parents[3] / "dag_templates" / "grpo.yaml"
BASE = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True"]


def plan_of(cfg):
    return compile_plan(load_dag(cfg), cfg, 8)[0]


def settings(*keys: str):
    cfg = load_config([*BASE, *keys])
    return settings_of(cfg, plan_of(cfg))


COUNTED = (
    *("actor_rollout_ref.actor.optim.lr=0.5", "actor_rollout_ref.rollout.n=3", "data.train_batch_size=512"),
    *("actor_rollout_ref.rollout.temperature=0.7", "trainer.seed=9", "data.max_response_length=77"),
    *("actor_rollout_ref.actor.kl_loss_coef=0.5", "actor_rollout_ref.actor.clip_ratio=0.3"),
    *("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32", "trainer.critic_warmup=2"),
    *("custom_reward_function.path=/other.py", "actor_rollout_ref.model.path=/other", "data.shuffle=False"),
    *(
        "actor_rollout_ref.rollout.name=hf",
        "reward_model.reward_kwargs.key=1",
        "data.train_files=[a.parquet]",
    ),
)
UNCOUNTED = (
    *(
        "trainer.logger=[console]",
        "trainer.output_dir=/elsewhere",
        "trainer.save_freq=7",
        "trainer.test_freq=3",
    ),
    *(
        "trainer.deadline_s=60",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
    ),
    *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "trainer.total_training_steps=900"),
    *(
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "trainer.max_restarts=9",
        "data.val_batch_size=5",
    ),
    *("actor_rollout_ref.rollout.val_kwargs.n=3", "trainer.resume_mode=disable", "trainer.export_hf=False"),
    *("critic.optim.lr=0.5", "actor_rollout_ref.actor.checkpoint.async_save=True"),  # no critic, so no effect
)


@pytest.mark.parametrize("key", [*COUNTED, *UNCOUNTED])
def test_a_key_counts_if_another_value_would_change_the_result(key):
    lines = differing(json.loads(json.dumps(settings())), settings(key))
    assert bool(lines) == (key in COUNTED), lines
    name = key.partition("=")[0].removesuffix(".key")
    assert key not in COUNTED or any(line.startswith(f"{name}: ") for line in lines), lines


@pytest.mark.parametrize(
    "schedule", ["warmup_style=cosine", "lr_warmup_steps_ratio=0.1", "lr_decay_style=linear"]
)
def test_the_length_of_the_run_counts_where_the_learning_rate_follows_from_it(schedule):
    key = f"actor_rollout_ref.actor.optim.{schedule}"
    lines = differing(
        settings(key, "trainer.total_training_steps=5"), settings(key, "trainer.total_training_steps=9")
    )
    assert lines == ["trainer.total_training_steps: 5 in the checkpoint, 9 now"]


def test_every_pattern_of_the_table_is_of_a_key_and_no_key_is_free_for_two_reasons():
    for why, patterns in FREE.items():
        for pattern in patterns:
            assert any(fnmatchcase(name, pattern) for name in all_keys()), (why, pattern)
    for name in all_keys():
        reasons = [why for why, all_of in FREE.items() if any(fnmatchcase(name, p) for p in all_of)]
        assert len(reasons) <= 1, (name, reasons)
    cfg = load_config(BASE)
    algorithm = [name for name in all_keys() if name.startswith(("algorithm.", "custom_reward_function.r"))]
    assert not [name for name in algorithm if is_free(name, cfg)]


def test_secrets_stay_out_of_checkpoints_and_a_file_is_the_same_by_any_path(tmp_path, monkeypatch):
    secret = [
        "reward_model.reward_kwargs.password=swordfish",
        "actor_rollout_ref.model.hf_hub_token=swordfish",
    ]
    assert "swordfish" not in json.dumps(settings(*secret))
    (tmp_path / "train.parquet").write_text("")
    monkeypatch.chdir(tmp_path)
    whole, short = (
        settings(f"data.train_files={tmp_path}/train.parquet"),
        settings("data.train_files=train.parquet"),
    )
    assert differing(whole, short) == []


def test_a_changed_workflow_counts_and_a_key_newer_than_the_checkpoint_does_not():
    now = settings()
    old = {name: value for name, value in now.items() if name != "algorithm.gamma"}
    assert differing(old, now) == []
    node = next(name for name in now if name.startswith("node ") and ":" not in name)
    without = {name: value for name, value in now.items() if name != node}
    assert differing(without, now)[0].startswith(f"{node}: not there in the checkpoint, [")
    assert len(differing(now, without)) == 1


def test_a_workflow_file_counts_by_what_its_nodes_are_and_set_not_by_where_it_lies(tmp_path):
    text = WORKFLOW.read_text()
    moved, changed = tmp_path / "moved.yaml", tmp_path / "changed.yaml"
    moved.write_text(f"# a comment\n{text}")
    changed.write_text(text.replace("function_reward", "scores"))
    here, there, other = (settings(f"dag.workflow_path={path}") for path in (WORKFLOW, moved, changed))
    assert differing(here, there) == []
    assert any(line.startswith("node scores: not there") for line in differing(here, other))


def test_a_run_that_would_go_on_with_other_settings_is_refused_until_it_is_told_to(tmp_path, caplog):
    checkpoint = tmp_path / "global_step_4"
    checkpoint.mkdir()
    cfg = load_config([*BASE, "actor_rollout_ref.actor.optim.lr=0.5"])
    told = load_config([*BASE, "actor_rollout_ref.actor.optim.lr=0.5", "trainer.resume_changed=true"])
    for text in ("{", '{"loaders": {}}', "[]", json.dumps({"settings": settings_of(cfg, plan_of(cfg))})):
        (checkpoint / "extra.json").write_text(text)
        check_settings(cfg, plan_of(cfg), checkpoint)
    (checkpoint / "extra.json").write_text(json.dumps({"settings": settings()}))
    with pytest.raises(ConfigError) as error:
        check_settings(cfg, plan_of(cfg), checkpoint)
    line = "actor_rollout_ref.actor.optim.lr: 1e-06 in the checkpoint, 0.5 now"
    assert line in str(error.value) and "trainer.resume_changed=true" in str(error.value)
    assert caplog.text == ""
    check_settings(told, plan_of(told), checkpoint)
    assert line in caplog.text


@pytest.mark.parametrize(
    ("before", "now", "digests", "told"),
    [
        ("/a/reward.py", "/b/reward.py", ("1", "1"), False),
        ("/a/model", "/b/c/other", ("1", "1"), False),
        ("/a/model", "/b/model", ("1", "2"), True),
        ("/a/model", "/b/model", (), True),
        ("name/on-a-hub", "name/other", (), True),
        (["/a/x.parquet", "/a/y.parquet"], ["/b/x.parquet", "/b/y.parquet"], ("1", "1"), False),
        (["/a/x.parquet", "/a/y.parquet"], ["/b/y.parquet", "/b/x.parquet"], ("1", "1"), True),
        (["custom", "/a/my.py:one", "reward"], ["custom", "/b/my.py:one", "reward"], ("1", "1"), False),
        (["custom", "/a/my.py:one", "reward"], ["custom", "/b/my.py:other", "reward"], ("1", "1"), True),
        (["custom", "/a/my.py:one", "reward"], ["custom", "/b/my.py:one", "rollout"], ("1", "1"), True),
    ],
)
def test_what_lies_elsewhere_is_the_same_if_its_content_is(before, now, digests, told):
    settings = [
        {"key": value} | ({"key, FILE": digest} if digest else {})
        for value, digest in zip((before, now), digests or ("", ""), strict=True)
    ]
    assert any(line.startswith("key: ") for line in differing(*settings)) == told
