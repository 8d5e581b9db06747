"""Text of models, users and their exceptions, made fit for terminals, files and reports."""

import re

# Control characters but tab and line feed, marks that reorder or break lines, halves of surrogate pairs.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""The text with every character that a terminal obeys, or no file can hold, as its escape (\x1b).

    A carriage return at the end of a line is dropped. What is printable already is returned as it is.
    """
    if UNPRINTABLE.search(text) is None:
        return text
    return UNPRINTABLE.sub(_escaped, text.replace("\r\n", "\n"))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
