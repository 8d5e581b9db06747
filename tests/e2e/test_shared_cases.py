"""Inputs that failed for other people, by the user's command: models that say what is known in advance.

Skipped where the folder of cases is not beside the checkout.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
CASES = ROOT.parent / "shared" / "cases"
TOOLS = (
    "actor_rollout_ref.rollout.multi_turn.enable=true",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
    "custom_reward_function.path=reward.py",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CASES.is_dir(), reason="the cases are not beside this checkout"),
    pytest.mark.timeout(400),
]


def run_case(folder: Path, number: str, *keys: str, **env: str) -> tuple[str, dict[str, float]]:
    """What the command printed, and the metrics of its step: none where no step ended."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", str(CASES / "case.sh"), number, *keys],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)} | env,
        capture_output=True,
        text=True,
    )
    metrics = folder / "siirl-cases" / number / "out" / "metrics.jsonl"
    row = json.loads(metrics.read_text().splitlines()[0]) if metrics.exists() else {}
    return done.stdout + done.stderr, row


@pytest.mark.parametrize("model", ["model_special", "model_plain"])
def test_rewards_see_marks_whether_they_are_special_tokens_or_words(model, tmp_path):
    text, row = run_case(tmp_path, "01", f"actor_rollout_ref.model.path={model}")
    assert row["reward/total"] == 1.0, text


def test_a_turn_ends_at_the_ends_that_the_files_of_a_model_list(tmp_path):
    text, row = run_case(tmp_path, "02")
    assert (row["reward/total"], row["rollout/response_length"]) == (1.0, 2.0), text


def test_tools_are_called_alike_whether_marks_are_special_tokens_or_words(tmp_path):
    told = []
    for model in ("model_special", "model_plain"):
        text, row = run_case(tmp_path / model, "04", f"actor_rollout_ref.model.path={model}", *TOOLS)
        assert row, text
        told.append(
            {name: value for name, value in row.items() if name.startswith(("interaction/", "tools/"))}
        )
    assert told[0] == told[1] and any("call" in name and value > 0 for name, value in told[0].items())


def test_a_prompt_that_ends_in_the_assistants_words_is_continued(tmp_path):
    text, row = run_case(tmp_path, "06", "trainer.dump_rollouts_dir=dumped")
    assert row, text
    folder = tmp_path / "siirl-cases" / "06"
    (file,) = (folder / "dumped").rglob("*.safetensors")
    rows = load_file(file)
    first = rows["prompt_ids"][: rows["prompt_length"][0]]
    words = AutoTokenizer.from_pretrained(folder / "model").decode(first)
    assert words.rstrip().endswith("assistant: the answer is")


def test_lengths_of_prompts_count_the_tools(tmp_path):
    keys = ("data.filter_overlong_prompts=True", "data.max_prompt_length=24", *TOOLS[:2])
    text, row = run_case(tmp_path, "07", *keys)
    assert row and not any("full" in name and value for name, value in row.items()), text


@pytest.mark.parametrize("model", ["unknown", "argument", "enum"])
def test_half_a_surrogate_pair_ends_no_run(model, tmp_path):
    both = tmp_path / "both.py"
    both.write_text("import runpy\nrunpy.run_path('make.py')\nrunpy.run_path('make2.py')\n")
    path = f"actor_rollout_ref.model.path=model_{model}"
    text, row = run_case(tmp_path, "09", path, *TOOLS, MAKE=str(both))
    assert row, text


def test_the_json_text_of_a_chat_is_a_finding_of_check(tmp_path):
    text, _ = run_case(tmp_path, "20", "data.max_prompt_length=64", CHECK="1")
    assert "JSON" in text and "prompt" in text, text
