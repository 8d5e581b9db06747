"""Names of modules that are to have LoRA adapters are looked for in the model's files."""

import pytest
from fixtures_tiny import make_tiny_model_dir
from plan_cases import config

from siirl.errors import ConfigError
from siirl.model_files.directory import check_model_files

MODEL = "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model_dir(tmp_path_factory.mktemp("models") / "qwen3", tokenizer=False))


def check(model: str, targets: str, trains: bool = True) -> None:
    lengths = ("data.max_prompt_length=8", "data.max_response_length=8")
    keys = (f"{MODEL}.path={model}", f"{MODEL}.lora_rank=2", f"{MODEL}.target_modules={targets}")
    check_model_files(config(*keys, *lengths), "actor", trains)


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        ("[c_attn]", "c_attn"),
        ("[q_proj,gate_up_proj]", "gate_up_proj"),
        ("[lm_head]", "lm_head"),
        ("[q_proj,embed_tokens]", "embed_tokens"),
        ("[proj]", "proj"),
    ],
)
def test_names_that_no_layer_has_are_refused_with_those_that_it_has(model, targets, missing):
    """With none of them the run ended when it had begun; one of several was left out in silence."""
    with pytest.raises(ConfigError, match=rf"has no {missing}\. .* down_proj, gate_proj, k_proj, o_proj"):
        check(model, targets)


@pytest.mark.parametrize("targets", ["all-linear", "[q_proj,down_proj]", "[self_attn.q_proj]"])
def test_names_that_layers_have_are_accepted(model, targets):
    check(model, targets)


def test_a_model_that_is_not_trained_has_no_adapter_of_its_own(model):
    check(model, "[c_attn]", trains=False)
