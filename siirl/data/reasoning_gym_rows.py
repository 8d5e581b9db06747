"""Prompts that reasoning-gym makes: reasoning_gym:TASK?size=N&seed=N in the place of a file. No torch.

The package is imported when rows are counted or read: it takes seconds.
"""

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import pyarrow as pa
import yaml

from siirl.data.made_rows import Made, MadeRows
from siirl.errors import DataError
from siirl.spelling import suggest
from siirl.user_code.extras import missing_extra

PREFIX = "reasoning_gym:"
SOURCE = "reasoning_gym/"
"""Before the name of a task: the data source of its rows."""
SYSTEM_PROMPT = "system_prompt"


@dataclass(frozen=True)
class GeneratedRows(MadeRows):
    """A data set of reasoning-gym, as its name says: the same rows on every rank and in every run."""

    text: str
    extra = pa.struct([("dataset", pa.string()), ("index", pa.int64()), ("entry", pa.string())])

    def __str__(self) -> str:
        return self.text

    @property
    def task(self) -> str:
        """Its name among the data sets of the package."""
        return self.text.removeprefix(PREFIX).partition("?")[0]

    @property
    def data_source(self) -> str:
        """See MadeRows."""
        return SOURCE + self.task

    @property
    def options(self) -> dict[str, Any]:
        """What stands behind the question mark: values as YAML reads them."""
        query = self.text.partition("?")[2]
        return {name: yaml.safe_load(value) for name, value in parse_qsl(query, keep_blank_values=True)}

    @property
    def num_rows(self) -> int:
        """How many there are. DataError if the name cannot be read, or the package is not installed."""
        return len(dataset_of(self.text))

    def overlaps(self, other: "GeneratedRows") -> bool:
        """Whether another one, which is not the same, has rows of this one: row i is drawn from seed + i."""
        mine, theirs = dict(self.options), dict(other.options)
        first, second = ((o.pop("seed"), o.pop("size")) for o in (mine, theirs))
        if self.task != other.task or mine != theirs or first == second:
            return False
        return first[0] < second[0] + second[1] and second[0] < first[0] + first[1]

    def rows(self) -> Iterator[Made]:
        """See MadeRows."""
        system = system_prompt(self.options.get(SYSTEM_PROMPT))
        dataset = dataset_of(self.text)
        for index in range(len(dataset)):
            try:
                entry = dataset[index]
            except Exception as error:  # the edge to the package
                raise DataError(
                    f"{self.text}: row {index} raised {type(error).__name__}: {error}. Change its options."
                ) from error
            prompt = [*system, {"role": "user", "content": entry["question"]}]
            extra = {"dataset": self.text, "index": index, "entry": entry_text(entry, self.text)}
            yield prompt, entry["answer"], extra


@functools.lru_cache(maxsize=64)
def dataset_of(text: str) -> Any:
    """The data set of the package that a name stands for. DataError if there is none."""
    rows = GeneratedRows(text)
    if problem := missing_extra("reasoning_gym"):
        raise DataError(f"{text}: {problem}")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if rows.task not in DATASETS or rows.task == "composite":
        instead = "Name several data sets in a list." if rows.task == "composite" else ""
        raise DataError(
            f"{text}: reasoning-gym {'gives it no rows of its own' if instead else 'has no data set'} "
            f"{rows.task!r}. {instead or suggest(rows.task, DATASETS)}"
        )
    options = rows.options
    system_prompt(options.pop(SYSTEM_PROMPT, None))
    for name in ("size", "seed"):
        value = options.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < (name == "size"):
            raise DataError(
                f"{text}: {name} = {value!r} is no whole number{' above 0' if name == 'size' else ''}. All "
                f"ranks must draw the same rows: write {PREFIX}{rows.task}?size=1000&seed=0."
            )
    try:
        return reasoning_gym.create_dataset(rows.task, **options)
    except Exception as error:  # the edge to the package, which asserts
        known = ", ".join(name for name in DATASETS[rows.task][1].__dataclass_fields__)
        raise DataError(
            f"{text}: {type(error).__name__}: {error}. Its options: {known}, {SYSTEM_PROMPT}."
        ) from error


def system_prompt(given: str | None) -> list[dict[str, str]]:
    """The message before the question: one that the package has a name for, a text, or none."""
    if given is None:
        return []
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return [{"role": "system", "content": SYSTEM_PROMPTS.get(str(given), str(given))}]


def entry_text(entry: Any, who: str) -> str:
    """A row of the package as Python writes it, since its scorers compare tuples and numbers as keys, which
    JSON does not know. DataError if it holds anything else.
    """
    plain = _plain(entry)
    text = repr(plain)
    try:
        if ast.literal_eval(text) == plain:
            return text
    except (ValueError, SyntaxError):
        pass
    raise DataError(f"not supported yet: {who}: its rows hold objects that cannot be written as text.")


def _plain(value: Any) -> Any:
    """Scalars of numpy, and texts of other types, as Python's own, anywhere within."""
    match value:
        case dict():
            return {_plain(name): _plain(item) for name, item in value.items()}
        case list() | tuple() | set():
            return type(value)(map(_plain, value))
        case str():
            return str.__str__(value)
    return value.item() if hasattr(value, "item") else value


def first_overlap(train: Sequence[Any], val: Sequence[Any]) -> tuple[GeneratedRows, GeneratedRows] | None:
    """A data set of the training and one of the validation that have rows in common, but not all."""
    made = [[file for file in files if isinstance(file, GeneratedRows)] for files in (train, val)]
    return next(((one, other) for one in made[0] for other in made[1] if one.overlaps(other)), None)
