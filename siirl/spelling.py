"""How names, sizes and tables are written: closest matches for names that are not known, memory in GiB."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def suggest(name: object, known: Iterable[str]) -> str:
    """A sentence that offers the closest known name, or lists what is known when nothing is close."""
    names = list(known)
    close = get_close_matches(str(name), names, n=1, cutoff=0.6) or [
        n for n in names if n.lower() == str(name).lower()
    ]
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}." if names else "There is none."


GIB = 2**30
_MOST_DECIMALS = 3


def gib_texts(taken: float, of: float) -> tuple[str, str]:
    """GiB that are taken, and those that there are, with as many decimals as it takes to tell them apart.

    80.3 of 80 is not "80 of 80", nor 1.3 of 1.4 "1.3 of 1".
    """
    decimals = 0 if taken >= 10 else 1
    while decimals < _MOST_DECIMALS and not _in_order(taken, of, decimals):
        decimals += 1
    texts = f"{taken:.{decimals}f}", f"{of:.{max(1, decimals)}f}"
    taken_text, of_text = (text.rstrip("0").rstrip(".") if "." in text else text for text in texts)
    return taken_text, of_text


def _in_order(taken: float, of: float, decimals: int) -> bool:
    """Whether rounded sizes compare as the sizes do."""
    rounded = round(taken, decimals), round(of, max(1, decimals))
    return taken == of or (rounded[0] < rounded[1] if taken < of else rounded[0] > rounded[1])


def size_text(num_bytes: float) -> str:
    """A size alone: in GiB, in MiB or KiB where that is little."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit // 10:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 2**10:.1f} KiB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells, the first of them the head, as lines; columns that are empty below it are left out."""
    columns = [index for index in range(len(rows[0])) if any(row[index] for row in rows[1:])]
    widths = [max(len(row[index]) for row in rows) for index in columns]
    return [
        "  ".join(row[index].ljust(width) for index, width in zip(columns, widths, strict=True)).rstrip()
        for row in rows
    ]
