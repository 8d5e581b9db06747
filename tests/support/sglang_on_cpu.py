"""SGLang for tests on a CPU: the one that is installed, or else the small one of fake_sglang."""

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FAKE = Path(__file__).parent / "fake_sglang"


@contextmanager
def sglang_here() -> Iterator[None]:
    """Have processes that are started meanwhile find an SGLang."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError:
            paths = [str(FAKE), *filter(None, [os.environ.get("PYTHONPATH")])]
            patch.setenv("PYTHONPATH", os.pathsep.join(paths))
            patch.setattr(sys, "path", [*sys.path, str(FAKE)])
        yield
