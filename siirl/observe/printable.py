"""Text of models, users and their exceptions, made fit for terminals, files and reports."""

import re

# Control characters but tab and line feed, marks that reorder or break lines, halves of surrogate pairs.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)

HALVES = re.compile("([\ud800-\udbff][\udc00-\udfff])|[\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with every character that a terminal obeys, or no file can hold, as its escape (\x1b).

    A carriage return at the end of a line is dropped. What is printable already is returned as it is.
    """
    if UNPRINTABLE.search(text) is None:
        return text
    return UNPRINTABLE.sub(_escaped, text.replace("\r\n", "\n"))


def first_line(text: str) -> str:
    """The first line of an error that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown error")


def encodable(text: str) -> str:
    r"""The text for tokenizers and files: halves of surrogate pairs are joined, one without its other is its
    escape (\ud800). Nothing else changes.
    """
    return HALVES.sub(_whole, text) if HALVES.search(text) else text


def _whole(found: re.Match[str]) -> str:
    return found[1].encode("utf-16", "surrogatepass").decode("utf-16") if found[1] else _escaped(found)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
