"""What the fuzz tests share: how many cases are drawn, of what, and commands that must answer with words."""

import faulthandler
import io
import os
import warnings
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SOME, MANY = 60, 5000
SEED = int(os.environ.get("FUZZ_SEED", "0"))
"""The cases of a run are those of the last one; another number gives others."""
CASE_S = 120.0
"""A case that takes longer than this hangs: all stacks are printed, and the process ends."""


def cases(some: int = SOME, many: int = MANY) -> pytest.MarkDecorator:
    """Parametrizes a test by the number of its cases: a few in `make test`, many in `make test-all`."""
    slow = pytest.param(many, marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="many")
    return pytest.mark.parametrize("num_cases", [pytest.param(some, id="some"), slow])


def explore(num_cases: int, check: Callable[..., None], *drawn: st.SearchStrategy) -> None:
    """Call `check` with what is drawn, so many times; a case that fails is made small and printed."""
    options = settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )

    def watched(values: tuple[Any, ...]) -> None:
        faulthandler.dump_traceback_later(CASE_S, exit=True)
        try:
            check(*values)
        finally:
            faulthandler.cancel_dump_traceback_later()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed(SEED)(options(given(st.tuples(*drawn))(watched)))()


NASTY = (
    *("", " ", "null", "None", "~", "true", "-1", "0", "1e400", "nan", "-inf", "9" * 30, "0x10", "1_0", "٣"),
    *("${", "${a}", "${oc.env:NOWHERE}", "$", "{", "[", "]", "[1,", "{a:", "{a:1}", "[[]]", "'", '"', "\\"),
    *(
        "a=b",
        "a:b",
        "*",
        "&a",
        "!!python/object:os.system",
        "%s",
        "{0}",
        "\n",
        "\t",
        "é",
        "\U0001f600",
        "\x7f",
    ),
    *("../..", ".", "a/b", "x" * 300, "no_such_file.py:f", "json:loads", "json:", ":f", "\x1b[2J", "\ufeff"),
)
"""Texts that parsers trip over."""
WORDS = st.one_of(
    st.sampled_from(NASTY), st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))
)
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 3, 7, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, 1e-300, 1e300]),
    st.integers(),
    st.floats(),
)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=8,
)
"""What JSON and YAML can hold."""


def mangled(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with a few changes: some flipped, cut out, put in, or the end lost."""
    positions, few = st.integers(0, len(data)), st.binary(max_size=8)
    change = st.tuples(st.sampled_from(["put", "flip", "cut", "end"]), positions, few)

    def apply(changes: list[tuple[str, int, bytes]]) -> bytes:
        out = data
        for how, at, new in changes:
            match how:
                case "put":
                    out = out[:at] + new + out[at:]
                case "flip":
                    out = out[:at] + new + out[at + len(new) :]
                case "cut":
                    out = out[:at] + out[at + len(new) :]
                case "end":
                    out = out[:at]
        return out

    return st.lists(change, min_size=1, max_size=4).map(apply)


def replaced_somewhere(tree: Any) -> st.SearchStrategy[Any]:
    """The plain data with a few of its values replaced, removed, or put under another name."""

    @st.composite
    def change(draw: Callable[[st.SearchStrategy], Any]) -> Any:
        out = tree
        for _ in range(draw(st.integers(1, 3))):
            out = _changed(out, draw)
        return out

    return change()


def _changed(value: Any, draw: Callable[[st.SearchStrategy], Any]) -> Any:
    inside = isinstance(value, dict | list) and value and draw(st.integers(0, 9))
    if not inside:
        return draw(PLAIN)
    if isinstance(value, list):
        at = draw(st.integers(0, len(value) - 1))
        match draw(st.sampled_from(["in", "in", "in", "out", "twice"])):
            case "out":
                return value[:at] + value[at + 1 :]
            case "twice":
                return [*value, value[at]]
        return [*value[:at], _changed(value[at], draw), *value[at + 1 :]]
    name = draw(st.sampled_from(sorted(value, key=str)))
    rest = {key: item for key, item in value.items() if key != name}
    match draw(st.sampled_from(["in", "in", "in", "in", "out", "renamed"])):
        case "out":
            return rest
        case "renamed":
            return rest | {draw(WORDS): value[name]}
    return value | {name: _changed(value[name], draw)}


class Said(io.TextIOWrapper):
    """A stream as a console has it: what cannot be encoded is an error for standard output."""

    def __init__(self, errors: str) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors=errors)

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined]


@contextmanager
def _within(folder: str):
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def command(arguments: list[str], folder: str) -> int:
    """Run `siirl ARGUMENTS` in this process, in a folder; its exit code, which is 0 or 2 with words."""
    from siirl import cli

    out, err = Said("strict"), Said("backslashreplace")
    with _within(folder), redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as ended:  # argparse
            code = ended.code
    assert code in (0, 2), (code, err.text())
    out.text()
    if code == 2:
        assert err.text().strip() and "Traceback" not in err.text(), err.text()
    return code
