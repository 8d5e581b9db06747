"""The folder of a run of many nodes, ranks, steps and conversations, by the writers that runs use."""

import json
import random
from pathlib import Path

from plan_cases import add_agent, config

from siirl.compiler.compile import compile_plan
from siirl.compiler.plan import Plan
from siirl.compiler.plan_instructions import Free, Reshard, Run, SyncWeights
from siirl.dag.spec import DagBuilder
from siirl.launch.job import Job
from siirl.observe.position import PositionFile, record_begin
from siirl.observe.sinks import SampleSink
from siirl.observe.trace import TRACE_DIR, TraceFile

AGENTS, RANKS_EACH, LAST_RANKS, TENSOR = 51, 80, 96, 4
"""Each agent has four nodes on ranks of its own; the last agent has more ranks, so that they are 4,096."""
WORLD_SIZE = (AGENTS - 1) * RANKS_EACH + LAST_RANKS
PER_MACHINE, STEPS, CONVERSATIONS, EACH_FILE = 8, 2_000, 10_000, 100
METRICS_OF_AGENT = (
    *("reward/score", "reward/zero_std_groups", "val/reward/mean", "actor/entropy", "actor/ppo_kl"),
    *("actor/ref_kl", "actor/grad_norm", "actor/clip_fraction", "actor/loss", "actor/lr", "advantage/std"),
    *("rollout/response_length", "rollout/truncated", "rollout/tokens", "perf/tokens_per_s", "perf/mfu"),
)
SLOW_RANK, NEEDLE = 1_234, "needle in step"


def large_plan() -> Plan:
    """204 nodes on 4,096 ranks."""
    dag = DagBuilder("large")
    for agent in range(AGENTS):
        first, size = agent * RANKS_EACH, LAST_RANKS if agent == AGENTS - 1 else RANKS_EACH
        add_agent(dag, agent, placement=f"{first}-{first + size - 1}")
    cfg = config(
        "data.train_batch_size=480",
        "actor_rollout_ref.actor.ppo_mini_batch_size=480",
        "actor_rollout_ref.actor.strategy=megatron",
        f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={TENSOR}",
    )
    return compile_plan(dag.build(), cfg, WORLD_SIZE)[0]


def write_large_run(folder: Path, steps: int = STEPS, conversations: int = CONVERSATIONS) -> Path:
    """A run that goes on in its last step; one machine is a step behind."""
    plan, dice = large_plan(), random.Random(0)
    settings = {"trainer": {"total_training_steps": steps, "experiment_name": "large"}}
    Job(settings, plan.to_json(), str(folder), WORLD_SIZE, PER_MACHINE).prepare()
    _metrics(folder, plan, steps, dice)
    _conversations(folder, steps, conversations, dice)
    _traces(folder, plan, steps)
    for rank in range(WORLD_SIZE):
        position = PositionFile(folder / "status" / f"rank_{rank}")
        agent = min(rank // RANKS_EACH, AGENTS - 1)
        behind = rank // PER_MACHINE == SLOW_RANK // PER_MACHINE
        position.set(steps - behind, f"{'rollout' if rank % 3 else 'train'}_{agent}")
        position.close()
        (folder / "logs" / f"rank_{rank}.log").write_text(f"hello from rank {rank}\n" * 20)
    (folder / "run.yaml").write_text(
        "---\nrun_id: id\nstarted: 2026-01-01 10:00:00 +0000\nhost: node7\n"
        "command: python -m siirl.main_dag\n"
    )
    record_begin(folder, "id", steps)
    return folder


def _metrics(folder: Path, plan: Plan, steps: int, dice: random.Random) -> None:
    """metrics.jsonl as the sink writes it, of a few hundred different lines."""
    names = [f"agent_{agent}/{name}" for agent in range(AGENTS) for name in METRICS_OF_AGENT]
    names += [f"time/{node}_s" for node in plan.nodes]
    names += [f"memory/{node}_{kind}_gib" for node in plan.nodes for kind in ("peak", "device")]
    rests = []
    for _ in range(200):
        values = {name: dice.random() for name in names} | {"time/step_s": 300.0}
        rests.append(json.dumps(values)[1:])
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(f'{{"step": {step}, "time_s": {1e9 + step}, {rests[dice.randrange(200)]}\n')


def _conversations(folder: Path, steps: int, conversations: int, dice: random.Random) -> None:
    sink, files = SampleSink(folder, {}), conversations // EACH_FILE
    words = [f"word{number}" for number in range(500)]
    for number in range(files):
        step = steps - number * (steps // files)
        rows = []
        for index in range(EACH_FILE):
            said = [
                {"role": "user", "content": " ".join(dice.choices(words, k=40)), "agent": None, "turn": None},
                *(
                    {"agent": turn, "node": f"agent {turn}", "turn": turn, "reward": 0.5, "content": text}
                    for turn, text in enumerate(" ".join(dice.choices(words, k=80)) for _ in range(2))
                ),
            ]
            if index == 7:
                said[2]["content"] += f" {NEEDLE} {step}."
            about = {"episode_id": index, "ended": ""}
            row = {"data_source": "large", "sample_index": index, "episode": about, "messages": said}
            rows.append(row | {"rewards": {"agent 0": dice.random(), "agent 1": dice.random()}})
        sink.text(step, "train", rows)


def _traces(folder: Path, plan: Plan, steps: int) -> None:
    """A file for each rank, of the last two steps; ranks that do the same differ by their numbers alone,
    but for one that comes late."""
    scratch = folder / "scratch"
    written: dict[tuple[int, bool], str] = {}
    (folder / TRACE_DIR).mkdir()
    for rank in range(WORLD_SIZE):
        first = min(rank // RANKS_EACH, AGENTS - 1) * RANKS_EACH
        late = rank == SLOW_RANK
        if (first, late) not in written:
            trace = TraceFile(scratch, rank, "RANK", 0.0)
            for step in (steps - 1, steps):
                _step(trace, plan, rank, step, 3.0 if late else 0.0)
            trace.close()
            text = (scratch / f"rank_{rank}.jsonl").read_text()
            written[first, late] = text.replace(f'"pid":{rank}', "PID")
        text = written[first, late].replace("PID", f'"pid":{rank}').replace("RANK", f"rank {rank} of node7")
        (folder / TRACE_DIR / f"rank_{rank}.jsonl").write_text(text)


def _step(trace: TraceFile, plan: Plan, rank: int, step: int, late_s: float) -> None:
    at_s = step * 300.0
    for ins in plan.of_rank(rank):
        name = {Reshard: "reshard", SyncWeights: "weight_sync", Free: "free"}.get(type(ins), "load")
        lasts_s, args = 0.5, {"step": step}
        if isinstance(ins, Run):
            name, lasts_s, args = ins.node, 20.0, {"step": step, "rows": 24, "tokens": 24_000}
            lasts_s += late_s if name.startswith("rollout") else 0.0
        elif isinstance(ins, Reshard):
            args |= {"route": ins.route, "bytes": 1 << 20}
        trace.begin(name, at_s)
        for part in range(4):
            begin_s = at_s + part * lasts_s / 4
            trace.complete("micro_batch", begin_s, begin_s + lasts_s / 4, {"tokens": 6_000})
        at_s += lasts_s
        trace.end(at_s, args)
