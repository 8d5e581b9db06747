"""The tables of docs/models.md and docs/evidence/models.md are what is refused, and what was recorded."""

import json
import re
from pathlib import Path

import family_columns
import family_limits
import models_page
import proven_models
import pytest
from plan_cases import config
from proven_models import ALONE, SAMPLED, TRAINING, Case, Proof

import siirl
from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import with_overrides
from siirl.errors import UserError
from siirl.models.families import FAMILIES, family_of, known_types, types_with
from siirl.models.trained import TRAINABLE
from siirl.testing.tiny_models import tiny_config

WHY_NOT = types_with(lambda row: row.vllm.why_not)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASE = Case("qwen3", "fsdp", TRAINING, ALONE, "CPU", "float32")
NEAR = Proof(2e-6, 3e-7, "abc")


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]


def row_of(cases: proven_models.Cases, kind: str, strategy: str) -> list[str]:
    (found,) = [row for row in rows(models_page.table(cases)) if row[:2] == [kind, strategy]]
    return found


@pytest.mark.parametrize("page", [models_page.PAGE, models_page.EVIDENCE], ids=lambda page: page.parent.name)
def test_the_page_is_the_generated_one(page):
    if page.read_text() != models_page.written(proven_models.load(proven_models.FILE))[page]:
        pytest.fail(f"{page.name} is out of date: run `make docs`")


def test_every_type_that_a_strategy_trains_has_a_row_with_what_was_proven_or_that_nothing_was():
    cases = proven_models.load(proven_models.FILE)
    page = models_page.EVIDENCE.read_text()
    wanted = {(kind, strategy) for strategy in TRAINABLE for kind in known_types(strategy)}
    written = page.partition(models_page.BEGIN)[2].partition(models_page.END)[0]
    head, *tables = [row for row in rows(written) if len(row) == 7]
    tables = tables[1 : 1 + len(wanted)]
    found = {(row[0], row[1]): row[2:] for row in tables}
    assert found.keys() == wanted and head[5] == "in vLLM"
    for (kind, strategy), (layouts, log_prob, _, in_vllm, _) in found.items():
        if strategy == "megatron":
            assert in_vllm == "", kind
        elif kind in WHY_NOT or in_vllm == models_page.NOT_RUN:
            sampled = any(
                (case.model_type, case.part, case.device) == (kind, SAMPLED, "CPU") for case in cases
            )
            assert not sampled and (in_vllm == models_page.REFUSED) == (kind in WHY_NOT), kind
        else:
            gap, *dtype = in_vllm.split(", ")
            assert dtype == [name for name in (family_of(kind).vllm.cpu_dtype,) if name], kind
            assert dtype or float(gap) < 2e-5, kind
        own = CASE._replace(model_type=kind, strategy=strategy)
        proven = [case for case in cases if case._replace(layout=ALONE) == own]
        assert (layouts != models_page.NOT_RUN) == bool(proven), (kind, strategy)
        assert not proven or float(log_prob) < 1e-5, (kind, strategy)


ACTOR = "actor_rollout_ref.actor"
ASKED = {
    "fsdp": (f"{ACTOR}.strategy=fsdp",),
    "megatron": (f"{ACTOR}.strategy=megatron",),
    "sampled by": ("actor_rollout_ref.rollout.name=vllm",),
    "LoRA": ("actor_rollout_ref.model.lora_rank=4",),
    "FP8": (f"{ACTOR}.fsdp_config.float8=true",),
}
"""Column -> what is asked for by it."""
SAYS_YES = {
    "sampled by": lambda cell: "vllm" in cell.split(", "),
    "LoRA": lambda cell: cell == "all",
    **dict.fromkeys(("fsdp", "megatron", "FP8"), lambda cell: cell != "-"),
}


@pytest.fixture(scope="module")
def family_table() -> dict[str, dict[str, str]]:
    head, _, *table = rows("\n".join(family_columns.family_rows()))
    return {row[0]: dict(zip(head, row, strict=True)) for row in table}


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if not FAMILIES[kind].sees_images])
def test_what_a_type_s_row_says_is_what_is_accepted(tmp_path, family_table, kind):
    wide = {"num_attention_heads": 2} if kind == "gpt_bigcode" else {}  # whose one head of keys FP8 takes
    tiny_config(kind, **wide).save_pretrained(tmp_path)
    path = f"actor_rollout_ref.model.path={tmp_path}"
    for column, asked in ASKED.items():
        cfg = config(path, "trainer.device=cuda", *asked)
        try:
            compile_plan(load_dag(cfg), cfg, 1)
            accepted = True
        except UserError:
            accepted = False
        cell = family_table[kind][column]
        assert SAYS_YES[column](cell) == accepted, (column, cell)


def test_a_type_with_adapters_on_its_attention_has_them_and_one_without_has_none(tmp_path, family_table):
    """Types of one kind each: compressed keys, images, [in, out], experts of both kinds."""
    asked = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_proj]")
    cells = {"deepseek_v3": "-", "gpt2": "-", "qwen2_moe": "attention", "qwen3_moe": "all"}
    for kind, cell in cells.items():
        tiny_config(kind).save_pretrained(tmp_path)
        cfg = config(f"actor_rollout_ref.model.path={tmp_path}", *asked)
        assert family_table[kind]["LoRA"] == cell
        if cell == "-":
            with pytest.raises(UserError, match="LoRA adapters"):
                compile_plan(load_dag(cfg), cfg, 1)
        else:
            compile_plan(load_dag(cfg), cfg, 1)
    assert family_table["qwen3_vl"]["LoRA"] == "text part"  # tests/contracts/test_vision_engine.py


ASKED_LIMITS = [one for one in family_limits.limits() if one.values or one.keys or one.what == "training"]


@pytest.mark.parametrize("limit", ASKED_LIMITS, ids=lambda one: f"{one.what[:40]} {one.types[0]}")
def test_what_the_page_says_is_refused_is_refused(tmp_path, limit):
    """The first and the last type of a line."""
    on_cpu = any(key.startswith("trainer.device=") for key in limit.keys)
    keys = limit.keys if on_cpu else (*limit.keys, "trainer.device=cuda")
    for kind in {limit.types[0], limit.types[-1]}:
        raw = tiny_config(kind if kind in FAMILIES else "qwen3").to_dict()
        (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": kind} | dict(limit.values)))
        cfg = config(f"actor_rollout_ref.model.path={tmp_path}", *keys)
        with pytest.raises(UserError) as refused:
            compile_plan(load_dag(cfg), cfg, cfg.trainer.n_gpus_per_node)
        assert (limit.words or limit.why) in str(refused.value)


def test_only_the_line_of_older_versions_is_not_asked():
    assert [one.what for one in family_limits.limits() if one not in ASKED_LIMITS] == ["... before vLLM 0.32"]


def test_the_table_of_types_has_every_type_with_the_strategies_that_train_it(family_table):
    assert family_table.keys() == {kind for strategy in TRAINABLE for kind in known_types(strategy)}
    for strategy in TRAINABLE:
        cells = {kind: row[strategy] for kind, row in family_table.items()}
        assert [kind for kind, cell in cells.items() if cell != "-"] == list(known_types(strategy))
        any_head = [kind for kind, cell in cells.items() if "any role" in cell]
        assert any_head == list(known_types(strategy, "value"))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_5_text"])
def test_one_layer_more_than_the_largest_gets_a_warning_of_memory(tmp_path, family_table, kind):
    layers = int(re.findall(r"(\d+) layers", family_table[kind]["largest"])[0])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    cfg = next(cfg for cfg in family_columns.jobs(kind, str(tmp_path)) if family_columns.deepest(cfg))
    sized = {"trainer.device_memory_gib": family_columns.GPU_GIB}
    for depth, fits in ((layers, True), (layers + 1, False)):
        planned = siirl.plan(with_overrides(cfg, family_columns.deep(depth) | sized))
        assert any("memory" in line for line in planned.warnings) != fits, planned.warnings


def test_nothing_is_said_of_types_that_no_strategy_trains():
    assert models_page.strangers(proven_models.load(proven_models.FILE)) == []
    odd = [CASE._replace(model_type="opt", strategy="megatron"), CASE._replace(strategy="other")]
    assert models_page.strangers(dict.fromkeys([CASE, *odd], NEAR)) == odd


def test_what_benchmarks_tell_is_what_they_measured():
    """Lines that name a file of benchmarks/results have the largest distance of its steps."""
    told = {
        case: proof
        for case, proof in proven_models.load(proven_models.FILE).items()
        if proof.source.startswith("backends_gpu")
    }
    assert told
    for case, proof in told.items():
        result = json.loads((RESULTS / proof.source).read_text())
        steps = result["runs"][case.strategy]["actor/rollout_log_prob_diff"]["all"]
        assert proof.log_prob == pytest.approx(max(steps), rel=0.05), case
        assert f"NVIDIA {case.device}" == result["machine"]["gpus"][0]
        assert case.layout in (
            result["settings"]["layout"],
            "tp2 pp2",
            f"dp{result['settings']['gpus']}",
            ALONE,
        )


def layout_of(settings: dict, strategy: str) -> str:
    """The layout of a benchmark's run: of megatron the one that was asked for, of fsdp all GPUs."""
    if settings["gpus"] == 1:
        return ALONE
    if strategy == "fsdp":
        return f"dp{settings['gpus']}"
    return " ".join(re.findall(r"[a-z]+\d+", settings["layout"]))


def test_a_row_has_the_largest_distances_and_names_layouts_or_their_sizes():
    cases = {CASE: NEAR, CASE._replace(layout="cp2"): Proof(4e-6, 1e-7, "abc")}
    assert row_of(cases, "qwen3", "fsdp")[2:] == ["1 rank, cp2", "4.0e-6", "3.0e-7", "not run", ""]
    cases |= {CASE._replace(layout=name): NEAR for name in ("cp2 ep2", "dp2")}
    assert row_of(cases, "qwen3", "fsdp")[2] == "4 of cp2 dp2 ep2"
    cases[CASE._replace(part="adapters")] = Proof(1e-6, 5e-6, "abc")
    cases[CASE._replace(part="router loss")] = Proof(None, 6e-7, "abc")
    assert row_of(cases, "qwen3", "fsdp")[6] == "adapters, router loss: 5.0e-6"
    cases[CASE._replace(part=SAMPLED)] = Proof(7e-6, None, "abc")
    assert row_of(cases, "qwen3", "fsdp")[5:] == ["7.0e-6", "adapters, router loss: 5.0e-6"]
    assert row_of(cases, "qwen3", "megatron")[2:] == ["not run", "", "", "", ""]
    assert row_of(cases, "afmoe", "fsdp")[5] == "refused"
    bound = {CASE._replace(device="H100"): Proof("<1e-4", None, "a test")}
    last = rows(models_page.table(cases | bound))[-1]
    assert last == ["qwen3", "fsdp", "H100, float32", TRAINING, ALONE, "<1e-4", ""]


def test_partial_runs_add_up_and_a_failure_takes_its_line_away(tmp_path, monkeypatch):
    file = tmp_path / "proven.json"
    other = CASE._replace(layout="tp2", strategy="megatron")
    proven_models.record(CASE, 1e-6)
    assert not file.exists(), "nobody has asked"
    monkeypatch.setenv("SIIRL_RECORD_MODELS", str(file))
    monkeypatch.setattr(proven_models, "_commit", lambda: "one")
    proven_models.record(CASE, 1.234e-6, 2e-7)
    proven_models.record(other, 3e-6)
    proven_models.record(CASE, 1.1e-6, 5e-7)
    assert proven_models.load(file) == {CASE: Proof(1.2e-6, 5e-7, "one"), other: Proof(3e-6, None, "one")}
    monkeypatch.setattr(proven_models, "_commit", lambda: "two")
    proven_models.record(CASE, 1e-7, 1e-8)
    proven_models.record(other)
    assert proven_models.load(file) == {CASE: Proof(1e-7, 1e-8, "two")}
    proven_models.save(tmp_path / "more.json", {other: NEAR, CASE: NEAR})
    proven_models.merge(file, [tmp_path / "more.json"])
    assert proven_models.load(file) == {CASE: NEAR, other: NEAR}
    proven_models.save(tmp_path / "again.json", dict(reversed(proven_models.load(file).items())))
    assert (tmp_path / "again.json").read_text() == file.read_text()
