"""`siirl plan --from RUN key=value`: what a recorded run would take with other keys, by its own measurements.

The run's plan and the changed one are both predicted by the cost model; each part is then corrected by what
the run took for it (siirl/compiler/cost/calibration.py). No torch.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from siirl.commands.recorded_run import RecordedRun, from_here
from siirl.commands.resume import permissions
from siirl.compiler.cost.calibration import (
    FEWEST,
    SYNCS,
    Calibration,
    calibrated,
    lengths_under,
    step_means,
)
from siirl.compiler.cost.device_kinds import CPU, DeviceKind, chosen_device
from siirl.compiler.cost.lengths import Lengths, lengths_of
from siirl.compiler.cost.step_time import StepTime, rank_rows, step_time
from siirl.compiler.memory.phases import host_peaks, memory_lines, phase_peaks
from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Run
from siirl.config import Config, with_overrides
from siirl.config.load import read_config
from siirl.config.resolve import get
from siirl.config.tree import from_dict, put
from siirl.config.values import plain
from siirl.errors import ConfigError
from siirl.findings import Findings
from siirl.launch.devices import named_machine
from siirl.launch.run_record import CONFIG_FILE
from siirl.launch.survey import survey, survey_inputs, with_choices
from siirl.parallel.placement import format_ranks
from siirl.runs.folder_reader import Skipped
from siirl.runs.run_files import read_history, read_job, read_plan, read_starts
from siirl.show.batch_text import parts_text, seconds_text
from siirl.spelling import GIB, aligned, gib_texts

Configs = Mapping[str, Config]
MACHINE = ("trainer.device", "trainer.nnodes", "trainer.n_gpus_per_node")
LEAST = 0.01
"""Of a step: shorter parts are left out."""


@dataclass(frozen=True)
class Case:
    """A plan, and what it is predicted for."""

    cfg: Config
    plan: Plan
    configs: Configs
    kind: DeviceKind
    lengths: Lengths | None

    def time(self, recorded: Calibration) -> StepTime:
        """ConfigError for a model whose config.json is not known."""
        found = step_time(self.plan, self.configs, self.kind, self.lengths, recorded=recorded)
        if isinstance(found, str):
            raise ConfigError(f"the time of a step cannot be predicted: {found}.")
        return found

    def peaks(self) -> dict[str, float]:
        """Phase -> estimated GiB of the fullest device; on CPUs, of a process."""
        lines = memory_lines(self.plan, self.configs)
        if isinstance(lines, str):
            return {}
        if on_cpu(self.cfg):
            whole = {peak.node: sum(peak.parts.values()) for peak in host_peaks(self.plan, lines)}
            return {node: size / GIB / self.plan.world_size for node, size in whole.items()}
        gib = self.cfg.trainer.device_memory_gib or self.kind.gib
        found: dict[str, float] = {}
        for peak in phase_peaks(self.plan, lines, int(gib * GIB)):
            found[peak.node] = max(found.get(peak.node, 0.0), peak.device / GIB)
        return found


def on_cpu(cfg: Config) -> bool:
    return cfg.trainer.device == "cpu"


def what_if(folder: Path, overrides: list[str], device: str | None, trust: bool) -> str:
    """The report: seconds of each part, memory and staleness, as recorded and with other keys.

    device: the kind that the changed run has; else that of the run. trust: the folder names code that makes
    the workflow, and others can change it. ConfigError: the run has too few steps, or its plan cannot be
    read. UserError: all that is wrong with the changed keys.
    """
    run = RecordedRun.read(folder)
    means = step_means(read_history(folder, Skipped()).series)
    plan = read_plan(folder)
    if not means or plan is None:
        what = f"fewer than {FEWEST} steps" if plan is not None else "no plan that can be read"
        raise ConfigError(
            f"--from {folder}: the run has {what}: what it took says nothing of another one. Choose another "
            "run, or let it go on; siirl plan --explain predicts without one."
        )
    base, lines = _base(run, plan, device)
    given = from_here(overrides)
    changed = _changed(run, base, given, device, trust, means)
    calibration = _calibration(base, _recorded(base, means), means["time/step_s"])
    before, after = base.time(calibration), changed.time(calibration)
    with_keys = f" and with {' '.join(overrides)}" if overrides else ""
    body = [
        *_parts_table(before, after, calibration.rest_s),
        *_memory(base, changed, means),
        *_staleness(base, changed, means, after),
        *(f"not counted: {line}" for line in after.not_counted),
        *(f"assumed: {line}" for line in dict.fromkeys([*lines, *_assumed(base, before, after)])),
    ]
    return "\n".join([f"a step of {folder}, as recorded{with_keys}", *(f"  {line}" for line in body)])


def _base(run: RecordedRun, plan: Plan, device: str | None) -> tuple[Case, list[str]]:
    """The run as it was, and what is to be said of it."""
    cfg = from_dict(read_job(run.folder, Skipped())["config"])
    _, start = read_starts(run.folder, Skipped())
    kind, lines = CPU, list[str]()
    if not on_cpu(cfg):
        kind, lines = chosen_device(None if start.device else device, start.device or None)
    configs = {name: with_overrides(cfg, node.overrides) for name, node in plan.nodes.items()}
    lengths = None
    try:
        lengths = lengths_of(str(run.folder))
    except ConfigError:
        lines.append("the run has no lengths of one agent's responses")
    return Case(cfg, plan, configs, kind, lengths), lines


def _changed(
    run: RecordedRun,
    base: Case,
    given: list[str],
    device: str | None,
    trust: bool,
    means: Mapping[str, float],
) -> Case:
    """The run with other keys, checked as by `siirl check --elsewhere`; what nobody set is chosen anew."""
    if base.cfg.dag.custom_pipeline_fn:
        given = permissions(run, "siirl plan --from", given, trust) + given
    run.enter_directory()
    found = Findings()
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, CONFIG_FILE)
        file.write_text(_set_keys(base.cfg), encoding="utf-8")
        cfg = read_config(given, str(file), found)
    kind = chosen_device(device, base.kind.name)[0] if not on_cpu(cfg) else CPU
    seen = survey_inputs(replace(survey(cfg, found), asks_hub=False), True, found)
    found.close()
    chosen = with_choices(seen, named_machine(seen.cfg, kind))
    assert chosen.plan is not None, "without a plan there is a problem"
    lengths = base.lengths
    if lengths is not None:
        before, most = (one.actor_rollout_ref.rollout.response_length for one in (base.cfg, cfg))
        lengths = lengths_under(lengths, before, most, means.get("rollout/truncated", 0.0))
    return Case(seen.cfg, chosen.plan, chosen.node_cfgs, kind, lengths)


def _set_keys(cfg: Config) -> str:
    """The keys that somebody set, as YAML, and on what the run was: keys that follow others still do."""
    tree: dict[str, Any] = {}
    for name in {*cfg.explicit, *MACHINE}:
        put(tree, name, plain(get(cfg, name)))
    return yaml.safe_dump(tree)


def _recorded(base: Case, means: Mapping[str, float]) -> dict[str, float]:
    """Phase -> mean seconds; weights of several engines share those of all syncs as they are predicted."""
    found = base.time(Calibration())
    syncs = {phase.name: phase.seconds for phase in found.phases if phase.kind == "sync"}
    whole = sum(syncs.values())
    recorded = {name: means.get(SYNCS, 0.0) * seconds / whole for name, seconds in syncs.items() if seconds}
    for ins in base.plan.instructions:
        if isinstance(ins, Run) and (seconds := means.get(f"time/{ins.node}_s")):
            behind = base.plan.nodes[ins.node].runs_in_background
            recorded[ins.node] = means["time/step_s"] if behind else seconds
    return recorded


def _calibration(base: Case, recorded: Mapping[str, float], step_s: float) -> Calibration:
    """By what the run's parts differ from the model, and what is left of its step."""
    predicted = {phase.name: (phase.kind, phase.seconds) for phase in base.time(Calibration()).phases}
    own = {name for name in recorded if name not in predicted and name in base.plan.nodes}
    rows = {name: rank_rows(base.plan, base.configs, name) for name in own}
    found = calibrated(recorded, predicted, rows)
    if (parts_s := base.time(found).step_s) > step_s:
        return found.scaled(step_s / parts_s)
    return replace(found, rest_s=step_s - parts_s)


def _parts_table(before: StepTime, after: StepTime, rest_s: float) -> list[str]:
    """Each part of a step in both, and the step; what hardly counts in either is left out."""
    rows = [["part", "ranks", "recorded, s", "changed, s", "where it goes, s"]]
    was = {phase.name: phase for phase in before.phases}
    now = {phase.name: phase for phase in after.phases}
    for name in dict.fromkeys([*now, *was]):
        old, new = was.get(name), now.get(name)
        times = [phase.seconds if phase else 0.0 for phase in (old, new)]
        if max(times) < LEAST * max(before.step_s, after.step_s):
            continue
        texts = [seconds_text(time) if time else "-" for time in times]
        rows.append([name, format_ranks(new.ranks) if new else "", *texts, parts_text(new) if new else ""])
    if rest_s > LEAST * before.step_s:
        rows.append(["between the parts", "", *[seconds_text(rest_s)] * 2, "as recorded"])
    ratio = f"{after.step_s / before.step_s:.2f} times as long"
    rows.append(["step", "", f"{before.step_s:.3g}", f"{after.step_s:.3g}", ratio])
    rates = [f"{found.tokens / found.step_s:,.0f}" for found in (before, after)]
    return aligned([*rows, ["trained tokens/s", "", *rates, ""]])


def _memory(base: Case, changed: Case, means: Mapping[str, float]) -> Iterator[str]:
    """The fullest phase: of the run as recorded, of the changed one as estimated, by how far the estimate of
    the run is from that. On CPUs processes hold more than models: what the estimate adds counts."""
    was, now = base.peaks(), changed.peaks()
    if not was or not now:
        return
    if on_cpu(base.cfg):
        if (recorded := means.get("memory/host_peak_gib")) is not None:
            more = max(now.values()) - max(was.values())
            yield f"memory: {recorded:.2f} GiB of a process recorded, {recorded + more:.2f} changed"
        return
    ratios = {node: held / was[node] for node in was if (held := _held_gib(node, means))}
    usual = fmean(ratios.values()) if ratios else 1.0
    found = {node: gib * ratios.get(node, usual) for node, gib in now.items()}
    node = max(found, key=lambda one: found[one])
    size = changed.cfg.trainer.device_memory_gib or changed.kind.gib
    taken, of = gib_texts(found[node], size)
    recorded = (
        f"{max(was[one] * ratio for one, ratio in ratios.items()):.1f} GiB recorded, " if ratios else ""
    )
    fits = "" if found[node] <= size else ": it does not fit"
    yield f"memory: {recorded}{taken} of {of} GiB changed, in {node}{fits}"


def _held_gib(node: str, means: Mapping[str, float]) -> float:
    """The most that a device held in a phase, 0 if it is not known. The whole device is looked at when a
    phase begins and ends, and what its allocator took in between may be gone by then."""
    kinds = ("device", "reserved", "peak")
    return max(means.get(f"memory/{node}_{kind}_gib", 0.0) for kind in kinds)


def _staleness(base: Case, changed: Case, means: Mapping[str, float], after: StepTime) -> Iterator[str]:
    """Of each rollout in whose steps rows may be of older weights."""
    for name, node in changed.plan.nodes.items():
        was = base.plan.nodes[name].max_lag if name in base.plan.nodes else 0
        if not (node.max_lag or was):
            continue
        mean = after.staleness.get(name, 0.0)
        recorded = means.get("rollout/staleness", means.get(f"agent_{node.agent}/rollout/staleness"))
        if base.plan.nodes[name] == node and recorded is not None:
            mean = recorded
        before = f"{recorded or 0.0:.1f} steps recorded, " if recorded is not None or not was else ""
        yield f"staleness of {name}: {before}{mean:.1f} changed, at most {node.max_lag}"


def _assumed(base: Case, before: StepTime, after: StepTime) -> Iterator[str]:
    """What a reader of the prediction should know of it."""
    yield from after.assumed
    missing = {phase.name for phase in after.phases} - {phase.name for phase in before.phases}
    for name in sorted(missing):
        yield f"{name}: the run has no such part; it is as far from the model as those of its kind"
    for name, node in base.plan.nodes.items():
        if node.runs_in_background:
            yield f"{name}: it ran behind the training; it counts as long as a step, the most that it took"
    if base.plan.interactions:
        yield "conversations: as many turns as recorded"
