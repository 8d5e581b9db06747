"""Hashes of the weights that small jobs of all kinds export: what a refactoring must not change.

`python tools/weight_hashes.py OUT.json [JOB ...]` runs the jobs of this checkout (all: two to five minutes on
two cores) and writes what they exported; with `--against BASE.json` it compares that with another checkout's,
made on the same machine, and exits with 1 where bits differ. `tests/e2e/test_weight_hashes.py` holds the
numbers of tests/e2e/weight_hashes.json, which `--hold` writes anew: for a change that means to change them.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run the jobs that were asked for; 1 if their bits are not those of --against."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    import hashed_jobs as jobs

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="where the numbers go")
    parser.add_argument("jobs", nargs="*", help=f"of {', '.join(jobs.JOBS)}; none: all")
    parser.add_argument("--against", type=Path, help="numbers of another checkout")
    parser.add_argument("--hold", action="store_true", help=f"write {jobs.HELD.relative_to(ROOT)}")
    asked = parser.parse_args()
    found: dict[str, Any] = {"machine": jobs.machine(), "jobs": {}}
    for name in asked.jobs or jobs.JOBS:
        with tempfile.TemporaryDirectory() as folder:
            found["jobs"][name] = jobs.run(name, Path(folder) / name)
        print(name, found["jobs"][name]["sha256"][:16], flush=True)
    for path in filter(None, (asked.out, jobs.HELD if asked.hold else None)):
        path.write_text(json.dumps(found, indent=1) + "\n")
    if asked.against is None:
        return 0
    base = json.loads(asked.against.read_text())
    differ = [n for n, job in found["jobs"].items() if job["sha256"] != base["jobs"][n]["sha256"]]
    print(f"differ: {', '.join(differ)}" if differ else "all are equal")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
