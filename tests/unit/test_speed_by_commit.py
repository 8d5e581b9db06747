"""The page of speeds by commit, and what a call of its benchmark leaves to the next one."""

import argparse
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def smoke():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import smoke

    yield smoke
    sys.path.remove(str(ROOT / "benchmarks"))


def test_the_page_is_that_of_the_files(smoke):
    kept = (ROOT / "docs/evidence/speed_by_commit.md").read_text()
    assert kept == smoke.page((ROOT / "benchmarks/results").glob("smoke_*.json")), "run smoke.py --table"


def test_a_number_that_is_worse_than_the_best_before_it_is_bold(smoke, tmp_path):
    runs = [
        ("c", "2026-03-01", {"step_s": 10.2, "update_mfu": 0.49}, {}),
        ("a", "2026-01-01", {"step_s": 10.0, "update_mfu": 0.5, "experts_16384_ms": 7.0}, {}),
        ("b", "2026-02-01", {"step_s": 10.4, "experts_16384_ms": 6.0, "experts_16384_share": 0.5}, {}),
        ("small", "2026-02-02", {"step_s": 1.0}, {"small": True}),
        ("keys", "2026-02-03", {"step_s": 1.0}, {"keys": ["x=1"]}),
        ("other", "2026-02-04", {"step_s": 20.0}, {"machine": {"gpus": ["NVIDIA H100"]}}),
        ("d", "2026-04-01", {"update_mfu": 0.48, "experts_16384_ms": 7.0}, {}),
    ]
    for commit, date, figures, more in runs:
        plain = {"small": False, "keys": [], "machine": {"gpus": ["NVIDIA H200"]}}
        told = {"commit": commit, "date": date, "figures": figures} | plain | more
        (tmp_path / f"smoke_{commit}.json").write_text(json.dumps(told))
    table = [line.split(" | ") for line in smoke.page(tmp_path.glob("*")).splitlines() if line[:2] == "| "]
    places = [table[0].index(name) for name in ("step, s", "update MFU", "experts 16k, ms")]
    rows = {line[0][2:]: [line[place] for place in places] for line in table[2:]}
    assert rows == {
        "`a`": ["10.00", "0.500", "7.00"],
        "`b`": ["**10.40**", "", "6.00 (50%)"],
        "`other`": ["20.00", "", ""],
        "`c`": ["10.20", "0.490", ""],
        "`d`": ["", "**0.480**", "**7.00**"],
    }
    assert table[1][0] == "| verl 0.9.1"


def test_a_part_is_not_measured_again_of_the_same_commit(smoke, tmp_path):
    args = argparse.Namespace(small=True, keys=[])
    asked, out = {"experts": 10, "step": 3}, tmp_path / "out.json"
    first = smoke.resumed(out, asked, args)
    first["experts"], first["metrics"] = {"256": {"median_ms": 1.0}}, {"time/step_s": {"median": 2.0}}
    first.count("experts", 10)
    first.count("step", 2)
    then = smoke.resumed(out, asked, args)
    assert then["counted_steps"] == {"experts": 10, "step": 0}
    assert then["experts"] == first["experts"] and then["metrics"] == {}
    for change in ({"commit": "other"}, {"small": False}):
        out.write_text(json.dumps(first | change))
        assert smoke.resumed(out, asked, args)["counted_steps"] == {"experts": 0, "step": 0}
