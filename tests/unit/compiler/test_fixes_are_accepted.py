"""What a refusal says to set is accepted: its finding is gone then, and nothing is refused because of it."""

import json
import re

import pytest
import yaml

from siirl.compiler.compile import TEMPLATES
from siirl.config.load import read_config
from siirl.config.root import all_keys
from siirl.errors import UserError
from siirl.findings import Findings
from siirl.session import planned

pytestmark = pytest.mark.heavy

KEYS = all_keys()
POLICY = "actor_rollout_ref"
ACTOR, MODEL, ROLLOUT = (f"{POLICY}.{group}" for group in ("actor", "model", "rollout"))
BASE = [
    *("algorithm.adv_estimator=grpo", "data.train_files=t.parquet", "data.train_batch_size=64"),
    *("trainer.device=cuda", "trainer.n_gpus_per_node=8", "trainer.device_memory_gib=288"),
    *(f"{ROLLOUT}.n=4", f"{ROLLOUT}.name=vllm"),
]
QWEN = {
    **{"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    **{"tie_word_embeddings": True, "max_position_embeddings": 40960},
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
LATENT = {
    **{"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
    **{"v_head_dim": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "vocab_size": 129280},
    **{"num_key_value_heads": 16, "head_dim": None, "tie_word_embeddings": False},
}
GPT = {"max_position_embeddings": 2048, "num_key_value_heads": 8, "head_dim": None}
DELTA = {
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    **{"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 2},
}
MODELS = {
    "qwen": QWEN,
    "twelve heads": QWEN | {"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 30},
    "28 heads": QWEN | {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584},
    "72B": QWEN
    | {"num_attention_heads": 64, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80},
    "windows": QWEN
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 14},
    "cut heads": QWEN | {"model_type": "qwen2", "head_dim": 64},
    "odd sides": QWEN | {"intermediate_size": 6152},
    "experts": QWEN
    | EXPERTS
    | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": 48},
    "Moonlight": QWEN
    | LATENT
    | {
        "n_routed_experts": 64,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "q_lora_rank": None,
    },
    "DeepSeek-V3": QWEN
    | LATENT
    | {"n_routed_experts": 256, "first_k_dense_replace": 3, "moe_intermediate_size": 2048}
    | {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "q_lora_rank": 1536}
    | {"num_attention_heads": 128, "num_key_value_heads": 128},
    "gpt_neox": QWEN | GPT | {"model_type": "gpt_neox", "num_attention_heads": 8},
    "gpt_oss": QWEN
    | {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    "other bounds": QWEN
    | {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 1.0},
    "hybrid": QWEN | DELTA | {"model_type": "qwen3_5_text"},
    "hybrid with experts": QWEN
    | DELTA
    | {"model_type": "qwen3_next", "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512, "decoder_sparse_step": 1},
    "sees images": QWEN
    | {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 1280, "depth": 32, "num_heads": 16}}
    | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
}
MEGATRON = [f"{ACTOR}.strategy=megatron", f"{POLICY}.ref.strategy=megatron"]
TP, EP = (f"{ACTOR}.megatron.{axis}_model_parallel_size" for axis in ("tensor", "expert"))
ETP = f"{ACTOR}.megatron.expert_tensor_parallel_size"
CP, SP = f"{ACTOR}.megatron.context_parallel_size", f"{ACTOR}.megatron.sequence_parallel"
ENGINE, HF, SGLANG = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.name=hf", f"{ROLLOUT}.name=sglang"
MANY = ["trainer.nnodes=32", "data.train_batch_size=1024", "trainer.device_memory_gib=80"]
FLOAT8, ULYSSES = f"{ACTOR}.fsdp_config.float8=true", f"{ACTOR}.ulysses_sequence_parallel_size"
SHARDS, IMAGES = f"{ACTOR}.fsdp_config.expert_parallel_size", "data.dataset_type=vlm"
FILTER, ROUTER = "algorithm.filter_groups.enable=true", f"{ACTOR}.router_replay.mode"
ROUNDED = [f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.max_log_prob_diff=0.1"]
LAG, FLASH = f"{ROLLOUT}.max_lag=1", f"{MODEL}.attention_kernels=flash_attn_4"
TAUGHT = ["dag.workflow_path=dag_templates/distill.yaml", "teacher.strategy=vllm", "teacher.model.path={}"]
REFUSED = [
    # keys that contradict each other
    ("qwen", [f"{ACTOR}.ppo_mini_batch_size=7"]),
    ("qwen", ["data.train_batch_size=24", f"{ACTOR}.ppo_mini_batch_size=16"]),
    *(("qwen", [f"{ROLLOUT}.{key}"]) for key in ("temperature=0", "top_k=0", "top_p=0", "do_sample=false")),
    *(("qwen", [f"{ROLLOUT}.val_kwargs.{key}"]) for key in ("n=4", "do_sample=true")),
    ("qwen", [f"{ROLLOUT}.name=replay", "data.val_files=v.parquet"]),
    ("qwen", [FILTER, "trainer.dump_rollouts_dir=x"]),
    ("qwen", [FILTER, f"{ROLLOUT}.n=1"]),
    ("qwen", [FILTER, "dag.workflow_path=dag_templates/grpo.yaml"]),
    *(
        ("qwen", [f"trainer.{key}"])
        for key in ("critic_warmup=3", "resume_mode=resume_path", "test_freq=5", "launcher=local nnodes=2")
    ),
    ("qwen", [f"{ACTOR}.fsdp_config.fsdp_size=0"]),
    ("qwen", [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=100"]),
    ("qwen", [LAG, f"{ROLLOUT}.surplus=3"]),
    ("qwen", ["algorithm.use_pf_ppo=true"]),
    ("qwen", ["algorithm.adv_estimator=opo", f"{ROLLOUT}.n=1"]),
    ("qwen", ["algorithm.adv_estimator=maxrl", "algorithm.use_kl_in_reward=true"]),
    ("qwen", ["dag.workflow_path=dag_templates/ppo.yaml"]),
    ("qwen", [*ROUNDED, f"{ROLLOUT}.dtype=float32"]),
    ("qwen", [*ROUNDED, "trainer.device=cpu"]),
    # rollout engines and models
    *((name, []) for name in ("windows", "cut heads", "gpt_neox", "other bounds")),
    ("gpt_oss", [*MEGATRON]),
    ("Moonlight", [*MEGATRON, f"{ENGINE}=3"]),
    ("hybrid with experts", []),
    ("hybrid", [f"{ROLLOUT}.dtype=float32", "trainer.device=cpu"]),
    ("hybrid", [f"{POLICY}.model.lora_rank=8", f"{ROLLOUT}.merge_lora=false", "trainer.device=cpu"]),
    *((name, [SGLANG]) for name in ("experts", "gpt_neox", "Moonlight", "windows")),
    *((name, [SGLANG, f"{ENGINE}={tp}"]) for name, tp in (("qwen", 2), ("twelve heads", 3), ("72B", 8))),
    *((name, [HF, f"{ENGINE}={tp}"]) for name, tp in (("qwen", 2), ("qwen", 3), ("Moonlight", 8))),
    ("72B", [*MANY, HF, f"{ENGINE}=8"]),
    ("72B", [*MANY, f"{ENGINE}=1", f"{ROLLOUT}.gpu_memory_utilization=0.6"]),
    ("72B", [*MANY, SGLANG]),
    *((name, [f"{ENGINE}={tp}"]) for name, tp in (("28 heads", 8), ("twelve heads", 8), ("twelve heads", 6))),
    ("experts", ROUNDED),
    ("qwen", [HF, f"{ROLLOUT}.replace_weights=in_place"]),
    ("qwen", [f"{ROUTER}=R3"]),
    ("experts", [f"{ROUTER}=R2", f"{ACTOR}.recompute_old_log_prob=false"]),
    # FSDP2
    ("twelve heads", [f"{ULYSSES}=8"]),
    ("qwen", [f"{ULYSSES}=3"]),
    *(("experts", [f"{SHARDS}={size}"]) for size in (3, 4)),
    ("qwen", [f"{SHARDS}=8"]),
    ("qwen", [f"{ACTOR}.fsdp_config.moe_aux_loss_coeff=0.1"]),
    ("Moonlight", [HF, f"{ACTOR}.fsdp_config.moe_aux_loss_coeff=0.1"]),
    ("Moonlight", [HF, f"{MODEL}.lora_rank=8"]),
    *((name, [FLOAT8]) for name in ("experts", "odd sides")),
    ("qwen", [FLOAT8, f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=float32"]),
    *(("qwen", [f"{MODEL}.compile_layers=true", more]) for more in (f"{MODEL}.use_liger=true", FLOAT8)),
    *(("experts", [f"{MODEL}.{key}=true"]) for key in ("compile_layers", "use_liger")),
    ("sees images", []),
    ("qwen", [IMAGES]),
    *(
        ("sees images", [IMAGES, more])
        for more in (f"{MODEL}.use_liger=true", f"{ENGINE}=2", f"{ULYSSES}=2", FLASH)
    ),
    ("sees images", [IMAGES, f"{MODEL}.lora_rank=8", f"{ROLLOUT}.merge_lora=false"]),
    ("sees images", [IMAGES, "data.truncation=left"]),
    # Megatron
    *((name, [*MEGATRON, f"{TP}={tp}"]) for name, tp in (("twelve heads", 8), ("28 heads", 8))),
    ("qwen", [*MEGATRON, f"{EP}=2"]),
    ("qwen", [*MEGATRON, f"{TP}=2", f"{ETP}=2"]),
    ("experts", [*MEGATRON, f"{EP}=3", "trainer.nnodes=3", "data.train_batch_size=48"]),
    ("experts", [*MEGATRON, f"{TP}=2", f"{SP}=false"]),
    ("qwen", [*MEGATRON, f"{MODEL}.compile_layers=true"]),
    ("qwen", [*MEGATRON, f"{CP}=2", FLASH]),
    (
        "qwen",
        [
            *(
                *MEGATRON,
                f"{CP}=2",
                f"{ACTOR}.use_dynamic_bsz=true",
                f"{ACTOR}.ppo_max_token_len_per_gpu=200",
            ),
            *("data.max_prompt_length=101", "data.max_response_length=300"),
        ],
    ),
    # teachers
    ("qwen", [*TAUGHT, f"{ROLLOUT}.temperature=0.7"]),
    ("qwen", [*TAUGHT, f"{ACTOR}.distill.top_k=-1"]),
]
NO_ENGINE = [
    ("DeepSeek-V3", [*MANY, SGLANG]),
    ("DeepSeek-V3", [*MANY, HF, f"{ENGINE}=8"]),
]
SETTING = re.compile(r"(?<![\w.{+])([a-z_]\w*(?:\.[a-z_]\w*)*)=(\[[^]]*\]|[\w.|/-]+)")
NO_VALUES = {"more", "less", "so", "N", "DIR", "MIN", "file.py"}
"""What stands in the place of a value that is the user's."""


def problems(overrides: list[str]) -> list[str]:
    """All that `siirl check --elsewhere` refuses."""
    found = Findings()
    try:
        planned(read_config(overrides, "ppo_dag_trainer", found), True, found)
    except UserError as error:
        found.add(error)
    return [str(problem) for problem in found.problems]


def split(message: str) -> tuple[str, str]:
    """What is wrong and why, and what to do."""
    about = re.sub(r"^(?:not supported yet: )?[^:]*\.strategy=\w+: ", "", message)
    first, *rest = re.split(
        r"(?<=[.;:)]) (?=(?:Set|Or set|With|Even with|Name|Add|Remove|Use) )", about, maxsplit=1
    )
    return re.sub(r"\d+", "N", first), " ".join(rest)


def full(name: str, message: str) -> str | None:
    """The key that a message means by a shorter name."""
    ends = [key for key in KEYS if f".{key}".endswith(f".{name}")]
    own = [key for key in ends if key in message] or [key for key in ends if key.startswith(POLICY)] or ends
    return name if name in KEYS else min(own, key=len, default=None)


def advised(message: str) -> list[list[str]]:
    """The settings that a message advises, those joined by "or" each by itself; commands are left out, and
    what the user is to fill in."""
    what, fix = split(message)
    keys = [full(name, message) for name in re.findall(r"([a-z_]\w*(?:\.[a-z_]\w*)*)=", what)]
    choices = [
        [(full(name, message) if name != "it" else next(filter(None, keys), None), value)]
        for name, values in re.findall(r"[Ss]et ([\w.]+) to ((?:[\w.-]+(?:, | or |))+)(?=[,;:.]|$)", fix)
        for value in re.findall(r"[\w.-]*\w", values.replace(" or ", " "))
    ]
    choosing = False
    for part in re.split(r",? or |; or |; ", fix):
        choosing |= re.match(r"(?:.*[ .])?[Ss]et ", part) is not None
        pairs = [(full(name, message), value.rstrip(".")) for name, value in SETTING.findall(part)]
        if choosing and "`" not in part and not re.search(r" and [a-z_]+(?:\.\w+)+(?![=\w.])", part):
            choices += [[(key, one)] for key, value in pairs for one in value.split("|") if "|" in value] or [
                pairs
            ]
    wanted = [pairs for pairs in choices if pairs and None not in dict(pairs)]
    return [
        [f"{key}={value}" for key, value in pairs]
        for pairs in wanted
        if not {value for _, value in pairs} & NO_VALUES
    ]


@pytest.fixture
def command(tmp_path):
    """(name of a model, overrides) -> the command line."""

    def made(name: str, overrides: list[str]) -> list[str]:
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir(exist_ok=True)
        sizes = {key: value for key, value in MODELS[name].items() if value is not None or "rank" in key}
        (folder / "config.json").write_text(json.dumps(sizes))
        words = [word.replace("launcher=local nnodes", "launcher=local trainer.nnodes") for word in overrides]
        words = [part for word in words for part in word.split(" ")]
        return [*BASE, f"{MODEL}.path={folder}", *(word.replace("{}", str(folder)) for word in words)]

    return made


@pytest.mark.parametrize(
    ("model", "wrong"),
    REFUSED,
    ids=lambda of: of if isinstance(of, str) else " ".join(of).replace(POLICY, ""),
)
def test_what_a_refusal_says_to_set_is_accepted(model, wrong, command):
    asked = command(model, wrong)
    said = problems(asked)
    choices = [(message, settings) for message in said for settings in advised(message)]
    assert choices, f"refused with a setting that mends it: {said}"
    known = {split(message)[0] for message in said}
    for message, settings in choices:
        after = {split(problem)[0]: problem for problem in problems([*asked, *settings])}
        assert split(message)[0] not in after, (settings, message)
        assert not after.keys() - known, (settings, message, after)


@pytest.mark.parametrize(("model", "wrong"), NO_ENGINE, ids=["sglang", "hf"])
def test_no_engine_is_advised_where_none_holds_the_model(model, wrong, command):
    """Of DeepSeek-V3 each rank would have 1.25 TiB in transformers, and 160 GiB in vLLM."""
    said = problems(command(model, wrong))
    assert any(
        "No other engine of siirl samples it" in message and "GiB of 80" in message for message in said
    )
    assert [settings for message in said for settings in advised(message)] == []


def test_a_field_that_two_nodes_write_is_mended_by_what_the_message_says(tmp_path, command):
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
        said = problems([*command("qwen", []), kl, f"dag.workflow_path={file}"])
        assert bool(said) == wrong, (again, said)
        if again == {}:
            assert ["remove one. Models that it learns from" in message for message in said] == [True]
