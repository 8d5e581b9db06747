"""Hashes of the weights that small jobs of all kinds export: what a refactoring must not change.

`python tools/weight_hashes.py OUT.json [JOB ...]` runs the jobs of this checkout (all: two to five minutes on
two cores) and writes what they exported; with `--against BASE.json` it compares that with another checkout's,
made on the same machine, and exits with 1 where bits differ. `tests/e2e/test_weight_hashes.py` holds the
numbers of tests/e2e/weight_hashes.json; `--hold WHY` writes those of the jobs that ran anew, each with the
reason: for a change that means to change them.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run the jobs that were asked for; 1 if their bits are not those of --against."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    os.environ["OMP_NUM_THREADS"] = "1"  # as `make test-all`: some CPUs round by it
    import hashed_jobs as jobs

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="where the numbers go")
    parser.add_argument("jobs", nargs="*", help=f"of {', '.join(jobs.JOBS)}; none: all")
    parser.add_argument("--against", type=Path, help="numbers of another checkout")
    parser.add_argument(
        "--hold", metavar="WHY", help=f"write {jobs.HELD.relative_to(ROOT)}: the commit, and what it changed"
    )
    asked = parser.parse_args()
    found: dict[str, Any] = {"machine": jobs.machine(), "jobs": {}}
    for name in asked.jobs or jobs.JOBS:
        with tempfile.TemporaryDirectory() as folder:
            found["jobs"][name] = jobs.run(name, Path(folder) / name)
        print(name, found["jobs"][name]["sha256"][:16], flush=True)
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    if asked.hold:
        hold(jobs.HELD, found, asked.hold)
    if asked.against is None:
        return 0
    base = json.loads(asked.against.read_text())
    differ = [n for n, job in found["jobs"].items() if job["sha256"] != base["jobs"][n]["sha256"]]
    print(f"differ: {', '.join(differ)}" if differ else "all are equal")
    return int(bool(differ))


def hold(path: Path, found: dict[str, Any], why: str) -> None:
    """Write what was found into a file of held numbers, beside those of the jobs that did not run.

    ValueError if the file's numbers are of another machine, and some of them would stay.
    """
    held = json.loads(path.read_text())
    kept = {name: job for name, job in held["jobs"].items() if name not in found["jobs"]}
    if kept and held["machine"] != found["machine"]:
        raise ValueError(f"{path}: {', '.join(kept)} are of {held['machine']}: run all jobs")
    new = {name: {"why": why, **job} for name, job in found["jobs"].items()}
    jobs = {name: (kept | new)[name] for name in held["jobs"] | new}
    path.write_text(json.dumps({"machine": found["machine"], "jobs": jobs}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
