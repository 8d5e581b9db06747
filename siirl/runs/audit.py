"""`siirl audit RUN`: what the ledger of a run proves of its rows, or the row that disproves it.

Each node has said on its own what it saw of a row (siirl/data/ledger_events.py). Of a step that several
attempts have trained, the last one counts: the others were undone by the resume.
"""

import contextlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from siirl.data.ledger_events import EVENTS, FOLDER, HEADER, KINDS, ROUND_BITS, step_of
from siirl.errors import DataError
from siirl.runs.folder_reader import Skipped, content
from siirl.show.batch_text import count_of
from siirl.show.conversation_text import sample_name

NAME = re.compile(r"attempt_(\d+)\.rank_(\d+)\.(\d+)\.arrow")
CLOSE = 1e-5
"""Advantages are means over tokens, added up in two orders."""
Rows = dict[str, Any]


@dataclass
class Part:
    """The files of one rank in one attempt."""

    attempt: int
    rank: int
    header: dict[str, Any]
    """Of the newest file."""
    tables: list[pa.Table] = field(default_factory=list)


@dataclass
class Ledger:
    """All that a run has told of its rows."""

    parts: list[Part]
    events: dict[str, Rows]
    """Kind -> columns, of the steps and attempts that count."""
    steps: dict[int, dict[int, set[int]]]
    """Attempt -> step -> the ranks that have finished it."""
    counted: dict[int, int]
    """Step -> the attempt that counts; not the last steps of a run that goes on, where a rank is not done."""
    ended: bool
    skipped: Skipped
    empty: set[tuple[int, int]] = field(default_factory=set)
    """(attempt, rank) with a file in which nothing is: they died before the end of their first step."""

    @property
    def header(self) -> dict[str, Any]:
        return self.parts[-1].header

    def agent(self, number: int, attempt: int | None = None) -> dict[str, Any]:
        """What the run promises of an agent's rows, in an attempt: an amended run promises other things."""
        headers = [part.header for part in self.parts if part.attempt == attempt] or [self.header]
        return headers[-1]["agents"].get(str(number), {})

    def oldest(self) -> dict[int, tuple[int, int]]:
        """Of each rank, (attempt, segment) of the first file that was not removed for the bound."""
        return {part.rank: tuple(part.header["oldest"]) for part in self.parts}

    def begins(self) -> int:
        """The step at whose end it is known of each prompt and row in flight: 0, or the first one kept."""
        first: dict[int, int] = {}
        for step, attempt in self.counted.items():
            for rank in self.steps[attempt][step]:
                first[rank] = min(step, first.get(rank, step))
        removed = any(oldest != (1, 0) for oldest in self.oldest().values())
        found = (max if removed else min)(first.values(), default=1)
        return found if found > 1 else 0

    def where(self, agent: int, prompt: int) -> str:
        """The file and row of a prompt."""
        files = (self.header["loaders"].get(str(agent)) or {}).get("files") or []
        for name, start in reversed(files):
            if start <= prompt:
                return f"{name}, row {prompt - start}"
        return f"prompt {prompt}"


def read_ledger(run: Path) -> Ledger:
    """The ledger in a run's folder. DataError if there is none."""
    skipped, parts, empty = Skipped(), {}, set()
    names = [found for path in (run / FOLDER).glob("*.arrow") if (found := NAME.fullmatch(path.name))]
    for found in sorted(names, key=lambda one: tuple(map(int, one.groups()))):
        attempt, rank, _ = map(int, found.groups())
        with contextlib.suppress(OSError):
            if not (run / FOLDER / found[0]).stat().st_size:
                empty.add((attempt, rank))
                continue
        schema, table = _table(run / FOLDER / found[0], skipped)
        if table is not None:
            header = json.loads((schema.metadata or {}).get(HEADER, b"{}"))
            part = parts.setdefault((attempt, rank), Part(attempt, rank, header))
            part.header = header
            part.tables.append(table)
    if not parts:
        raise DataError(
            f"{run / FOLDER} has no ledger: the run was started with trainer.ledger=disable. Start it with "
            "trainer.ledger=rows, and audit that."
        )
    return replace(_joined(list(parts.values()), skipped), empty=empty)


def _table(path: Path, skipped: Skipped) -> tuple[pa.Schema, pa.Table | None]:
    """What can be read of a stream: a process that was killed has perhaps not written its end."""
    batches: list[pa.RecordBatch] = []
    schema = EVENTS
    try:
        stream = pa.ipc.open_stream(content(path, skipped))
        schema = stream.schema
        if schema.remove_metadata() != EVENTS:
            skipped.add(path, "it has other columns: another version of siirl has written it")
            return schema, None
        for batch in stream:
            batch.validate(full=True)
            batches.append(batch)
    except (pa.ArrowInvalid, OSError) as error:
        skipped.add(path, f"it is cut off or damaged: {error}")
        if schema is EVENTS:
            return schema, None
    return schema, pa.Table.from_batches(batches, EVENTS)


def _joined(parts: list[Part], skipped: Skipped) -> Ledger:
    steps: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    ended = False
    for part in parts:
        part_rows = _columns(pa.concat_tables(part.tables))
        for step in part_rows["step"][part_rows["kind"] == KINDS.index("step")].tolist():
            steps[part.attempt][step].add(part.rank)
        ended |= part.attempt == parts[-1].attempt and bool((part_rows["kind"] == KINDS.index("end")).any())
        part_rows["attempt"] = np.full(len(part_rows["kind"]), part.attempt)
        part_rows["rank"] = np.full(len(part_rows["kind"]), part.rank)
        for name, column in part_rows.items():
            columns[name].append(column)
    whole = {name: np.concatenate(column) for name, column in columns.items()}
    found = {attempt: dict(by_step) for attempt, by_step in sorted(steps.items())}
    counted = {step: attempt for attempt, by_step in found.items() for step in by_step}
    sizes = {part.attempt: part.header["world_size"] for part in parts}
    while (
        not ended
        and counted
        and len(found[counted[max(counted)]][max(counted)]) < sizes[counted[max(counted)]]
    ):
        del counted[max(counted)]
    ledger = Ledger(parts, {}, found, counted, ended, skipped)
    valid = np.array(
        [counted.get(s) == a for s, a in zip(whole["step"].tolist(), whole["attempt"].tolist(), strict=True)],
        dtype=bool,
    )
    for number, kind in enumerate(KINDS):
        chosen = valid & (whole["kind"] == number)
        ledger.events[kind] = {name: column[chosen] for name, column in whole.items()}
    return ledger


def _columns(table: pa.Table) -> Rows:
    """Columns as arrays; where a number is missing: -1, or no number."""
    found = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_string(column.type):
            found[name] = np.array([value or "" for value in column.to_pylist()], dtype=object)
        else:
            missing = float("nan") if pa.types.is_floating(column.type) else -1
            found[name] = column.fill_null(pa.scalar(missing, column.type)).to_numpy()
    return found


Problems = Iterator[str]


def attempts_are_joined(ledger: Ledger) -> Problems:
    """Each step is in the ledger, of all ranks; an attempt begins where one before has been."""
    by_attempt: dict[int, list[Part]] = defaultdict(list)
    for part in ledger.parts:
        by_attempt[part.attempt].append(part)
    oldest = ledger.oldest()
    begin, last = min(attempt for attempt, _ in oldest.values()), 0
    for number in range(begin, max(by_attempt) + 1):
        found = by_attempt.get(number)
        if not found:
            if any(attempt == number for attempt, _ in ledger.empty):
                continue
            yield f"attempt {number} has no file in the ledger, and a later one has"
            continue
        ranks, size = {part.rank for part in found}, found[0].header["world_size"]
        kept = {rank for rank in range(size) if oldest.get(rank, (0, 0)) <= (number, sys.maxsize)}
        kept -= {rank for attempt, rank in ledger.empty if attempt == number}
        if missing := sorted(kept - ranks):
            yield f"attempt {number}: the files of ranks {missing} of {size} are missing"
        first, steps = found[0].header["first_step"], ledger.steps.get(number, {})
        if first > last + 1 and (last or not found[0].header["resumed"]):
            yield f"attempt {number} begins with step {first}, and those before end with step {last}"
        last = max(last, *steps, first - 1)
    counted, begins = ledger.counted, ledger.begins()
    for step in range(max(begins, min(counted, default=1)), max(counted, default=0) + 1):
        attempt = counted.get(step)
        if attempt is None:
            yield f"step {step} is in no attempt"
            continue
        ranks = set(range(by_attempt[attempt][0].header["world_size"]))
        if missing := sorted(ranks - ledger.steps[attempt][step]):
            yield f"step {step} of attempt {attempt}: ranks {missing} have not finished it"
    yield from _whole_steps(ledger)


def _whole_steps(ledger: Ledger) -> Problems:
    """As many events as a rank has counted in a step."""
    found = Counter[tuple[int, int]]()
    for kind, rows in ledger.events.items():
        if kind != "end":
            found.update(zip(rows["step"].tolist(), rows["rank"].tolist(), strict=True))
    told = ledger.events["step"]
    for step, rank, count in zip(*(told[name].tolist() for name in ("step", "rank", "count")), strict=True):
        if found[step, rank] != count:
            yield f"step {step}, rank {rank}: {found[step, rank]} events of the {count} that were written"


def rows_are_trained_once(ledger: Ledger) -> Problems:
    """A row that was sampled is trained once an epoch (ppo_epochs) of its step, or dropped, or waits."""
    sampled, trained, drawn = (ledger.events[kind] for kind in ("sampled", "trained", "drawn"))
    times, last = Counter(_keys(trained)), max(ledger.counted)
    waiting = ledger.events["waiting"]
    gone = {key for key in _keys(ledger.events["dropped"]) if key[1] >= 0}
    gone |= {(agent, row) for agent, row, step in _each(waiting, "agent", "id", "step") if step == last}
    draws = {(agent, row): count for agent, row, count in _each(drawn, "agent", "id", "count")}
    seen = set()
    for place, (agent, row, attempt) in enumerate(_each(sampled, "agent", "id", "attempt")):
        key = (agent, row)
        wanted = 0 if key in gone else ledger.agent(agent, attempt).get("epochs", 0) * draws.get(key, 1)
        if key in seen:
            yield f"{_row(ledger, sampled, place)} was sampled twice"
        elif times[key] != wanted:
            yield f"{_row(ledger, sampled, place)} was trained {times[key]} times, not {wanted}"
        seen.add(key)
    for place, key in enumerate(_keys(trained)):
        if key not in seen and step_of(key[1]) > ledger.begins():
            yield f"{_row(ledger, trained, place)} was trained, and its agent has not sampled it"


def prompts_are_trained_once(ledger: Ledger) -> Problems:
    """Each prompt is loaded once an epoch, and sampled as often as it was loaded, or dropped, or waits; by an
    agent that is given another's prompts, at most as often, as it may have nothing to say."""
    loaded, sampled, dropped, waiting = (
        ledger.events[kind] for kind in ("loaded", "sampled", "dropped", "waiting")
    )
    begin, last = ledger.begins(), max(ledger.counted)
    had, left = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    seen: dict[tuple[int, int, int], int] = {}
    for agent, epoch, prompt, step in _each(loaded, "agent", "epoch", "prompt", "step"):
        had[agent, prompt] += step > begin
        before = seen.setdefault((agent, epoch, prompt), step)
        if before != step:
            which = ledger.where(agent, prompt)
            yield f"{which} was loaded in steps {before} and {step} of epoch {epoch + 1}"
    of_group = ("agent", "prompt", "step", "group")
    groups = {
        (*group, row >> ROUND_BITS) for *group, row in _each(sampled, *of_group, "id") if group[2] > begin
    }
    left.update((agent, prompt) for agent, prompt, *_ in groups)
    alive, lost = set(_each(sampled, *of_group)), _each(dropped, *of_group)
    given_up = [key for key in lost if key[1] >= 0 and key[3] < 0]  # whole groups, one event each
    given_up += {key for key in lost if key[1] >= 0 and key[3] >= 0} - alive  # of which each episode failed
    left.update((agent, prompt) for agent, prompt, step, _ in given_up if step > begin)
    for agent, prompt, step in _each(waiting, "agent", "prompt", "step"):
        if prompt >= 0 and step in (begin, last) and begin != last:
            (had if step == begin else left)[agent, prompt] += 1
    for agent, prompt in had.keys() | left.keys():
        loads = ledger.agent(agent).get("prompts_of", agent)
        given, found = had[loads, prompt], left[agent, prompt]
        if found > given or (found < given and agent == loads):
            where = ledger.where(loads, prompt)
            yield f"{where} was loaded {given} times, and {found} times sampled, dropped or left waiting"


def staleness_is_bounded(ledger: Ledger) -> Problems:
    """No trained token is older than max_lag steps: of an amended run, the largest since it was sampled."""
    policy, sampled = ledger.events["policy"], ledger.events["sampled"]
    steps_of: dict[int, dict[int, int]] = defaultdict(dict)
    for agent, step, version in _each(policy, "agent", "step", "first_version"):
        steps_of[agent][version] = max(step, steps_of[agent].get(version, 0))
    for place, (agent, step, version) in enumerate(_each(sampled, "agent", "step", "first_version")):
        known = steps_of[agent]
        if version < 0 or not known or version < min(known):
            continue
        made = max(at for number, at in known.items() if number <= version)
        attempts = {ledger.counted.get(between) for between in range(made, step + 1)}
        max_lag = max(ledger.agent(agent, attempt).get("max_lag", 0) for attempt in attempts)
        if step - made > max_lag:
            yield (
                f"{_row(ledger, sampled, place)}: its oldest token is of the weights of step {made} "
                f"(version {version}), {step - made} steps before; max_lag is {max_lag}"
            )


def rewards_are_those_given(ledger: Ledger) -> Problems:
    """The advantage is computed from the score that the reward gave, and trained as it was computed."""
    scored, credited, trained = (ledger.events[kind] for kind in ("scored", "credited", "trained"))
    whole = zip(_keys(scored), _each(scored, "score", "update"), strict=True)
    given = {key: score for key, (score, is_whole) in whole if is_whole == 1}
    advantage = {}
    for place, (key, score) in enumerate(zip(_keys(credited), credited["score"].tolist(), strict=True)):
        advantage[key] = credited["advantage"][place]
        if key in given and score == score and given[key] != score:
            which = _row(ledger, credited, place)
            yield f"{which}: its reward was {given[key]:.7g}, and {score:.7g} was credited"
    for place, (key, value) in enumerate(zip(_keys(trained), trained["advantage"].tolist(), strict=True)):
        if value == value and key in advantage and abs(value - advantage[key]) > CLOSE * max(1, abs(value)):
            yield (
                f"{_row(ledger, trained, place)}: the mean advantage {advantage[key]:.7g} was computed, and "
                f"{value:.7g} was trained"
            )


def no_reward_is_a_failure(ledger: Ledger) -> Problems:
    """No trained row has a reward that stands for a service that failed, or for a process that died, if
    custom_reward_function.on_error did not ask for it."""
    scored = ledger.events["scored"]
    trained = set(_keys(ledger.events["trained"]))
    for place, (agent, row, failure, attempt) in enumerate(
        _each(scored, "agent", "id", "failure", "attempt")
    ):
        asked_for = failure == "died" and ledger.agent(agent, attempt).get("counts_as_zero")
        if failure in ("service", "died") and (agent, row) in trained and not asked_for:
            score = scored["score"][place]
            yield f"{_row(ledger, scored, place)}: its reward {score:g} is a failure ({failure})"


def tokens_are_the_agents_own(ledger: Ledger) -> Problems:
    """The trained tokens of a row are those that its agent's engine has sampled."""
    sampled, trained = ledger.events["sampled"], ledger.events["trained"]
    said = dict(zip(_keys(sampled), sampled["digest"].tolist(), strict=True))
    others = defaultdict(set)
    for (agent, row), digest in said.items():
        others[row, digest].add(agent)
    for place, (agent, count) in enumerate(_each(sampled, "agent", "foreign")):
        if count > 0 and not ledger.agent(agent).get("given"):
            which = _row(ledger, sampled, place)
            yield f"{which}: no engine of the agent sampled {count} of its trained tokens"
    for place, (key, digest) in enumerate(zip(_keys(trained), trained["digest"].tolist(), strict=True)):
        if key in said and said[key] != digest:
            whose = sorted(others[key[1], digest] - {key[0]})
            of = f"those of agent {whose[0]}" if whose else "others than were sampled"
            yield f"{_row(ledger, trained, place)}: the trained tokens are {of}"


def groups_are_whole(ledger: Ledger) -> Problems:
    """A prompt has as many responses, or episodes, as rollout.n says, and all are compared in one step."""
    sampled, dropped, credited = (ledger.events[kind] for kind in ("sampled", "dropped", "credited"))
    members: dict[tuple[int, int, int, int], set[int]] = defaultdict(set)
    rows_of: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    names = ("agent", "step", "group", "id", "episode")
    for place, (agent, step, group, row, episode) in enumerate(_each(sampled, *names)):
        key = (agent, step, row >> ROUND_BITS, group)
        members[key].add(row if episode < 0 else episode // ledger.agent(agent).get("branches", 1))
        rows_of[key].append(place)
    failed = Counter((step, group) for step, group in _each(dropped, "step", "group") if group >= 0)
    step_of_row = dict(zip(_keys(credited), credited["step"].tolist(), strict=True))
    filtered = {key for key in _keys(dropped) if key[1] >= 0}
    loading = min((int(one) for one in ledger.header["loaders"]), default=None)
    for key, found in members.items():
        agent, step, _, group = key
        n, first = ledger.agent(agent).get("n"), rows_of[key][0]
        speaks = sampled["episode"][first] < 0 or loading in (None, agent)
        if n and speaks and len(found) + failed[step, group] != n:
            yield f"{_row(ledger, sampled, first)}: its group has {len(found)} of {n} responses"
        rows = [(agent, int(sampled["id"][place])) for place in rows_of[key]]
        if len({step_of_row.get(row) for row in rows if row not in filtered}) > 1:
            yield f"{_row(ledger, sampled, first)}: the advantages of its group were not computed together"


CHECKS: dict[str, Callable[[Ledger], Problems]] = {
    "attempts are joined without loss": attempts_are_joined,
    "each prompt is trained once an epoch, or dropped": prompts_are_trained_once,
    "each row is trained once, or dropped": rows_are_trained_once,
    "the staleness bound is held": staleness_is_bounded,
    "groups are whole": groups_are_whole,
    "agents are trained on their own tokens": tokens_are_the_agents_own,
    "rewards are those that were given": rewards_are_those_given,
    "no failure became a reward": no_reward_is_a_failure,
}
SHOWN = 3
"""Counter-examples of a check that are printed."""


def audit(run: Path) -> tuple[list[str], bool]:
    """(lines of the report, whether all holds)."""
    ledger = read_ledger(run)
    counted, events = ledger.counted, ledger.events
    lines = [
        f"{count_of(len(counted), 'step')}, {count_of(len(ledger.steps), 'attempt')}, "
        f"{count_of(len(events['loaded']['id']), 'prompt')}, "
        f"{len(events['sampled']['id'])} rows sampled, {len(set(_keys(events['trained'])))} trained",
    ]
    holds = True
    for name, check in CHECKS.items():
        problems = list(check(ledger)) if counted or check is attempts_are_joined else []
        holds &= not problems
        lines.append(f"{'BROKEN' if problems else 'held  '}  {name}")
        lines += [f"        {problem}" for problem in problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"        and {len(problems) - SHOWN} more")
    lines += [f"amended {line}" for line in ledger.header.get("amendments", ())]
    reasons = Counter(events["dropped"]["what"].tolist())
    lines += [f"dropped: {count}: {reason}" for reason, count in sorted(reasons.items())]
    failures = Counter(failure for failure in events["scored"]["failure"].tolist() if failure)
    lines += [
        f"rewards that are 0 as the function failed ({kind}): {n}" for kind, n in sorted(failures.items())
    ]
    if begins := ledger.begins():
        lines.append(f"not shown: steps 1 to {begins - 1}, of which the ledger has nothing")
    if not ledger.ended:
        lines.append("the run has not ended: what was in flight in its last step is not counted")
    lines += [f"not read: {name}: {why}" for name, why in ledger.skipped.items()]
    return lines, holds


def life_of(run: Path, row: int) -> list[str]:
    """All that the ledger says of a row (its id), a line for each event. DataError if it has no such row."""
    ledger = read_ledger(run)
    lines = list(_lines_of(ledger, lambda rows: rows["id"] == row))
    if not lines:
        some = ", ".join(map(str, ledger.events["sampled"]["id"][:3].tolist()))
        raise DataError(
            f"{run / FOLDER} has no row {row}. `siirl audit {run}` and siirl view name rows by their numbers"
            f"{f'; it has {some} and others' if some else ''}."
        )
    return [line for _, _, line in lines]


def lives_in(ledger: Ledger, step: int) -> dict[str, list[str]]:
    """The same of all rows that left their rollout in a step, by the `sample_name` that each has from a node
    that scored it; those of an episode together."""
    sampled, scored = ledger.events["sampled"], ledger.events["scored"]
    prompts = dict(zip(_keys(sampled), _each(sampled, "prompt", "episode"), strict=True))
    names, lives = defaultdict[tuple[int, int], set[str]](set), defaultdict[str, list[str]](list)
    for agent, row, node in _each(scored, "agent", "id", "what"):
        if step_of(row) == step and (agent, row) in prompts:
            prompt, episode = prompts[agent, row]
            names[agent, row].add(sample_name(node, prompt, episode, row & ((1 << ROUND_BITS) - 1)))
    wanted = np.array([row for _, row in names], dtype=np.int64)
    for row, agent, line in _lines_of(ledger, lambda rows: np.isin(rows["id"], wanted)):
        for name in names.get((agent, row), ()):
            lives[name].append(f"row {row} {line}")
    return dict(lives)


def _lines_of(ledger: Ledger, chosen: Callable[[Rows], np.ndarray]) -> Iterator[tuple[int, int, str]]:
    """(row, agent, a line) for each event of some rows."""
    for kind, rows in ledger.events.items():
        for place in np.flatnonzero(chosen(rows)).tolist():
            told = {name: rows[name][place] for name in EVENTS.names if name not in ("kind", "id")}
            known = {name: value for name, value in told.items() if value not in (-1, "") and value == value}
            about = ", ".join(
                f"{name} {value:.7g}" if isinstance(value, float | np.floating) else f"{name} {value}"
                for name, value in known.items()
            )
            agent, prompt = int(rows["agent"][place]), known.get("prompt")
            where = "" if prompt is None else f" ({ledger.where(agent, int(prompt))})"
            yield int(rows["id"][place]), agent, f"{kind}: {about}{where}"


def _each(rows: Rows, *names: str) -> list[tuple[Any, ...]]:
    """These columns of each row."""
    return list(zip(*(rows[name].tolist() for name in names), strict=True))


def _keys(rows: Rows) -> list[tuple[int, int]]:
    """(agent, id) of each."""
    return _each(rows, "agent", "id")


def _row(ledger: Ledger, rows: Rows, place: int) -> str:
    """How a row is named: its prompt where it is known, its id, agent and step."""
    agent, row, step = (int(rows[name][place]) for name in ("agent", "id", "step"))
    prompt = int(rows["prompt"][place])
    where = f" ({ledger.where(agent, prompt)})" if prompt >= 0 else ""
    return f"row {row} of agent {agent} in step {step}{where}"
