"""model.override_config means what the same values in config.json mean: to trainers, engines and exports."""

import json
from pathlib import Path
from typing import Any

import pytest
from job_harness import Inputs, overrides

from siirl import check
from siirl.config import load_config
from siirl.config.common import ModelConfig
from siirl.errors import ConfigError, UserError
from siirl.model_files.directory import model_positions
from siirl.model_files.hf_config import engine_overrides, load_hf_config, written_changes
from siirl.models.overridden import overridden

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
SHAPE = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 64, "rms_norm_eps": 1e-6},
}
NEW = {"model_type": "qwen3", **SHAPE, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
NEW |= {"layer_types": ["full_attention"] * 2, "dtype": "bfloat16"}
OLD = {"model_type": "qwen3", **SHAPE, "rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"}
KINDS = {
    "model_type": "gemma3_text",
    **SHAPE,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}
VISION = {
    **{"model_type": "qwen3_vl", "text_config": {**NEW, "model_type": "qwen3_vl_text"}},
    "vision_config": {"depth": 1, "hidden_size": 16, "model_type": "qwen3_vl"},
}
FILES = {"new": NEW, "old": OLD, "kinds": KINDS, "vision": VISION}


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def values(model: ModelConfig) -> dict[str, Any]:
    return load_hf_config(model).to_dict() | {"_name_or_path": ""}


ROPE_OF_OLD = {"rope_theta": 5e5, "rope_scaling": YARN}
FULL = {**NEW["rope_parameters"], **YARN}
CASES = [
    ("new", {"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
    ("old", {"rope_theta": 1e4}, {"rope_theta": 1e4}),
    ("new", {"rope_scaling": YARN}, {"rope_parameters": FULL}),
    ("old", {"rope_scaling": YARN}, ROPE_OF_OLD),
    ("new", {"rope_parameters": YARN}, {"rope_parameters": FULL}),
    ("old", {"rope_parameters": YARN}, ROPE_OF_OLD),
    ("new", {"rope_scaling": YARN, "rope_theta": 7.0}, {"rope_parameters": FULL | {"rope_theta": 7.0}}),
    ("new", {"rope_scaling": None}, {}),
    ("new", {"num_hidden_layers": 1}, {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    ("old", {"num_hidden_layers": 1}, {"num_hidden_layers": 1}),
    ("kinds", {"num_hidden_layers": 1}, {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
    ("new", {"rms_norm_eps": 1}, {"rms_norm_eps": 1.0}),
    ("new", {"torch_dtype": "float32"}, {"dtype": "float32"}),
    ("old", {"dtype": "float32"}, {"torch_dtype": "float32"}),
    (
        "kinds",
        {"rope_parameters": {"full_attention": YARN}},
        {"rope_parameters": KINDS["rope_parameters"] | {"full_attention": {"rope_theta": 1e6, **YARN}}},
    ),
    (
        "vision",
        {"text_config": {"rope_theta": 1e4, "num_hidden_layers": 1}, "vision_config": {"depth": 3}},
        {
            "text_config": VISION["text_config"]
            | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
            | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
            "vision_config": VISION["vision_config"] | {"depth": 3},
        },
    ),
]


@pytest.mark.parametrize(("file", "changes", "written"), CASES)
def test_a_change_is_what_the_same_file_with_it_says(tmp_path, file, changes, written):
    """Written by hand; exports and engines that read the old one mean it, too."""
    stored = folder(tmp_path / "stored", FILES[file])
    by_hand = folder(tmp_path / "by_hand", FILES[file] | written)
    changed = ModelConfig(path=str(stored), override_config=changes)
    wanted = values(ModelConfig(path=str(by_hand)))
    assert values(changed) == wanted
    export = folder(tmp_path / "export", FILES[file] | written_changes(changed))
    assert values(ModelConfig(path=str(export))) == wanted
    told = engine_overrides(changed, load_hf_config(changed))
    again = ModelConfig(path=str(stored), override_config=told)
    assert values(again) == wanted and ("rope_scaling" not in told and "rope_theta" not in told)


def test_positions_of_a_change_are_those_that_it_stretches(tmp_path):
    for name in ("new", "old"):
        stored = str(folder(tmp_path / name, FILES[name]))
        assert model_positions(ModelConfig(path=stored)) == 64
        for key in ("rope_scaling", "rope_parameters"):
            longer = {key: {"rope_type": "yarn", "factor": 4.0}}
            assert model_positions(ModelConfig(path=stored, override_config=longer)) == 256


WRONG = [
    ("new", {"rms_norm_epps": 1e-5}, "no such value.*Did you mean 'rms_norm_eps'"),
    ("vision", {"num_hidden_layers": 1}, "no such value.*Did you mean 'text_config.num_hidden_layers'"),
    (
        "vision",
        {"text_config": {"num_hiden_layers": 1}},
        "num_hiden_.*Did you mean 'num_hidden_layers'",
    ),
    ("new", {"text_config": {"num_hidden_layers": 1}}, "text_config.*no such value"),
    ("new", {"to_dict": 1}, "to_dict=1.*no such value"),
    ("new", {"attn_implementation": "eager"}, "Set model.attention_kernels"),
    ("new", {"model_type": "llama"}, "Set model.path"),
    ("new", {"num_hidden_layers": "two"}, "builds no qwen3 with num_hidden_layers='two'.*expected int"),
    ("new", {"num_hidden_layers": 3}, "builds no qwen3 .*layer_types"),
    ("new", {"sliding_window": 8}, "sliding_window=8: transformers makes None of it"),
    ("kinds", {"rope_theta": 1e4}, "differ by the kind of layer.*full_attention, sliding_attention"),
    ("kinds", {"rope_scaling": YARN}, "differ by the kind of layer"),
]


@pytest.mark.parametrize(("file", "changes", "said"), WRONG)
def test_a_change_that_has_no_place_is_refused_with_the_reason(tmp_path, file, changes, said):
    stored = folder(tmp_path / "stored", FILES[file])
    with pytest.raises(ConfigError, match=rf"(?s)override_config.*{said}"):
        load_hf_config(ModelConfig(path=str(stored), override_config=changes))


def test_a_name_that_stands_for_another_is_refused_with_that_of_the_file(tmp_path):
    """transformers dropped the one of the two that it reads first, in silence."""
    experts = {"model_type": "qwen3_moe", **SHAPE, "num_local_experts": 4}
    stored = str(folder(tmp_path / "stored", experts))
    with pytest.raises(ConfigError, match="calls it num_local_experts"):
        load_hf_config(ModelConfig(path=stored, override_config={"num_experts": 2}))


def test_check_refuses_what_a_run_would_and_takes_what_it_would(tmp_path):
    inputs, key = Inputs.make(tmp_path / "inputs"), "actor_rollout_ref.model.override_config"
    for good in ("{rope_theta: 1e5}", "{rope_scaling: {rope_type: linear, factor: 2.0}}", "{dtype: float32}"):
        check(load_config(overrides(inputs, tmp_path / "out", f"{key}={good}")))
    for bad, said in (("{rms_norm_epps: 1.0}", "rms_norm_eps"), ("{num_hidden_layers: two}", "expected int")):
        with pytest.raises(UserError, match=said) as caught:
            check(load_config(overrides(inputs, tmp_path / "out", f"{key}={bad}")))
        assert len(str(caught.value).splitlines()) == 1


def test_what_is_not_changed_stays():
    assert overridden(NEW, {}) == NEW and overridden(OLD, {"rms_norm_eps": 0.5}) == OLD | {
        "rms_norm_eps": 0.5
    }
