"""Makes the shared helpers of the test suite importable, and says which tests may run beside each other."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

RAY = ("test_ray_launch.py", "test_ray_scripts.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (`-n 2 --dist loadgroup`) a file stays on one of them, and so do all files that
    start a Ray cluster: `ray stop` ends every cluster of a machine."""
    for item in items:
        group = "ray" if item.path.name in RAY else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
