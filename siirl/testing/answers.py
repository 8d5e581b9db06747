"""What agents say in a test: those of a file, or of a run's samples.

A file is YAML or JSON: who -> answers, one for each sample of a prompt, in turn, of the next prompt from the
next one on, so that all are said also where a prompt has one sample:

    solver: ["{ground_truth}", "I do not know", null]     # a node, agent_N, or "*": all others
    caller: [["<tool_call>...</tool_call>", "so it is 7"]]  # a list: what it says turn by turn

{ground_truth} and {extra_info.NAME} are those of the row; null is what the tiny model samples.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from siirl.errors import ConfigError

Turns = tuple[str | None, ...]
"""What somebody says turn by turn; the last again, where there are more turns."""
ANYONE = "*"
PLACE = re.compile(r"\{(ground_truth|extra_info\.(\w+))\}")
FORMS = ("{ground_truth}", "\\boxed{{ground_truth}}", "#### {ground_truth}")
"""How rewards want the row's own answer: each prompt tries another, where no file says what is said."""
SAMPLES = "rollouts/tokens"


@dataclass(frozen=True)
class Answers:
    """Who says what."""

    said: Mapping[str, tuple[Turns, ...]] = field(default_factory=dict)
    """Node, agent_N or ANYONE -> answers, one for each sample in turn."""
    source: str = ""
    """The file or run; empty: none was named."""

    def of(self, names: Sequence[str], prompt: int, sample: int, turn: int, place: int = 0) -> str | None:
        """What is said as the turn-th own turn of one of these names; None: what the model samples.

        place: of the speaker among those of its conversation. Where nothing is said by a file, all ways in
        which each of them is right or samples come up among the samples of a prompt.
        """
        found = next((self.said[name] for name in (*names, ANYONE) if name in self.said), None)
        if found is None:
            if self.source:
                return None
            if sample >> place & 1:
                return None
            found = ((FORMS[prompt % len(FORMS)],),)
        turns = found[(sample + prompt) % len(found)]
        return turns[min(turn, len(turns) - 1)]

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Those of the file's names that nobody has."""
        return sorted(self.said.keys() - set(names) - {ANYONE})


def filled_in(text: str, row: Mapping[str, Any]) -> str:
    """The answer with what it names of its row."""

    def value(found: re.Match[str]) -> str:
        extra = row.get("extra_info")
        named = (
            row.get("ground_truth")
            if found[2] is None
            else extra.get(found[2])
            if isinstance(extra, dict)
            else None
        )
        return named if isinstance(named, str) else json.dumps(named, ensure_ascii=False)

    return PLACE.sub(value, text)


def read_answers(name: str | None) -> Answers:
    """Of a file, or of the folder of a run (what its agents said in its samples); None: of neither.

    ConfigError for one that has none.
    """
    if name is None:
        return Answers()
    path = Path(name).expanduser()
    if path.is_dir():
        return Answers(_of_run(path), str(path))
    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--answers {name} cannot be read: {error}. Name a file of YAML: who: [answer, ...]; "
            "or the folder of a run."
        ) from None
    if isinstance(told, list):
        told = {ANYONE: told}
    if not isinstance(told, dict) or not all(isinstance(one, list) and one for one in told.values()):
        raise ConfigError(
            f"--answers {name}: {told!r:.80} is no map of who to a list of answers. "
            'Write NODE: [answer, ...], with "*" for all others.'
        )
    return Answers(
        {str(who): tuple(_turns(one, name) for one in said) for who, said in told.items()}, str(path)
    )


def _turns(one: Any, name: str) -> Turns:
    turns = tuple(one) if isinstance(one, list) else (one,)
    if not turns or not all(turn is None or isinstance(turn, str | int | float) for turn in turns):
        raise ConfigError(
            f"--answers {name}: {one!r:.80} is no answer. Write a text, null for what the model "
            "samples, or a list of these: turn by turn."
        )
    return tuple(None if turn is None else str(turn) for turn in turns)


def _of_run(folder: Path) -> dict[str, tuple[Turns, ...]]:
    """agent_N -> what it said in the run's latest samples, turn by turn."""
    files = sorted((folder / SAMPLES).glob("step_*.jsonl"), key=lambda file: int(file.stem[len("step_") :]))
    if not files:
        raise ConfigError(
            f"--answers {folder}: there is no {SAMPLES}/step_N.jsonl in it, so what its agents said is "
            "not known. Name the folder of a run that has trained, or a file of answers."
        )
    said: dict[str, list[Turns]] = {}
    for line in files[-1].read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        turns: dict[int, list[str]] = {}
        for text, turn in zip(row["tokens"]["text"], row["tokens"]["turn"], strict=True):
            turns.setdefault(turn, []).append(text)
        if turns:
            said.setdefault(f"agent_{row['speaker']}", []).append(
                tuple("".join(turns[turn]) for turn in sorted(turns))
            )
    return {who: tuple(rows) for who, rows in said.items()}
