"""Logging of one worker: a rank prefix, a level from the environment, an optional file, quiet libraries."""

import logging
import os
import sys
import warnings
from pathlib import Path

from siirl.errors import ConfigError
from siirl.guarded_files import open_regular
from siirl.observe.printable import printable

QUIET = (
    "httpcore",
    "httpx",
    "httpx2",
    "urllib3",
    "filelock",
    "fsspec",
    "matplotlib",
    "PIL",
    "asyncio",
    "torch.distributed",
    "tensorboard",
)
TAIL_BYTES, TAIL_LINES, TAIL_COLUMNS = 1 << 18, 20, 400
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _CurrentStderr(logging.StreamHandler):
    """Writes to whatever sys.stderr is now: a live progress bar replaces it, to print above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


class _Printable(logging.Formatter):
    """Messages quote what models and users wrote: nothing of it moves a terminal's cursor."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def logging_file(log_dir: Path) -> Path | None:
    """What SIIRL_LOGGING_FILENAME names; a relative name is below `log_dir`."""
    name = os.environ.get("SIIRL_LOGGING_FILENAME")
    return log_dir / Path(name).expanduser() if name else None


def setup_logging(rank: int, log_dir: Path) -> None:
    """Configure the root logger of this process.

    SIIRL_LOG_VERBOSITY: DEBUG, INFO (default), WARNING, ERROR or CRITICAL; ranks other than 0 write to their
    own log files, all at the same level. SIIRL_LOGGING_FILENAME: also write there (see logging_file).
    """
    level = os.environ.get("SIIRL_LOG_VERBOSITY", "INFO").upper()
    if level not in _LEVELS:
        raise ConfigError(
            f"SIIRL_LOG_VERBOSITY={level!r} is no logging level. Use one of {', '.join(_LEVELS)}."
        )
    line = f"%(asctime)s [rank {rank}] %(levelname).1s %(name)s: %(message)s"
    handlers: list[logging.Handler] = [_CurrentStderr()]
    if path := logging_file(log_dir):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(logging.FileHandler(path))
        except OSError as error:
            raise ConfigError(
                f"SIIRL_LOGGING_FILENAME: {path} cannot be written: {error}. Choose another file."
            ) from error
    for handler in handlers:
        handler.setFormatter(_Printable(line, datefmt="%H:%M:%S"))
    for noisy in QUIET:  # setLevel goes through all loggers there are; that of the root does it below
        logging.getLogger(noisy).level = max(logging.WARNING, getattr(logging, level))
    logging.basicConfig(level=level, handlers=handlers, force=True)
    logging.captureWarnings(True)
    if level != "DEBUG":  # what torch will rename is for us to know, not for who reads the table
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")


def last_lines(path: Path, offset: int = 0) -> list[str]:
    """The last lines of a log, nothing before byte `offset`, where this run began; long ones are cut.

    All of one that is shorter than that: it was emptied since.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(offset if offset <= size else 0, size - TAIL_BYTES))
            return log_lines(log.read(TAIL_BYTES))
    except OSError:
        return []


def log_lines(data: bytes) -> list[str]:
    """The last lines of a part of a log, as they are shown."""
    lines = [printable(line) for line in data.decode(errors="replace").splitlines()[-TAIL_LINES:]]
    return [line if len(line) <= TAIL_COLUMNS else f"{line[:TAIL_COLUMNS]} ..." for line in lines]
