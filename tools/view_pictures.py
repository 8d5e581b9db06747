"""Pictures of the sections of `siirl view --demo`: docs/view_NAME.png light, docs/view_NAME_dark.png dark.

Memory is that of a run on a GPU, as the recorded one had none: what MEASURED keeps, beside the estimate.

    python tools/view_pictures.py [FOLDER]

Needs chromium and pillow. Colours are put on a palette, so that a picture has some 50 kB.
"""

import io
import json
import sys
import tempfile
import time
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

from PIL import Image

from siirl.compiler.memory.phases import estimate_record
from siirl.view.view_command import unpacked_demo
from siirl.view.view_page import export

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]
from page_browser import Tab, opened_tab  # noqa: E402
from what_if import gpu_runs  # noqa: E402

WIDE, MOST_HIGH = 1280, 1000
"""Pixels of a picture; what a section shows below that is cut off."""
COLOURS = 256
"""Fewer give parts of a bar the colour of another one."""
THIRD = """(() => {
  const scrub = document.getElementById("scrub");
  scrub.value = 0.3 * scrub.max;
  scrub.dispatchEvent(new Event("input"));
})()"""
SHOWN = {  # name of a picture -> what brings its section into the state that is shown
    "overview": "show('overview')",
    "dag": "show('dag')",
    "step": f"show('step').then(() => {THIRD})",
    "timeline": "show('timeline')",
    "curves": "show('curves')",
    "conversations": "show('conversations')",
    "groups": "page.state.look = 'groups', page.state.filters.kind = 'train', show('conversations')",
    "tokens": "page.state.look = 'list', page.state['tokens by'] = 'advantage', show('conversations')",
    "config": "show('config')",
    "health": "show('health')",
}
MEASURED, DEVICE_GIB = "one_call_gpu_A_1", 139.8
"""The file of benchmarks/results whose memory is shown, and what its GPU has."""


def take(tab: Tab, script: str) -> Image.Image:
    """The page after a script, as high as its section, within MOST_HIGH."""
    tab.value(f"(async () => {{ await ({script}); await page.written; scrollTo(0, 0); }})()")
    time.sleep(0.5)
    bottom = tab.value("document.getElementById('panel').getBoundingClientRect().bottom")
    clip = {"x": 0, "y": 0, "width": WIDE, "height": min(MOST_HIGH, int(bottom) + 16), "scale": 1}
    data = tab.call("Page.captureScreenshot", format="png", clip=clip)["data"]
    return Image.open(io.BytesIO(b64decode(data))).convert("RGB")


def measured_run(folder: Path) -> Path:
    """The folder of a run as MEASURED tells of it."""
    told = json.loads((ROOT / "benchmarks" / "results" / f"{MEASURED}.json").read_text())["metrics"]
    peaks = {name: max(found["all"]) for name, found in told.items() if name.startswith("memory/")}
    run = gpu_runs(folder)[MEASURED]
    replace(run, means=dict(run.means) | peaks).write(out := folder / "measured")
    _, plan, configs = run.planned()
    job = json.loads((out / "job.json").read_text())
    job["memory_estimate"] = estimate_record(plan, configs, DEVICE_GIB)
    (out / "job.json").write_text(json.dumps(job))
    return out


def main(folder: Path) -> None:
    """All pictures into a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        pages = {Path(scratch) / "demo.html": (unpacked_demo(Path(scratch)), SHOWN)}
        pages[Path(scratch) / "memory.html"] = (measured_run(Path(scratch)), {"memory": "show('memory')"})
        with opened_tab(Path(scratch) / "profile") as tab:
            size = {"width": WIDE, "height": MOST_HIGH, "deviceScaleFactor": 1, "mobile": False}
            tab.call("Emulation.setDeviceMetricsOverride", **size)
            for page, (run, shown) in pages.items():
                export([run], page)
                for scheme, ending in (("light", ""), ("dark", "_dark")):
                    feature = {"name": "prefers-color-scheme", "value": scheme}
                    tab.call("Emulation.setEmulatedMedia", features=[feature])
                    tab.open(page.as_uri())
                    tab.wait_for("document.readyState === 'complete' && window.location.protocol === 'file:'")
                    for name, script in shown.items():
                        colours = take(tab, script).quantize(COLOURS, dither=Image.Dither.NONE)
                        colours.save(folder / f"view_{name}{ending}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs")
