"""The page of runs: one HTML file with its data, script and styles, that asks nobody for anything.

What models, tools and users wrote reaches the page as JSON alone; its script makes text of it, never markup.
"""

import base64
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from siirl.compiler.plan import Plan
from siirl.runs.folder_reader import LeftOut, attempt
from siirl.runs.run_files import read_history, read_job
from siirl.runs.run_state import read_run as read_state
from siirl.show.plan_picture import AGENT_COLORS
from siirl.view.alerts import alerts
from siirl.view.dag_share import dag_of
from siirl.view.episodes import KINDS, read_episodes
from siirl.view.memory_phases import memory_phases
from siirl.view.metric_curves import curves
from siirl.view.run_status import health, overview, trainer_of
from siirl.view.timeline import timeline

SCRIPTS = ("page.js", "dag.js", "step.js", "timeline.js", "memory.js", "curves.js", "conversations.js")
LAST_WORDS = "start();\n"
SAMPLE_KEYS = {"train": "rollout_data_dir", "validation": "validation_data_dir"}


def read_run(output_dir: Path) -> dict[str, Any]:
    """All that the page shows of a run, as JSON values; `notes` says what was left out, or is damaged."""
    left_out, state = LeftOut(), read_state(output_dir)
    job, history = read_job(output_dir, left_out), read_history(output_dir, left_out)
    trainer = trainer_of(job)
    plan = attempt(lambda: Plan.from_json(job["plan"]), None, "the plan of job.json", LeftOut())
    folders = {
        kind: Path(str(trainer.get(SAMPLE_KEYS[kind]) or output_dir / "rollouts" / kind)) for kind in KINDS
    }
    run = {
        "overview": overview(state, job, left_out),
        "alerts": attempt(lambda: [asdict(alert) for alert in alerts(history)], [], "alerts", left_out),
        "dag": attempt(lambda: dag_of(job, history, left_out), None, "the plan of job.json", left_out),
        "timeline": attempt(lambda: timeline(output_dir, plan, left_out), None, "the trace", left_out),
        "memory": attempt(lambda: memory_phases(job, history.series), None, "memory", left_out),
        "curves": curves(history, left_out),
        "episodes": read_episodes(folders, left_out),
        "health": health(state, left_out),
    }
    for what, why in state.unreadable.items():
        left_out.add(what, why)
    return run | {"notes": [f"{what}: {why}" for what, why in left_out.items()]}


def read_runs(output_dirs: Sequence[Path], live: bool = False) -> dict[str, Any]:
    """The data of the page. live: it is served, and asks again for what has changed."""
    runs = [read_run(folder) for folder in output_dirs]
    names = [run["overview"]["name"] for run in runs]
    for run, name in zip(runs, names, strict=True):
        alone = names.count(name) == 1
        run["label"] = name if alone else f"{name} ({Path(run['overview']['folder']).name})"
    return {
        "live": live,
        "made": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "made_s": time.time(),
        "agent_colors": AGENT_COLORS,
        "runs": runs,
    }


def page(data: dict[str, Any], connect: str = "'none'") -> str:
    """The page as text. connect: whom its script may ask, as the content policy says it."""
    script = "\n".join([*(_asset(name) for name in SCRIPTS), LAST_WORDS])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    title = ", ".join(run["label"] for run in data["runs"])
    parts = {
        "POLICY": escape(policy, quote=False),
        "TITLE": escape(title),
        "STYLE": _asset("page.css"),
        "DATA": safe_json(data),
        "SCRIPT": script,
    }
    text = _asset("page.html")
    before = []
    for name, content in parts.items():  # in the order of the template: what was put in is not searched again
        head, text = text.split(f"[[{name}]]", 1)
        before += [head, content]
    return "".join([*before, text])


def safe_json(value: Any) -> str:
    """JSON without <, > and &, so that it ends no script element; halves of surrogate pairs become "?"."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.encode("utf-8", "replace").decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def export(output_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page as one file, whole or not at all; returns where."""
    text = page(read_runs(output_dirs))
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f"{out.name}.part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, out)
    return out


def _asset(name: str) -> str:
    return files("siirl.view").joinpath("page", name).read_text(encoding="utf-8")
