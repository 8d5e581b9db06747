"""The memory estimate: parameter counts equal those of transformers' models."""

import pytest

from siirl.compiler.memory.estimate import fsdp_lines, model_shape, read_shape
from siirl.models.families import types_with

LATENT = types_with(lambda row: row.latent)
DELTA_NETS = types_with(lambda row: row.delta_nets)


@pytest.mark.parametrize("family", types_with(lambda row: row.counted))
@pytest.mark.parametrize("tie", [True, False])
def test_parameter_counts_equal_those_of_transformers(family, tie):
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "tie_word_embeddings": tie,
        "pad_token_id": 0,
    }
    if family.startswith("qwen3") or family in ("glm4", "ministral", "gemma3_text"):
        sizes["head_dim"] = 32
    if family in DELTA_NETS:
        sizes |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8}
        sizes |= {"linear_value_head_dim": 12, "linear_conv_kernel_dim": 3}
    if family.endswith("_moe") or (family in DELTA_NETS and family != "qwen3_5_text"):
        sizes |= {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
        }
    if family == "glm4_moe":
        sizes |= {"n_routed_experts": 4, "first_k_dense_replace": 2, "n_shared_experts": 2, "head_dim": 32}
        sizes |= {"attention_bias": True, "use_qk_norm": True}
    if family in LATENT:
        sizes |= {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
        sizes |= {"moe_intermediate_size": 32, "first_k_dense_replace": 2, "n_shared_experts": 2}
        sizes |= {"kv_lora_rank": 16, "q_lora_rank": 24 if tie else None, "qk_rope_head_dim": 8}
        sizes |= {"qk_nope_head_dim": 12, "v_head_dim": 20}
    if family == "qwen2_moe" or family in DELTA_NETS:
        sizes["shared_expert_intermediate_size"] = 48
    if family in ("mixtral", "gpt_oss"):
        sizes["num_local_experts"] = 4
    if family == "glm4":
        sizes["attention_bias"] = True
    if family == "qwen3_5_moe_text":  # which has experts in all layers
        del sizes["mlp_only_layers"]
    config = CONFIG_MAPPING[family](**sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = model_shape(config.to_dict())
    assert shape.params == sum(p.numel() for p in model.parameters())
    dense = [x for x in model.state_dict() if x.startswith("model.layers.1.")]
    assert shape.moe_layers == shape.layers or shape.layer_tensors == len(dense)


def test_states_of_a_trained_model_are_sharded_and_offload_moves_them_to_the_host():
    from plan_cases import config, template_plan

    raw = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    shape = model_shape(raw)
    offload = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"
    for world in (1, 4):
        model = template_plan(world).models["agent_0.actor"]
        lines = {line.what: line for line in fsdp_lines(model, config(offload), shape, 8)}
        shard = -(-shape.params // world)
        assert lines["parameters"].num_bytes == 4 * shard
        assert lines["gradients"].num_bytes == 4 * shard
        assert lines["optimizer"].num_bytes == 8 * shard
        assert (lines["optimizer"].host, lines["parameters"].host) == (True, False)


def test_muon_has_one_tensor_of_a_matrix_and_two_of_all_else():
    from plan_cases import config, template_plan
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    wanted = LlamaConfig(**sizes, vocab_size=1000, num_key_value_heads=2)
    params = dict(AutoModelForCausalLM.from_config(wanted).named_parameters())
    held = sum((1 if ".layers." in name and x.ndim == 2 else 2) * x.numel() for name, x in params.items())
    cfg, shape = config("actor_rollout_ref.actor.optim.name=muon"), model_shape(wanted.to_dict())
    for world in (1, 4):
        model = template_plan(world).models["agent_0.actor"]
        lines = {line.what: line.num_bytes for line in fsdp_lines(model, cfg, shape, 8)}
        assert lines["optimizer"] == pytest.approx(4 * held / world, rel=0.01)
        assert lines["orthogonal update"] == 6 * 4 * 128 * 256


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read (FileNotFoundError)"),
        ("{", "cannot be read (JSONDecodeError)"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2' is none of cwm, deepseek_v2"),
        ('{"model_type": "llama", "hidden_size": null}', "has no hidden_size"),
    ],
)
def test_an_unknown_model_gives_a_reason_instead_of_an_estimate(text, reason, tmp_path):
    from plan_cases import config

    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert reason in str(read_shape(config(f"actor_rollout_ref.model.path={tmp_path}"), "actor"))
