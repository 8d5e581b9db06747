"""Unit tests of generated programs: what a dataset row's ground truth says, and whether outputs are right."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from siirl.errors import DataError

TOLERANCE = 1e-6  # relative, and absolute near zero, of numbers with a decimal point
FORMS = (
    '{"inputs": [...], "outputs": [...]} with or without "fn_name", or [{"input": ..., "output": ...}, ...]'
)


@dataclass(frozen=True)
class UnitTests:
    """The tests of one program."""

    fn_name: str | None
    """The function to call, on inputs that are lists of arguments; None: a program to run, on inputs that are
    texts for stdin."""
    inputs: list[Any]
    outputs: list[Any]
    """What is right."""

    def __len__(self) -> int:
        return len(self.inputs)

    def first(self, count: int) -> "UnitTests":
        return UnitTests(self.fn_name, self.inputs[:count], self.outputs[:count])


def read_tests(ground_truth: Any) -> UnitTests:
    """The tests of a row: a dict or list of one of FORMS, or that as JSON text. DataError otherwise."""
    try:
        given = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except json.JSONDecodeError as error:
        raise DataError(f"reward_model.ground_truth is no JSON: {error}. It must be {FORMS}") from error
    if isinstance(given, list) and all(isinstance(case, dict) for case in given):
        names = [(case.get("metadata") or {}).get("func_name") for case in given]
        fn_name = next((name for name in names if name), None)
        inputs, outputs = [case.get("input") for case in given], [case.get("output") for case in given]
    elif isinstance(given, dict):
        fn_name, inputs, outputs = given.get("fn_name"), given.get("inputs"), given.get("outputs")
    else:
        raise DataError(f"reward_model.ground_truth is a {type(given).__name__}: it must be {FORMS}")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or len(inputs) != len(outputs)
        or not inputs
    ):
        sizes = [len(part) if isinstance(part, list) else type(part).__name__ for part in (inputs, outputs)]
        raise DataError(
            f"reward_model.ground_truth has {sizes[0]} inputs and {sizes[1]} outputs: it needs as many of "
            f"both, and at least one. It must be {FORMS}"
        )
    if fn_name:
        return UnitTests(fn_name, [_arguments(case) for case in inputs], [_value(case) for case in outputs])
    return UnitTests(None, [_text(case) for case in inputs], [_text(case) for case in outputs])


def same_text(written: str, expected: str) -> bool:
    """Whether a program wrote what it should: word by word, numbers with a decimal point within TOLERANCE."""
    got, wanted = written.split(), expected.split()
    return len(got) == len(wanted) and all(map(_same_word, got, wanted))


def same_value(returned: Any, expected: Any) -> bool:
    """Whether a function returned what it should; a list of one expected value stands for that value too."""
    if _equal(returned, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _equal(returned, expected[0])


def _same_word(got: str, wanted: str) -> bool:
    if got == wanted:
        return True
    if "." not in wanted and "e" not in wanted.lower():
        return False
    try:
        left, right = Decimal(got), Decimal(wanted)
    except InvalidOperation:
        return False
    if not (left.is_finite() and right.is_finite()):
        return False
    return math.isclose(float(left), float(right), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, float | int) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return left == right


def _arguments(case: Any) -> list[Any]:
    """A call's arguments: a list of them, or a text with one JSON value on each line."""
    if isinstance(case, str):
        return [_value(line) for line in case.split("\n") if line.strip()]
    return case if isinstance(case, list) else [case]


def _value(case: Any) -> Any:
    if not isinstance(case, str):
        return case
    try:
        return json.loads(case)
    except json.JSONDecodeError:
        return case


def _text(case: Any) -> str:
    """A text; a list is its lines."""
    if isinstance(case, Sequence) and not isinstance(case, str):
        return "\n".join(map(str, case))
    return str(case)
