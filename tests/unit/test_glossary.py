"""docs/glossary.md and the names in the code agree."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "glossary.md").read_text()


def glossary() -> list[list[str]]:
    """The cells of each row: word, meaning, words that are not used for it."""
    head = PAGE.index("| word | what it is | not |")
    rows = PAGE[head:].splitlines()[2:]
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
