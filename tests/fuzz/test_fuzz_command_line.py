"""Whatever stands on a command line or in a run's YAML file: exit code 0 or 2, and never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fuzzing import NASTY, NUMBERS, PLAIN, WORDS, cases, command, explore, mangled, replaced_somewhere
from hypothesis import strategies as st
from job_harness import ROOT

from siirl.config.root import all_groups, all_keys

ARGUMENT_BYTES = st.characters(exclude_characters="\0", exclude_categories=("Cs",)) | st.characters(
    min_codepoint=0xDC80, max_codepoint=0xDCFF, categories=("Cs",)
)
"""What arguments can hold; a byte that is no text is half of a surrogate pair."""


def values_of(name: str) -> st.SearchStrategy[str]:
    key = all_keys().get(name)
    known = [*key.rule.choices, *key.rule.synonyms] if key else []
    written = st.one_of(
        WORDS,
        NUMBERS.map(str),
        st.lists(WORDS | NUMBERS.map(str), max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.dictionaries(WORDS, NUMBERS, max_size=2).map(lambda tree: str(tree).replace("'", "")),
        st.text(ARGUMENT_BYTES, max_size=6),
        *([st.sampled_from(known)] if known else []),
    )
    return written.map(lambda text: "." + text if text.startswith(("/", "~")) else text)


NAMES = st.one_of(
    st.sampled_from(sorted(all_keys())),
    st.sampled_from(sorted(all_keys())),
    st.sampled_from(sorted(all_groups())),
    st.builds(lambda name, more: f"{name}.{more}", st.sampled_from(sorted(all_keys())), WORDS),
    st.text(ARGUMENT_BYTES, max_size=8),
)


@st.composite
def settings(draw) -> list[str]:
    """Some arguments: mostly of keys that there are."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        name = draw(NAMES)
        sign = draw(st.sampled_from(["", "", "", "", "+", "++", "~"]))
        equals = draw(st.sampled_from(["=", "=", "=", "=", "==", ""]))
        made.append(f"{sign}{name}{equals}{draw(values_of(name))}")
    return [text for text in made if not text.startswith("-")] or ["a=1"]


@cases(16)
def test_any_settings_are_taken_or_refused_in_words(num_cases, good, deep):
    def check(changed: list[str], verb: str) -> None:
        command([*verb.split(), f"--config-name={good}", *changed], deep)

    verbs = ["check", "check", "check --elsewhere", "plan", "plan --explain --device h200"]
    explore(num_cases, check, settings(), st.sampled_from(verbs))


@cases(16)
def test_any_run_file_is_taken_or_refused_in_words(num_cases, good, deep):
    tree, path = yaml.safe_load(good.read_text()), Path(deep) / "run.yaml"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        command(["check", f"--config-name={path}"], deep)

    def written(value) -> bytes:
        return yaml.safe_dump(value, allow_unicode=True).encode()

    changed = replaced_somewhere(tree).map(written)
    explore(num_cases, check, st.one_of(changed, changed, mangled(written(tree)), PLAIN.map(written)))


@pytest.mark.heavy
@cases(1, 40)
def test_the_command_of_users_says_the_same(num_cases, good, deep):
    """A process, of which other parts may write a traceback too."""

    def check(changed: list[str]) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "siirl.cli", "check", f"--config-name={good}", *changed],
            cwd=deep,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            timeout=100,
        )
        assert done.returncode in (0, 2), done.stderr.decode(errors="replace")
        assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")

    explore(num_cases, check, settings())


@pytest.mark.parametrize("text", NASTY)
def test_a_text_alone_is_no_setting_that_breaks_the_command(text, deep):
    if not text.startswith("-"):
        command(["check", "--elsewhere", text], deep)
