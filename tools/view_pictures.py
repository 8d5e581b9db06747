"""Pictures of the sections of `siirl view --demo`: docs/view_NAME.png light, docs/view_NAME_dark.png dark.

Memory is not among them: the recorded run had no GPU. docs/view_memory.png is of another run.

    python tools/view_pictures.py [FOLDER]

Needs chromium and pillow. Colours are put on a palette, so that a picture has some 40 kB.
"""

import io
import sys
import tempfile
import time
from base64 import b64decode
from pathlib import Path

from PIL import Image

from siirl.view.view_command import unpacked_demo
from siirl.view.view_page import export

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from page_browser import Tab, opened_tab  # noqa: E402

WIDE, MOST_HIGH = 1280, 1000
"""Pixels of a picture; what a section shows below that is cut off."""
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


def take(tab: Tab, script: str) -> Image.Image:
    """The page after a script, as high as its section, within MOST_HIGH."""
    tab.value(f"(async () => {{ await ({script}); await page.written; scrollTo(0, 0); }})()")
    time.sleep(0.5)
    bottom = tab.value("document.getElementById('panel').getBoundingClientRect().bottom")
    high = min(MOST_HIGH, int(bottom) + 16)
    clip = {"x": 0, "y": 0, "width": WIDE, "height": high, "scale": 1}
    data = tab.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
    return Image.open(io.BytesIO(b64decode(data))).convert("RGB")


def main(folder: Path) -> None:
    """All pictures into a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "page.html"
        export([unpacked_demo(Path(scratch))], page)
        with opened_tab(Path(scratch) / "profile") as tab:
            size = {"width": WIDE, "height": MOST_HIGH, "deviceScaleFactor": 1, "mobile": False}
            tab.call("Emulation.setDeviceMetricsOverride", **size)
            for scheme, ending in (("light", ""), ("dark", "_dark")):
                feature = {"name": "prefers-color-scheme", "value": scheme}
                tab.call("Emulation.setEmulatedMedia", features=[feature])
                tab.open(page.as_uri())
                tab.wait_for("document.readyState === 'complete' && window.location.protocol === 'file:'")
                for name, script in SHOWN.items():
                    colours = take(tab, script).quantize(96, dither=Image.Dither.NONE)
                    colours.save(folder / f"view_{name}{ending}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs")
