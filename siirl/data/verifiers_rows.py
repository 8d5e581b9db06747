"""Tasks of an environment of verifiers: verifiers:ENVIRONMENT?num_examples=N in place of a file. No torch.

The package and its environments are in an interpreter of their own: a process of it gives the rows.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pyarrow as pa
import yaml

from siirl.data.made_rows import Made, MadeRows
from siirl.errors import DataError
from siirl.spelling import suggest
from siirl.user_code import verifiers_program

PREFIX = "verifiers:"
SOURCE = "verifiers/"
"""Before the name of an environment: the data source of its rows."""
OPTIONS = {"python": sys.executable, "split": "train", "num_examples": -1, "seed": None}
"""What may stand behind the question mark, besides args.NAME, and what holds otherwise."""
ARGS = "args"
MOST_LINES = 12


@dataclass(frozen=True)
class VerifiersRows(MadeRows):
    """Tasks of an environment, as their name says: the same rows on every rank and in every run."""

    text: str
    extra = pa.struct([("dataset", pa.string()), ("index", pa.int64()), ("input", pa.string())])

    def __str__(self) -> str:
        return self.text

    @property
    def env(self) -> str:
        """Its name, or its file."""
        return self.text.removeprefix(PREFIX).partition("?")[0]

    @property
    def data_source(self) -> str:
        """See MadeRows."""
        return SOURCE + (Path(self.env).stem if self.env.endswith(".py") else self.env)

    @property
    def options(self) -> dict[str, Any]:
        """OPTIONS and ARGS, what the environment is made with. DataError for others."""
        found: dict[str, Any] = {**OPTIONS, ARGS: {}}
        for name, value in parse_qsl(self.text.partition("?")[2], keep_blank_values=True):
            first, *rest = name.split(".")
            if (first == ARGS) != bool(rest) or first not in found:
                known = ", ".join((*OPTIONS, f"{ARGS}.NAME"))
                raise DataError(
                    f"{self.text}: no option {name!r}: there are {known}. {suggest(name, OPTIONS)} What the "
                    f"environment itself takes is {ARGS}.NAME."
                )
            place = found
            for step in (first, *rest)[:-1]:
                place = place.setdefault(step, {})
            place[(first, *rest)[-1]] = yaml.safe_load(value)
        return found

    @property
    def num_rows(self) -> int:
        """How many there are. DataError if the environment cannot be made."""
        return len(_rows_of(self.text))

    def rows(self) -> Iterator[Made]:
        """See MadeRows."""
        for index, row in enumerate(_rows_of(self.text)):
            prompt = row["prompt"]
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            chat = [{"role": one["role"], "content": _text(one.get("content"))} for one in messages]
            extra = {"dataset": self.text, "index": index, "input": json.dumps(row["input"])}
            yield chat, _text(row["answer"]), extra


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value or "")


@functools.lru_cache(maxsize=16)
def _rows_of(text: str) -> list[dict[str, Any]]:
    """The answer of the program. DataError if there is none."""
    rows = VerifiersRows(text)
    options = rows.options
    asked = {"env": rows.env, **options}
    command = [str(options["python"]), verifiers_program.__file__, "rows"]
    try:
        ended = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    except OSError as error:
        raise DataError(f"{text}: {missing_python(options['python'], error)}") from error
    printed = "\n".join(ended.stderr.strip().splitlines()[-MOST_LINES:])
    try:
        answer = json.loads(ended.stdout)
    except ValueError:
        raise DataError(f"{text}: its process ended with exit code {ended.returncode}:\n{printed}") from None
    if verifiers_program.MISSING in answer:
        raise DataError(f"{text}: {missing_package(options['python'])}")
    if "error" in answer:
        raise DataError(f"{text}: {answer['error']}\n{printed}".rstrip())
    return answer["rows"]


INSTALL = (
    "python -m venv .venv-verifiers && .venv-verifiers/bin/pip install 'verifiers<0.4', or verifiers for a "
    "taskset, and the environment; then python=.venv-verifiers/bin/python here."
)


def missing_python(python: Any, error: OSError) -> str:
    """What is wrong, and the fix, if an interpreter cannot be started."""
    return f"python={python} cannot be started ({error}). Make the interpreter that has verifiers: {INSTALL}"


def missing_package(python: Any) -> str:
    """What is wrong, and the fix, if an interpreter lacks the package."""
    return f"{python} has no package verifiers. Install it, in an environment of its own: {INSTALL}"
