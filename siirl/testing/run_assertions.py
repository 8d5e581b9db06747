"""Of whole runs: that they go through, on one rank as on two, killed as undisturbed; and of the real job."""

import math
from typing import Any

import torch
from torch import Tensor

from siirl.compiler.cost.device_kinds import chosen_device
from siirl.compiler.cost.step_time import step_time
from siirl.errors import UserError
from siirl.launch.devices import device_name, rank_memory_gib
from siirl.show.memory_text import memory_table
from siirl.testing.trial import Outcome, Trial
from siirl.testing.verdicts import (
    SAME,
    Verdict,
    failing,
    nodes_of,
    not_here,
    of_failed,
    passed,
    trains_policy,
)

MEMORY = "memory: "
"""Begins the warnings of phases that may not fit a device."""


def the_steps_run(trial: Trial) -> Verdict:
    """The workflow goes through its training steps."""
    outcome = trial.alone
    if outcome.error:
        return of_failed(outcome, "", "Correct what it names; nothing else can be said before the steps run.")
    steps = {record.step for record in outcome.records()}
    names = ", ".join(trial.plan.nodes)
    return passed(f"{len(steps)} steps of {names} in {outcome.seconds:.1f} s")


def one_rank_equals_two(trial: Trial) -> Verdict:
    """On two ranks the same is sampled, rewarded and learnt as on one."""
    two = trial.runs["two_ranks"]
    if two.error:
        return of_failed(two, "the run on two ranks failed: ")
    told = []
    for node in trial.plan.nodes:
        one_rows, two_rows = _by_row(trial.alone, node), _by_row(two, node)
        for name in ("response_ids", "env_reward", "score", "advantage"):
            mine = {row: found[name] for row, found in one_rows.items() if name in found}
            theirs = {row: found[name] for row, found in two_rows.items() if name in found}
            if mine.keys() != theirs.keys():
                return failing(
                    f"{name} of node {node!r}: {len(mine)} rows on one rank, {len(theirs)} on two",
                    "Let the node treat each row, or each group, by itself.",
                )
            wrong = [row for row in mine if not _same(mine[row], theirs[row])]
            if wrong:
                return failing(
                    f"{name} of {len(wrong)} of {len(mine)} rows of node {node!r} is another one on two",
                    "Let rewards, tools, environments and nodes depend on the row and its seed alone, not on "
                    "what else is on the rank.",
                )
            if mine:
                told.append(f"{name} of {node}")
    for node in nodes_of(trial, trains_policy):
        mine, theirs = (_norms(run, node.name) for run in (trial.alone, two))
        if mine and theirs and abs(mine[0] - theirs[0]) > 0.01 * max(mine[0], SAME):
            return failing(
                f"the gradient of {node.name!r} has norm {mine[0]:.6g} on one rank, {theirs[0]:.6g} on two",
                "Normalise by sums over all ranks (sum_over_ranks), not by those of one.",
            )
        if mine and theirs:
            told.append(f"gradient of {node.name} {mine[0]:.4g} and {theirs[0]:.4g}")
    return passed("equal: " + "; ".join(told))


def _norms(run: Outcome, node: str) -> list[float]:
    found = (x.metrics.get("actor/grad_norm") for x in run.records(1) if x.node == node)
    return [norm for norm in found if norm is not None and math.isfinite(norm)]


def _by_row(run: Outcome, node: str) -> dict[int, dict[str, Any]]:
    """row_id -> the fields of what a node wrote in the first step, where it knows its rows."""
    found: dict[int, dict[str, Any]] = {}
    for record in run.records(1):
        if record.node != node or not record.has("row_id"):
            continue
        for place, row in enumerate(record.wrote.get("row_id", record.read.get("row_id")).tolist()):
            names = [name for name in record.wrote if isinstance(record.wrote[name], Tensor)]
            found[row] = {name: record.wrote[name][place] for name in names}
            if "response_ids" in found[row] and record.has("response_length"):
                length = int(record.column("response_length")[place])
                found[row]["response_ids"] = found[row]["response_ids"][:length]
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dim() and one.shape != other.shape:
        width = min(one.shape[0], other.shape[0])
        one, other = one[:width], other[:width]
    return bool(torch.allclose(one.double(), other.double(), rtol=SAME, atol=SAME))


def resume_equals_undisturbed(trial: Trial) -> Verdict:
    """A run that was killed and gone on with ends with the same weights, bit for bit."""
    resumed = trial.runs["resumed"]
    if resumed.error:
        return of_failed(resumed, "the run that was killed did not go on: ")
    last = max((step for one in trial.alone.evidence for step in one.digests), default=0)
    mine, theirs = (
        {name: digest for one in run.evidence for name, digest in one.digests.get(last, {}).items()}
        for run in (trial.alone, resumed)
    )
    other = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    restarted = sum(record.metrics.get("rollout/restarted", 0) for record in resumed.records(last))
    if other and restarted:
        return not_here(f"it went on; {restarted:g} groups in flight restarted (docs/async_reference.md)")
    if other:
        return failing(
            f"{', '.join(other)} after step {last} is not what it is without the kill",
            "Keep what nodes, tools and environments remember from step to step in ctx.state, or nowhere.",
        )
    return passed(f"killed in step {last}, gone on with: weights of {', '.join(mine)} equal bit for bit")


def the_real_job_fits(trial: Trial) -> Verdict:
    """The job as it is planned, with its own models on its own devices: memory, and the time of a step."""
    real = trial.real
    if real is None:
        return failing(trial.refused, "Change the keys that it names; `siirl plan` shows the plan.")
    if too_much := [line for line in real.warnings if line.startswith(MEMORY)]:
        return failing(" ".join(too_much), "Take the keys that it names, or more devices.")
    table = memory_table(real.plan, real.node_cfgs, rank_memory_gib(real.cfg))
    told = [" ".join(line.split()) for line in table if not line.startswith(("phase ", "("))][-1:]
    try:
        kind, _ = chosen_device(None, device_name())
        found = step_time(real.plan, real.node_cfgs, kind)
    except UserError as error:
        found = str(error)
    if not isinstance(found, str):
        told.append(f"a step of the longest rows takes {found.step_s:.3g} s on {kind.name}")
    told += [f"warning: {line}" for line in real.warnings[:1]]
    return passed("; ".join(filter(None, told)) or "nothing is known of its sizes")
