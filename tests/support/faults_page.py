"""The page that lists what `siirl test` finds."""

from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "testing_a_workflow.md"
REFUSED = "refused before it runs"


def not_listed(faults: Iterable[tuple[str, str]]) -> list[str]:
    """Those of (fault, assertion that it fails) that the page does not name in the assertion's row."""
    text = PAGE.read_text().partition("## Faults that it finds")[2].partition("\n## ")[0]
    rows, last = dict[str, list[str]](), ""
    for line in (line for line in text.splitlines() if line.startswith("| ")):
        name, listed = (cell.strip() for cell in line.strip("|").split("|"))
        last = name or last  # a long row goes on below
        rows.setdefault(last, []).extend(listed.split("; "))
    return [fault for fault, assertion in faults if fault not in rows.get(assertion, ())]
