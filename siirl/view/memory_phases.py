"""The memory of each phase of a step: what the plan estimated when the run started, and what was measured."""

import re
from collections.abc import Mapping
from typing import Any

from siirl.observe.curve import Series
from siirl.runs.folder_reader import mapping, number, word
from siirl.spelling import GIB

KINDS = ("peak", "reserved", "device")
HOST = "memory/host_peak_gib"
OFF = 0.15
"""By how much a measured phase differs from its estimate before the page says so."""
MOST_PARTS, MOST_PHASES, MOST_NAMED = 40, 2_000, 3
_MEASURED = re.compile(rf"memory/(.+)_({'|'.join(KINDS)})_gib")

Measured = dict[str, list[float]]
"""Kind -> [the most of all ranks and steps in GiB, the step that had it]."""


def memory_phases(job: Mapping[str, Any], series: Series) -> dict[str, Any]:
    """Phases with `estimate` (None without one) and what was measured; in GiB. on_host: of a machine without
    GPUs, all processes together.

    The estimate is that of the ranks on which the phase takes most; measured is the most of all ranks.
    """
    told, measured = mapping(job.get("memory_estimate")), _measured(series)
    estimates = _estimates(told.get("phases"))
    names = [*estimates, *sorted(measured.keys() - estimates)]
    phases = [{"name": name, "estimate": estimates.get(name), **measured.get(name, {})} for name in names]
    device_gib, on_host = number(told.get("device_gib")), told.get("on_host") is True
    return {
        "on_host": on_host,
        "device_gib": device_gib,
        "assumed": told.get("assumed") is True,
        "host": _most(series.get(HOST, {})),
        "phases": phases[:MOST_PHASES],
        "text": _of_a_host(estimates, device_gib)
        if on_host
        else _sentences(phases, device_gib, word(told.get("left_out"))),
    }


def _measured(series: Series) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for metric, points in series.items():
        name = _MEASURED.fullmatch(metric)
        if name and metric != HOST and (most := _most(points)):
            found.setdefault(word(name[1]), {})[name[2]] = most
    return found


def _most(points: Mapping[int, float]) -> list[float] | None:
    """[largest value, first step that had it]"""
    step = max(points, key=lambda at: (points[at], -at), default=None)
    return None if step is None else [float(f"{points[step]:.4g}"), step]


def _estimates(phases: Any) -> dict[str, dict[str, Any]]:
    """Node -> its estimate on the ranks that it takes most of."""
    found: dict[str, dict[str, Any]] = {}
    for phase in phases if isinstance(phases, list) else []:
        told = mapping(phase)
        sizes = {name: number(told.get(name)) for name in ("tensors", "device", "host")}
        if None in sizes.values():
            continue
        node = word(told.get("node"))
        here = {name: _gib(size) for name, size in sizes.items()}
        here |= {"ranks": word(told.get("ranks")), "parts": _parts(told.get("parts"))}
        if node not in found or here["device"] > found[node]["device"]:
            found[node] = here
    return found


def _parts(parts: Any) -> list[list[Any]]:
    """[model, kind, GiB], the largest first."""
    rows = (
        [row for row in parts if isinstance(row, list) and len(row) == 3] if isinstance(parts, list) else []
    )
    return [
        [word(model), word(what), _gib(number(size))]
        for model, what, size in rows[:MOST_PARTS]
        if number(size)
    ]


def _gib(size: float | None) -> float:
    return float(f"{(size or 0.0) / GIB:.4g}")


def _of_a_host(estimates: Mapping[str, dict[str, Any]], machine_gib: float | None) -> list[str]:
    """What a reader would look for in the estimate of a run without GPUs."""
    most = max(estimates, key=lambda name: estimates[name]["device"], default=None)
    if most is None:
        return []
    of = f" of the machine's {machine_gib:.4g} GiB" if machine_gib else ""
    took = (
        f"{most} takes the most by estimate, all processes together: {estimates[most]['device']:.3g} GiB{of}."
    )
    return ["Without GPUs the processes share the memory of their machine.", took]


def _sentences(phases: list[dict[str, Any]], device_gib: float | None, why: str) -> list[str]:
    """What a reader would look for in the numbers."""
    out = [f"There is no estimate: {why}."] if why else []
    seen = [phase for phase in phases if "peak" in phase]
    if not seen:
        return [*out, "No rank has measured the memory of a device: it has none, or no step is done yet."]
    most = max(seen, key=_taken)
    of = f" of a device's {device_gib:g} GiB" if device_gib else ""
    out.append(f"{most['name']} took the most: {_taken(most):.4g} GiB{of}.")
    off = [
        f"{phase['name']} by {_off(phase):+.0%}"
        for phase in seen
        if phase["estimate"] and abs(_off(phase)) > OFF
    ]
    if off:
        more = f" and {len(off) - MOST_NAMED} more" if len(off) > MOST_NAMED else ""
        out.append(
            f"The trainers' tensors differ from their estimate in {', '.join(off[:MOST_NAMED])}{more}. "
            "Less is usual where rows are shorter than the keys allow; more is what the estimate misses."
        )
    return out


def _taken(phase: Mapping[str, Any]) -> float:
    """GiB of a device that were in use for certain."""
    return max(phase[kind][0] for kind in KINDS if kind in phase)


def _off(phase: Mapping[str, Any]) -> float:
    """By which share of its estimate a phase took more."""
    return phase["peak"][0] / max(phase["estimate"]["tensors"], 1e-9) - 1
