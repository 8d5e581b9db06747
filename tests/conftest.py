"""Makes the shared helpers of the test suite importable: dist_harness, fixtures_tiny."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
