"""The command line becomes a typed configuration, or an error that a user can act on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from siirl.config import (
    Config,
    diff_keys,
    effect_warnings,
    from_dict,
    load,
    load_config,
    print_config,
    to_dict,
    with_overrides,
)
from siirl.config.aliases import ALIASES
from siirl.config.resolve import FOLLOWS, get
from siirl.config.root import all_keys
from siirl.config.tree import default_config
from siirl.errors import ConfigError, NotSupportedError

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"

# The keys of siiRL's guide script, as its shell hands them over (values after expansion of variables).
GUIDE_SCRIPT = f"""
algorithm.adv_estimator=grpo data.train_files=/data/deepscaler/train.parquet
data.val_files=/data/deepscaler/test.parquet data.train_batch_size=128 data.max_prompt_length=1024
data.max_response_length=2048 {MODEL}.path=/data/models/Qwen3-8B
{MODEL}.enable_gradient_checkpointing=True
{ACTOR}.strategy=megatron {ACTOR}.megatron.tensor_model_parallel_size=2
{ACTOR}.megatron.pipeline_model_parallel_size=4 {ACTOR}.megatron.context_parallel_size=1
{ACTOR}.megatron.sequence_parallel=True {ACTOR}.megatron.use_distributed_optimizer=True
{ACTOR}.megatron.param_dtype=bfloat16 {ACTOR}.megatron.param_offload=False {ACTOR}.optim.lr=1e-6
{ACTOR}.ppo_mini_batch_size=16 {ACTOR}.ppo_micro_batch_size_per_gpu=8 {ACTOR}.grad_clip=1.0
{ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.name=vllm {ROLLOUT}.gpu_memory_utilization=0.45
{ROLLOUT}.n=8 {ROLLOUT}.prompt_length=1024 {ROLLOUT}.response_length=2048
trainer.logger=['console','tensorboard']
trainer.project_name=siirl_deepscaler_grpo trainer.experiment_name=qwen3 trainer.n_gpus_per_node=8
trainer.nnodes=1 trainer.save_freq=30 trainer.test_freq=10 trainer.total_epochs=30 trainer.resume_mode=auto
trainer.max_actor_ckpt_to_keep=5 trainer.default_local_dir=/ckpts/qwen3 trainer.val_before_train=True
""".split()


AS_HYDRA = {
    "nothing": [],
    "the guide's": [f"++{text}" for text in GUIDE_SCRIPT if "logger" not in text],
    "maps": [
        "++data={train_batch_size: 8}",
        "++data.max_prompt_length=3",
        f"++{ROLLOUT}.engine_kwargs={{a: {{b: [1, 2]}}}}",
    ],
    "a value over a map": ["++algorithm=3", "++algorithm.gamma=0.5"],
    "an interpolation": ["++trainer.nnodes=${trainer.n_gpus_per_node}", "++trainer.n_gpus_per_node=3"],
    "one that comes twice": ["++trainer.seed=1", "++trainer.seed=null", "++trainer.logger=[a,'b c']"],
}


@pytest.mark.parametrize("preset", ["ppo_dag_trainer", "megatron_ppo_dag_trainer"])
@pytest.mark.parametrize("overrides", AS_HYDRA.values(), ids=AS_HYDRA)
def test_overrides_are_put_onto_a_preset_as_hydra_puts_them(preset, overrides):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(load.PRESETS), version_base="1.3"):
        wanted = OmegaConf.to_container(compose(preset, overrides))
    if "${" in str(wanted):
        wanted["trainer"]["nnodes"] = wanted["trainer"]["n_gpus_per_node"]
    assert load._compose(overrides, preset) == wanted
    assert load._compose([], preset) == load._compose([], f"{preset}.yaml"), "the preset is as it was"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.logger=['console','tensorboard']", ("console", "tensorboard")),
        ("trainer.logger=[console,tensorboard]", ("console", "tensorboard")),
        ("trainer.logger=[]", ()),
        ("data.train_files=/a.parquet", ("/a.parquet",)),
        ("data.train_files=~/a b/x(1).parquet", ("~/a b/x(1).parquet",)),
        ("data.train_files=[~/a.parquet, '/b c.parquet']", ("~/a.parquet", "/b c.parquet")),
        ("data.train_files='/with,comma.parquet'", ("/with,comma.parquet",)),
        ("trainer.experiment_name=007", "007"),
        ("trainer.experiment_name=it's=here", "it's=here"),
        ("trainer.experiment_name=back\\slash\\", "back\\slash\\"),
        ('trainer.experiment_name="two words"', "two words"),
        ("trainer.project_name=true", "true"),
        ("trainer.resume_from_path=/ckpt/global_step_3", "/ckpt/global_step_3"),
        ("trainer.resume_from_path=False", False),
        ("trainer.total_training_steps=null", None),
        ("trainer.total_training_steps=12", 12),
        (f"{ACTOR}.optim.lr=1e-6", 1e-6),
        (f"{ACTOR}.entropy_coeff=0", 0.0),
        (f"{ACTOR}.optim.betas=[0.9,0.95]", (0.9, 0.95)),
        (f"{ACTOR}.strategy=fsdp2", "fsdp"),
        ("trainer.device=gpu", "cuda"),
        (f"{ROLLOUT}.stop_token_ids=[1,2]", (1, 2)),
        (f"{MODEL}.target_modules=[q_proj,v_proj]", ("q_proj", "v_proj")),
        (f"{MODEL}.target_modules=all-linear", "all-linear"),
        (f"{MODEL}.override_config={{a: 1, b: {{c: x}}}}", {"a": 1, "b": {"c": "x"}}),
        ("data.max_prompt_length=${data.max_response_length}", 512),
        ("trainer.output_dir=/runs/${trainer.experiment_name}", "/runs/run"),
        ("+data.shuffle=False", False),
        ("++data.shuffle=false", False),
    ],
)
def test_a_value_gets_the_type_of_its_key(override, expected):
    value = get(load_config([override]), override.lstrip("+").partition("=")[0])
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("trainer.sav_freq=1", ConfigError, ("'trainer.sav_freq'", "Did you mean 'trainer.save_freq'?")),
        ("+trainer.sav_freq=1", ConfigError, ("Did you mean 'trainer.save_freq'?",)),
        ("~data.shufle", ConfigError, ("Did you mean 'data.shuffle'?",)),
        ("actor.optim.lr=1", ConfigError, ("Did you mean 'actor_rollout_ref.actor.optim.lr'?",)),
        ("data.train_batch_size=many", ConfigError, ("data.train_batch_size=many", "an integer", "str")),
        ("data.train_batch_size=1.5", ConfigError, ("an integer", "float")),
        ("data.train_batch_size=0", ConfigError, ("at least 1",)),
        ("data.train_batch_size=", ConfigError, ("data.train_batch_size=''", "an integer")),
        ("data.shuffle=1", ConfigError, ("true or false", "int")),
        ("trainer.total_training_steps=None", ConfigError, ("an integer or null", "Write null")),
        ("trainer.validation_data_dir=None", ConfigError, ("Write null",)),
        ("data.seed=[1]", ConfigError, ("data.seed=[1]", "an integer")),
        (f"{ACTOR}.optim.betas=[0.9]", ConfigError, ("a list of 2 numbers",)),
        (f"{ACTOR}.grad_clip=1,2", ConfigError, ("several values", "[a,b]")),
        ("trainer.logger=console,tensorboard", ConfigError, ("several values", "[a,b]")),
        ("trainer.logger=[consol]", ConfigError, ("consol", "Did you mean 'console'?")),
        ("data=3", ConfigError, ("data is a group",)),
        ("data.truncation=lft", ConfigError, ("error, left, right, middle", "Did you mean 'left'?")),
        (f"{ACTOR}.loss_agg_mode=token-men", ConfigError, ("Did you mean 'token-mean'?",)),
        (f"{ACTOR}.optim.warmup_style=cosin", ConfigError, ("Did you mean 'cosine'?",)),
        (f"{ACTOR}.kl_loss_type=low_var", ConfigError, ("Did you mean 'low_var_kl'?",)),
        ("algorithm.adv_estimator=grop", ConfigError, ("Did you mean 'grpo'?",)),
        ("save_freq", ConfigError, ("write key=value",)),
        ("--cfg", ConfigError, ("write key=value",)),
        ("hydra.run.dir=x", ConfigError, ("trainer.output_dir",)),
        ("data.max_prompt_length=${nope}", ConfigError, ("nope",)),
        (f"{ACTOR}.optim.lr={{", ConfigError, ("malformed", "Quote it")),
        (f"{ACTOR}.ppo_micro_batch_size=8", ConfigError, ("ppo_micro_batch_size_per_gpu",)),
        (f"{ROLLOUT}.mode=async", NotSupportedError, (f"not supported yet: {ROLLOUT}.mode=async",)),
        ("critic.load_weight=false", NotSupportedError, ("not supported yet: critic.load_weight=false",)),
        (f"{ROLLOUT}.multi_turn.use_all_traj=True", NotSupportedError, ("not supported yet: ", "multi-turn")),
        (f"{ACTOR}.megatron.extra.x=1", ConfigError, ("override_transformer_config",)),
    ],
)
def test_a_bad_override_says_what_is_wrong(override, error, words):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    assert "hf_secret" not in str(caught.value)


def test_the_guide_script_is_taken_as_it_is():
    cfg = load_config(GUIDE_SCRIPT)
    assert cfg.actor_rollout_ref.actor.megatron.pipeline_model_parallel_size == 4
    assert cfg.actor_rollout_ref.ref.strategy == "megatron"
    assert cfg.trainer.logger == ("console", "tensorboard")
    assert cfg.actor_rollout_ref.rollout.gpu_memory_utilization == 0.45


def test_maps_take_any_key_with_and_without_a_plus():
    cfg = load_config(
        [
            f"+{MODEL}.override_config.attn_implementation=sdpa",
            f"{MODEL}.override_config.rope.theta=1e4",
            f"++{ROLLOUT}.engine_kwargs.vllm.download_dir=~/cache",
            "custom_reward_function.reward_kwargs.weights=[1,2]",
            f"+{ACTOR}.optim.override_optimizer_config.eps=1e-6",
        ]
    )
    assert cfg.actor_rollout_ref.model.override_config == {
        "attn_implementation": "sdpa",
        "rope": {"theta": 10000.0},
    }
    assert cfg.actor_rollout_ref.rollout.engine_kwargs.vllm == {"download_dir": "~/cache"}
    assert cfg.custom_reward_function.reward_kwargs == {"weights": [1, 2]}
    assert cfg.actor_rollout_ref.actor.optim.override_optimizer_config == {"eps": 1e-6}


def test_a_group_can_be_set_as_a_map():
    cfg = load_config([f"{ROLLOUT}.val_kwargs={{n: 4, do_sample: true, temperature: 0.7}}"])
    assert cfg.actor_rollout_ref.rollout.val_kwargs.n == 4
    assert cfg.actor_rollout_ref.rollout.val_kwargs.top_k == -1


def test_the_last_override_wins_and_tilde_goes_back_to_the_default(tmp_path):
    assert load_config(["data.train_batch_size=8", "data.train_batch_size=16"]).data.train_batch_size == 16
    preset = tmp_path / "mine.yaml"
    preset.write_text("data: {train_batch_size: 8}\n")
    assert load_config([], str(preset)).data.train_batch_size == 8
    assert load_config(["~data.train_batch_size"], str(preset)).data.train_batch_size == 128


def test_a_preset_of_the_users_own_builds_on_ours(tmp_path, monkeypatch):
    preset = tmp_path / "mine.yaml"
    preset.write_text(
        "defaults: [ppo_dag_trainer, _self_]\n"
        "data: {max_response_length: 64, max_prompt_length: '${data.max_response_length}'}\n"
    )
    monkeypatch.chdir(tmp_path)
    cfg = load_config(["trainer.seed=7"], "mine.yaml")
    assert (cfg.data.max_prompt_length, cfg.actor_rollout_ref.rollout.response_length, cfg.data.seed) == (
        64,
        64,
        7,
    )
    assert "data.max_response_length" in cfg.explicit
    preset.write_text("data: {max_respons_length: 64}\n")
    with pytest.raises(ConfigError, match=r"Did you mean 'data\.max_response_length'"):
        load_config([], "mine.yaml")
    preset.write_text("data: [\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        load_config([], "mine.yaml")


@pytest.mark.parametrize(
    ("name", "words"),
    [("ppo_dag_trianer", "Did you mean 'ppo_dag_trainer'"), ("no/such.yaml", "does not exist")],
)
def test_an_unknown_preset_is_an_error(name, words):
    with pytest.raises(ConfigError, match=words):
        load_config([], name)


def test_composing_leaves_another_users_hydra_alone(tmp_path):
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        assert load_config(["data.train_batch_size=8"]).data.train_batch_size == 8
        assert GlobalHydra.instance().hydra is outer


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        ([f"{ACTOR}.clip_ratio=0.3"], f"{ACTOR}.clip_ratio_high", 0.3),
        ([f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_high=0.2"], f"{ACTOR}.clip_ratio_high", 0.2),
        ([f"{ACTOR}.clip_ratio_high=0.28"], f"{ACTOR}.clip_ratio_low", 0.2),
        (["data.max_prompt_length=9"], f"{ROLLOUT}.prompt_length", 9),
        (["trainer.seed=5"], "data.seed", 5),
        (["trainer.seed=5", "data.seed=null"], "data.seed", 5),
        (
            ["trainer.project_name=p", "trainer.experiment_name=e"],
            "trainer.default_local_dir",
            "outputs/p/e/checkpoints",
        ),
        (["trainer.output_dir=/o"], "trainer.default_local_dir", "/o/checkpoints"),
    ],
)
def test_an_unset_key_follows_the_key_it_belongs_to(overrides, key, expected):
    assert get(load_config(overrides), key) == expected


def test_a_following_key_follows_a_nodes_override_too():
    cfg = load_config([f"{ACTOR}.clip_ratio=0.3"])
    assert with_overrides(cfg, {f"{ACTOR}.clip_ratio": 0.1}).actor_rollout_ref.actor.clip_ratio_low == 0.1
    cfg = load_config([f"{ACTOR}.clip_ratio_low=0.3"])
    assert with_overrides(cfg, {f"{ACTOR}.clip_ratio": 0.1}).actor_rollout_ref.actor.clip_ratio_low == 0.3


@pytest.mark.parametrize(
    ("override", "target", "value"),
    [
        ("data.filter_overlong_prompt=true", "data.filter_overlong_prompts", True),
        (f"{ACTOR}.optim.clip_grad=0.5", f"{ACTOR}.grad_clip", 0.5),
        (f"{ACTOR}.param_offload=true", f"{ACTOR}.fsdp_config.param_offload", True),
        (f"{MODEL}.fsdp_config.fsdp_size=2", "actor_rollout_ref.ref.fsdp_config.fsdp_size", 2),
        (f"{ACTOR}.checkpoint.contents=[model]", f"{ACTOR}.checkpoint.load_contents", ("model",)),
    ],
)
def test_an_older_name_sets_the_key_it_stands_for(override, target, value):
    assert get(load_config([override]), target) == value


def test_an_older_name_that_contradicts_the_newer_one_is_an_error():
    with pytest.raises(ConfigError, match=r"optim\.clip_grad=0\.5 contradicts .*grad_clip=1\.0.*Set only"):
        load_config([f"{ACTOR}.optim.clip_grad=0.5", f"{ACTOR}.grad_clip=1.0"])
    assert load_config([f"{ACTOR}.optim.clip_grad=0.5", f"{ACTOR}.grad_clip=0.5"])


def test_json_gives_back_the_same_configuration():
    cfg = load_config(
        [
            "data.train_files=[/a,/b]",
            f"+{MODEL}.override_config.x.y=[1,2.5,null]",
            f"{ACTOR}.clip_ratio=0.3",
            f"{ROLLOUT}.stop_token_ids=[3]",
            "trainer.resume_from_path=/c",
        ]
    )
    assert from_dict(json.loads(json.dumps(to_dict(cfg)))) == cfg
    with pytest.raises(ConfigError, match=r"data\.train_batch_sise"):
        from_dict({"data": {"train_batch_sise": 3}})


def test_overrides_of_a_node_are_checked_and_share_what_they_do_not_touch():
    cfg = load_config([f"{MODEL}.override_config.a=1"])
    node = with_overrides(cfg, {f"{ACTOR}.optim.lr": 2e-6, f"{MODEL}.override_config": {"b": 2}})
    assert node.actor_rollout_ref.actor.optim.lr == 2e-6
    assert node.actor_rollout_ref.model.override_config == {"a": 1, "b": 2}
    assert cfg.actor_rollout_ref.actor.optim.lr == 1e-6
    assert node.data is cfg.data
    assert node.actor_rollout_ref.actor.fsdp_config is cfg.actor_rollout_ref.actor.fsdp_config
    with pytest.raises(ConfigError, match="Did you mean"):
        with_overrides(cfg, {f"{ACTOR}.optim.lrr": 1.0})
    with pytest.raises(ConfigError, match="a number"):
        with_overrides(cfg, {f"{ACTOR}.optim.lr": "fast"})
    with pytest.raises(NotSupportedError):
        with_overrides(cfg, {f"{ACTOR}.load_weight": False})


def test_only_what_somebody_set_is_explicit():
    cfg = load_config(
        ["data.train_batch_size=128", f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.optim.clip_grad=0.5"]
    )
    assert cfg.explicit == (
        f"{ACTOR}.clip_ratio",
        f"{ACTOR}.grad_clip",
        f"{ACTOR}.optim.clip_grad",
        "data.train_batch_size",
    )
    assert diff_keys(cfg) == {
        f"{ACTOR}.clip_ratio": (0.2, 0.3),
        f"{ACTOR}.grad_clip": (1.0, 0.5),
        f"{ACTOR}.optim.clip_grad": (1.0, 0.5),
    }
    assert load_config([]) == default_config()


def test_the_printed_configuration_is_complete_and_composes_to_the_same(tmp_path):
    cfg = load_config(
        [
            f"{ROLLOUT}.name=hf",
            "algorithm.adv_estimator=grpo",
            f"{ACTOR}.optim.clip_grad=0.5",
            f"{ACTOR}.clip_ratio=0.3",
            f"+{MODEL}.override_config.a=1",
            "data.train_files=[/a,/b]",
        ]
    )
    preset = tmp_path / "printed.yaml"
    preset.write_text(print_config(cfg))
    again = load_config([], str(preset))
    assert {name: get(again, name) for name in all_keys() if name not in ALIASES} == {
        name: get(cfg, name) for name in all_keys() if name not in ALIASES
    }
    assert effect_warnings(again) == []


def test_a_configuration_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        load_config([]).trainer.seed = 3  # type: ignore[misc]


def test_no_value_is_left_open():
    assert isinstance(default_config(), Config)
    open_keys = {name for name in FOLLOWS if get(default_config(), name) is None}
    sizes = "actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size"
    assert open_keys == {sizes, "data.data_source"}


def test_workers_read_a_configuration_without_hydra_or_torch():
    code = (
        "import sys; from siirl.config import from_dict, to_dict;"
        "from siirl.config.tree import default_config;"
        "from_dict(to_dict(default_config()));"
        "print([m for m in ('torch','ray','transformers','tensordict','hydra','numpy') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert done.stdout.strip() == "[]"


def test_off_is_siirls_word_for_not_resuming(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [ppo_dag_trainer, _self_]\ntrainer:\n  resume_mode: off\n")
    assert load_config(["trainer.resume_mode=off"]).trainer.resume_mode == "disable"
    assert load_config(config_name=str(file)).trainer.resume_mode == "disable"
    file.write_text("defaults: [ppo_dag_trainer, _self_]\ntrainer:\n  resume_mode: on\n")
    with pytest.raises(ConfigError, match=r"resume_mode=true: expected text"):
        load_config(config_name=str(file))


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (
            "trainer.nnodes=2 trainer.save_freq=5",
            "not one text. Write ['trainer.nnodes=2', 'trainer.save_freq=5'].",
        ),
        ({"trainer.nnodes": 2}, "not a map. Write ['trainer.nnodes=2']."),
    ],
)
def test_settings_that_are_no_list_are_refused_once(given, fix):
    with pytest.raises(ConfigError) as caught:
        load_config(given)
    assert str(caught.value) == f"settings are a list of texts, {fix}"
