"""The page of runs: one HTML file with its data, script and styles, that asks nobody for anything.

What models, tools and users wrote reaches the page as JSON alone; its script makes text of it, never markup.
"""

import base64
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from siirl.guarded_files import replaced
from siirl.show.conversation_page import page_style
from siirl.show.plan_picture import AGENT_COLORS
from siirl.view.run_parts import LIVES, OVERVIEW, PARTS, TEXTS, Part, RunParts

SCRIPTS = (
    "page.js",
    "overview.js",
    "dag.js",
    "step.js",
    "timeline.js",
    "memory.js",
    "curves.js",
    "tokens.js",
    "groups.js",
    "conversations.js",
    "config.js",
)
LAST_WORDS = "start();\n"
MOST_TEXT_BYTES = 48 << 20
"""Texts of conversations in a page that is a file."""


def read_run(output_dir: Path) -> dict[str, Any]:
    """All parts of a run but texts of conversations; `notes` says what was left out, or is damaged."""
    parts = RunParts(output_dir)
    found = {name: part for name in PARTS if (part := parts.read(name))}
    notes = dict.fromkeys(note for part in found.values() for note in part.notes)
    return {name: part.value for name, part in found.items()} | {"notes": list(notes)}


def first_data(runs: Sequence[RunParts], live: bool) -> dict[str, Any]:
    """What the page begins with: each run's overview. live: it is served, and asks for everything else."""
    overviews = [run.read(OVERVIEW) for run in runs]
    names = [part.value["name"] if part else "" for part in overviews]
    return {
        "live": live,
        "made": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "made_s": time.time(),
        "agent_colors": AGENT_COLORS,
        "runs": [
            {
                "label": name if names.count(name) == 1 else f"{name} ({run.folder.name})",
                "overview": part_data(part),
            }
            for run, name, part in zip(runs, names, overviews, strict=True)
        ],
    }


def part_data(part: Part | None) -> dict[str, Any]:
    """A part as the page gets it."""
    return {"value": part.value if part else None, "notes": list(part.notes) if part else []}


def page(data: dict[str, Any], connect: str = "'none'") -> Iterator[str]:
    """The page in pieces. connect: whom its script may ask, as the content policy says it."""
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
        "STYLE": page_style(),
        "DATA": safe_json(data),
        "SCRIPT": script,
    }
    text = _asset("page.html")
    for name, content in parts.items():  # in the order of the template: what was put in is not searched again
        head, text = text.split(f"[[{name}]]", 1)
        yield head
        yield content
    yield text


def more_parts(runs: Sequence[RunParts]) -> Iterator[str]:
    """All else that a page has that is a file: an element for each part, which its script finds by its id."""
    room = MOST_TEXT_BYTES
    for number, run in enumerate(runs):
        blocks = []
        for name in run.blocks():
            text = safe_json(part_data(run.read(name)))
            if room < len(text):
                break
            room -= len(text)
            blocks.append((name, text))
        for name in PARTS:
            if name == "episodes":
                yield _element(number, name, safe_json(_listed(run, [block for block, _ in blocks])))
            elif name != OVERVIEW:
                yield _element(number, name, safe_json(part_data(run.read(name))))
        for name, text in blocks:
            yield _element(number, name, text)
            if name.startswith(f"{TEXTS}train "):
                lives = f"{LIVES}{name.split()[-1]}"
                yield _element(number, lives, safe_json(part_data(run.read(lives))))


def _listed(run: RunParts, blocks: list[str]) -> dict[str, Any]:
    """The list of the conversations whose texts are there."""
    found = part_data(run.read("episodes"))
    there = {block.removeprefix(TEXTS) for block in blocks}
    kept = [one for one in found["value"] if f"{one['kind']} {one['step']}" in there]
    left = len(found["value"]) - len(kept)
    notes = [f"conversations: the texts of {left} older ones have no room in this file"] if left else []
    return {"value": kept, "notes": [*found["notes"], *notes]}


def _element(number: int, name: str, json_text: str) -> str:
    mark = "-".join(["part", str(number), *name.split()])
    return f'<script type="application/json" id="{mark}">{json_text}</script>\n'


def safe_json(value: Any) -> str:
    """JSON without <, > and &, so that it ends no script element; halves of surrogate pairs become "?"."""
    try:
        text = msgspec.json.encode(value).decode()  # a tenth of the time, but it takes no half of a pair
    except UnicodeEncodeError:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text = text.encode("utf-8", "replace").decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def export(output_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page as one file, whole or not at all; returns where."""
    runs = [RunParts(folder) for folder in output_dirs]
    with replaced(out) as draft, draft.open("w", encoding="utf-8") as file:
        file.writelines(page(first_data(runs, live=False)))
        file.writelines(more_parts(runs))
    return out


def _asset(name: str) -> str:
    return files("siirl.view").joinpath("page", name).read_text(encoding="utf-8")
