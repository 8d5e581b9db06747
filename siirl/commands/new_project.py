"""`siirl new`: a folder with a small project that works as it is, to be changed piece by piece."""

from importlib.resources import files
from pathlib import Path

from siirl.errors import ConfigError

PROJECT = "project"


def write_project(folder: Path) -> str:
    """Copy the project into a folder that is new or empty; what to do next. ConfigError if it is neither."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} is there and not empty: nothing is overwritten. Choose a new folder."
            )
        folder.mkdir(parents=True, exist_ok=True)
        for source in sorted(files("siirl.commands").joinpath(PROJECT).iterdir(), key=lambda path: path.name):
            if source.name.endswith(".txt"):  # no Python of ours: it is the user's when it is written
                target = folder / source.name.removesuffix(".txt")
                target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
                if target.suffix == ".sh":
                    target.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}. Choose another folder.") from error
    return (
        f"wrote {folder.absolute()}. Next:\n  cd {folder}\n  python prepare.py      # data and a tiny model\n"
        "  ./run.sh --check       # what a run would refuse\n"
        "  python -m pytest -q    # the reward and the environment\n"
        "  ./run.sh               # train, about a minute on a CPU"
    )
