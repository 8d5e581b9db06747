"""Runs whose folder goes away, or whose reader does: each ends as its user may expect."""

import shlex
import subprocess
import sys

import pytest
from job_harness import ROOT, Inputs, overrides
from killed_jobs import start, steps_done, wait_until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


def test_a_folder_that_is_renamed_while_the_run_writes_to_it_ends_the_run_with_its_name(inputs, tmp_path):
    keys = ("trainer.total_training_steps=500", "trainer.test_freq=-1", "trainer.export_hf=false")
    output = tmp_path / "out"
    words = [sys.executable, "-m", "siirl.main_dag", *overrides(inputs, output, *keys)]
    job = start(words, tmp_path / "console")
    wait_until(lambda: steps_done(output) >= 1, job, tmp_path / "console")
    output.rename(tmp_path / "elsewhere")
    assert job.wait(60) == 2
    assert f"{output} was removed or renamed while the run wrote to it" in (tmp_path / "console").read_text()


def test_a_reader_that_leaves_ends_no_run(inputs, tmp_path):
    """`siirl run ... | head -1` trains to its end, and ends well."""
    keys = ("trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.progress=plain")
    words = [sys.executable, "-m", "siirl.cli", "run", *overrides(inputs, tmp_path / "out", *keys)]
    piped = f"set -o pipefail; {shlex.join(words)} 2>&1 | head -1"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1), done.stdout + done.stderr
    assert steps_done(tmp_path / "out") == 1
