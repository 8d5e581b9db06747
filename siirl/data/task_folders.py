"""Folders of tasks as Harbor and terminal-bench lay them out: instruction, environment, tests. No torch.

    Harbor:          task.toml  instruction.md  environment/Dockerfile  tests/test.sh  solution/solve.sh
    terminal-bench:  task.yaml  Dockerfile  run-tests.sh  tests/  solution.sh

A folder of them stands in the place of a file of rows: a row for each task, in the order of their names.
Nothing of a task is executed here.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import yaml

from siirl.data.made_rows import Made, MadeRows
from siirl.errors import DataError

HARBOR, TERMINAL_BENCH = "task.toml", "task.yaml"
"""The file that makes a folder a task, by layout."""
FOLDER_KEY = "task_folder"
SOURCE = "tasks/"
"""Before the name of a folder of tasks: the data source of its rows."""
TEST_S = {HARBOR: 600.0, TERMINAL_BENCH: 180.0}
"""How long tests may take where the task does not say it."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
UNITS_MB = {"": 1 / 2**20, "K": 1 / 2**10, "M": 1, "G": 2**10, "T": 2**20}


@dataclass(frozen=True)
class Dockerfile:
    """What an environment is made of."""

    folder: Path
    """Its context."""
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] | None = field(default_factory=dict)
    """What it copies, by path; None where it does more than that."""


@dataclass(frozen=True)
class Task:
    """A task as its folder says."""

    folder: Path
    layout: str
    """HARBOR or TERMINAL_BENCH."""
    instruction: str
    image: str | None
    """One that is there already, in the place of the Dockerfile."""
    dockerfile: Dockerfile | None
    memory_mb: int | None
    tests_s: float
    tests_env: Mapping[str, str]

    @property
    def tests(self) -> dict[str, bytes]:
        """The files of its tests, by their path in the sandbox."""
        found = files_below(self.folder / "tests", "/tests")
        if self.layout == TERMINAL_BENCH:
            found["/tests/run-tests.sh"] = (self.folder / "run-tests.sh").read_bytes()
        return found

    @property
    def solution(self) -> dict[str, bytes]:
        """The files of the reference solution, by their path in the sandbox; empty if it has none."""
        if self.layout == HARBOR:
            return files_below(self.folder / "solution", "/solution")
        file = self.folder / "solution.sh"
        return {"/solution/solve.sh": file.read_bytes()} if file.is_file() else {}


def is_task(folder: Path) -> bool:
    """Whether a folder is a task."""
    return any((folder / name).is_file() for name in (HARBOR, TERMINAL_BENCH))


def tasks_in(folder: Path) -> list[Path]:
    """The tasks of a folder, which may be one itself, by name; empty if it has none."""
    return [folder] if is_task(folder) else sorted(one for one in folder.iterdir() if is_task(one))


def read_task(folder: Path) -> Task:
    """The task of a folder. DataError for one that cannot be read, or needs what is not supported."""
    folder = folder.resolve()
    try:
        if (folder / HARBOR).is_file():
            task = _harbor(folder, tomllib.loads((folder / HARBOR).read_text(encoding="utf-8")))
            needed = folder / "tests" / "test.sh"
        else:
            task = _terminal_bench(
                folder, yaml.safe_load((folder / TERMINAL_BENCH).read_text(encoding="utf-8"))
            )
            needed = folder / "run-tests.sh"
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise DataError(f"the task {folder} cannot be read: {error}. Mend its files.") from error
    if not needed.is_file():
        raise DataError(
            f"the task {folder} has no {needed.relative_to(folder)}: nothing would reward it. Add it."
        )
    if not task.instruction.strip():
        raise DataError(f"the task {folder} has no instruction. Write one.")
    return task


def _harbor(folder: Path, said: dict[str, Any]) -> Task:
    if said.get("steps"):
        raise ValueError(
            f"not supported yet: it has {len(said['steps'])} [[steps]]; only tasks of one step are read"
        )
    place, tests = said.get("environment", {}), said.get("verifier", {})
    if tests.get("environment_mode", "shared") != "shared" or "environment" in tests:
        raise ValueError("not supported yet: its [verifier] has an environment of its own")
    _one_service(folder / "environment" / "docker-compose.yaml")
    memory = place.get("memory_mb", place.get("memory"))
    return Task(
        folder,
        HARBOR,
        (folder / "instruction.md").read_text(encoding="utf-8"),
        place.get("docker_image"),
        read_dockerfile(folder / "environment"),
        memory if memory is None or isinstance(memory, int) else _megabytes(str(memory)),
        float(tests.get("timeout_sec", TEST_S[HARBOR])),
        {name: str(value) for name, value in tests.get("env", {}).items()},
    )


def _terminal_bench(folder: Path, said: dict[str, Any]) -> Task:
    parser = said.get("parser_name", "pytest")
    if parser != "pytest":
        raise ValueError(f"not supported yet: parser_name = {parser!r}; the output of pytest alone is read")
    _one_service(folder / "docker-compose.yaml")
    return Task(
        folder,
        TERMINAL_BENCH,
        str(said.get("instruction") or ""),
        None,
        read_dockerfile(folder),
        None,
        float(said.get("max_test_timeout_sec", TEST_S[TERMINAL_BENCH])),
        {"TEST_DIR": "/tests"},
    )


def _one_service(compose: Path) -> None:
    if compose.is_file():
        services = (yaml.safe_load(compose.read_text(encoding="utf-8")) or {}).get("services", {})
        if len(services) > 1:
            raise ValueError(
                f"not supported yet: {compose.name} has {len(services)} services, {', '.join(services)}"
            )


def _megabytes(text: str) -> int:
    if (found := SIZE.fullmatch(text.strip())) is None:
        raise ValueError(f"{text!r} is no size of memory")
    return max(1, round(float(found[1]) * UNITS_MB[found[2].upper()]))


def files_below(folder: Path, at: str) -> dict[str, bytes]:
    """All files of a folder, by the path that they get below `at`."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(PurePosixPath(at) / file.relative_to(folder).as_posix()): file.read_bytes() for file in files}


def read_dockerfile(folder: Path) -> Dockerfile | None:
    """What the Dockerfile of a folder says; None if there is none. ValueError for one that cannot be read."""
    path = folder / "Dockerfile"
    if not path.is_file():
        return None
    workdir: str | None = None
    env: dict[str, str] = {}
    files: dict[str, bytes] | None = {}
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")
    ]
    for line in re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        match word.upper():
            case "WORKDIR":
                workdir = str(PurePosixPath(workdir or "/") / rest.strip().strip('"'))
            case "ENV":
                parts = shlex.split(rest)
                pairs = (
                    [part.partition("=") for part in parts]
                    if "=" in parts[0]
                    else [(parts[0], "", " ".join(parts[1:]))]
                )
                env |= {name: value for name, _, value in pairs}
            case "COPY" | "ADD":
                copied = _copied(folder, shlex.split(rest), workdir or "/")
                files = None if files is None or copied is None else files | copied
            case "" | "FROM" | "CMD" | "ENTRYPOINT" | "LABEL" | "EXPOSE" | "MAINTAINER":
                pass
            case _:
                files = None
    return Dockerfile(folder, workdir, env, files)


def _copied(folder: Path, words: Sequence[str], workdir: str) -> dict[str, bytes] | None:
    """The files of a COPY, by path; None for one that takes from elsewhere than the folder."""
    flags = [word for word in words if word.startswith("--")]
    *sources, target = [word for word in words if not word.startswith("--")]
    if any(flag.startswith("--from") for flag in flags) or any("://" in source for source in sources):
        return None
    where = str(PurePosixPath(workdir) / target)
    found: dict[str, bytes] = {}
    for source in sources:
        matched = [folder] if source in (".", "./") else sorted(folder.glob(source.lstrip("./") or "*"))
        if not matched:
            raise ValueError(f"its Dockerfile copies {source}, which is not there")
        into = len(sources) > 1 or len(matched) > 1 or target.endswith(("/", "."))
        for path in matched:
            if path.is_dir():
                found |= files_below(path, where)
            else:
                found[str(PurePosixPath(where) / path.name) if into else where] = path.read_bytes()
    return found


@dataclass(frozen=True)
class TaskRows(MadeRows):
    """The tasks of a folder as rows: the same ones on every rank and in every run."""

    folder: Path
    extra = pa.struct([(FOLDER_KEY, pa.string()), ("task", pa.string())])

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def data_source(self) -> str:
        """See MadeRows."""
        return SOURCE + self.folder.resolve().name

    @property
    def num_rows(self) -> int:
        """See MadeRows."""
        return len(tasks_in(self.folder))

    def rows(self) -> Iterator[Made]:
        """See MadeRows."""
        for task in map(read_task, tasks_in(self.folder)):
            extra = {FOLDER_KEY: str(task.folder), "task": task.folder.name}
            yield [{"role": "user", "content": task.instruction.strip()}], "", extra


def reward_in(text: str | None, as_json: str | None) -> float:
    """The reward that tests of Harbor have written: reward.txt, or reward.json. ValueError without one."""
    if text is not None:
        return float(text.strip())
    if as_json is None:
        raise ValueError("the tests have written no reward: neither reward.txt nor reward.json")
    named = json.loads(as_json)
    if not isinstance(named, dict) or ("reward" not in named and len(named) != 1):
        raise ValueError(f"reward.json has no single reward: {as_json.strip()[:200]}")
    return float(named["reward"] if "reward" in named else next(iter(named.values())))


RESULT = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\b", re.MULTILINE)
SUMMARY = re.compile(r"^=+ short test summary info =+$", re.MULTILINE)


def reward_of_pytest(output: str) -> float:
    """1 if a test passed and none failed, by pytest's summary (-rA); else 0. ValueError without a summary."""
    if (found := SUMMARY.search(output)) is None:
        raise ValueError("the tests have printed no summary of pytest")
    results = RESULT.findall(output[found.end() :])
    return float("PASSED" in results and not {"FAILED", "ERROR"} & set(results))
