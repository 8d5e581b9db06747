"""The tokens of samples on the page: read with what they were trained with, coloured, and harmless."""

import json
from pathlib import Path

import pytest
from page_browser import opened_tab
from viewed_runs import HOSTILE, write_run

from siirl.observe.sinks import SampleSink, write_json_lines
from siirl.runs.folder_reader import Skipped
from siirl.view.episodes import MOST_TOKENS, read_tokens
from siirl.view.view_page import export, read_run

SAID = {0: ["It ", "is ", "four", HOSTILE, "<eos>"], 1: ["Right", "."]}
NUMBERS = {
    "rollout_log_prob": [-0.5, -1.0, -4.0, 0.0, -2.0],
    "old_log_prob": [-0.5, -1.0, -4.0, 0.0, -2.0],
    "advantage": [1.0, 0.5, -0.25, -1.0, 0.0],
    "ratio": [1.0, 1.5, 0.5, 1.0, 1.25],
    "clip": [0.0, 1.0, 1.0, 0.0, 0.0],
    "weight": [1.0, 0.5, 0.0, 1.0, 1.0],
}
CREDIT = {"advantage": 0.05, "own": 0.25, "team": -1.5, "env": 0.5, "shaping": 0.0}


def line_of(turn: int, episode: int | None = 3, **more: object) -> dict:
    """A row as the training node writes it: one turn of the agent of its number."""
    texts = SAID[turn]
    numbers = {name: values[: len(texts)] for name, values in NUMBERS.items()}
    tokens = {"text": texts, "id": list(range(len(texts))), "turn": [turn] * len(texts), **numbers}
    about = {"turn": turn, "tokens": len(texts) + 2, **CREDIT}
    names = {"agent": turn, "speaker": turn, "sample_index": 7, "row_id": 30 + turn, "episode_id": episode}
    return {**names, "turns": [about], "left_out": 2, "tokens": tokens, **more}


def with_tokens(folder: Path, lines: list[dict]) -> Path:
    """A run with samples of step 6 of two kinds, a conversation and a response, and these lines."""
    write_run(folder)
    said = [
        {"agent": turn, "node": "speaker", "turn": turn, "content": "".join(texts), "score": 1.0}
        for turn, texts in SAID.items()
    ]
    episode = {"sample_index": 7, "data_source": "sums", "rewards": {"agent 0": 1.0}, "messages": said}
    row = {"node": "agent_0.rollout", "data_source": "sums", "sample_index": 7, "row_id": 30, "score": 1.0}
    row |= {"prompt": "2+2?", "response": "".join(SAID[0]), "ground_truth": "4"}
    SampleSink(folder, {}).text(6, "train", [{**episode, "episode": {"episode_id": 3, "ended": ""}}, row])
    write_json_lines(folder / "rollouts" / "tokens" / "step_6.jsonl", lines)
    return folder


def test_turns_have_the_tokens_and_the_credit_of_their_rows(tmp_path):
    lines = [line_of(0), line_of(1), line_of(0, episode=None)]
    folder = with_tokens(tmp_path / "run", lines)
    listed = {one["id"]: one["tokens"] for one in read_run(folder)["episodes"]}
    assert listed == {"train 6.0": True, "train 6.1": True, "train 1.0": False} | {
        f"validation {step}.0": False for step in (1, 6)
    }
    skipped = Skipped()
    found = read_tokens(folder / "rollouts" / "tokens" / "step_6.jsonl", skipped)
    assert not skipped and set(found) == {(7, 3, None), (7, None, 30)}
    turn = found[7, 3, None][0, 0]
    assert (turn["credit"], turn["left_out"]) == (CREDIT, 2) and turn["numbers"] == NUMBERS
    assert turn["texts"][:3] == SAID[0][:3] and "\x1b" not in turn["texts"][3]
    assert found[7, 3, None][1, 1]["numbers"]["ratio"] == NUMBERS["ratio"][:2]


@pytest.mark.parametrize(
    "damage",
    [
        {"tokens": None},
        {"tokens": {"text": ["a"], "turn": [0], "ratio": []}},
        {"turns": [None]},
        {"tokens": {"text": 5, "turn": [0]}},
        {"speaker": None, "turns": 3},
    ],
)
def test_a_damaged_row_is_skipped_and_noted(tmp_path, damage):
    path = tmp_path / "step_6.jsonl"
    write_json_lines(path, [line_of(0, **damage), line_of(1)])
    skipped = Skipped()
    found = read_tokens(path, skipped)
    assert set(found[7, 3, None]) == {(1, 1)} and "1" in skipped["tokens"]


def test_numbers_that_are_none_and_endless_rows_are_borne(tmp_path):
    path, line = tmp_path / "step_6.jsonl", line_of(0)
    length = MOST_TOKENS + 5
    line["tokens"] = {
        "text": ["a"] * length,
        "turn": [0] * length,
        "ratio": [None, "x", 1e400] + [1] * length,
    }
    path.write_text(json.dumps(line) + "\n")
    [turn] = read_tokens(path, Skipped())[7, 3, None].values()
    assert turn["numbers"]["ratio"][:4] == [None, None, None, 1.0]
    assert len(turn["texts"]) == len(turn["numbers"]["ratio"]) == MOST_TOKENS


CONTRAST = """
(() => {
  const rgba = text => {
    const [r, g, b, a] = text.match(/[-.\\d]+(e-?\\d+)?/g).map(Number);
    const by = text.startsWith("color") ? 1 : 255;
    return [r / by, g / by, b / by, a === undefined ? 1 : a];
  };
  const light = color => color.slice(0, 3).map(x => x <= 0.04 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, index) => sum + x * [0.2126, 0.7152, 0.0722][index], 0);
  const under = rgba(getComputedStyle(document.querySelector("#episodes details")).backgroundColor);
  return Math.min(...[...document.querySelectorAll(".token")].map(span => {
    const style = getComputedStyle(span), over = rgba(style.backgroundColor), ink = light(rgba(style.color));
    const ground = light(over.slice(0, 3).map((x, index) => x * over[3] + under[index] * (1 - over[3])));
    return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
  }));
})()
"""
CHOOSE = """
(async () => {
  const labels = [...document.querySelectorAll(".bar label")];
  const chosen = labels.find(label => label.textContent.startsWith("tokens by")).querySelector("select");
  chosen.value = "%s";
  chosen.dispatchEvent(new Event("change"));
  await page.written;
  const shade = span => [span.className, span.style.getPropertyValue("--deep")];
  return [...document.querySelectorAll("#episodes details[data-id='train 6.0'] .tokens")].map(
    box => [...box.querySelectorAll(".token")].map(shade));
})()
"""


@pytest.mark.heavy
def test_tokens_are_coloured_by_a_number_and_say_all_of_them(tmp_path):
    folder = with_tokens(tmp_path / "run", [line_of(0), line_of(1), line_of(0, episode=None)])
    address = export([folder], tmp_path / "page.html").as_uri() + "#conversations"
    with opened_tab(tmp_path / "profile") as tab:
        for scheme in ("light", "dark"):
            tab.call(
                "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
            )
            tab.open(address)
            tab.wait_for("document.querySelectorAll('#episodes details[open] .credit').length >= 4")
            assert not tab.value("document.querySelectorAll('.token').length"), "text, until it is asked for"
            for name, values in NUMBERS.items():
                first, second = tab.value(CHOOSE % name)
                assert len(first) == 5 and len(second) == 2
                assert tab.value(CONTRAST) > 4.5, (scheme, name)
                deepest = [deep for _, deep in first].index("62%")
                middle = 1 if name in ("ratio", "weight") else 0
                assert abs(values[deepest] - middle) == max(abs(value - middle) for value in values)
            shades = dict(zip(SAID[0], tab.value(CHOOSE % "advantage")[0], strict=True))
            assert shades["It "] == ["token more", "62%"] and shades["four"] == ["token less", "16%"]
            assert shades["<eos>"][1] == "0%"
            tab.value("document.querySelector('.tokens').focus()")
            for _ in range(3):
                tab.press("ArrowRight")
            told = tab.value("document.getElementById('tip').textContent")
            said = ["advantage -0.25", "ratio of the update 0.5", "clipped yes", "correction 0", "trainer -4"]
            assert '"four"' in told and all(words in told for words in said), told
            head = tab.value("document.querySelector(\"[data-id='train 6.0'] .head\").textContent")
            assert all(
                words in head for words in ("advantage +0.05", "own +0.25", "team -1.5", "environment +0.5")
            )
            assert "shaping" not in head
            assert "2 more tokens" in tab.value(
                "document.querySelector(\"[data-id='train 6.0']\").textContent"
            )
            assert tab.value("document.title") != "owned" and not tab.value("document.images.length")
