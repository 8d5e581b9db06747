"""What a script or a notebook does with a configuration: check it, look at its plan, train. No torch.

The console commands are made of the same functions.
"""

from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from siirl import main_dag
from siirl.compiler.cost.device_kinds import chosen_device
from siirl.compiler.cost.lengths import lengths_of
from siirl.compiler.cost.step_time import step_time
from siirl.compiler.plan import Plan
from siirl.compiler.plan_warnings import plan_notes
from siirl.config import Config
from siirl.errors import ConfigError, Place, WorkerError
from siirl.findings import Findings
from siirl.launch.devices import device_name, machine_of, named_machine, rank_memory_gib
from siirl.launch.job import Launcher, choose_launcher
from siirl.launch.launched_devices import assumed_devices, check_start, with_devices_here
from siirl.launch.preflight import kept_choices, with_template_date
from siirl.launch.run_folder import absolute, with_own_name
from siirl.launch.survey import Survey, survey, survey_inputs, with_choices
from siirl.observe.curve import METRICS_FILE, RunSeries, read_series
from siirl.show.batch_text import explanation
from siirl.show.memory_text import memory_warnings
from siirl.show.plan_picture import draw, drawn_as_svg
from siirl.show.plan_text import report

if TYPE_CHECKING:
    from networkx import DiGraph


@dataclass(frozen=True)
class PlannedRun:
    """The plan of a configuration. A notebook shows its picture and its report; print() the report."""

    cfg: Config
    plan: Plan
    """Who does what on which ranks, as data."""
    node_cfgs: dict[str, Config]
    """The configuration of each node that runs, with what the workflow sets for it alone."""
    warnings: list[str]
    """What will work, but perhaps not as meant: a line each."""
    data: list[str]
    """What the files of rows hold, where they are here: a line for each split."""
    surveyed: Survey
    """The same before anything was chosen for keys that nobody set."""

    def __str__(self) -> str:
        notes = "".join(f"note: {note}.\n" for note in plan_notes(self.plan))
        return report(self.plan, self.node_cfgs, rank_memory_gib(self.cfg)) + notes

    def explain(self, device: str | None = None, tokens: str | None = None) -> str:
        """Where the time of a step will go, by the cost model of docs/tuning.md, with what is chosen for it.

        device: a kind, as in "h200"; else that of the GPUs here. tokens: the mean lengths of rows, as in
        "256+600", or the folder of a run that has such rows; else all the longest. UserError for what cannot
        be predicted.
        """
        kind, lines = chosen_device(device, device_name())
        chosen = with_choices(self.surveyed, named_machine(self.cfg, kind))
        assert chosen.plan is not None, "without a plan there is a problem"
        found = step_time(chosen.plan, chosen.node_cfgs, kind, lengths_of(tokens))
        if isinstance(found, str):
            raise ConfigError(f"the time of a step cannot be predicted: {found}.")
        found.assumed[:0] = lines
        return explanation(found, kind.name, self.plan.world_size)

    def draw(self, path: str | Path) -> None:
        """Write the picture: .svg or .png."""
        draw(self.plan, Path(path), self.node_cfgs)

    def graph(self) -> "DiGraph[str]":
        """The nodes that run, with agent, op and ranks of each, below what they depend on: for networkx."""
        import networkx as nx  # here, as it takes a fifth of a second: `siirl check` need not wait for it

        found: DiGraph[str] = nx.DiGraph()
        for name, node in self.plan.nodes.items():
            found.add_node(name, agent=node.agent, op=node.op, ranks=self.plan.run_of(name).ranks)
            found.add_edges_from((above, name) for above in node.dependencies)
        return found

    def _repr_svg_(self) -> str:
        return drawn_as_svg(self.plan, self.node_cfgs)

    def _repr_html_(self) -> str:
        warnings = "".join(f"<p>warning: {escape(line, quote=False)}</p>" for line in self.warnings)
        picture = self._repr_svg_()
        words = f"<details><summary>in words</summary><pre>{escape(str(self), quote=False)}</pre></details>"
        return warnings + picture[picture.index("<svg") :] + words


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended well."""

    output_dir: Path
    """Its folder: checkpoints, the exported model (hf_model), logs, metrics."""

    def metrics(self) -> RunSeries:
        """metric -> {step: value}, named as in docs/metrics.md; earlier starts of it count, too."""
        return read_series(self.output_dir / METRICS_FILE)


def plan(cfg: Config) -> PlannedRun:
    """The plan of a configuration, for a cluster of any size; for this machine where nothing says how many
    devices there are. UserError: all that is wrong with it.

    Data and models may be on other machines, and are not looked for here.
    """
    return planned(cfg, elsewhere=True, found=Findings(), devices_here=True)


def check(cfg: Config, elsewhere: bool = False) -> list[str]:
    """Check all that can be checked before a run; returns its warnings. UserError: all that is wrong.

    elsewhere: data and models are on other machines; they are not looked for here, and no hub is asked.
    """
    return planned(cfg, elsewhere, found=Findings(), asks_hub=not elsewhere).warnings


def train(cfg: Config) -> FinishedRun:
    """Run the job of a configuration to its end, as `python -m siirl.main_dag` does; returns where it is.

    Workers are processes of their own: what a notebook defines is not seen by them, so functions of the user
    live in files. UserError before the start: all that is wrong. WorkerError if the run fails; its cause has
    been printed. KeyboardInterrupt if the user ended it.
    """
    cfg = with_own_name(cfg, shares_no_time=choose_launcher(cfg) == "torchrun")
    code = main_dag.run(cfg, Findings())
    output_dir = absolute(cfg.trainer.output_dir)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise WorkerError(
            f"the run in {output_dir} ended with exit code {code}: its cause is printed above, and each "
            f"rank's log is in {output_dir / 'logs'}. Mend that and train again."
        )
    return FinishedRun(output_dir)


def planned(
    cfg: Config,
    elsewhere: bool,
    found: Findings,
    devices_here: bool | None = None,
    asks_hub: bool = True,
) -> PlannedRun:
    """The run that a configuration plans. UserError: all that is wrong, with what `found` has already.

    elsewhere: data and models are on other machines. devices_here: whether a plan of which nobody said on how
    many devices it runs is for those of this machine; None: where data and models are here, too. asks_hub:
    whether the hub is asked for a config.json that is not here.
    """
    launcher: Launcher = "local"
    here = list[str]()
    with found.at(Place.MACHINE):
        launcher = choose_launcher(cfg)
        if devices_here or (devices_here is None and not elsewhere):
            cfg = with_devices_here(cfg, launcher)
        here += assumed_devices(cfg, launcher)
        if not elsewhere:
            here += _refused_here(cfg, launcher)
    with found.at():
        cfg = with_template_date(cfg)
    seen = replace(survey(cfg, found), asks_hub=asks_hub)
    surveyed = survey_inputs(seen, elsewhere, found)
    seen, too_much = surveyed, list[str]()
    if surveyed.has_sizes:
        seen = with_choices(surveyed, machine_of(cfg, launcher), kept_choices(cfg))
        if seen.plan is not None:
            too_much = memory_warnings(seen.plan, seen.node_cfgs, rank_memory_gib(seen.cfg), found)
    found.close()
    assert seen.plan is not None, "without a plan there is a problem"
    warnings = [*here, *seen.warnings, *too_much]
    return PlannedRun(seen.cfg, seen.plan, seen.node_cfgs, warnings, seen.data, surveyed)


def _refused_here(cfg: Config, launcher: Launcher) -> list[str]:
    """A warning where a start on this machine is refused, which may not be the machine of the run. UserError:
    torchrun has started this process, so it is."""
    try:
        check_start(cfg, launcher)
    except ConfigError as error:
        if launcher == "torchrun":
            raise
        return [f"a run that is started on this machine is refused: {error}"]
    return []
