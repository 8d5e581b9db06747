"""The ledger of a run: an honest one holds, and of each edited one the right check names the row."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from job_harness import Finished, Inputs, audited, overrides, run_job

from siirl.cli import main
from siirl.data.ledger import SegmentedStream
from siirl.data.ledger_events import EVENTS, FOLDER, HEADER, KINDS, TOKENS
from siirl.runs.audit import CHECKS, audit
from siirl.testing.trial import play
from siirl.view import run_parts
from siirl.view.run_parts import RunParts
from siirl.view.view_page import more_parts

LAG = (
    *("actor_rollout_ref.rollout.max_lag=2", "actor_rollout_ref.rollout.surplus=1.5"),
    *("actor_rollout_ref.rollout.n=2", "data.max_response_length=64", "trainer.total_training_steps=6"),
    "actor_rollout_ref.rollout.stop_token_ids=[5,6,7,8]",
)
Event = dict[str, Any]
JOINED, PROMPTS, ROWS, STALENESS, GROUPS, TOKENS_OWN, REWARDS, FAILURES = CHECKS


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Finished:
    """Six steps with a lag of two, on one rank."""
    made = Inputs.make(tmp_path_factory.mktemp("inputs"), rows=200)
    keys = (*LAG, "trainer.ledger=tokens")
    return run_job(1, overrides(made, tmp_path_factory.mktemp("runs") / "honest", *keys))


def stream(folder: Path, stem: str) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """The schema and the batches, one a step, of the only file of rank 0."""
    (path,) = folder.glob(f"{stem}_1.rank_0.*.arrow")
    with pa.ipc.open_stream(path.read_bytes()) as reader:
        return reader.schema, list(reader)


def test_an_honest_run_holds_and_a_row_has_one_life(run, capsys):
    assert audited(run)[0].startswith("6 steps, 1 attempt, ")
    assert main(["audit", str(run.output)]) == 0
    assert capsys.readouterr().out.count("held    ") == len(CHECKS)
    schema, batches = stream(run.output / FOLDER, "attempt")
    assert schema.remove_metadata() == EVENTS and len(batches) == 7, "one a step, and the end"
    trained = next(one for one in batches[3].to_pylist() if KINDS[one["kind"]] == "trained")
    assert main(["audit", str(run.output), "--row", str(trained["id"])]) == 0
    said = capsys.readouterr().out
    for words in (
        "sampled: step 4",
        "scored: step 4",
        "credited: step 4",
        "trained: step 4",
        "train.parquet, row",
    ):
        assert words in said, said
    assert main(["audit", str(run.output), "--row", "12345"]) == 2
    said = capsys.readouterr().err
    assert "has no row 12345" in said
    some = said.partition("it has ")[2].partition(",")[0]
    assert main(["audit", str(run.output), "--row", some]) == 0


def test_tokens_are_kept_with_what_the_loss_said_of_each(run):
    schema, batches = stream(run.output / FOLDER, "tokens")
    assert schema.remove_metadata() == TOKENS and [len(batch) for batch in batches] == [16] * 6
    _, events = stream(run.output / FOLDER, "attempt")
    said = {e["id"]: e for batch in events for e in batch.to_pylist() if KINDS[e["kind"]] == "trained"}
    for row in (row for batch in batches for row in batch.to_pylist()):
        assert len(row["token"]) == len(row["ratio"]) == said[row["id"]]["tokens"]
        assert sum(row["clip"]) / len(row["clip"]) == pytest.approx(said[row["id"]]["clipped"])
        mean = sum(row["advantage"]) / len(row["advantage"])
        assert mean == pytest.approx(said[row["id"]]["advantage"], abs=1e-6)


def test_a_run_without_a_ledger_is_refused_with_the_key(tmp_path, run, capsys):
    copied = shutil.copytree(run.output, tmp_path / "copy", ignore=shutil.ignore_patterns(FOLDER))
    assert main(["audit", str(copied)]) == 2
    assert "trainer.ledger=rows" in capsys.readouterr().err


def rewritten(
    run: Finished, folder: Path, change: Callable[[list[Event]], list[Event]], **header: Any
) -> Path:
    """A copy of the run with other events, all of a step in one batch as before."""
    copied = shutil.copytree(
        run.output, folder / "copy", ignore=shutil.ignore_patterns("checkpoints", "hf_model")
    )
    (path,) = (copied / FOLDER).glob("attempt_*.arrow")
    schema, batches = stream(copied / FOLDER, "attempt")
    changed = change([event for batch in batches for event in batch.to_pylist()])
    agents = {"agents": {"0": json.loads(schema.metadata[HEADER])["agents"]["0"] | header}}
    told = json.dumps(json.loads(schema.metadata[HEADER]) | agents)
    schema = EVENTS.with_metadata({HEADER: told})
    with pa.ipc.new_stream(path, schema) as writer:
        writer.write_table(pa.Table.from_pylist(changed, schema=schema))
    return copied


def of(kind: str, step: int = 5) -> Callable[[Event], bool]:
    return lambda event: KINDS[event["kind"]] == kind and event["step"] == step


def without(chosen: Callable[[Event], bool]):
    """The first such event is lost."""

    def change(events: list[Event]) -> list[Event]:
        events.remove(next(event for event in events if chosen(event)))
        return events

    return change


def twice(chosen: Callable[[Event], bool], **other: Any):
    """The first such event stands there once more, maybe otherwise."""
    return lambda events: [*events, next(event for event in events if chosen(event)) | other]


def altered(chosen: Callable[[Event], bool], **other: Any):
    """The first such event says something else."""

    def change(events: list[Event]) -> list[Event]:
        next(event for event in events if chosen(event)).update(other)
        return events

    return change


def cut_without_waiting(events: list[Event]) -> list[Event]:
    """The run has come to step 3 so far, and a prompt that waits there has been lost."""
    return without(of("waiting", 3))([event for event in events if event["step"] <= 3])


EDITED = {
    "a step is missing": (JOINED, lambda events: [e for e in events if e["step"] != 3], "step 3 is in no"),
    "an event is missing": (JOINED, without(of("policy")), "step 5, rank 0: "),
    "a prompt was trained that nobody loaded": (PROMPTS, without(of("loaded", 2)), "loaded 0 times"),
    "a prompt was loaded twice in an epoch": (
        PROMPTS,
        twice(of("loaded", 2), step=4),
        "loaded in steps 2 and 4",
    ),
    "a prompt in flight was lost": (PROMPTS, cut_without_waiting, "0 times sampled, dropped or left"),
    "a row was never trained": (ROWS, without(of("trained")), "was trained 0 times, not 1"),
    "a row was trained twice": (ROWS, twice(of("trained")), "was trained 2 times, not 1"),
    "a row came from nowhere": (ROWS, without(of("sampled")), "its agent has not sampled it"),
    "a row was sampled twice": (ROWS, twice(of("sampled")), "was sampled twice"),
    "a token is too old": (
        STALENESS,
        altered(of("sampled", 6), first_version=0),
        "5 steps before; max_lag is 2",
    ),
    "a group lacks a response": (GROUPS, without(of("sampled")), "its group has 1 of 2 responses"),
    "a group was compared in two steps": (GROUPS, altered(of("credited"), step=4), "not computed together"),
    "other tokens were trained": (TOKENS_OWN, altered(of("trained"), digest=7), "others than were sampled"),
    "tokens of nobody": (TOKENS_OWN, altered(of("sampled"), foreign=3), "sampled 3 of its trained tokens"),
    "another reward": (REWARDS, altered(of("credited"), score=0.123), "and 0.123 was credited"),
    "another advantage": (REWARDS, altered(of("trained"), advantage=9.0), "and 9 was trained"),
    "a dead service": (FAILURES, altered(of("scored"), failure="service"), "is a failure (service)"),
    "a dead process": (FAILURES, altered(of("scored"), failure="died"), "is a failure (died)"),
}


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_ledger_is_caught_by_the_right_check(run, name, tmp_path):
    check, change, words = EDITED[name]
    lines, holds = audit(rewritten(run, tmp_path, change))
    assert not holds
    at = lines.index(f"BROKEN  {check}")
    said = lines[at + 1 : next((i for i in range(at + 1, len(lines)) if lines[i][0] != " "), None)]
    assert any(words in line for line in said), "\n".join(lines)
    missing = {"a step is missing", "an event is missing", "a row came from nowhere"}
    broken = {line[8:] for line in lines if line.startswith("BROKEN")}
    if name not in missing:
        assert broken <= {check, JOINED, PROMPTS, GROUPS, ROWS}, "\n".join(lines)


def test_a_dead_process_counts_as_zero_where_the_user_asked_for_it(run, tmp_path):
    died = altered(of("scored"), failure="died")
    lines, holds = audit(rewritten(run, tmp_path, died, counts_as_zero=True))
    assert holds and "rewards that are 0 as the function failed (died): 1" in lines


def test_a_lost_attempt_or_rank_is_named(run, tmp_path):
    copied = rewritten(run, tmp_path, lambda events: events)
    (path,) = (copied / FOLDER).glob("attempt_*.arrow")
    path.rename(path.with_name(path.name.replace("attempt_1", "attempt_2")))
    assert "        attempt 1 has no file in the ledger, and a later one has" in audit(copied)[0]
    (path,) = (copied / FOLDER).glob("attempt_*.arrow")
    path.rename(path.with_name(path.name.replace("attempt_2.rank_0", "attempt_1.rank_1")))
    assert "        attempt 1: the files of ranks [0] of 1 are missing" in audit(copied)[0]


@pytest.mark.parametrize("bytes_kept", [14_000, 24_000])
def test_a_ledger_whose_oldest_files_went_for_the_bound_is_judged_by_what_is_left(run, tmp_path, bytes_kept):
    """The same steps again, under a bound that a few of them fill: prompts in flight are accounted for."""
    copied = shutil.copytree(
        run.output, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "hf_model")
    )
    schema, batches = stream(copied / FOLDER, "attempt")
    header = json.loads(schema.metadata[HEADER])
    shutil.rmtree(copied / FOLDER)
    bounded = SegmentedStream(copied / FOLDER, "attempt_1.rank_0", EVENTS, header, bytes_kept)
    for batch in batches:
        bounded.write(batch)
        assert sum(path.stat().st_size for path in (copied / FOLDER).iterdir()) <= bytes_kept * 1.3
    bounded.close()
    lines, holds = audit(copied)
    assert holds, "\n".join(lines)
    assert any(line.startswith("not shown: steps 1 to ") for line in lines), "\n".join(lines)
    kinds = [{KINDS[event["kind"]] for event in batch.to_pylist()} for batch in batches[:4]]
    assert all("waiting" in of_step for of_step in kinds), "nothing was in flight"


def test_the_page_shows_the_life_of_each_sample(run, capsys):
    """What `siirl audit --row` says of the same rows, also in a page that is a file."""
    page = RunParts(run.output)
    shown = [one for one in page.read("episodes").value if one["kind"] == "train"]
    lives = page.read("lives 1").value
    assert shown and {one["life"] for one in shown} <= lives.keys() and len(lives) == 16
    lines = lives[shown[0]["life"]]
    row = lines[0].split()[1]
    assert main(["audit", str(run.output), "--row", row]) == 0
    assert [line.removeprefix(f"row {row} ") for line in lines] == capsys.readouterr().out.splitlines()
    file = "".join(more_parts([page]))
    assert 'id="part-0-lives-1"' in file and lines[-1].split(",")[-1] in file
    assert page.read("lives 1x").value == page.read("lives 9").value == {}


def test_a_ledger_that_no_page_can_show_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(run_parts, "MOST_LEDGER_BYTES", 10)
    part = RunParts(run.output).read("lives 1")
    assert part.value == {} and "siirl audit --row" in part.notes[0]
    monkeypatch.undo()
    copied = shutil.copytree(run.output, tmp_path / "copy")
    for file in (copied / FOLDER).glob("attempt_*.arrow"):
        file.write_bytes(b"no stream")
    part = RunParts(copied).read("lives 1")
    assert part.value == {} and part.notes and "ledger" in part.notes[0]


@pytest.mark.slow
def test_a_test_says_what_the_agents_of_a_run_have_said(run, tmp_path):
    """`siirl test --answers RUN`: token by token, also what a chat template would not write."""
    rows = [
        json.loads(line)
        for line in sorted((run.output / "rollouts/tokens").glob("*"))[-1].read_text().splitlines()
    ]
    said = {tuple(row["tokens"]["id"]) for row in rows}
    config = str(run.output / "run_config.yaml")
    trial = play([], tmp_path / "trial", config, answers=str(run.output), only=("alone",))
    assert not trial.alone.error, trial.alone.error
    spoken = [one for evidence in trial.alone.evidence for _, one in evidence.spoken]
    assert len(spoken) > 8 and all(one.scripted for one in spoken)
    assert {tuple(one.token_ids) for one in spoken} <= said, "the test says something else"
