"""Draw validation rewards of runs over their steps: a panel for each FOLDER, a line for each agent of a run.

FOLDER=METRIC draws what ends with /METRIC/mean in the place of the reward.
"""

import argparse
import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

DARK = """
   @media (prefers-color-scheme: dark) {
    text { fill: #c9d1d9 }
    [style*="#ffffff"] { fill: #0d1117 !important }
    [style*="stroke: #000000"] { stroke: #8b949e !important }
   }
"""
"""Style of a page that is read in the dark: it goes into each .svg."""


def rewards(folder: Path, metric: str) -> dict[str, dict[int, float]]:
    """Name of the run, and of the agent if there are several -> step -> value of the validation's metric."""
    found: dict[str, dict[int, float]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            agent = name.partition("val/")[0].rstrip("/")
            if "val/" in name and name.endswith(f"/{metric}/mean"):
                found.setdefault(f"{folder.name} {agent}".strip(), {})[line["step"]] = value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folders", nargs="+", metavar="FOLDER[=METRIC]", help="holds the output folder of each run"
    )
    parser.add_argument("picture", type=Path, help="an .svg or .png to write")
    args = parser.parse_args()

    number = len(args.folders)
    figure = Figure(figsize=(7 if number == 1 else 4 * number, 3.6), layout="constrained")
    panels = figure.subplots(1, number, sharey=True, squeeze=False)[0]
    for axes, text in zip(panels, args.folders, strict=True):
        name, _, metric = text.partition("=")
        parent, metric = Path(name), metric or "reward"
        axes.set(
            xlabel="training step", ylim=(0, 1.03), title=f"{parent.name}: {metric}" if number > 1 else None
        )
        for folder in sorted(path.parent for path in parent.glob("*/metrics.jsonl")):
            for name, found in rewards(folder, metric).items():
                axes.plot(list(found), list(found.values()), label=name, marker=".", linewidth=1.2)
                print(f"| {name} | " + " | ".join(f"{reward:.2f}" for reward in found.values()) + " |")
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    panels[0].set_ylabel("validation reward")
    with matplotlib.rc_context({"svg.hashsalt": "siirl", "svg.fonttype": "none"}):
        figure.savefig(args.picture, metadata={"Date": None} if args.picture.suffix == ".svg" else None)
    if args.picture.suffix == ".svg":
        args.picture.write_text(args.picture.read_text().replace("</style>", f"{DARK}</style>", 1))


if __name__ == "__main__":
    main()
