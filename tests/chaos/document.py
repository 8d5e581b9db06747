"""Writes the table of the chaos suite, with times, into docs/evidence/fault_tolerance.md.

CHAOS_TIMES=1 .venv/bin/python -m pytest tests/chaos        # measures: tests/chaos/times.json
.venv/bin/python tests/chaos/document.py                    # writes the table
"""

import json
from itertools import groupby
from pathlib import Path

from chaos_cases import CASES, Case

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "fault_tolerance.md"
TIMES = Path(__file__).parent / "times.json"
BEGIN, END = "<!-- chaos table: tests/chaos/document.py -->\n", "<!-- end of the chaos table -->\n"


def table() -> str:
    """A row for each process and signals with the same phases and outcome."""
    times = json.loads(TIMES.read_text())
    by_signal: dict[tuple[str, str, str], list[Case]] = {}
    for case in CASES:
        by_signal.setdefault((case.who, case.then, case.how), []).append(case)

    def row_of(cases: list[Case]) -> tuple[str, str, bool, tuple[str, ...]]:
        first = cases[0]
        return first.who, first.then, first.how == "SIGSTOP", tuple(case.phase for case in cases)

    lines = ["| struck | how | in which phases | the run | seconds |", "|---|---|---|---|---|"]
    for (who, then, _, phases), found in groupby(sorted(by_signal.values(), key=row_of), row_of):
        cases = [case for one in found for case in one]
        hows = ", ".join(sorted({case.how for case in cases}))
        took_s = [times[case.name] for case in cases]
        seconds = f"{min(took_s):.1f} to {max(took_s):.1f}"
        lines.append(f"| {who} | {hows} | {', '.join(phases)} | {then} | {seconds} |")
    lines.append(f"\n{len(CASES)} cases, {sum(case.fast for case in CASES)} of them in `make test`.")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The page with the table of now."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
