"""Fits the constants of the cost model to measured steps, and says how far its predictions are from others.

    python benchmarks/fit_costs.py

Reads benchmarks/results, prints the constants of siirl/compiler/cost/device_kinds.py as they are fitted, and
the table of docs/evidence/predictions.md: what that file predicts against what was measured, of the files
that were fitted to and of those held out.
Runs without torch and without a device. A step's time is a sum of amounts of work over rates, so the fit is
least squares of relative errors. Files of a call that was cut (report_file.py) count with the steps that they
have; a run of which no step was counted is left out.
"""

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import long_tail
import numpy as np
from backends_gpu import SHAPES as BACKEND_SHAPES
from grpo_gpu import COMMON, HERE, SHAPES, overrides

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.cost.device_kinds import H200, Constant, DeviceKind, scaled
from siirl.compiler.cost.lengths import Lengths, lengths_of
from siirl.compiler.cost.step_time import StepTime, step_time
from siirl.compiler.memory.estimate import model_shape
from siirl.compiler.plan import Plan
from siirl.config import Config, load_config
from siirl.dag.ops import LATER_OLD_LOG_PROB, OLD_LOG_PROB

RESULTS = HERE / "results"
FITTED = (
    *("grpo_gpu_A_1", "grpo_gpu_B_1", "grpo_gpu_A_4", "grpo_gpu_A_4_tp2"),
    *("backends_gpu_speed_1.7B_1_tp1", "backends_gpu_speed_1.7B_4_tp4", "backends_gpu_vllm_1.7B_1_tp1"),
    "backends_gpu_speed_1.7B_1_shared",
)
"""The files that the constants are fitted to; all others are held out."""
EXPERTS = ("experts_gpu_30B-A3B-8_2_ep2",)
"""The same for the constant of experts, by itself, as these are of H100s."""
HOST = "memory_checkpoint_gpu_A_1"
"""The file of the rate between device and host: it saves to host memory."""
KINDS = (
    *("grpo_gpu_*", "shared_prompts_gpu_A_1", "one_pass_draws_gpu_*", "flash_four_gpu_A_1"),
    "one_call_gpu_A_1",
)
"""Of files of grpo_gpu.py, the newest last; those of the first kind are of a siirl that computed more."""
CARD = "H200"
"""The constants are of this card: what was measured on another one is no test of them."""
TIMES = {
    "actor_train": "time/actor_train_s",
    "actor_old_log_prob": "time/actor_old_log_prob_s",
    "reference_log_prob": "time/reference_log_prob_s",
    "rollout_actor": "time/rollout_actor_s",
    "weights of agent_0.rollout": "time/weight_sync_s",
}
"""Phase -> metric."""
ROUNDS = 8


@dataclass(frozen=True)
class Measured:
    """A run in benchmarks/results."""

    name: str
    """File, and strategy where it has several."""
    fitted: bool
    today: bool
    """Whether it computed as siirl does today; else old log-probs of all rows, and what step_time says."""
    plan: Plan
    configs: dict[str, Config]
    seconds: dict[str, float]
    """Metric -> median."""
    lengths: Lengths | None = None
    """Of rows; None: as long as the keys allow."""
    card: str = "h200"
    keys: tuple[str, ...] = ()
    """Of its command, with the model's folder here."""


def measured_runs(folder: Path) -> Iterator[Measured]:
    """The runs of grpo_gpu.py and backends_gpu.py that have times; config.json files go to a folder."""
    for file in (file for kind in KINDS for file in sorted(RESULTS.glob(f"{kind}.json"))):
        result = json.loads(file.read_text())
        if "time/step_s" not in result["metrics"]:
            continue
        arguments = argparse.Namespace(
            train_tokens=40960, forward_tokens=81920, gpu_memory=0.6, steps=6, keys=result["keys"],
            tensor_parallel=result["tensor_parallel"], gpus=result["gpus"],
            best_flags=result.get("best_flags", False),
        )  # fmt: skip
        shape = SHAPES[result["workload"]]
        keys = overrides(arguments, folder, result.get("prompts", shape["prompts"] * result["gpus"]))
        today = not file.stem.startswith("grpo_gpu")
        yield _measured(file.stem, "", keys, folder, shape, result["gpus"], result["metrics"], today)
    for file in sorted(RESULTS.glob("backends_gpu_[sv]*.json")):
        result = json.loads(file.read_text())
        settings, today = result["settings"], "commit" in result  # which older files do not name
        if not all(CARD in card for card in result["machine"]["gpus"]):
            continue
        for run, metrics in result["runs"].items():
            if "time/step_s" not in metrics:
                continue
            sizes, gpus = BACKEND_SHAPES[settings["shape"]].sizes, settings["gpus"]
            yield _measured(file.stem, run, result["keys"][run], folder, sizes, gpus, metrics, today)
    yield from _long_tails(folder)
    yield from _experts(folder)


def _experts(folder: Path) -> Iterator[Measured]:
    """The runs of backends_gpu.py of a mixture of experts, on H100s."""
    for file in sorted(RESULTS.glob("experts_gpu_*.json")):
        result = json.loads(file.read_text())
        settings = result["settings"]
        sizes = BACKEND_SHAPES[settings["shape"]].sizes | {"model_type": "qwen3_moe"}
        made = folder / settings["shape"]
        made.mkdir(exist_ok=True)
        for run, metrics in result["runs"].items():
            keys = result["keys"][run]
            found = _measured(file.stem, run, keys, made, sizes, settings["gpus"], metrics, today=True)
            yield replace(found, card="h100", fitted=file.stem in EXPERTS)


def _long_tails(folder: Path) -> Iterator[Measured]:
    """The runs of long_tail.py on GPUs: means, as their steps differ; with a lag, of whole cycles, in which
    responses that go on come to their ends."""
    for file in sorted(RESULTS.glob("long_tail_vllm_gpu*.json")):
        result = json.loads(file.read_text())
        for lag, found in result["lags"].items():
            args = long_tail.arguments(shlex.split(result["command"].partition(";")[0])[1:])
            made = folder / file.stem / lag
            made.mkdir(parents=True)
            vocabulary = COMMON["vocab_size"]
            keys = long_tail.job_keys(args, made, made, lag, vocabulary)
            block, cycle = found["blocks"][0], 1 + int(lag)
            times = {"time/step_s": block["step_s"], "time/rollout_actor_s": block["rollout_s"]}
            if args.apart and cycle > 1:
                del times["time/rollout_actor_s"]  # what the trainer waits for it, not how long it takes
            means = {
                name: {"median": fmean(values[: len(values) // cycle * cycle])}
                for name, values in times.items()
            }
            run = _measured(file.stem, f"lag {lag}", keys, folder, SHAPES["A"], 1 + args.apart, means)
            yield replace(run, lengths=lengths_of(f"{args.prompt_tokens}+{args.mean_tokens}"))


def _measured(
    stem: str,
    run: str,
    keys: list[str],
    folder: Path,
    sizes: dict,
    gpus: int,
    metrics: dict[str, Any],
    today: bool = False,
) -> Measured:
    model = folder / f"{sizes['hidden_size']}"
    model.mkdir(exist_ok=True)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **COMMON, **sizes}
    config.pop("prompts", None)
    (model / "config.json").write_text(json.dumps(config))
    path = "actor_rollout_ref.model.path="
    keys = [*(key for key in keys if not key.startswith(path)), f"{path}{model}"]
    cfg = load_config(keys)
    plan, configs = compile_plan(load_dag(cfg), cfg, gpus)
    seconds = {name: value["median"] for name, value in metrics.items() if isinstance(value, dict)}
    plan = plan if today else _with_whole_pass(plan)
    name = f"{stem} {run}".strip()
    return Measured(name, stem in FITTED, today, plan, configs, seconds, keys=tuple(keys))


def _with_whole_pass(plan: Plan) -> Plan:
    """The plan as it was when older files were measured: old log-probs of all rows."""
    nodes = {
        name: replace(node, op=OLD_LOG_PROB.name) if node.op == LATER_OLD_LOG_PROB.name else node
        for name, node in plan.nodes.items()
    }
    return replace(plan, nodes=nodes)


def predicted(run: Measured, device: DeviceKind) -> StepTime:
    """The prediction for a run."""
    device = device if run.card == device.name else scaled(run.card, device)
    found = step_time(run.plan, run.configs, device, run.lengths, run.today)
    assert isinstance(found, StepTime), found
    return found


def fit(runs: list[Measured], device: DeviceKind = H200) -> DeviceKind:
    """The device with constants that predict the phases of the fitted runs best."""
    alone = ("network", "experts", "host", "decode_hop")
    names = {constant.what: name for name, constant in device.constants.items() if name not in alone}
    for _ in range(ROUNDS):
        found = [
            [parts.get(what, 0.0) / seconds for what in names]
            for run in (run for run in runs if run.fitted and run.card == device.name)
            for parts, seconds in _observations(run, predicted(run, device))
        ]
        amounts = np.array(found)
        factors = _not_negative(amounts, np.ones(len(found)))
        constants = dict(device.constants)
        for name, factor in zip(names.values(), factors, strict=True):
            old = constants[name]
            value = old.value / factor if old.unit.endswith("/s") else old.value * factor
            constants[name] = replace(old, value=float(value))
        device = replace(device, constants=constants)
    device = replace(device, constants=device.constants | {"host": _host(device.constants["host"])})
    return _with_experts([run for run in runs if run.fitted and run.card != device.name], device)


def _host(constant: Constant) -> Constant:
    """The rate at which a run saved its state to host memory: weights and two moments in fp32."""
    (run,) = json.loads((RESULTS / f"{HOST}.json").read_text())["runs"]
    state = 12 * model_shape({"model_type": "qwen3", **COMMON, **SHAPES["A"]}).params
    return replace(constant, value=state / run["metrics"]["time/memory_checkpoint_s"]["median"])


def _with_experts(runs: list[Measured], device: DeviceKind) -> DeviceKind:
    """The device with a rate of experts' products that predicts these runs best, all else as it is."""
    experts = device.constants["experts"]
    found = [
        (parts.get(experts.what, 0.0) / seconds, sum(parts.values()) / seconds)
        for run in runs
        for parts, seconds in _observations(run, predicted(run, device))
    ]
    amounts, sums = np.array(found or [(1.0, 1.0)]).T
    factor = float(amounts @ (1 - sums + amounts) / (amounts @ amounts))
    return replace(
        device,
        constants=device.constants | {"experts": replace(experts, value=experts.value / factor)},
    )


def _observations(run: Measured, found: StepTime) -> Iterator[tuple[dict[str, float], float]]:
    """(kind of work -> predicted seconds, measured seconds) of each phase; waking by itself where it was."""
    waking = H200.constants["wake"].what
    for phase in found.phases:
        seconds, parts = run.seconds.get(TIMES.get(phase.name, "")), dict(phase.parts)
        if seconds is None:
            continue
        if phase.name == "rollout_actor":
            seconds += run.seconds.get("time/reshard_s", 0.0)  # in which ranks wait for the slowest
            if "time/rollout_actor/wake_s" in run.seconds:
                woken = sum(run.seconds[f"time/rollout_actor/{name}_s"] for name in ("wake", "sleep"))
                seconds -= woken
                yield {waking: parts.pop(waking)}, woken
        yield parts, seconds


def _not_negative(amounts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares in which no factor falls below a hundredth: what does falls out, one after the other."""
    free = list(range(amounts.shape[1]))
    while True:
        found = np.full(amounts.shape[1], 0.01)
        rest = wanted - amounts @ np.where(np.isin(range(len(found)), free), 0.0, found)
        found[free] = np.linalg.lstsq(amounts[:, free], rest, rcond=None)[0]
        worst = min(free, key=lambda index: found[index])
        if found[worst] >= 0.01:
            return found
        free.remove(worst)


def errors(runs: list[Measured], device: DeviceKind = H200) -> list[str]:
    """The table of docs/evidence/predictions.md, as lines of Markdown."""
    heads = ("run", "step, s", "predicted", "error", "rollout", "old log-probs", "reference", "update")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for title in dict.fromkeys(map(_section, runs)):
        lines.append(f"| **{title}** | | | | | | | |")
        for run in (run for run in runs if _section(run) == title):
            found = predicted(run, device)
            phases = {phase.name: phase.seconds for phase in found.phases}
            cells = []
            for phase in ("rollout_actor", "actor_old_log_prob", "reference_log_prob", "actor_train"):
                seconds = run.seconds.get(TIMES[phase])
                cells.append(_percent(phases[phase], seconds) if seconds and phase in phases else "")
            step = run.seconds["time/step_s"]
            own = [run.name, f"{step:.1f}", f"{found.step_s:.1f}", _percent(found.step_s, step)]
            lines.append(f"| {' | '.join([*own, *cells])} |")
    return lines


def _section(run: Measured) -> str:
    """Of the table."""
    if run.lengths is not None:
        return "held out, responses of many lengths"
    if run.card != "h200":
        return f"experts, on H100s, {'fitted to' if run.fitted else 'held out'}"
    return "fitted to" if run.fitted else "held out, of today" if run.today else "held out"


def _percent(found: float, measured: float) -> str:
    return f"{round(100 * (found / measured - 1)):+d}%"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = list(measured_runs(Path(folder)))
        for name, constant in fit(runs).constants.items():
            print(f"{name:16s} {constant.value:.3g} {constant.unit}")
        print("\n".join(errors(runs)))


if __name__ == "__main__":
    main()
