"""The Megatron preset, parameter page and scaling guide say what the schema and the code say."""

import dataclasses
import re
from pathlib import Path

import pytest
from megatron_cases import ACTOR, megatron_plan, option, sizes, write_model

from siirl.algorithms.advantages import ADVANTAGES
from siirl.cli import main
from siirl.compiler.backends import backend_of
from siirl.compiler.checks.megatron_options import FIXED, OPTIONS
from siirl.compiler.memory.estimate import read_shape
from siirl.config import load_config
from siirl.config.common import MegatronConfig
from siirl.config.root import all_keys
from siirl.config.tree import diff_keys
from siirl.config.values import show

ROOT = Path(__file__).parents[3]
PRESET = ROOT / "siirl" / "config" / "megatron_ppo_dag_trainer.yaml"
PAGE = (ROOT / "docs" / "megatron_parameters.md").read_text()


def test_the_preset_sets_the_strategy_and_writes_out_every_other_parameter():
    cfg = load_config(config_name="megatron_ppo_dag_trainer")
    assert set(diff_keys(cfg)) == {"actor_rollout_ref.actor.strategy"}
    assert cfg.actor_rollout_ref.ref.strategy == "megatron"
    written = {name.rpartition(".")[2] for name in cfg.explicit if ".actor.megatron." in name}
    known = {field.name for field in dataclasses.fields(MegatronConfig)}
    assert written == known - {"extra"}


def test_the_parameter_page_explains_every_key_with_its_default():
    for field in dataclasses.fields(MegatronConfig):
        if field.name.startswith(("override_", "extra")):
            assert f"`{field.name}`" in PAGE, field.name
            continue
        key = all_keys()[f"actor_rollout_ref.actor.megatron.{field.name}"]
        assert f"| `{field.name}` | {show(key, field.default)} |" in PAGE, field.name


def test_the_parameter_page_lists_every_option_that_is_passed_on():
    options = PAGE[PAGE.index("## Options of Megatron-Core") : PAGE.index("## Keys beside the group")]
    parts = re.split(
        r"`(?:override_transformer_config|override_ddp_config|optim.override_optimizer_config)`[, ]", options
    )
    for kind, part in zip(OPTIONS, parts[1:], strict=True):
        named = set(re.findall(r"^\| `(\w+)`", part, re.MULTILINE))
        assert named == OPTIONS[kind].keys() - {"eps"}
    said = re.findall(r"`(\w+)=", parts[0][parts[0].index("anyway") :])
    assert set(said) <= set().union(*FIXED.values()) and len(said) > 3
    comments = "\n".join(line for line in PRESET.read_text().splitlines() if line.startswith("      #   "))
    named = set(re.findall(r"(\w+): ", comments))
    assert len(named) > 15
    assert named <= set().union(*OPTIONS.values())


GUIDE = (ROOT / "docs" / "scaling.md").read_text()


def guide_rows() -> list[list[str]]:
    """The cells of the recipes in the scaling guide."""
    table = GUIDE[GUIDE.index("| model | devices |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def gib_of(directory: Path, name: str, world: int, described: str) -> tuple[int, dict[str, float]]:
    """Data-parallel size, and GiB by kind on the fullest rank, of a recipe of the guide."""
    parallel = dict(part.split("=") for part in described.split() if "=" in part)
    ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    plan, configs = megatron_plan(
        world,
        *sizes(**parallel, sp=True),
        *(option(end, True) for end in ends if "both ends" in described),
        "data.max_prompt_length=1024",
        "data.max_response_length=2048",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        model=write_model(directory, name),
        rows=1024,
    )
    actor = plan.models["agent_0.actor"]
    cfg = configs[actor.node]
    shape = read_shape(cfg, "actor")
    assert not isinstance(shape, str)
    lines = backend_of(actor).memory(actor, cfg, shape, 0)
    return actor.dims.dp, {line.what: line.num_bytes / 2**30 for line in lines if "update" in line.during}


@pytest.mark.parametrize("row", guide_rows(), ids=lambda row: f"{row[0]} on {row[1]}")
def test_the_memory_in_the_scaling_guide_is_what_the_plan_estimates(tmp_path, row):
    name, devices, described, dp, *amounts = row
    shards, gib = gib_of(tmp_path, name, int(devices), described)
    kinds = ("parameters", "gradients", "optimizer", "activations", "log-prob head")
    assert [dp, *amounts] == [
        str(shards),
        *(f"{gib[kind]:.1f}" if kind in gib else "" for kind in kinds),
        f"{sum(gib.values()):.1f}",
    ]


def test_the_worked_arithmetic_of_the_scaling_guide(tmp_path):
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    head = 151936 * 4096
    rank = (9 * layer + head) / 2
    values = 9 * 4096 // 2 + (4 * 4096 + 3 * 4096 + 3 * 1024 + 3 * 12288) // 2
    expected = {
        "parameters": 2 * rank,
        "gradients": 4 * rank,
        "optimizer": 12 * rank,
        "activations": 2 * values * 8 * 3072,
        "log-prob head": 2 * 2**28 + 8 * head / 2,
    }
    _, gib = gib_of(tmp_path, "Qwen3-8B", 8, "tp=2 pp=4")
    assert gib == pytest.approx({kind: amount / 2**30 for kind, amount in expected.items()}, rel=1e-4)
    _, large = gib_of(tmp_path, "Llama-3.1-70B", 16, "tp=8 pp=2")
    rank = (40 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 128256 * 8192) / 8
    assert large["optimizer"] == pytest.approx(12 * rank / 2**30, rel=1e-4)
    for number in (
        "2358.9 M",
        "1179.4 M",
        "108,032 values",
        "52,736 values",
        "25.0 GiB",
        "4410 M",
        "73.9 GiB",
    ):
        assert number in " ".join(GUIDE.split()), number
    assert sum(large.values()) - large["activations"] == pytest.approx(73.9, abs=0.05)


def test_the_worked_arithmetic_of_a_mixture_of_experts(tmp_path):
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048 + 2 * 2048 + 2 * 128
    dense, experts = (24 * layer + 151936 * 2048) / 2, 24 * 128 * 3 * 2048 * 768 / 4
    values = 15 * 3 * 2048 // 2 + (4 * 2048 + 3 * 4096 + 3 * 512 + 8 * (3 * 768 + 2 * 2048)) // 2
    expected = {
        "parameters": 2 * (dense + experts),
        "gradients": 4 * (dense + experts),
        "optimizer": 12 * (dense / 8 + experts / 4),
        "activations": 2 * values * 8 * 3072,
        "log-prob head": 2 * 2**28 + 8 * 151936 * 2048 / 2,
    }
    _, gib = gib_of(tmp_path, "Qwen3-30B-A3B", 32, "tp=2 pp=2 vpp=8 ep=4")
    assert gib == pytest.approx({kind: amount / 2**30 for kind, amount in expected.items()}, rel=1e-4)
    for number in ("770.6 M", "385.3 M", "3623.9 M", "4009.2 M", "82,688 values", "38.5 GiB"):
        assert number in " ".join(GUIDE.split()), number
    assert [f"{dense / 1e6:.1f}", f"{experts / 1e6:.1f}"] == ["385.3", "3623.9"]


def test_siirl_plan_prints_what_the_guide_quotes_of_it(tmp_path, capsys):
    settings = (
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={write_model(tmp_path, 'Qwen3-8B')}",
        "actor_rollout_ref.actor.strategy=megatron",
        *sizes(tp=2, pp=4, sp=True),
        "data.max_prompt_length=1024",
        "data.max_response_length=2048",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.n=8",
        "trainer.n_gpus_per_node=8",
    )
    assert main(["plan", *settings]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    quoted = GUIDE[GUIDE.index("`siirl plan` with these settings") :].split("```")[1].strip().splitlines()
    assert len(quoted) == 4
    assert [line for line in quoted if " ".join(line.split()) not in printed] == []


def test_an_optimizer_on_the_host_or_in_fewer_bytes_leaves_the_device(tmp_path):
    model = write_model(tmp_path, "Llama-3.1-70B")

    def gib(*overrides: str) -> dict[str, tuple[float, bool]]:
        plan, configs = megatron_plan(16, *sizes(tp=8, pp=2, sp=True), *overrides, model=model, rows=1024)
        actor = plan.models["agent_0.actor"]
        shape = read_shape(configs[actor.node], "actor")
        assert not isinstance(shape, str)
        lines = backend_of(actor).memory(actor, configs[actor.node], shape, 0)
        lines = [line for line in lines if line.during != ("forward",)]
        return {line.what: (round(line.num_bytes / 2**30, 1), line.host) for line in lines}

    optim = "actor_rollout_ref.actor.optim.override_optimizer_config"
    half = gib(f"{optim}.optimizer_cpu_offload=True", f"{optim}.optimizer_offload_fraction=0.5")
    assert (half["optimizer"], half["optimizer on the host"]) == ((24.6, False), (24.6, True))
    aware = (f"{optim}.use_precision_aware_optimizer=True", f"{optim}.exp_avg_dtype=bf16")
    assert gib(*aware, f"{optim}.exp_avg_sq_dtype=bf16")["optimizer"] == (32.9, False)
    assert gib(f"{ACTOR}.grad_offload=True")["gradients"] == (16.4, True)
    assert gib(f"{ACTOR}.param_dtype=float32")["parameters"][0] == 16.4
    kept = gib("actor_rollout_ref.model.enable_gradient_checkpointing=False")["activations"][0]
    assert kept > 20 * gib()["activations"][0]


def migration_targets() -> set[str]:
    """The keys in the right column of the tables written by hand, without values."""
    text = (ROOT / "docs" / "migration_reference.md").read_text().partition("<!-- end -->")[2]
    cells = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    named = {part for cell in cells for code in re.findall(r"`([^`]+)`", cell) for part in code.split()}
    return {part.partition("=")[0] for part in named if re.fullmatch(r"[a-z_.]+(=.*)?", part)}


def test_every_key_that_the_migration_tables_lead_to_exists():
    fields = {field.name for field in dataclasses.fields(MegatronConfig)}
    unknown = set()
    for name in migration_targets():
        group, _, option = name.partition(".")
        if group in OPTIONS and option:
            known = option in OPTIONS[group] or option in FIXED[group]
        else:
            prefixes = ("", "actor_rollout_ref.", "actor_rollout_ref.actor.")
            known = any(prefix + name in all_keys() for prefix in prefixes) or name in fields
        if not known:
            unknown.add(name)
    words = set("tp pp cp ep etp dp divides torchrun python siirl convert export placement ...".split())  # noqa: SIM905
    assert unknown - words - set(ADVANTAGES.names()) == {"optimizer.", "transformer.", "siirl.main_dag"}
    assert len(migration_targets()) > 40


THEIR_KEYS = {
    "ROLL": """
        strategy_name tensor_model_parallel_size virtual_pipeline_model_parallel_size
        device_mapping use_distributed_optimizer sequence_parallel moe_token_dispatcher_type
        moe_grouped_gemm moe_layer_recompute recompute_granularity overlap_grad_reduce
        infer_batch_size disable_gradient_checkpointing dtype model_type learning_rate
        weight_decay per_device_train_batch_size gradient_accumulation_steps warmup_steps
        num_train_epochs
    """,
    "Oumi": """
        trainer_type enable_fsdp enable_deepspeed cpu_offload model_name torch_dtype_str datasets
        dataset_name split load_pretrained_weights max_steps learning_rate output_dir
        include_performance_metrics enable_gradient_checkpointing
        virtual_pipeline_model_parallel_size micro_batch_size global_batch_size
        per_device_train_batch_size gradient_accumulation_steps enable_sequence_packing
        grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather average_in_collective
        optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
        recompute_granularity recompute_method recompute_num_layers recompute_modules
        use_async_checkpoint use_fully_parallel_strategy enable_weight_sync weight_sync_method
        inference_backend num_generations temperature epsilon
    """,
    "Megatron in verl and Trinity-RFT": """
        strategy tensor_model_parallel_size param_offload grad_offload optimizer_offload
        use_mbridge use_dist_checkpointing dist_checkpointing_path override_transformer_config
    """,
}
"""The keys that the documents of these frameworks use."""


@pytest.mark.parametrize("framework", THEIR_KEYS)
def test_the_migration_page_says_what_becomes_of_every_key(framework):
    text = (ROOT / "docs" / "migration_reference.md").read_text()
    section = text[text.index(f"## {framework}") :].partition("\n## ")[0]
    there = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| "))
    assert [key for key in THEIR_KEYS[framework].split() if not re.search(rf"\b{key}\b", there)] == []


TEST_NAME = re.compile(r"\b((?:unit(?:/[a-z_]+)?|dist|contracts|e2e|gpu)/test_\w+)(?:::(\w+))?")


def test_the_checklist_names_tests_and_documents_that_exist_and_every_item():
    text = (ROOT / "docs" / "evidence" / "checklist.md").read_text()
    absent = []
    for file, function in TEST_NAME.findall(text):
        path = ROOT / "tests" / f"{file}.py"
        if not path.is_file() or (function and f"def {function}(" not in path.read_text()):
            absent.append((file, function))
    assert absent == []
    pages = set(re.findall(r"\b((?:docs|docker|benchmarks)/[\w./]+\w)", text))
    assert [page for page in sorted(pages) if not (ROOT / page).exists()] == []
    covered: set[int] = set()
    for numbers, entry in re.findall(
        r"^- \*\*([\d, -]+)\*\*: (.*?)(?=^- |\Z)", text, re.MULTILINE | re.DOTALL
    ):
        below = entry.partition("\n  - ")[2]
        assert TEST_NAME.search(below) or re.search(r"docs/|benchmarks/|this list", below), numbers
        for part in numbers.split(","):
            first, _, last = part.strip().partition("-")
            covered |= set(range(int(first), int(last or first) + 1))
    assert covered == set(range(1, 184))
    assert "open" not in re.findall(r"[a-z]+", text.lower()), "an item that nothing covers"
