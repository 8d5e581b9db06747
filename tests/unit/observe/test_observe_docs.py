"""Four pages of docs/: their keys exist, what is quoted is printed."""

import re
from pathlib import Path

import pytest
from package_sources import texts

from siirl.config.root import TOP_GROUPS, all_groups, all_keys

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / f"docs/{name}.md" for name in ("troubleshooting", "messages", "observability", "metrics")]
COMMANDS = ("siirl ", "cat ", "kill ", "python ", "# ")


def quoted(page: Path) -> list[str]:
    """What stands in backticks, code blocks left out; lines of one paragraph are joined."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return re.findall(r"`([^`]+)`", re.sub(r"\n\s*", " ", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_keys_on_a_page_exist(page):
    names = [*all_keys(), *all_groups()]
    words = [word.partition("=")[0] for text in quoted(page) for word in text.split()]
    dotted = [w for w in words if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", w)]
    groups = {part for name in all_groups() for part in name.split(".")} | set(TOP_GROUPS)
    keys = [word for word in dotted if word.split(".")[0] in groups]
    assert len(keys) > 10
    unknown = [key for key in keys if not any(f".{name}".endswith(f".{key}") for name in names)]
    assert not unknown


def test_the_messages_that_are_quoted_are_printed():
    messages = [text for text in quoted(PAGES[0]) if " " in text and not text.startswith(COMMANDS)]
    assert len(messages) > 10
    unknown = []
    for message in messages:
        # What is inserted into a message stands there as ..., a number, N or M, or a 'name'.
        for part in re.split(r"\.\.\.|\b\d+\b|\b[NM]\b|'\w+'|\bnan\b|\bheaders\b", message):
            words = part.strip(" :;,.=()|")
            if len(words.split()) > 1 and words not in texts():
                unknown.append((message, words))
    assert not unknown
