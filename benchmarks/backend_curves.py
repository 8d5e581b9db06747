"""Curves of backends_gpu.py: how far apart they are, and pictures of them."""

import json
from pathlib import Path
from typing import Any

from report_file import write

BF16_TIMES = 2.0
"""Curves overlap that are nowhere further apart than so often what bf16 alone does."""


def overlap(runs: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """For each curve the largest distances, and whether Megatron's is within the tolerance of FSDP2's.

    Of the steps that both have, where one was cut.
    """

    def distance(one: str, other: str, name: str) -> float | None:
        if one not in runs or other not in runs:
            return None
        return max(abs(a - b) for a, b in zip(runs[one][name], runs[other][name], strict=False))

    found: dict[str, Any] = {}
    for name in next(iter(runs.values())):
        apart, bf16 = distance("megatron", "fsdp", name), distance("fsdp", "fsdp_fp32", name)
        found[name] = {"megatron_to_fsdp": apart, "fsdp_bf16_to_fp32": bf16}
        if apart is not None and bf16 is not None:
            found[name] |= {"tolerance": BF16_TIMES * bf16, "overlap": apart <= BF16_TIMES * bf16}
    return found


def plot(result: dict[str, Any], png: Path) -> None:
    """A picture of the curves: one panel for each metric, the tolerance as a band around FSDP2's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs, tolerances = result["runs"], result["overlap"]
    names = list(next(iter(runs.values())))
    figure, panels = plt.subplots(1, len(names), figsize=(5 * len(names), 4), layout="constrained")
    styles = {"fsdp": "-", "megatron": "--", "fsdp_fp32": ":"}
    for panel, name in zip(panels, names, strict=True):
        for run, curves in runs.items():
            panel.plot(
                range(1, len(curves[name]) + 1), curves[name], styles[run], label=run.replace("_", " ")
            )
        band = tolerances[name].get("tolerance")
        if band is not None and "fsdp" in runs:
            curve = runs["fsdp"][name]
            low, high = ([value + sign * band for value in curve] for sign in (-1, 1))
            label = f"FSDP2 in bf16 +- {band:.2g}"
            panel.fill_between(range(1, len(curve) + 1), low, high, alpha=0.2, label=label)
        panel.set(title=name, xlabel="step")
        panel.legend(fontsize="small")
    about = result["settings"]
    figure.suptitle(
        f"Qwen3 {about['shape']} shape, {about['gpus']} devices, Megatron {about['layout']}, FSDP2: the same "
        "weights and rows. Tolerance: what bf16 does to FSDP2, twice"
    )
    figure.savefig(png, dpi=110)
    print(f"wrote {png}")


def join_and_plot(files: list[Path], png: Path) -> None:
    """Join the runs of several curves files of the same settings, and plot them."""
    results = [json.loads(file.read_text()) for file in files]
    if any(result["settings"] != results[0]["settings"] for result in results):
        raise SystemExit(f"{', '.join(map(str, files))}: not of the same settings.")
    joined = results[0]
    for result in results[1:]:
        joined["runs"] |= result["runs"]
        joined["keys"] |= result["keys"]
        for name in ("asked_steps", "counted_steps"):
            joined[name] = joined.get(name, {}) | result.get(name, {})
    joined["complete"] = all(result.get("complete", True) for result in results)
    joined["overlap"] = overlap(joined["runs"])
    write(png.with_suffix(".json"), json.dumps(joined, indent=1) + "\n")
    plot(joined, png)
