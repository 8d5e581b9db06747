"""Steps of a verl log beside those of a result: what is read, what is warm-up, what the ratio is of."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
beside_verl = importlib.import_module("beside_verl")

LINE = (
    "\x1b[36m(TaskRunner pid=7)\x1b[0m step:{step} - num_turns/mean:np.float64(2.0) - timing_s/gen:{gen} - "
    "timing_s/step:np.float64({took}) - perf/throughput:1000.5"
)


def log(*steps: tuple[int, float, float]) -> str:
    lines = [LINE.format(step=step, gen=gen, took=took) for step, gen, took in steps]
    return "\n".join(["step:0 - val/reward:0.1", "Training Progress: 33%", *lines])


def test_warm_up_is_skipped_of_both_and_means_are_compared(tmp_path, monkeypatch, capsys):
    result, console, out = (tmp_path / name for name in ("result.json", "verl.log", "out.json"))
    result.write_text(json.dumps({"commit": "c", "metrics": {"time/step_s": {"all": [2.0, 4.0]}}}))
    console.write_text(log((1, 90.0, 99.0), (2, 9.0, 20.0), (3, 4.0, 8.0), (4, 5.0, 10.0)))
    words = [str(result), str(console), "--settings", "liger", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["beside_verl.py", *words])
    beside_verl.main()
    found = json.loads(out.read_text())
    assert found["commit"] == "c" and found["verl_step_over_ours"] == pytest.approx(9 / 3)
    all_steps = {"step": [8.0, 10.0], "rollout": [4.0, 5.0], "tokens_per_s_per_gpu": [1000.5, 1000.5]}
    assert found["verl"]["all"] == all_steps and found["verl"]["steps"] == [3, 4]
    assert found["verl"]["settings"] == "liger"
    assert "3.00x" in capsys.readouterr().out


def test_a_log_that_ends_in_the_warm_up_is_refused():
    steps = beside_verl.verl_steps(log((1, 1.0, 2.0), (2, 1.0, 2.0)))
    with pytest.raises(SystemExit, match="2 steps, and the first 2 are warm-up"):
        beside_verl.beside({"metrics": {"time/step_s": {"all": [1.0]}}}, steps, "")


@pytest.mark.parametrize("workload", ["A", "B"])
def test_the_files_of_the_repository_say_what_their_steps_do(workload):
    found = json.loads((BENCHMARKS / "results" / f"beside_verl_gpu_{workload}_1.json").read_text())
    ours, verl = found["metrics"]["time/step_s"]["all"], found["verl"]["all"]["step"]
    assert len(ours) == found["counted_steps"][workload] >= 6 and len(verl) == len(found["verl"]["steps"])
    ratio = sum(verl) / len(verl) / (sum(ours) / len(ours))
    assert found["verl_step_over_ours"] == pytest.approx(ratio)
