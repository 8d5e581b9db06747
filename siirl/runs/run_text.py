"""Words and tables about runs, for a terminal: ages, sizes, numbers, cells that end where the line does."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from siirl.observe.columns import number
from siirl.observe.curve import Series
from siirl.runs.folder_reader import one_line
from siirl.spelling import aligned

UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def age_text(seconds: float) -> str:
    """A time that has gone by, by its largest unit: 3 d, 5 h, 12 min, 40 s."""
    for length, unit in UNITS:
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def last_and_best(series: Series) -> tuple[str, str]:
    """The last values of a reward, and the best ones with their steps; several agents are joined by a bar."""
    lasts, bests = [], []
    for points in series.values():
        best = max(points, key=lambda step: (points[step], -step))
        lasts.append(number(points[max(points)], 3))
        bests.append(f"{number(points[best], 3)} @{best}")
    return "|".join(lasts) or "-", "|".join(bests) or "-"


def path_text(folder: Path) -> str:
    """A path as one printable line."""
    return one_line(str(folder))


def short_command(command: str) -> str:
    """What of a command tells runs apart: the words after the program's name."""
    for program in ("-m siirl.main_dag ", "siirl run "):
        if program in command:
            return command.split(program, 1)[1]
    return command


def cut(text: str, width: int) -> str:
    """The text, or its beginning and three dots."""
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


def line_width() -> int | None:
    """Columns of the terminal; None where the output is no terminal and nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Aligned columns; the last one ends where the line does."""
    return "\n".join(line if width is None else cut(line, width) for line in aligned([head, *rows]))


def moment_text(time_s: float) -> str:
    """A moment on the clock of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
