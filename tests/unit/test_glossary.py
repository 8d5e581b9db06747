"""docs/glossary.md and the names in the code agree."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "glossary.md").read_text()
FIELD = "## Words of the field"


def glossary() -> list[list[str]]:
    """The cells of each row: word, meaning, words that are not used for it."""
    head = PAGE.index("| word | what it is | not |")
    rows = PAGE[head : PAGE.index(FIELD)].strip().splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@cache
def names() -> dict[str, str]:
    """Each name that siirl defines or uses -> where it stands first."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "siirl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for attribute in ("id", "attr", "arg", "name", "asname"):
                name = getattr(node, attribute, None)
                if isinstance(name, str):
                    found.setdefault(name, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}")
    return found


def words(name: str) -> set[str]:
    """The words of an identifier: of MegatronScope megatron and scope, of mini_batch mini and batch."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_no_name_has_a_word_that_the_glossary_gives_up():
    given_up = {word for row in glossary() for word in row[2].split(", ") if word}
    assert len(given_up) > 5
    wrong = {name: where for name, where in names().items() if words(name) & given_up}
    assert not wrong


def texts() -> Iterator[tuple[str, str]]:
    """(where it stands, a text that users read): lines of pages without code, and texts of siirl of several
    words that are no docstring."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        if page.name == "glossary.md":
            prose = prose[: prose.index(FIELD)]
        for line in prose.splitlines():
            yield page.name, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
    for path in sorted((ROOT / "siirl").rglob("*.py")):
        tree = ast.parse(path.read_text())
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or id(node) in documentation:
                continue
            if isinstance(node.value, str) and " " in node.value:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


READ_BY_MODELS = ("(image left out)", " left out)")
"""What a model is shown in the place of an image or another block: other words were other prompts."""


def test_what_users_read_has_the_words_of_the_field():
    rows = [line.strip("|").split("|") for line in PAGE[PAGE.index(FIELD) :].splitlines() if "|" in line][2:]
    given_up = [word.strip() for row in rows for word in row[1].split(",")]
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
            if anchor:
                heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in anchors, f"{page.name}: {target}#{anchor}"
