"""`siirl plan --from RUN key=value`: what a run would take with other keys, held against runs that did it."""

import importlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from siirl.cli import main
from siirl.compiler.cost.calibration import lengths_under, step_means
from siirl.compiler.cost.device_kinds import CPU
from siirl.compiler.cost.lengths import lengths_of

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
what_if = importlib.import_module("what_if")
PAGE = ROOT / "docs" / "evidence" / "predictions.md"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return list(what_if.pairs(tmp_path_factory.mktemp("pairs")))


@pytest.fixture(scope="module")
def cpu_runs(tmp_path_factory):
    return what_if.cpu_runs(tmp_path_factory.mktemp("models"))


@pytest.fixture
def ask(capsys, tmp_path):
    """The output of the command for a run, whose folder is written, and what it says where it refuses."""

    def asked(run, *words: str) -> str:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run.write(tmp_path / "run")
        code = main(["plan", "--from", str(tmp_path / "run"), *words])
        out, err = capsys.readouterr()
        assert code == (2 if err else 0)
        return out + err

    return asked


def step_of(said: str) -> tuple[float, float]:
    recorded, changed = re.search(r"^  step +([\d.]+) +([\d.]+) ", said, re.M).groups()
    return float(recorded), float(changed)


def gib_of(said: str) -> float:
    return float(re.search(r"([\d.]+) of [\d.]+ GiB changed", said)[1])


def part_of(said: str, name: str) -> list[str]:
    """Seconds as recorded and changed."""
    return re.search(rf"^  {name} +[\d-]+ +([\d.-]+) +([\d.-]+) ", said, re.M).groups()


def test_steps_of_pairs_of_recorded_runs_are_predicted_within_20_percent(pairs):
    near = [pair for pair in pairs if pair.title not in what_if.FURTHER_OFF]
    assert len(near) >= 20 and len(near) == len(pairs) - len(what_if.FURTHER_OFF)
    for pair in near:
        assert abs(pair.step_s.error) <= 0.2, pair


def test_memory_of_pairs_of_recorded_runs_is_predicted_within_20_percent(pairs):
    """Of GPUs that of the fullest phase, which is not the same in both of some pairs."""
    known = [pair for pair in pairs if pair.gib is not None]
    assert len(known) >= 20 and sum(pair.title in what_if.GPU_PAIRS for pair in known) >= 8
    for pair in known:
        assert abs(pair.gib.error) <= 0.2, pair


def test_staleness_of_pairs_of_recorded_runs_is_predicted_within_20_percent(pairs):
    known = [pair for pair in pairs if pair.staleness is not None]
    assert len(known) >= 4
    for pair in known:
        assert abs(pair.staleness.error) <= 0.2, pair


def test_the_predictions_are_better_than_that_nothing_changes(pairs):
    for what in ("step_s", "gib"):
        found = [getattr(pair, what) for pair in pairs if pair.title not in what_if.FURTHER_OFF]
        answers = [answer for answer in found if answer is not None]
        errors = fmean(abs(answer.error) for answer in answers)
        as_it_was = fmean(abs(answer.recorded / answer.measured - 1) for answer in answers)
        assert errors < 0.3 * as_it_was, what


def test_the_page_has_the_pairs_of_today(pairs):
    for what, unit in what_if.TABLES.items():
        assert "\n".join(what_if.table(pairs, what, unit)) in PAGE.read_text()


def test_the_constants_of_cpus_are_what_the_fit_gives(cpu_runs):
    for name, value in what_if.fit(cpu_runs).items():
        assert CPU.constants[name].value == pytest.approx(value, rel=0.01), name


def test_a_run_without_other_keys_takes_what_it_took(ask, cpu_runs):
    run = cpu_runs["base"]
    recorded, changed = step_of(ask(run))
    assert recorded == changed == pytest.approx(run.means["time/step_s"], rel=0.01)


def test_a_slower_machine_is_slower_with_other_keys_too(ask, cpu_runs):
    run, keys = cpu_runs["base"], ["data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16"]
    slow = {name: value * (3 if name.startswith("time/") else 1) for name, value in run.means.items()}
    here = step_of(ask(run, *keys))
    there = step_of(ask(replace(run, means=slow), *keys))
    assert [b / a for a, b in zip(here, there, strict=True)] == pytest.approx([3, 3], rel=0.02)


def test_one_part_that_took_longer_than_the_model_knows_moves_that_part_alone(ask, cpu_runs):
    run = cpu_runs["base"]
    more = {"time/rollout_actor_s": run.means["time/rollout_actor_s"] + 5}
    more["time/step_s"] = run.means["time/step_s"] + 5
    said = ask(replace(run, means={**run.means, **more}), f"{ACTOR}.ppo_micro_batch_size_per_gpu=2")
    recorded, changed = part_of(said, "rollout_actor")
    assert recorded == changed
    assert float(part_of(said, "actor_train")[1]) < 2


def test_parts_of_ranks_that_differ_fill_the_step_and_no_more(ask, cpu_runs):
    """Each is recorded of the slowest rank: their sum is more than the step."""
    run = cpu_runs["base"]
    said = ask(replace(run, means={**run.means, "time/actor_train_s": 0.9 * run.means["time/step_s"]}))
    recorded, changed = step_of(said)
    assert recorded == changed == pytest.approx(run.means["time/step_s"], rel=0.01)
    assert "between the parts" not in said
    parts = re.findall(r"^  (?!step|trained|part)\S+ +0 +([\d.]+) ", said, re.M)
    assert sum(map(float, parts)) == pytest.approx(recorded, rel=0.05)


def test_keys_that_follow_others_still_do(ask, cpu_runs):
    """run_config.yaml has all keys; those that nobody set are those of the changed run."""
    said = ask(cpu_runs["base"], "data.max_response_length=128")
    assert "rows of 32 + 128 tokens" in said
    said = ask(cpu_runs["base"], f"{ROLLOUT}.max_lag=2")
    assert "staleness of rollout_actor: 0.0 steps recorded, 1.0 changed, at most 2" in said


def test_a_part_that_the_run_did_not_have_is_named_and_corrected_as_its_kind(ask, cpu_runs):
    said = ask(cpu_runs["base"], *what_if.KL)
    assert "reference_log_prob: the run has no such part" in said
    before, after = part_of(said, "reference_log_prob")
    assert before == "-" and 0 < float(after) < float(part_of(said, "actor_train")[1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"{ROLLOUT}.n=1"], "there are none"),
        (["data.train_batch=4"], "Did you mean"),
        (["--search"], "--from"),
        (["--tokens", "8+8"], "--from"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_reason(ask, cpu_runs, words, said):
    assert said in ask(cpu_runs["base"], *words)


def test_a_run_that_tells_too_little_is_refused(ask, cpu_runs, tmp_path, capsys):
    ask(cpu_runs["base"])
    folder = tmp_path / "run"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(lines[0] + "\n")
    assert main(["plan", "--from", str(folder)]) == 2 and "fewer than 4 steps" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "job.json").write_text("{")
    assert main(["plan", "--from", str(folder)]) == 2 and "no plan" in capsys.readouterr().err


def test_memory_of_a_gpu_is_as_far_from_the_estimate_as_the_run_was(ask, tmp_path):
    run = what_if.gpu_runs(tmp_path)["grpo_gpu_A_1"]
    means = {name: value for name, value in run.means.items() if not name.startswith("memory/")}
    run = replace(run, means=means | {"memory/actor_train_device_gib": 60.0})
    assert re.search(r"memory: 60\.0 GiB recorded, [\d.]+ of 139\.8 GiB changed", ask(run))
    sizes = [
        gib_of(ask(replace(run, means=means | {"memory/actor_train_device_gib": gib})))
        for gib in (50.0, 100.0)
    ]
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.02), "all phases are as far from their estimate"
    without = f"{ACTOR}.ppo_max_token_len_per_gpu=2048"
    assert gib_of(ask(run, without, "actor_rollout_ref.rollout.gpu_memory_utilization=0.2")) < gib_of(
        ask(run)
    )


def test_lengths_under_another_limit():
    geometric = lengths_of("8+100")
    assert lengths_under(geometric, 200, 200, 0.1) is geometric
    cut = lengths_under(geometric, 10_000, 100, 0.0)
    assert cut.response == pytest.approx(63, rel=0.03)  # 1 - 1/e of the mean
    assert lengths_under(lengths_of("8+64"), 64, 128, 1.0).response == 128
    drawn = lengths_under(replace(geometric, response=63.2), 100, 10_000, 0.368)
    assert drawn.response == pytest.approx(100, rel=0.03)


def test_the_first_steps_and_single_slow_ones_do_not_count():
    steps = {step: 1.0 for step in range(1, 31)} | {1: 60.0, 17: 30.0}
    assert step_means({"time/step_s": steps, "x": {30: 4.0}}) == {"time/step_s": 1.0, "x": 4.0}
    assert step_means({"time/step_s": {1: 1.0, 2: 1.0}}) == {}


def test_a_folder_of_a_run_is_read_without_its_secrets_or_its_machine(ask, cpu_runs, tmp_path):
    """What the command reads is what every run writes: no model, no data, no code."""
    ask(cpu_runs["base"])
    config = json.loads((tmp_path / "run" / "job.json").read_text())["config"]
    config["data"]["train_files"] = ["/elsewhere/train.parquet"]
    job = json.loads((tmp_path / "run" / "job.json").read_text()) | {"config": config}
    (tmp_path / "run" / "job.json").write_text(json.dumps(job))
    assert main(["plan", "--from", str(tmp_path / "run")]) == 0
