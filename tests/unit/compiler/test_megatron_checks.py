"""What `siirl check` refuses of a Megatron model before the launch, and the recipes that it takes."""

import dataclasses
import subprocess
import sys

import pytest
from megatron_cases import ACTOR, REF, megatron_config, megatron_plan, option, sizes, write_model

from siirl.compiler.backends import backend_of
from siirl.compiler.checks.megatron_options import CLASSES, DECIDED, FIXED, MODULES, OPTIONS, refusal
from siirl.config.effects import effect_warnings
from siirl.errors import ConfigError, NotSupportedError, UserError
from siirl.parallel.pipeline_layers import parse_layout, split_layers, suggest_split
from siirl.show.plan_text import model_setup

BOTH_ENDS = (
    option("account_for_embedding_in_pipeline_split", True),
    option("account_for_loss_in_pipeline_split", True),
)
OPTIMIZER = "actor_rollout_ref.actor.optim.override_optimizer_config"
HF = "actor_rollout_ref.rollout.name=hf"
RECIPES = {
    "8B on 8": ("Qwen3-8B", 8, sizes(tp=2, pp=4, cp=1, sp=True)),
    "30B-A3B on 32, 8 chunks a rank": ("Qwen3-30B-A3B", 32, sizes(tp=2, pp=2, vpp=8, ep=4, sp=True)),
    "70B on 16": ("Llama-3.1-70B", 16, sizes(tp=8, pp=2, sp=True)),
    "70B on 64": ("Llama-3.1-70B", 64, sizes(tp=8, pp=4, cp=2, sp=True)),
    "70B on 128": ("Llama-3.1-70B", 128, sizes(tp=8, pp=8, cp=2, sp=True)),
    "405B on 256": ("Llama-3.1-405B", 256, (*sizes(tp=8, pp=16, cp=2, vpp=2, sp=True), *BOTH_ENDS)),
    "GLM-4.5-Air on 64": ("GLM-4.5-Air", 64, (*sizes(tp=4, pp=2, ep=8, sp=True), HF)),
    "235B on 256": ("Qwen3-235B-A22B", 256, (*sizes(tp=4, pp=8, ep=8, sp=True), *BOTH_ENDS)),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reference_recipes_are_accepted(tmp_path, recipe):
    name, world, overrides = RECIPES[recipe]
    plan, configs = megatron_plan(world, *overrides, model=write_model(tmp_path, name), rows=1024)
    actor = plan.models["agent_0.actor"]
    assert actor.dims.dp * actor.dims.model_parallel == world
    assert f"agent_0.actor: megatron on {world} ranks (0-{world - 1}), tp {actor.dims.tp}" in model_setup(
        plan, configs
    )


def test_a_reference_may_have_sizes_of_its_own_on_the_same_ranks(tmp_path):
    model = write_model(tmp_path, "Qwen3-30B-A3B")
    own = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 4}
    plan, _ = megatron_plan(
        32,
        *sizes(tp=2, pp=2, vpp=8, ep=4, sp=True),
        "actor_rollout_ref.actor.use_kl_loss=True",
        *(f"{REF}.{key}={value}" for key, value in own.items()),
        model=model,
    )
    ref = plan.models["agent_0.ref"].dims
    assert (ref.tp, ref.pp, ref.vpp, ref.ep, ref.dp, ref.expert_dp) == (1, 1, 1, 4, 32, 8)
    followed, _ = megatron_plan(
        32,
        *sizes(tp=2, pp=2, vpp=8, ep=4, sp=True),
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"{REF}.override_transformer_config.attention_softmax_in_fp32=True",
        model=model,
    )
    assert followed.models["agent_0.ref"].dims == followed.models["agent_0.actor"].dims


REFUSED = {
    "FlashAttention 4 for ranks that cut the stream": (
        "Qwen3-8B",
        8,
        (*sizes(tp=2, cp=2), "actor_rollout_ref.model.attention_kernels=flash_attn_4", "trainer.device=cuda"),
        "attention_kernels=flash_attn_4: ranks that cut the stream of tokens (cp 2) have attention of their",
    ),
    "FlashAttention 4 in another type": (
        "Qwen3-8B",
        8,
        (
            *sizes(tp=2, param_dtype="float32"),
            "actor_rollout_ref.model.attention_kernels=flash_attn_4",
            "trainer.device=cuda",
        ),
        "actor.megatron.param_dtype=float32: it computes in bfloat16. Set it to torch.",
    ),
    "405B cut evenly": (
        "Llama-3.1-405B",
        256,
        sizes(tp=8, pp=16, cp=2, sp=True),
        "126 layers do not divide into pp(16) stages. Set "
        f"+{ACTOR}.override_transformer_config.account_for_embedding_in_pipeline_split=True "
        f"+{ACTOR}.override_transformer_config.account_for_loss_in_pipeline_split=True, or a "
        "pipeline_model_parallel_size that divides them (1, 2, 3, 6, 7, 9, 14, 18, 21, 42, 63, 126 with "
        "vpp(1)).",
    ),
    "235B cut evenly": (
        "Qwen3-235B-A22B",
        256,
        sizes(tp=4, pp=8, ep=8, sp=True),
        "94 layers do not divide into pp(8) stages. Set "
        f"+{ACTOR}.override_transformer_config.account_for_embedding_in_pipeline_split=True "
        f"+{ACTOR}.override_transformer_config.account_for_loss_in_pipeline_split=True, or a ",
    ),
    "chunks counted over all ranks": (
        "Llama-3.1-405B",
        256,
        (*sizes(tp=8, pp=16, cp=2, vpp=32, sp=True), *BOTH_ENDS),
        "pipeline rank 0 gets 8 layers, which do not divide into vpp(32) chunks",
    ),
    "ends that leave an uneven middle": (
        "Llama-3.1-8B",
        4,
        (*sizes(pp=4), option("num_layers_in_last_pipeline_stage", 6)),
        "num_layers_in_last_pipeline_stage=6 leave 26 of 32 layers for 3 other stages of pp(4)",
    ),
    "two kinds of uneven cuts": (
        "Llama-3.1-8B",
        4,
        (*sizes(pp=4), option("num_layers_in_last_pipeline_stage", 5), BOTH_ENDS[0]),
        "do not go with account_for_embedding_in_pipeline_split",
    ),
    "a layout with a layer too few": (
        "Llama-3.1-8B",
        4,
        (*sizes(pp=4), option("pipeline_model_parallel_layout", "'E,t*7|t*8|t*8|t*8,L'")),
        "pipeline_model_parallel_layout has 31 layers (t), the model has 32",
    ),
    "a layout of more chunks than said": (
        "Llama-3.1-8B",
        4,
        (*sizes(pp=4), option("pipeline_model_parallel_layout", "'E(tttt|)*8L'")),
        "describes 9 chunks, but pp(4) * vpp(1) = 4",
    ),
    "heads": (
        "Qwen3-8B",
        24,
        sizes(tp=24, sp=True),
        "32 attention heads do not divide over tp(24) ranks. Set "
        f"{ACTOR}.tensor_model_parallel_size=8|4|2|1.",
    ),
    "expert width": (
        "Qwen3-30B-A3B",
        10,
        sizes(tp=1, etp=5),
        "expert width 768 does not divide over etp(5) ranks",
    ),
    "experts": (
        "Qwen3-30B-A3B",
        48,
        sizes(ep=48),
        f"128 experts do not divide over ep(48) ranks. Set {ACTOR}.expert_model_parallel_size=16|8|4|2|1.",
    ),
    "experts of a dense model": (
        "Qwen3-8B",
        4,
        sizes(ep=4),
        f"ep(4): qwen3 has no experts. Set {ACTOR}.expert_model_parallel_size=1.",
    ),
    "experts with tensor but without sequence parallelism": (
        "Qwen3-30B-A3B",
        8,
        sizes(tp=2, ep=4),
        f"without sequence parallelism: the dispatcher takes each rank's own tokens, and without it all tp "
        f"ranks have the same. Set {ACTOR}.sequence_parallel=true, or {ACTOR}.tensor_model_parallel_size=1.",
    ),
    "a share of more than all": (
        "Qwen3-8B",
        8,
        (f"{OPTIMIZER}.optimizer_cpu_offload=True", f"{OPTIMIZER}.optimizer_offload_fraction=1.5"),
        "optimizer_offload_fraction=1.5: it is a share, 0 to 1.",
    ),
    "a share of nothing": (
        "Qwen3-8B",
        8,
        (f"{OPTIMIZER}.optimizer_offload_fraction=0.5",),
        "nothing is on the host. Set actor_rollout_ref.actor.optim.override_optimizer_config."
        "optimizer_cpu_offload=True.",
    ),
    "moments in fp8": (
        "Qwen3-8B",
        8,
        (f"{OPTIMIZER}.use_precision_aware_optimizer=True", f"{OPTIMIZER}.exp_avg_dtype=fp8"),
        "exp_avg_dtype=fp8: it is fp32, bf16.",
    ),
    "narrow moments without the switch": (
        "Qwen3-8B",
        8,
        (f"{OPTIMIZER}.exp_avg_sq_dtype=bf16",),
        "use_precision_aware_optimizer=True. Set it.",
    ),
    "narrow main weights": (
        "Qwen3-8B",
        8,
        (f"{OPTIMIZER}.main_params_dtype=fp16",),
        "main_params_dtype=fp16 is refused: small updates would be lost in narrow main weights. It may only "
        "be fp32. Remove it.",
    ),
    "allgather under pipelining": (
        "Qwen3-30B-A3B",
        8,
        (*sizes(pp=2, ep=4), option("moe_token_dispatcher_type", "allgather")),
        "moe_token_dispatcher_type=alltoall.",
    ),
    "sequence parallelism without tensor parallelism": (
        "Qwen3-8B",
        2,
        sizes(sp=True),
        "sequence_parallel with tp(1): it splits activations over the tensor-parallel ranks.",
    ),
    "chunks without a pipeline": (
        "Qwen3-8B",
        2,
        sizes(vpp=2),
        "virtual_pipeline_model_parallel_size = 2 with pp(1)",
    ),
    "batched messages of interleaved ranks": (
        "Qwen3-8B",
        2,
        (*sizes(pp=2, vpp=2), option("batch_p2p_comm", True)),
        "batch_p2p_comm=true is refused: siirl batches messages without vpp, and overlaps them with it.",
    ),
    "parts whose recomputation needs Transformer Engine": (
        "Qwen3-8B",
        2,
        (option("recompute_granularity", "selective"), option("recompute_modules", "[layernorm,mlp]")),
        "recompute_modules=['layernorm', 'mlp']: it is a list of core_attn, mlp, moe. layernorm cannot be "
        "recomputed: Megatron discards their outputs by Transformer Engine's linear layers.",
    ),
    "parts that no layer has": (
        "Qwen3-30B-A3B",
        2,
        (option("recompute_granularity", "selective"), option("recompute_modules", "[mlp]")),
        "recompute_modules names mlp: a layer of qwen3_moe has none. It may name core_attn, moe.",
    ),
    "two ways to say what is recomputed": (
        "Qwen3-30B-A3B",
        2,
        (option("moe_layer_recompute", True), option("recompute_granularity", "selective")),
        "moe_layer_recompute decides all of recomputation. Remove it, or recompute_granularity.",
    ),
    "options of experts for a dense model": (
        "Qwen3-8B",
        2,
        (option("moe_grouped_gemm", True),),
        "moe_grouped_gemm: qwen3 has no experts. Remove it.",
    ),
    "a balancing loss that weighs nothing": (
        "Qwen3-30B-A3B",
        2,
        (option("moe_router_load_balancing_type", "aux_loss"),),
        "aux_loss weighs nothing. Set moe_aux_loss_coeff.",
    ),
    "a balancing loss of a router of biases": (
        "GLM-4.5-Air",
        2,
        (HF, option("moe_aux_loss_coeff", 0.1)),
        "moe_aux_loss_coeff=0.1 for a glm4_moe: its router does not choose by its logits alone, which the "
        "loss would balance. Remove it.",
    ),
    "another loss of a router of biases": (
        "GLM-4.5-Air",
        2,
        (HF, option("moe_z_loss_coeff", 0.1)),
        "moe_z_loss_coeff=0.1 for a glm4_moe",
    ),
    "a balancing loss that is off": (
        "Qwen3-30B-A3B",
        2,
        (option("moe_router_load_balancing_type", "none"), option("moe_aux_loss_coeff", 0.1)),
        "moe_aux_loss_coeff=0.1 with moe_router_load_balancing_type=none: remove one.",
    ),
    "a gather of what every rank has": (
        "Qwen3-8B",
        2,
        (
            f"{ACTOR}.use_distributed_optimizer=False",
            f"{ACTOR}.override_ddp_config.overlap_grad_reduce=True",
            f"{ACTOR}.override_ddp_config.overlap_param_gather=True",
        ),
        "overlap_param_gather without the distributed optimizer",
    ),
    "buckets of one reduction": (
        "Qwen3-8B",
        2,
        (f"{ACTOR}.override_ddp_config.bucket_size=1000",),
        "bucket_size without overlap_grad_reduce: gradients are then reduced all at once.",
    ),
    "one epsilon by two names": (
        "Qwen3-8B",
        2,
        (f"{OPTIMIZER}.eps=1e-6", f"{OPTIMIZER}.adam_eps=1e-6"),
        "has eps and adam_eps, which are the same",
    ),
    "a full recompute that says not how": (
        "Qwen3-8B",
        2,
        (option("recompute_granularity", "full"),),
        "needs recompute_method=uniform|block and recompute_num_layers >= 1",
    ),
    "layers that are computed again in unequal numbers": (
        "Qwen3-8B",
        2,
        (*sizes(pp=2), option("recompute_num_layers", 4)),
        "recompute_method=uniform with recompute_num_layers=4 does not divide chunks of 18 layers. Set "
        f"{ACTOR}.override_transformer_config.recompute_num_layers=3|2|1, or recompute_method=block.",
    ),
    "an unknown recompute": (
        "Qwen3-8B",
        2,
        (option("recompute_granularity", "some"),),
        "recompute_granularity=some: it is full, selective, null",
    ),
    "a selective recompute of so many layers": (
        "Qwen3-8B",
        2,
        (option("recompute_granularity", "selective"), option("recompute_num_layers", 2)),
        "Remove recompute_num_layers",
    ),
    "a misspelt option": (
        "Qwen3-8B",
        2,
        (option("recompute_granularty", "full"),),
        "recompute_granularty is none of the options of megatron.core TransformerConfig that siirl passes "
        "on: recompute_granularity, recompute_method,",
    ),
    "a misspelt option of gradients": (
        "Qwen3-8B",
        2,
        (f"{ACTOR}.override_ddp_config.overlap_grad_reduction=True",),
        "No test of siirl holds what others do. Did you mean 'overlap_grad_reduce'? Remove it.",
    ),
    "an option that a key decides": (
        "Qwen3-8B",
        2,
        (option("tensor_model_parallel_size", 2),),
        f"would be decided twice: {ACTOR}.tensor_model_parallel_size does. Set that key.",
    ),
    "more ranks than words": (
        "Qwen3-8B",
        8,
        sizes(tp=8, sp=True),
        "a vocabulary of 9 words leaves some of tp(8) ranks without any",
    ),
    "a budget that holds no padded row": (
        "Qwen3-8B",
        4,
        (
            *sizes(cp=4),
            "data.max_prompt_length=1022",
            "data.max_response_length=2048",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3071",
        ),
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3071 does not hold the longest row: its 3070 "
        "tokens are padded to 3072, a multiple of 8, under cp(4) and tp(1). Set it to 3072 or more.",
    ),
    "a checkpoint without its directory": (
        "Qwen3-8B",
        2,
        (f"{ACTOR}.use_dist_checkpointing=True",),
        f"Set {ACTOR}.dist_checkpointing_path",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_numbers_and_a_fix(tmp_path, case):
    name, world, overrides, message = REFUSED[case]
    words = {"vocab_size": 9} if "words" in case else {}
    with pytest.raises(UserError) as caught:
        megatron_plan(world, *overrides, model=write_model(tmp_path, name, **words))
    assert message in str(caught.value)
    assert str(caught.value).startswith("node 'actor_train': ")


KINDS = {
    "transformer": f"{ACTOR}.override_transformer_config",
    "ddp": f"{ACTOR}.override_ddp_config",
    "optimizer": OPTIMIZER,
}


ROLE = "actor_rollout_ref.actor"


def test_each_map_is_held_against_its_own_table():
    for kind, where in KINDS.items():
        name = next(iter(FIXED[kind]))
        with pytest.raises(ConfigError, match=f"^node 'actor_train': {where}.{name}=7 is refused: "):
            megatron_plan(2, f"{where}.{name}=7")


def test_what_siirl_does_anyway_may_be_said_and_nothing_else():
    for kind, known in FIXED.items():
        for name, (values, why) in known.items():
            assert [refusal(kind, name, value, ROLE) for value in values] == [None] * len(values)
            other = "true" if values == (False,) else "false" if values == (True,) else 7
            problem = refusal(kind, name, {"true": True, "false": False}.get(other, other), ROLE)
            assert problem.startswith(f"={other} is refused: {why}."), name


def test_every_option_that_a_key_decides_is_refused_with_the_key():
    for kind, decided in DECIDED.items():
        for name, key in decided.items():
            named = key.format(megatron=f"{ROLE}.megatron", role=ROLE)
            assert f"would be decided twice: {named} does." in refusal(kind, name, 2, ROLE), name


def test_every_option_refuses_values_of_another_kind():
    for kind, options in OPTIONS.items():
        for name, one in options.items():
            if name != "pipeline_model_parallel_layout":  # text of any form; the cut itself is checked
                assert refusal(kind, name, "nonsense", ROLE) == f"=nonsense: it is {one.values}.", name


def test_options_are_of_one_table_and_of_megatron_core():
    config = pytest.importorskip("megatron.core.transformer")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    classes = dict(
        zip(CLASSES, (config.TransformerConfig, DistributedDataParallelConfig, OptimizerConfig), strict=True)
    )
    for kind, cls in classes.items():
        assert cls.__name__ == CLASSES[kind]
        tables = [OPTIONS[kind].keys() - {"eps"}, FIXED[kind].keys(), DECIDED[kind].keys()]
        known = {field.name for field in dataclasses.fields(cls)}
        assert sum(map(len, tables)) == len(set().union(*tables)), "an option is in two tables"
        assert set().union(*tables) <= known, set().union(*tables) - known
    assert not set(MODULES) & {"core_attn", "mlp", "moe"}


def test_checks_need_no_megatron_core():
    """Where it is not installed, unknown options are refused as well."""
    code = (
        "import sys; sys.modules['megatron'] = sys.modules['torch'] = None\n"
        "from siirl.compiler.checks.megatron_options import refusal\n"
        "print(refusal('ddp', 'overlap_grads', True, 'critic'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "is none of the options of megatron.core DistributedDataParallelConfig" in found.stdout


def test_a_router_of_one_expert_at_weight_one_is_refused(tmp_path):
    one = {"num_experts_per_tok": 1}
    megatron_plan(2, model=write_model(tmp_path / "a", "Qwen3-30B-A3B", **one, norm_topk_prob=False))
    with pytest.raises(NotSupportedError, match="qwen3_moe with one expert a token at weight 1"):
        megatron_plan(2, model=write_model(tmp_path / "b", "Qwen3-30B-A3B", **one, norm_topk_prob=True))


def test_kv_heads_are_split_or_repeated_but_not_both(tmp_path):
    six = write_model(tmp_path, "Qwen3-8B", num_key_value_heads=6, num_attention_heads=24)
    for tp in (1, 2, 3, 6, 12):
        megatron_plan(tp, *sizes(tp=tp, sp=tp > 1), model=six)
    with pytest.raises(ConfigError, match=r"tp\(4\) is neither a divisor nor a multiple of the 6 KV heads"):
        megatron_plan(4, *sizes(tp=4, sp=True), model=six)


def test_a_norm_over_all_kv_heads_is_not_split_within_one(tmp_path):
    four = {"num_key_value_heads": 4}
    normed = write_model(tmp_path / "a", "Qwen3-8B", model_type="olmo2", **four)
    for tp in (1, 2, 4):
        megatron_plan(tp, *sizes(tp=tp, sp=tp > 1), model=normed)
    with pytest.raises(ConfigError, match=r"tp\(8\) is more than the 4 KV heads of a olmo2.*=4"):
        megatron_plan(8, *sizes(tp=8, sp=True), model=normed)
    megatron_plan(8, *sizes(tp=8, sp=True), model=write_model(tmp_path / "b", "Qwen3-8B", **four))


BY_MBRIDGE = (f"{ACTOR}.use_mbridge=True",)
FROM_CHECKPOINT = (f"{ACTOR}.use_dist_checkpointing=True", f"{ACTOR}.dist_checkpointing_path=/ckpt")


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("Llama-3.1-8B", {"model_type": "mistral"}, "a mistral"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0]}, "a qwen3_moe with dense layers among those of experts"),
    ],
)
def test_what_mbridge_was_not_seen_to_read_is_refused(tmp_path, name, changes, what):
    model = write_model(tmp_path, name, **changes)
    megatron_plan(8, model=model)
    with pytest.raises(ConfigError, match=f"use_mbridge=true for {what}: .* Set it to false"):
        megatron_plan(8, *BY_MBRIDGE, model=model)


def test_weights_come_from_one_place(tmp_path):
    model = write_model(tmp_path, "Qwen3-8B")
    megatron_plan(2, *BY_MBRIDGE, model=model)
    megatron_plan(2, *FROM_CHECKPOINT, model=model)
    with pytest.raises(ConfigError, match="use_mbridge and use_dist_checkpointing are both true"):
        megatron_plan(2, *BY_MBRIDGE, *FROM_CHECKPOINT, model=model)


def test_the_start_says_how_vocabulary_and_layers_are_cut(tmp_path):
    model = write_model(tmp_path, "Llama-3.1-405B", vocab_size=128251)
    plan, configs = megatron_plan(256, *sizes(tp=8, pp=16, cp=2, sp=True), *BOTH_ENDS, model=model)
    [line] = [line for line in model_setup(plan, configs).splitlines() if line.startswith("agent_0.actor")]
    assert line == (
        "agent_0.actor: megatron on 256 ranks (0-255), tp 8, pp 16, cp 2, ep 1, dp 1, vocabulary padded from "
        "128251 to 128256, layers on each pipeline rank: 1 x 7, 14 x 8, 1 x 7"
    )


def test_all_problems_are_named_at_once(tmp_path):
    wrong = (*sizes(tp=2, pp=5, ep=3), option("recompute_method", "fast"))
    with pytest.raises(ConfigError) as caught:
        megatron_plan(30, *wrong, model=write_model(tmp_path, "Qwen3-30B-A3B"))
    assert len(str(caught.value).splitlines()) == 4


LORA = "actor_rollout_ref.model.lora_rank=8"


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        (
            "GLM-4.5-Air",
            (),
            "LoRA adapters on experts .*target_modules=all-linear.*of a glm4_moe.*q_proj,k_proj",
        ),
        ("Qwen3-8B", FROM_CHECKPOINT, "use_dist_checkpointing=true with LoRA.*use_mbridge"),
        (
            "Qwen3-8B",
            (*sizes(pp=2), option("pipeline_model_parallel_layout", "E|" + 36 * "t" + "L")),
            "pipeline rank 0 .*no layers, so nothing of it trains",
        ),
    ],
    ids=["experts", "a checkpoint", "no layers"],
)
def test_adapters_that_cannot_be_trained_are_refused(tmp_path, name, overrides, words):
    with pytest.raises((ConfigError, NotSupportedError), match=words):
        megatron_plan(2, LORA, *overrides, model=write_model(tmp_path, name))


@pytest.mark.parametrize(
    ("world", "overrides", "words"),
    [
        (2, (), "layers, heads and experts are not checked: "),
        (2, sizes(tp=2), "tp(2) without sequence_parallel keeps norms and residuals whole"),
        (
            16,
            (*sizes(tp=16, sp=True), "trainer.n_gpus_per_node=8"),
            "tp(16) reaches over machines (ranks 0-15)",
        ),
        (
            8,
            (*sizes(pp=8), "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1024"),
            "pp(8) with 2 micro-batches in a mini-batch idles 78% of the time",
        ),
        (
            2,
            (option("recompute_granularity", "selective"), option("recompute_method", "uniform")),
            "recompute_method has no effect with recompute_granularity=selective",
        ),
    ],
)
def test_what_works_but_badly_is_said(world, overrides, words):
    plan, configs = megatron_plan(world, "trainer.n_gpus_per_node=64", *overrides)
    models = plan.models.values()
    lines = [line for model in models for line in backend_of(model).advice(model, configs[model.node])]
    assert any(line.startswith("node 'actor_train': ") and words in line for line in lines), lines


def test_what_is_said_of_a_reference_that_follows_the_actor_names_the_actors_keys():
    """A single size of its own would put its other ones back to 1: the fix led to the next refusal."""
    with_kl = ("actor_rollout_ref.actor.use_kl_loss=True", "trainer.n_gpus_per_node=2")

    def said(*overrides: str) -> str:
        plan, configs = megatron_plan(2, *sizes(tp=2), *with_kl, *overrides)
        ref = plan.models["agent_0.ref"]
        return " ".join(backend_of(ref).advice(ref, configs[ref.node]))

    assert "Set actor_rollout_ref.actor.megatron.sequence_parallel=true" in said()
    own = said(f"{REF}.tensor_model_parallel_size=2")
    assert "Set actor_rollout_ref.ref.megatron.sequence_parallel=true" in own


def test_keys_of_the_other_strategy_warn():
    megatron = megatron_config("actor_rollout_ref.actor.fsdp_config.fsdp_size=2", *sizes(tp=2))
    [line] = effect_warnings(megatron)
    assert line == (
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=2 has no effect: actor_rollout_ref.actor.strategy is "
        "megatron."
    )
    from plan_cases import config

    fsdp = config(*sizes(tp=2))
    assert effect_warnings(fsdp) == [
        f"{ACTOR}.tensor_model_parallel_size=2 has no effect: actor_rollout_ref.actor.strategy is fsdp."
    ]
    assert effect_warnings(fsdp, [megatron]) == [], "it acts on another node"


def test_layers_are_split_as_megatron_splits_them():
    config_module = pytest.importorskip("megatron.core.transformer")
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    for layers in (7, 8, 12, 24, 30):
        for pp in (1, 2, 4, 8):
            for vpp in (1, 2, 3) if pp > 1 else (1,):
                for options in (
                    {},
                    {"account_for_embedding_in_pipeline_split": True},
                    {"account_for_loss_in_pipeline_split": True},
                    {
                        "account_for_embedding_in_pipeline_split": True,
                        "account_for_loss_in_pipeline_split": True,
                    },
                    {"num_layers_in_first_pipeline_stage": 3},
                    {"num_layers_in_last_pipeline_stage": 2},
                    {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 4},
                ):
                    if pp == 1 and len(options) == 2 and "account_for_loss_in_pipeline_split" not in options:
                        continue  # megatron-core drops layers there
                    theirs = _theirs(config_module, get_num_layers_to_build, layers, pp, vpp, options)
                    try:
                        ours = split_layers(layers, pp, vpp, options)
                    except ValueError:
                        ours = None
                    assert ours == theirs, (layers, pp, vpp, options)


def _theirs(module, count, layers, pp, vpp, options):
    """Chunks as megatron-core builds them, or None where it refuses."""
    import torch

    try:
        built = module.TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            pipeline_dtype=torch.float32,
            **options,
        )
        chunks = range(vpp) if vpp > 1 else (None,)
        return tuple(tuple(count(built, chunk, stage) for chunk in chunks) for stage in range(pp))
    except (ValueError, AssertionError):
        return None


def test_layouts_are_read_as_megatron_reads_them():
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    for text in ("Ett|tt|ttL", "E,t*3|(tt|)*6,tL", "Et|(t|tt|)*2L", "E|t*8|L", "Ettt|(tt|)*29,m|L"):
        theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
        assert parse_layout(text) == [[layer.name for layer in chunk] for chunk in theirs]
    assert parse_layout([["embedding", "Decoder"], ["loss"]]) == [["embedding", "decoder"], ["loss"]]
    for wrong in ("Exx|L", 3, [["embedding"], ["nothing"]]):
        with pytest.raises(ValueError):
            parse_layout(wrong)


def test_two_ends_need_two_stages():
    ends = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 5}
    with pytest.raises(ValueError, match="for 0 other stages"):
        split_layers(7, 1, 1, ends)


def test_the_suggested_cut_is_valid_and_nearly_even():
    for layers in range(1, 130):
        for pp in (1, 2, 3, 4, 8, 16):
            for vpp in (1, 2, 4):
                counts = [
                    count
                    for stage in split_layers(layers, pp, vpp, suggest_split(layers, pp, vpp))
                    for count in stage
                ]
                assert sum(counts) == layers
                assert max(counts) - min(counts) <= 1
