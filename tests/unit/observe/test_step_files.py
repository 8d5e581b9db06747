"""What a run writes step by step stays within bounds, and what is left of it can be read."""

import itertools
import json

import pytest

from siirl.observe.loggers import EVENTS, make_sinks
from siirl.observe.sinks import RunInfo, SampleSink
from siirl.observe.step_files import StepFiles
from siirl.runs.folder_reader import Skipped
from siirl.view.episodes import Episodes


def steps_of(folder) -> list[int]:
    return sorted({int(path.stem.removeprefix("step_")) for path in folder.iterdir()})


def add(files: StepFiles, folder, step: int, size: int = 100) -> None:
    path = folder / f"step_{step}.jsonl"
    path.write_bytes(bytes(size))
    files.added(path)


def test_the_last_steps_are_dense_and_older_ones_thinner(tmp_path):
    files = StepFiles(2000)
    for step in range(1, 201):
        add(files, tmp_path, step)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    left = steps_of(tmp_path)
    gaps = [after - before for before, after in itertools.pairwise(left)]
    assert left[0] == 1 and left[-10:] == list(range(191, 201)), left
    assert max(gaps[:3]) > 10 * gaps[-1], left


def test_what_was_there_before_counts_and_foreign_files_stay(tmp_path):
    (tmp_path / "notes.txt").write_bytes(bytes(5000))
    for step in range(10):
        (tmp_path / f"step_{step}.txt").write_bytes(bytes(100))
    add(StepFiles(500), tmp_path, 10)
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "step_10.jsonl").exists() and (tmp_path / "step_0.txt").exists()
    assert len(list(tmp_path.glob("step_*"))) == 5


def test_one_step_that_is_larger_than_all_may_be_stays(tmp_path):
    files = StepFiles(50)
    for step in (1, 2, 3):
        add(files, tmp_path, step)
        assert steps_of(tmp_path) == [step]


def test_without_a_bound_all_is_kept(tmp_path):
    for step in range(50):
        add(StepFiles(None), tmp_path, step)
    assert len(steps_of(tmp_path)) == 50


def test_samples_are_thinned_out_but_not_in_a_folder_that_somebody_named(tmp_path):
    sink = SampleSink(tmp_path, {"validation": tmp_path / "mine"}, most_bytes=5000)
    for step in range(1, 101):
        for kind in ("train", "validation"):
            sink.text(step, kind, [{"prompt": "1+1=", "response": "2" * 100, "score": 1.0}])
    left = steps_of(tmp_path / "rollouts" / "train")
    assert len(left) < 50 and left[-1] == 100
    assert all(
        (tmp_path / "rollouts/train" / f"step_{step}.{kind}").exists()
        for step in left
        for kind in ("txt", "jsonl")
    )
    assert len(steps_of(tmp_path / "mine")) == 100


def test_the_page_goes_on_over_samples_that_are_removed_while_it_reads(tmp_path):
    folder, skipped = tmp_path / "train", Skipped()
    sink = SampleSink(tmp_path, {"train": folder})
    row = {"prompt": "1+1=", "response": "2", "score": 1.0, "data_source": "sums", "sample_index": 0}
    for step in (1, 11, 21):
        sink.text(step, "train", [row])
    page = Episodes({"train": folder}, tmp_path / "tokens", tmp_path / "ledger")
    assert [entry["step"] for entry in page.listed(skipped)] == [21, 11, 1]
    for path in folder.glob("step_11.*"):
        path.unlink()
    assert [entry["step"] for entry in page.listed(skipped)] == [21, 1]
    assert page.texts("train 11", skipped) == {} and len(page.texts("train 21", skipped)) == 1


@pytest.mark.parametrize("is_shared", [False, True])
def test_event_files_stay_within_their_bound_and_tensorboard_reads_the_rest(tmp_path, monkeypatch, is_shared):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, most = tmp_path / "tensorboard", 40_000
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    if is_shared:
        monkeypatch.setenv("TENSORBOARD_DIR", str(folder))
    folder.mkdir()
    older = folder / "events.out.tfevents.0000000001.host.1.0"
    older.write_bytes(b"")
    info = RunInfo(tmp_path, "p", "e", 3000, 5, {}, {}, tensorboard_bytes=most)
    sinks = make_sinks(["tensorboard"], info)
    sizes = []
    for step in range(6, 3006):
        sinks.log(step, {"reward/score": float(step)})
        sinks.sinks[-1]._writer.flush()
        sizes.append(sum(path.stat().st_size for path in folder.glob(EVENTS)))
    sinks.close()
    assert max(sizes) <= 1.05 * most and sizes[-1] > 0.6 * most
    assert older.exists() == is_shared, "files of others are theirs"
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    steps = [event.step for event in events.Scalars("reward/score")]
    assert steps == list(range(steps[0], 3006)) and 300 < len(steps) < 1500
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6, 3006)), "all numbers are here"
