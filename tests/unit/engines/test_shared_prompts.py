"""Decode steps that read a prompt once: the Triton kernels, interpreted, and what is called of vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[2] / "support"


@pytest.mark.parametrize("share", [0.15, pytest.param(1.0, marks=pytest.mark.slow)])
def test_two_parts_are_one_for_every_batch(share):
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "shared_prompt_cases.py"), str(share)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
