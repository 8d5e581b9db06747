"""docs/glossary.md and the names in the code agree."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from package_sources import package_nodes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "glossary.md").read_text()
FIELD = "## Words of the field"


def glossary() -> list[list[str]]:
    """The cells of each row: word, meaning, words that are not used for it."""
    head = PAGE.index("| word | what it is | not |")
    rows = PAGE[head : PAGE.index(FIELD)].strip().splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


NAMED = ("id", "attr", "arg", "name", "asname")


@cache
def code() -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Each name that siirl defines or uses -> where it stands first; and (where it stands, a text of several
    words that is no docstring)."""
    found: dict[str, str] = {}
    said: list[tuple[str, str]] = []
    for path, in_file in package_nodes().items():
        file, documentation = str(path.relative_to(ROOT)), set()
        for node in in_file:
            if isinstance(node, ast.Expr):
                documentation.add(node.value)
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and " " in text and node not in documentation:
                said.append((f"{file}:{node.lineno}", text))
            for attribute in NAMED:
                if attribute in node._fields and isinstance(name := getattr(node, attribute), str):
                    found.setdefault(name, f"{file}:{getattr(node, 'lineno', 1)}")
    return found, said


def names() -> dict[str, str]:
    return code()[0]


def words(name: str) -> list[str]:
    """The words of an identifier: of MegatronScope megatron and scope, of mini_batch mini and batch."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def test_no_name_has_a_word_that_the_glossary_gives_up():
    given_up = {word for row in glossary() for word in row[2].split(", ") if word}
    assert len(given_up) > 5
    wrong = {name: where for name, where in names().items() if given_up.intersection(words(name))}
    assert not wrong


def given_up_in_the_field() -> list[str]:
    rows = [line.strip("|").split("|") for line in PAGE[PAGE.index(FIELD) :].splitlines() if "|" in line][2:]
    return [word.strip() for row in rows for word in row[1].split(",")]


def names_of_keys() -> set[str]:
    """What users write in a configuration: those that are older than a word of the field stay."""
    files = (in_file for path, in_file in package_nodes().items() if path.parent == ROOT / "siirl" / "config")
    fields = (node.target for in_file in files for node in in_file if isinstance(node, ast.AnnAssign))
    return {field.id for field in fields if isinstance(field, ast.Name)}


def test_no_class_function_or_file_is_named_by_a_word_that_the_field_does_not_use():
    bare = {re.sub("^(a|the|no) ", "", word) for word in given_up_in_the_field()}
    refused = re.compile(rf"\b({'|'.join(sorted(bare))})s?\b")
    files = {path.stem: str(path.relative_to(ROOT)) for path in (ROOT / "siirl").rglob("*.py")}
    keys = names_of_keys()
    assert "max_lag" in keys and refused.search(" ".join(words("LeftOut"))) and len(files) > 300

    def wrong(name: str) -> bool:
        return name.strip("_").lower() not in keys and bool(refused.search(" ".join(words(name))))

    assert {name: where for name, where in (names() | files).items() if wrong(name)} == {}


def texts() -> Iterator[tuple[str, str]]:
    """(where it stands, a text that users read): lines of pages without code, their titles too, and texts of
    several words of siirl, those of its page too, that are no docstring."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        if page.name == "glossary.md":
            prose = prose[: prose.index(FIELD)]
        for line in prose.splitlines():
            yield page.name, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
    for path in sorted((ROOT / "siirl").rglob("*.js")):
        for text in re.findall(r'"([^"\n]* [^"\n]*)"', path.read_text()):
            yield path.name, text
    yield from code()[1]


READ_BY_MODELS = ("(image left out)", " left out)")
"""What a model is shown in the place of an image or another block: other words were other prompts."""


def test_what_users_read_has_the_words_of_the_field():
    given_up = given_up_in_the_field()
    assert len(given_up) > 15
    refused = re.compile(rf"\b({'|'.join(given_up)})\b", re.IGNORECASE)
    assert refused.search("Its sign of life")
    assert [
        (where, text) for where, text in texts() if refused.search(text) and text not in READ_BY_MODELS
    ] == []


def test_what_the_glossary_names_is_there_and_no_word_has_two_meanings():
    rows = glossary()
    assert all(len(row) == 3 for row in rows) and len(rows) >= 30
    quoted = {word for row in rows for word in re.findall(r"`(\w+)`", row[1])}
    defined = set(names()) | {"agent_group"}
    assert quoted <= defined, quoted - defined
    listed = [word for row in rows for cell in (row[0], row[2]) for word in cell.split(", ") if word]
    assert len(listed) == len(set(listed))


def test_no_page_has_long_lines():
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
    for page in pages:
        wide = [number for number, line in enumerate(page.read_text().splitlines(), 1) if len(line) > 160]
        assert not wide, f"{page.name}: {wide}"


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), f"{page.name}: {target}"
            of_the_site = (ROOT / "docs") in page.parents and file.suffix == ".md"
            assert not of_the_site or (ROOT / "docs") in file.parents, (
                f"{page.name}: the site has no {target}"
            )
            if anchor:
                heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in anchors, f"{page.name}: {target}#{anchor}"
