"""The pages in docs/tutorials work as they stand: their files, their commands, and what these print."""

import json
from pathlib import Path

import pytest
from typed_pages import blocks, follow

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))
LEARNT = {
    "policies": {"agent_0/val/reward/mean": 0.8, "agent_1/val/reward/mean": 0.8},
    "reward": {"val/reward/mean": 0.6, "val/larger/right/mean": 0.3},
    "tools": {"val/reward/mean": 0.8},
    "verl": {"val/reward/mean": 0.6},
}
"""Page -> what its run reaches in the last validation, at least."""


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says_up_to_its_training(page, tmp_path):
    found = [block for block in blocks(page) if not block.trains]
    assert any("check" in block.text for block in found if block.kind == "commands")
    assert (page.stem in LEARNT) == any(block.trains for block in blocks(page))
    follow(found, tmp_path, timeout_s=400)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in LEARNT], ids=lambda page: page.stem)
def test_a_tutorial_trains_what_it_says(page, tmp_path):
    follow(blocks(page), tmp_path, timeout_s=800)
    (metrics,) = tmp_path.glob("*/outputs/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for name, least in LEARNT[page.stem].items():
        assert [line[name] for line in lines if name in line][-1] >= least
