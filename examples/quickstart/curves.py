"""Draw the validation reward of quickstart runs over their steps: one line for each folder below FOLDER."""

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


def rewards(folder: Path) -> dict[int, float]:
    """Step -> validation reward of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val/reward/mean"] for line in lines if "val/reward/mean" in line}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the QUICKSTART_DIR of each run")
    parser.add_argument("picture", type=Path, help="an .svg or .png to write")
    args = parser.parse_args()

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="training step", ylabel="validation reward", ylim=(0, 1))
    for folder in sorted(path.parent for path in args.folder.glob("*/metrics.jsonl")):
        found = rewards(folder)
        axes.plot(list(found), list(found.values()), label=folder.name, marker=".", linewidth=1.2)
        print(f"| {folder.name} | " + " | ".join(f"{reward:.2f}" for reward in found.values()) + " |")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    with matplotlib.rc_context({"svg.hashsalt": "siirl", "svg.fonttype": "none"}):
        figure.savefig(args.picture, metadata={"Date": None} if args.picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
