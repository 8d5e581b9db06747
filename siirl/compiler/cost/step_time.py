"""The time of a step, predicted from the plan: each instruction's work, on the clocks of its ranks. Pure.

Ranks that wait for one another meet in the plan's instructions, so disaggregated nodes run beside
others, as they do in a run.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from siirl.compiler.backends import backend_of
from siirl.compiler.cost.calibration import Calibration
from siirl.compiler.cost.device_kinds import DEVICES, DeviceKind
from siirl.compiler.cost.lengths import Lengths, RowTokens
from siirl.compiler.cost.work import (
    PackedRows,
    Work,
    engine_flow,
    host_work,
    model_pass,
    packed_rows,
    rollout_work,
    sync_work,
)
from siirl.compiler.memory.estimate import BYTES, Activity, MemoryLine, ModelShape, read_shape
from siirl.compiler.memory.phases import engine_rows
from siirl.compiler.plan import ModelPlan, NodePlan, Plan
from siirl.compiler.plan_instructions import Repeat, Reshard, Run, SyncWeights
from siirl.config import Config
from siirl.config.batch import batch_of
from siirl.config.resolve import COMPUTE_DTYPE, get
from siirl.config.roles import ROLES
from siirl.dag.ops import LATER_OLD_LOG_PROB
from siirl.parallel.placement import Ranks
from siirl.spelling import GIB

WAITING = "pipeline bubble"
Configs = Mapping[str, Config]


@dataclass(frozen=True)
class Phase:
    """A node's Run, or a weight sync, on its ranks."""

    name: str
    ranks: Ranks
    begins_s: float
    """After the step's begin."""
    parts: dict[str, float]
    """Kind of work -> seconds, the largest first."""
    kind: str
    """rollout, pass, update, sync; other: no model's."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass
class StepTime:
    """The prediction of a step."""

    step_s: float = 0.0
    phases: list[Phase] = field(default_factory=list)
    """In the order of the plan."""
    not_counted: list[str] = field(default_factory=list)
    """What the model cannot predict: a line each."""
    assumed: list[str] = field(default_factory=list)
    """A line each."""
    tokens: int = 0
    """Of the rows that a step trains on."""
    staleness: dict[str, float] = field(default_factory=dict)
    """Node with asynchronous rollouts -> mean steps between a response's first token and its training."""
    beside: float = 0.0
    """Seconds of a rollout that go on while others train."""

    def longer(self, other: "StepTime") -> dict[str, float]:
        """Kind of work -> seconds that it takes longer than another step, most first; negative: less."""
        kinds: dict[str, float] = {}
        for sign, time in ((1, self), (-1, other)):
            for phase in time.phases:
                for what, seconds in phase.parts.items():
                    kinds[what] = kinds.get(what, 0.0) + sign * seconds
        return dict(sorted(kinds.items(), key=lambda kind: -abs(kind[1])))


@dataclass
class _Walk:
    """What is known while the instructions are walked."""

    plan: Plan
    configs: Configs
    shapes: dict[str, ModelShape]
    device: DeviceKind
    lengths: Lengths | None
    machine: int
    today: bool
    recorded: Calibration | None
    found: StepTime = field(default_factory=StepTime)
    on_host: dict[str, list[MemoryLine]] = field(default_factory=dict)
    """Of models that have been asked for: what they keep in host memory."""

    def row_tokens(self, cfg: Config) -> RowTokens:
        rollout = cfg.actor_rollout_ref.rollout
        if self.lengths is None:
            return RowTokens(rollout.prompt_length, rollout.response_length)
        return self.lengths.up_to(rollout.response_length)

    def packed(self, model: ModelPlan, cfg: Config) -> PackedRows:
        tokens = self.row_tokens(cfg)
        return packed_rows(model, cfg, tokens) if self.today else PackedRows(tokens, 1)

    def from_host(self, model: ModelPlan, activity: Activity) -> Work:
        """What a phase moves of what the model keeps in host memory."""
        cfg = ROLES[model.role].engine_cfg(self.configs[model.node])
        if model.name not in self.on_host:
            lines: list[MemoryLine] = []
            if _offloads(model, cfg):
                rows = engine_rows(self.plan, model, self.configs)
                lines = backend_of(model).memory(model, cfg, self.shapes[model.name], rows)
            self.on_host[model.name] = [line for line in lines if line.host]
        return host_work(self.on_host[model.name], activity)

    def parts(self, work: Work) -> dict[str, float]:
        """Kind of work -> seconds."""
        seconds: dict[str, float] = {}
        for name, amount in work.items():
            if (constant := self.device.constants.get(name)) is None:
                continue  # what the device hides behind other work
            seconds[constant.what] = seconds.get(constant.what, 0.0) + constant.seconds(amount)
        return seconds


def step_time(
    plan: Plan,
    configs: Configs,
    device: DeviceKind,
    lengths: Lengths | None = None,
    today: bool = True,
    recorded: Calibration | None = None,
) -> StepTime | str:
    """The prediction for a step, or why there is none: a config.json that is not known.

    lengths: of rows; the longest that the keys allow if None. today: False for steps of a siirl that computed
    a prompt with each of its samples, logits of large micro-batches twice, and Megatron's layers by its own
    functions. recorded: of a run, by which all is corrected, and all that it timed is counted.
    """
    shapes: dict[str, ModelShape] = {}
    for model in plan.models.values():
        if not backend_of(model).weights:
            continue
        shape = read_shape(ROLES[model.role].engine_cfg(configs[model.node]), model.role)
        if isinstance(shape, str):
            return shape
        shapes[model.name] = shape
    machine = next(iter(configs.values())).trainer.n_gpus_per_node
    walk = _Walk(plan, configs, shapes, device, lengths, machine, today, recorded)
    _walk(walk)
    walk.found.assumed[:0] = _assumptions(walk)
    return walk.found


def _walk(walk: _Walk) -> None:
    plan, clock = walk.plan, dict.fromkeys(range(walk.plan.world_size), 0.0)
    for ins in plan.instructions:
        parts: dict[str, float] = {}
        name = kind = ""
        if isinstance(ins, Run):
            name, (kind, parts) = ins.node, _node_parts(walk, ins.node, plan.nodes[ins.node])
        elif isinstance(ins, SyncWeights):
            name, kind = f"weights of {plan.links[ins.link].target}", "sync"
            parts = _sync_parts(walk, ins.link)
        elif not isinstance(ins, Reshard):
            continue
        ranks = plan.routes[ins.route].ranks if isinstance(ins, Reshard) else ins.ranks
        begins = max(map(clock.__getitem__, ranks))
        ends = begins
        if parts:
            factor = walk.recorded.factor(name, kind) if walk.recorded and kind != OTHER else 1.0
            largest = {what: s * factor for what, s in sorted(parts.items(), key=lambda part: -part[1])}
            phase = Phase(name, tuple(ranks), begins, largest, kind)
            walk.found.phases.append(phase)
            on = isinstance(ins, Run) and plan.nodes[ins.node].runs_in_background
            ends += 0.0 if on else phase.seconds
            walk.found.beside = max(walk.found.beside, phase.seconds if on else 0.0)
        clock |= dict.fromkeys(ranks, ends)
    rest_s = walk.recorded.rest_s if walk.recorded else 0.0
    walk.found.step_s = max(max(clock.values()), walk.found.beside) + rest_s


OTHER = "other"
UNTIMED = {"judge": "a judge's answers", "scoring_teacher": "what a teacher says by a rollout engine"}
"""Role of a rollout engine that is not asked for rollouts -> what is not counted."""


def _node_parts(walk: _Walk, name: str, node: NodePlan) -> tuple[str, dict[str, float]]:
    """(kind of phase, kind of work -> seconds) of a node; empty: it takes next to none, or is not counted."""
    plan = walk.plan
    if name in plan.interactions:
        return "rollout", _conversation_parts(walk, name)
    if any(name == stage.node for talk in plan.interactions.values() for stage in talk.stages):
        return "", {}
    model = next((model for model in plan.models.values() if name in model.nodes), None)
    if model is None:
        return OTHER, _own_parts(walk, name, node)
    cfg = ROLES[model.role].engine_cfg(walk.configs[model.node])
    if model.generates:
        return "rollout", _rollout_parts(walk, name, model, cfg)
    if model.trains and node.spec.trains:
        walk.found.tokens += batch_of(cfg, model.role).rows * walk.row_tokens(cfg).row * model.is_policy
    moved = walk.from_host(model, "update" if node.spec.trains else "forward")
    parts = _pass_parts(walk, model, cfg, node) | walk.parts(moved)
    return "update" if node.spec.trains else "pass", parts


def _own_parts(walk: _Walk, name: str, node: NodePlan) -> dict[str, float]:
    """A node of no model: known only of a run, by its rows."""
    if walk.recorded is not None:
        each = walk.recorded.row_seconds.get(name, 0.0)
        return {"as recorded, by its rows": each * rank_rows(walk.plan, walk.configs, name)} if each else {}
    if node.executable or (node.spec.scores and not node.spec.combines):
        _skip(walk, f"{name}: code outside the models ({node.spec.name})")
    elif node.spec.is_rollout:
        _skip(walk, f"{name}: reading recorded rows")
    return {}


def rank_rows(plan: Plan, configs: Configs, node: str) -> float:
    """Rows of a step that a rank has of a node."""
    return batch_of(configs[node]).rows / len(plan.run_of(node).ranks)


def _conversation_parts(walk: _Walk, name: str) -> dict[str, float]:
    """Of a conversation, what its engines would do if every policy answered each row once; for a run, whose
    turns and environments are in the ratio to it."""
    if walk.recorded is None:
        _skip(walk, f"{name}: a conversation, whose turns and environments are not known before")
        return {}
    slowest: dict[str, float] = {}
    for policy in walk.plan.interactions[name].policies:
        model = walk.plan.models[policy]
        cfg = ROLES[model.role].engine_cfg(walk.configs[model.node])
        slowest = max(slowest, _rollout_parts(walk, name, model, cfg), key=lambda parts: sum(parts.values()))
    return slowest


def _pass_parts(walk: _Walk, model: ModelPlan, cfg: Config, node: NodePlan) -> dict[str, float]:
    """A pass: the slowest pipeline stage, and its waiting for others."""
    if not node.spec.trains and model.trains:
        model = replace(model, trains=False)
    batch = batch_of(cfg)
    later = node.op == LATER_OLD_LOG_PROB.name
    share = (batch.mini_batches - 1) / batch.mini_batches if later else 1.0
    packed = walk.packed(model, cfg)
    found = model_pass(model, cfg, walk.shapes[model.name], packed, share, walk.machine, walk.today)
    parts = max((walk.parts(stage) for stage in found.stages), key=lambda stage: sum(stage.values()))
    if found.bubble:
        parts[WAITING] = found.bubble * sum(parts.values())
    return parts


def _rollout_parts(walk: _Walk, name: str, model: ModelPlan, cfg: Config) -> dict[str, float]:
    rollout = cfg.actor_rollout_ref.rollout
    if (not backend_of(model).timed and walk.recorded is None) or model.role != "rollout":
        _skip(walk, f"{name}: {UNTIMED.get(model.role, f'rollout.name={model.backend}, not measured')}")
        return {}
    rows = engine_rows(walk.plan, model, walk.configs)
    device_bytes = (cfg.trainer.device_memory_gib or walk.device.gib) * GIB
    shape, flops = walk.shapes[model.name], walk.device.flops_of_a_byte
    tokens = walk.row_tokens(cfg)
    work = rollout_work(model, cfg, shape, tokens, rows, device_bytes, flops, walk.machine)
    parts = walk.parts(work)
    if rollout.max_lag:
        found = engine_flow(model, cfg, shape, tokens, rows, device_bytes)
        walk.found.staleness[name] = found.staleness
    constants = walk.device.constants
    if model.dims.world > 1:
        uneven = constants["slowest"].seconds(sum(parts.values()) * math.log2(model.dims.world))
        parts[constants["slowest"].what] = uneven
    others = (other for other in walk.plan.models.values() if other is not model)
    beside = any(set(other.ranks) & set(model.ranks) for other in others)
    if rollout.free_cache_engine and beside:
        parts[constants["wake"].what] = constants["wake"].seconds(1)
    return parts


def _sync_parts(walk: _Walk, name: str) -> dict[str, float]:
    link = walk.plan.links[name]
    source, target = walk.plan.models[link.source], walk.plan.models[link.target]
    if not backend_of(target).timed and walk.recorded is None:
        return {}
    cfg = walk.configs[target.node]
    work = sync_work(link, source, cfg, walk.shapes[target.name], walk.machine)
    return walk.parts(work | walk.from_host(source, "forward"))


def _skip(walk: _Walk, line: str) -> None:
    if line not in walk.found.not_counted:
        walk.found.not_counted.append(line)


def _assumptions(walk: _Walk) -> list[str]:
    """What a reader of the prediction should know of where it leaves what was measured."""
    plan, device, lines = walk.plan, walk.device, []
    cfg = next(iter(walk.configs.values()))
    if device.scaled_from:
        measured = DEVICES[device.scaled_from]
        faster, wider = device.matmul / measured.matmul, device.bandwidth / measured.bandwidth
        lines.append(
            f"no step was measured on {device.name}: the constants are those of {measured.name}, by the data "
            f"sheets (arithmetic x {faster:.2f}, memory x {wider:.2f}; messages and the host as they are)"
        )
    if cfg.trainer.device == "cpu" and walk.recorded is None:
        lines.append(f"trainer.device=cpu: nothing is fitted for CPUs; the times are those of {device.name}")
    tokens = walk.row_tokens(cfg)
    what = walk.lengths.source if walk.lengths else "the longest that the keys allow"
    longest = f"; the longest of a step {tokens.longest(batch_of(cfg).rows):,}" if tokens.lengths else ""
    lines.append(f"rows of {tokens.prompt} + {tokens.response:,} tokens, {what}{longest}")
    if plan.world_size > walk.machine:
        constant = device.constants["network"]
        lines.append(f"between machines {constant.value / 1e9:g} GB/s for each device ({constant.source})")
    for ins in plan.instructions:
        if isinstance(ins, Repeat):
            lines.append(f"{ins.node}: one round; how many it needs depends on the rewards")
    for name, shape in walk.shapes.items():
        if walk.recorded is None:
            lines += _unmeasured(plan.models[name], walk.configs[plan.models[name].node], shape)
    return list(dict.fromkeys(lines))


def _unmeasured(model: ModelPlan, cfg: Config, shape: ModelShape) -> list[str]:
    """What of a model lies outside of what was measured."""
    lines = []
    if shape.experts:
        lines.append("of experts 8 layers of 30B-A3B on H100s were measured, and no rollout")
    if shape.nets:
        lines.append(
            "layers with states count as matrix products do; torch's kernels of them are slower: not measured"
        )
    if model.generates:
        if backend_of(model).timed and cfg.actor_rollout_ref.rollout.enforce_eager:
            lines.append(
                "rollout.enforce_eager=True counts as fast as CUDA graphs, and is slower: not measured"
            )
        return lines
    group = ROLES[model.role].group
    dtype = get(cfg, f"{group}.{COMPUTE_DTYPE[model.backend]}")
    if BYTES[dtype] != 2:
        lines.append(f"{model.name} computes in {dtype}: measured in bfloat16, and counted as fast as that")
    if _offloads(model, cfg):
        lines.append("offloaded parts go at the rate at which an H200 saved to host memory")
    return lines


def _offloads(model: ModelPlan, cfg: Config) -> bool:
    """Whether a model keeps parts in host memory while it does not compute."""
    backend, group = backend_of(model), ROLES[model.role].group
    keys = [*backend.offloads, *(backend.offloads_trained if model.trains else ())]
    return any(get(cfg, f"{group}.{key}") for key in keys)
