"""What cannot be trained is refused with the reason, before anything runs."""

import dataclasses
import sys
from types import SimpleNamespace

import causal_lms
import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from transformers import AutoConfig

from siirl.compiler.plan import ModelPlan
from siirl.config import load_config, with_overrides
from siirl.engines.train.adapters.lora import add_lora
from siirl.engines.train.hf_model import (
    build_skeleton,
    torch_dtype,
    use_liger_kernels,
)
from siirl.engines.train.language_model import PackedValueModel
from siirl.engines.train.optimizer import make_adamw
from siirl.engines.train.settings import engine_settings
from siirl.errors import ConfigError, DataError, NotSupportedError
from siirl.model_files.directory import check_weight_files
from siirl.model_files.hf_config import load_hf_config
from siirl.parallel.dims import ParallelDims

MODEL = "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def config():
    return load_config([])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model_dir(tmp_path_factory.mktemp("tiny"))


def model_config(config, path, **values):
    given = {f"{MODEL}.{name}": value for name, value in values.items()}
    return with_overrides(config, {f"{MODEL}.path": str(path), **given}).actor_rollout_ref.model


def skeleton(tiny):
    return build_skeleton(AutoConfig.from_pretrained(tiny), torch.float32, False)


def test_a_missing_model_directory_is_named(config):
    with pytest.raises(DataError, match="/no/such/model does not exist"):
        load_hf_config(model_config(config, "/no/such/model"))


def test_a_directory_without_config_is_refused(config, tmp_path):
    with pytest.raises(DataError, match=r"has no config\.json"):
        load_hf_config(model_config(config, tmp_path))


def test_a_config_that_contradicts_itself_is_refused(config, tmp_path):
    file = make_tiny_model_dir(tmp_path, weights=False, tokenizer=False) / "config.json"
    file.write_text(file.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(DataError, match="layer_types"):
        load_hf_config(model_config(config, tmp_path))


def test_overrides_of_the_model_config_apply_and_unknown_ones_are_refused(config, tiny):
    assert (
        load_hf_config(model_config(config, tiny, override_config={"rms_norm_eps": 0.5})).rms_norm_eps == 0.5
    )
    with pytest.raises(ConfigError, match=r"override_config\.rms_norm_epps"):
        load_hf_config(model_config(config, tiny, override_config={"rms_norm_epps": 0.5}))


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(DataError, match="can run code when read"):
        check_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("gemma2", {"final_logit_softcapping": 0.0}, "softcapping=0.0"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "layers of kind conv"),
        ("cohere", {"logit_scale": 0.25}, "logit_scale"),
        ("nemotron", {}, "no model type whose results"),
    ],
)
def test_architectures_that_packing_or_our_head_would_get_wrong_are_refused(kind, values, reason):
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    with pytest.raises(NotSupportedError, match=reason):
        build_skeleton(AutoConfig.for_model(kind, **sizes, **values), torch.float32, False)


def test_float16_is_refused_by_key():
    with pytest.raises(ConfigError, match=r"fsdp_config\.model_dtype='float16'"):
        torch_dtype("float16", "fsdp_config.model_dtype")


def test_liger_that_is_not_installed_is_a_config_error(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ConfigError, match="liger-kernel is not installed"):
        use_liger_kernels(skeleton(tiny))


@pytest.mark.parametrize("targets", ["no_such_layer", ("lm_head",)])
def test_lora_on_nothing_or_on_the_head_is_refused(config, tiny, targets):
    values = model_config(config, tiny, lora_rank=2, target_modules=targets)
    with pytest.raises(ConfigError, match="target_modules"):
        add_lora(skeleton(tiny), values, 0)


@pytest.mark.parametrize(
    ("kind", "targets", "found"),
    [
        ("gpt2", "all-linear", r"attn.c_attn \(Conv1D\)"),
        ("qwen3", ("q_proj", "embed_tokens"), r"embed_tokens \(Embedding\)"),
    ],
)
def test_lora_on_what_is_no_linear_layer_is_refused(config, tiny, tmp_path, kind, targets, found):
    """Into GPT-2's square matrices, stored as [in, out], it would merge the wrong way round."""
    causal_lms.tiny_config(kind).save_pretrained(tmp_path)
    values = model_config(config, tmp_path, lora_rank=2, target_modules=targets)
    with pytest.raises(ConfigError, match=found):
        add_lora(skeleton(tmp_path), values, 0)


def test_optimizer_overrides_that_change_its_state_are_refused(config):
    key = "actor_rollout_ref.actor.optim.override_optimizer_config"
    optim = with_overrides(config, {key: {"amsgrad": True}}).actor_rollout_ref.actor.optim
    with pytest.raises(ConfigError, match="amsgrad"):
        make_adamw([torch.nn.Parameter(torch.zeros(2))], optim)


def plan_of(role, head="lm"):
    return ModelPlan(f"agent_0.{role}", 0, role, "fsdp", head, False, (0,), ParallelDims(1), "n", ("n",))


def test_roles_read_their_own_groups(config):
    cfg = with_overrides(
        config,
        {
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 5,
            "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 77,
        },
    )
    assert engine_settings(plan_of("actor"), cfg).forward_limit.max_rows == 5
    assert engine_settings(plan_of("ref"), cfg).forward_limit.max_tokens == 77
    assert engine_settings(plan_of("ref"), cfg).optim is None
    cfg = with_overrides(
        config, {"critic.model.path": "/c", "critic.use_dynamic_bsz": True, "critic.optim.lr": 0.5}
    )
    critic = engine_settings(dataclasses.replace(plan_of("critic", "value"), trains=True), cfg)
    assert (critic.model.path, critic.forward_limit.max_tokens, critic.optim.lr) == ("/c", 32768, 0.5)
    keys = {"reward_model.model.path": "/r", "reward_model.micro_batch_size_per_gpu": 7}
    cfg = with_overrides(config, keys)
    reward = engine_settings(plan_of("reward", "score"), cfg)
    assert (reward.model.path, reward.forward_limit.max_rows, reward.optim) == ("/r", 7, None)


def test_a_rollout_is_no_training_engine(config):
    with pytest.raises(NotSupportedError, match="rollout with a lm head"):
        engine_settings(plan_of("rollout"), config)


def test_a_missing_micro_batch_size_is_named(config):
    key = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    with pytest.raises(ConfigError, match=key):
        engine_settings(plan_of("ref"), with_overrides(config, {key: None}))


def test_what_a_value_model_returns_is_no_view():
    model = PackedValueModel(SimpleNamespace(score=torch.nn.Linear(4, 1)))
    value_M = model.head(torch.ones(3, 4), torch.zeros(3), 1.0, ("value",), None)["value"]
    assert value_M.shape == (3,) and value_M._base is None, "FSDP2 warns of views, and hooks may be lost"
