"""The history of a run that goes on: what was added is read, and what was read is not read again."""

import json
import math
import random

import pytest

from siirl.runs import run_files
from siirl.runs.folder_reader import Skipped, json_value, mapping
from siirl.runs.run_files import HistoryReader, MetricHistory, read_history


def line(step, **values):
    return json.dumps({"step": step, "time_s": 100.0 + step, **values}) + "\n"


def add(path, text):
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_only_what_was_added_is_read(path, monkeypatch):
    path.write_text(line(1, loss=0.5) + line(2, loss=None))
    reader, taken = HistoryReader(path.parent), []
    part = run_files.part
    monkeypatch.setattr(run_files, "part", lambda *args: taken.append(args[1]) or part(*args))
    history = reader.read(Skipped())
    assert history.series == {"loss": {1: 0.5}} and history.broken == {"loss": {2}}
    end = path.stat().st_size
    add(path, line(3, loss=0.25)[:10])
    taken.clear()
    assert reader.read(Skipped()).series == {"loss": {1: 0.5}}, "a line that is being written waits"
    add(path, line(3, loss=0.25)[10:])
    assert reader.read(Skipped()).series == {"loss": {1: 0.5, 3: 0.25}}
    assert min(taken) == end


def test_a_run_that_was_resumed_or_began_anew_is_read_as_it_is_now(path):
    reader = HistoryReader(path.parent)
    assert reader.read(Skipped()).series == {}, "there is no file yet"
    path.write_text("".join(line(step, loss=step) for step in range(1, 6)))
    reader.read(Skipped())
    add(path, line(3, loss=-3.0))
    assert reader.read(Skipped()).series == {"loss": {1: 1, 2: 2, 3: -3.0}}, "resumed from step 2"
    path.write_text(line(1, loss=7.0))
    assert reader.read(Skipped()).series == {"loss": {1: 7.0}}, "shorter: it is another one"
    path.unlink()
    assert reader.read(Skipped()).series == {}


@pytest.mark.parametrize("chunk", [64, 100, 1 << 20])
def test_pieces_of_any_size_give_the_same_history(path, monkeypatch, chunk):
    lines = [line(step, loss=step / 3) for step in range(1, 50)]
    path.write_text("".join(lines))
    wanted = read_history(path.parent, Skipped())
    monkeypatch.setattr(run_files, "CHUNK_BYTES", chunk)
    assert read_history(path.parent, Skipped()) == wanted and len(wanted.times) == 49


def test_what_is_damaged_or_too_long_is_said_each_time(path, monkeypatch):
    path.write_text(line(1, loss=1.0) + "{broken\n" + line(2, loss=2.0))
    reader = HistoryReader(path.parent)
    for _ in range(2):
        skipped = Skipped()
        assert reader.read(skipped).series == {"loss": {1: 1.0, 2: 2.0}}
        assert "1 damaged line skipped" in next(iter(skipped.values()))
    monkeypatch.setattr(run_files, "MOST_BYTES", len(line(2, loss=2.0)) + 3)
    skipped = Skipped()
    assert read_history(path.parent, skipped).series == {"loss": {2: 2.0}}
    assert "first" in " ".join(skipped.values())


def test_lines_that_are_read_together_give_the_history_of_lines_one_by_one(path):
    """Whatever they hold: other metrics, nulls, NaN, texts, steps twice or backwards, damage."""
    dice = random.Random(7)
    for _ in range(100):
        step, lines = 0, []
        for _ in range(dice.randrange(40)):
            step += dice.choice([1, 1, 1, 1, 0, -3, 2])
            values = {
                name: dice.choice([1, 2.5, 3, 4] * 5 + [None, True, math.nan, "x"])
                for name in dice.sample("abcd", dice.choice([4, 4, 4, 2]))
            }
            text = line(step, **values) if dice.random() > 0.1 else json.dumps(values | {"step": 1.5}) + "\n"
            lines.append(text if dice.random() > 0.05 else text[:-4] + "\n")
        path.write_text("".join(lines))
        alone = MetricHistory()
        for text in lines:
            alone.add(mapping(json_value(text.encode())))
        together = read_history(path.parent, Skipped())
        assert together == alone and list(together.times) == list(alone.times)
