"""The strongest mode that is possible is used, wherever Python lies, and why not a stronger one is said."""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from siirl.errors import SandboxError
from siirl.sandbox import box
from siirl.sandbox.isolation import MODES, Isolation

pytestmark = pytest.mark.heavy
PROGRAM = """
import json
from siirl.sandbox.box import Box, strongest_isolation
use = "import own_package, os; print(own_package.answer, os.listdir('/tmp'))"
with Box() as box:
    said = [box.run(use) for _ in range(2)]
    spoils = box.run("open('/tmp/left', 'w').write('x'); open(__import__('own_package').__file__, 'w')")
    said.append(box.run("import os; print(os.path.exists('/tmp/left'))"))
print(json.dumps([strongest_isolation().mode, [one.stdout for one in said], spoils.stderr[-200:]]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root knows which mode is possible here")
def test_python_below_tmp_is_in_the_sandbox_in_the_strongest_mode():
    """A virtual environment in /tmp, with a package of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{folder}/venv"], check=True)
        (site,) = Path(folder, "venv", "lib").glob("python*/site-packages")
        (site / "own_package.py").write_text("answer = 42")
        root = Path(__file__).parents[3]
        (site / "paths.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")
        run = [f"{folder}/venv/bin/python", "-c", PROGRAM]
        done = subprocess.run(run, capture_output=True, text=True, cwd="/", timeout=120)
        assert done.returncode == 0, done.stderr
        with box.Box() as here:
            here.run("pass")
        assert here.isolation is not None
        mode, said, spoils = json.loads(done.stdout)
        assert mode == here.isolation.mode
        name = Path(folder).name
        assert said == [*[f"42 ['box', '{name}']\n"] * 2, "False\n"]
        assert "Read-only file system" in spoils


def test_a_mode_that_fails_is_said_with_its_reason(monkeypatch, caplog):
    class Failing(box.Box):
        def _start(self) -> None:
            if self._mode != "process":
                raise SandboxError(f"a sandbox of mode {self._mode} cannot be made: File exists: '/tmp'")
            super()._start()

    monkeypatch.setattr(box, "Box", Failing)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found = box.strongest_isolation.__wrapped__()
    assert (found.mode, len(found.refused)) == (MODES[-1], 2)
    assert all("File exists: '/tmp'" in gap for gap in found.gaps()[:2])
    assert "a stronger mode does not work here: user_namespaces" in caplog.text


def test_without_refusals_nothing_is_said_of_them():
    assert Isolation("namespaces", True, 7).gaps() == []
