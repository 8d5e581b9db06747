"""Draw the validation reward of runs over their steps: a line for each agent of each folder below FOLDER."""

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


def rewards(folder: Path) -> dict[str, dict[int, float]]:
    """Name of the run, and of the agent if there are several -> step -> validation reward."""
    found: dict[str, dict[int, float]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            agent = name.removesuffix("val/reward/mean").rstrip("/")
            if name.endswith("val/reward/mean"):
                found.setdefault(f"{folder.name} {agent}".strip(), {})[line["step"]] = value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the output folder of each run")
    parser.add_argument("picture", type=Path, help="an .svg or .png to write")
    args = parser.parse_args()

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="training step", ylabel="validation reward", ylim=(0, 1))
    for folder in sorted(path.parent for path in args.folder.glob("*/metrics.jsonl")):
        for name, found in rewards(folder).items():
            axes.plot(list(found), list(found.values()), label=name, marker=".", linewidth=1.2)
            print(f"| {name} | " + " | ".join(f"{reward:.2f}" for reward in found.values()) + " |")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    with matplotlib.rc_context({"svg.hashsalt": "siirl", "svg.fonttype": "none"}):
        figure.savefig(args.picture, metadata={"Date": None} if args.picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
