"""Folders as runs leave them, made by the writers that runs use, without training anything."""

from pathlib import Path

from plan_cases import template_plan

from siirl.compiler.plan import Plan
from siirl.launch.failure import Failure, write_failure
from siirl.launch.job import Job
from siirl.observe.position import PositionFile, record_begin, record_end
from siirl.observe.sinks import JsonlSink, SampleSink
from siirl.observe.trace import TRACE_DIR, TraceFile

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<!--<script> ]]> \u2028 \x00\x1b[31m\u202e\ud800 ${x} [[SCRIPT]] [[DATA]]"
)
STEP_S = 2.0


def write_run(
    folder: Path,
    steps: int = 6,
    text: str = "four",
    name: str = "small",
    world_size: int = 2,
    plan: Plan | None = None,
) -> Path:
    """A run of one agent: metrics of all steps, samples of the first and last, a trace, positions, logs.

    text: what the model said, and is in every other place where text can be. plan: instead of a template's.
    """
    plan = plan or template_plan(world_size)
    config = {"trainer": {"total_training_steps": steps, "experiment_name": name}}
    Job(config, plan.to_json(), str(folder), world_size, world_size).prepare()
    metrics, samples = JsonlSink(folder / "metrics.jsonl"), SampleSink(folder, {})
    for step in range(1, steps + 1):
        nodes = {f"time/{node}_s": STEP_S / len(plan.nodes) for node in plan.nodes}
        metrics.log(step, {"reward/score": step / steps, "time/step_s": STEP_S, f"x/{text}": 1.0, **nodes})
        if step in (1, steps):
            samples.text(step, "validation", _conversations(step, text))
            samples.text(step, "train", [_row(step, text)])
    metrics.close()
    for rank in range(world_size):
        _trace(folder, rank, steps, list(plan.nodes))
        position = PositionFile(folder / "status" / f"rank_{rank}")
        position.set(steps, next(iter(plan.nodes)))
        position.close()
        (folder / "logs" / f"rank_{rank}.log").write_text(
            f"hello from rank {rank}\n{text}\n", errors="replace"
        )
    (folder / "run.yaml").write_text(
        "---\nrun_id: id\nstarted: 2026-01-01 10:00:00 +0000\nhost: node7\ncommand: python -m siirl.main_dag "
        "trainer.token=...\nsiirl:\n  commit: 0123456789abcdef\n  changed: true\npackages:\n  torch: 2.13.0\n"
    )
    record_begin(folder, "id", steps)
    record_end(folder, "id", "ended")
    return folder


def write_error(folder: Path, rank: int, error: str, secondary: bool = False) -> None:
    """What a rank leaves that dies."""
    failure = Failure(rank, "node7", "train", 3, error, False, secondary, 5.0 + rank, f"Traceback\n{error}")
    write_failure(folder / "errors" / f"rank_{rank}.json", failure)


def _conversations(step: int, text: str) -> list[dict]:
    said = [
        {"role": "user", "content": "2+2?", "agent": None, "node": None, "turn": None, "reward": 0.0},
        {"agent": 0, "node": "solver", "turn": 0, "content": f"{text} in step {step}", "reward": 0.0},
        {
            "agent": 1,
            "node": "critic",
            "turn": 1,
            "content": "right",
            "score": -0.5,
            "tool_errors": ["raised"],
        },
    ]
    return [
        {
            "data_source": text,
            "sample_index": 7,
            "rewards": {"agent 0": 1.0, "agent 1": -0.5},
            "episode": {"episode_id": 0, "ended": text},
            "messages": said,
            "conversation": "...\n  ground truth: 4",
        }
    ]


def _row(step: int, text: str) -> dict:
    return {
        "node": "agent_0.rollout",
        "data_source": "sums",
        "sample_index": step,
        "score": 1.0,
        "prompt": "1+3?",
        "response": text,
        "ground_truth": "4",
    }


def _trace(folder: Path, rank: int, steps: int, nodes: list[str]) -> None:
    trace = TraceFile(folder / TRACE_DIR, rank, f"rank {rank} of node7", 0.0)
    part_s = STEP_S / len(nodes)
    for step in range(1, steps + 1):
        for index, node in enumerate(nodes):
            start_s = step * STEP_S + index * part_s
            trace.begin(node, start_s)
            trace.complete("micro_batch", start_s, start_s + part_s / 2, {"tokens": 128, "bytes": 4096})
            trace.end(start_s + part_s, {"step": step, "rows": 16})
    trace.begin("hangs", (steps + 1) * STEP_S)
    trace.close()
