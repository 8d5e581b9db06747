"""The documentation as a site: every link leads somewhere, and the short list of keys is true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from siirl.config.resolve import FOLLOWS
from siirl.config.root import all_keys
from siirl.config.values import show

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_has_every_page(tmp_path):
    for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "trees")]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path / "site")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / "site" / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    index = (tmp_path / "site" / "index.html").read_text()
    fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', index)
    assert not fetched, "the site needs no network"


def test_the_keys_that_matter_have_the_defaults_of_the_schema():
    rows = re.findall(
        r"^\| (`\S+`(?:, `\S+`)*) \| ([^|]*) \| [^|]+ \|$", (ROOT / "docs/keys.md").read_text(), re.M
    )
    stated = {}
    for names, defaults in rows:
        names, defaults = re.findall(r"`([^`]+)`", names), re.findall(r"`([^`]+)`", defaults)
        assert len(defaults) in (0, len(names)), names
        stated |= dict(zip(names, defaults or [None] * len(names), strict=True))
    assert 30 <= len(stated) <= 45
    for name, default in stated.items():
        key = all_keys()[name]
        auto = "auto" if key.rule.auto else show(key, key.default)
        assert default in (None, FOLLOWS.get(name, auto)), name
