"""Whatever config.json leaves out, or has null, is taken as transformers takes it, or refused by check."""

import copy
import json

import config_values
import pytest
import torch
from plan_cases import config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.memory.estimate import model_shape
from siirl.engines.rollout.call_limits import cache_bytes_per_token
from siirl.engines.train.language_model import model_flops, seen_back
from siirl.engines.train.megatron.weights import entries, num_active_weights
from siirl.errors import NotSupportedError
from siirl.models.config_json import language_part
from siirl.models.config_values import as_read, why_not_built
from siirl.models.families import family_of, known_types, types_with
from siirl.models.sizes import head_size, num_heads, router_choices
from siirl.models.trained import why_not

LATENT = types_with(lambda row: row.latent)
VISION_MODELS = types_with(lambda row: row.sees_images)

SOME = ("mixtral", "deepseek_v2", "gpt2")
KINDS = [
    kind if kind in SOME else pytest.param(kind, marks=pytest.mark.slow) for kind in config_values.kinds()
]
STRATEGIES = ("fsdp", "megatron")
OF_OTHERS = ("sliding_window", "layer_types", "n_group", "topk_group")


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_says_of_a_type_what_transformers_does(kind):
    assert config_values.table()[kind] == json.loads(json.dumps(config_values.row(kind)))


def test_every_accepted_type_has_a_row():
    assert sorted(config_values.table()) == config_values.kinds()


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_absent_or_null_is_computed_as_transformers_does_or_refused(kind):
    first, *others = config_values.small_files(kind)
    files = [*config_values.absent_and_null(first, config_values.defaults(kind))]
    for other in others:
        files += config_values.absent_and_null(
            other, ("sliding_window", "layer_types", "n_group", "topk_group")
        )
    wrong = {}
    for what, raw in files:
        refused, runs = why_not_built(raw), config_values.runs(raw)
        if runs is not None and runs == bool(refused):
            wrong[what] = f"transformers runs: {runs}, check says {refused!r}"
        elif not refused and kind not in VISION_MODELS and (problem := _misread(raw)):
            wrong[what] = problem
    assert not wrong


def _misread(raw) -> str:
    """What is computed of a config.json otherwise than the model that transformers builds of it has it."""
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    num_params, read = sum(p.numel() for p in model.parameters()), language_part(raw)
    if not model_flops(model, [3, 4], backward=True) > 0 or seen_back(model) < 0:
        return "no flops"
    if raw["model_type"] not in LATENT:
        attending = [x for name, x in model.named_modules() if "mamba" not in name.split(".")]
        widths = [getattr(x, "head_dim", None) or getattr(x, "head_size", None) for x in attending]
        if {width for width in widths if isinstance(width, int)} - {head_size(read)}:
            return f"heads of {head_size(read)}, not {widths}"
        each = getattr(config, "num_key_value_heads", None) or num_heads(read)
        if cache_bytes_per_token(config) != 8 * config.num_hidden_layers * each * head_size(read):
            return "another cache"
    if router_choices(read) != router_choices(config.to_dict()):
        return f"routers choose {router_choices(read)}, not {router_choices(config.to_dict())}"
    if family_of(raw["model_type"]).counted and model_shape(raw).params != num_params:
        return f"{model_shape(raw).params} parameters, not {num_params}"
    if raw["model_type"] in known_types("megatron") and not why_not(raw, "megatron"):
        found = sum(x.num_rows * (x.columns or 1) for x in entries(config) if not x.untrained)
        if found != num_params or not 0 < num_active_weights(config) <= num_params:
            return f"megatron has {found} parameters, not {num_params}"
    return ""


def test_names_of_keys_are_those_of_transformers():
    read = as_read({"model_type": "gpt2", "hidden_size": 48, "n_head": 3})
    assert (read["n_embd"], read["hidden_size"], read["num_attention_heads"]) == (48, 48, 3)
    assert (read["num_hidden_layers"], num_heads(read), head_size(read)) == (12, 3, 16)
    assert as_read({"model_type": "of their own"}) == {"model_type": "of their own"}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {"model_type": "ministral", "vocab_size": 64},
            "no head_dim .* absent, for which a ministral has no default",
        ),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": None}, "no num_experts_per_tok"),
        ({"model_type": "llama", "hidden_size": None}, "no hidden_size"),
        (
            {"model_type": "mixtral", "vocab_size": 64, "num_attention_heads": 12},
            "num_key_value_heads=8 .* does not divide",
        ),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_check_refuses_what_transformers_cannot_build_with_the_key(tmp_path, raw, words, strategy):

    (tmp_path / "config.json").write_text(json.dumps(raw))
    keys = (f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.rollout.name=hf")
    cfg = config(*keys, f"actor_rollout_ref.actor.strategy={strategy}")
    with pytest.raises(NotSupportedError, match=words):
        compile_plan(load_dag(cfg), cfg, 1)
