"""What a restart takes with vLLM, if engines stay for the next attempt and if they are restarted.

    python benchmarks/kept_engines.py [--steps 8] [--step-s 4] [--ranks 2] [key=value ...]

The quickstart's job with rollout.name=vllm, twice, with nodes that wait as in ettr.py: as it is, and with a
launcher that keeps no engine, so that each ends with its worker. In each, rank 1 gets SIGKILL in the middle
of a step at a quarter of the run, and rank 0 in the last one, when processes stand by to be the next
workers. A restart's seconds go from the kill to the first instruction of the last rank. Both runs must end
with the same weights, bit for bit.

Writes benchmarks/results/kept_engines_cpu.json (--out for another place), after every kill (report_file.py).
On a GPU: trainer.device=cuda.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from ettr import REPOSITORY, Kill, Run, measured, same_weights
from report_file import Report, end_by_signals

from siirl.engines.rollout.served.engine_child import SERVER

RESULT = REPOSITORY / "benchmarks" / "results" / "kept_engines_cpu.json"
VLLM = (
    *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_num_seqs=64"),
    *("trainer.export_hf=True", "reward_model.num_workers=1"),
)
NONE_STAYS = """#!/bin/sh
exec "{python}" -c '
import runpy, sys
from siirl.launch.engine_keeper import EngineKeeper
EngineKeeper.descriptors = lambda self: {{}}
sys.argv = ["siirl", *sys.argv[3:]]
runpy.run_module("siirl.main_dag", run_name="__main__", alter_sys=True)
' "$@"
"""
"""Takes the place of Python: the launcher of the run offers no keeper to its workers."""


def main() -> int:
    end_by_signals()
    args = arguments()
    args.keys = [*VLLM, *args.keys]
    kills = [Kill(args.steps // 4, 0.5, 0.99), Kill(args.steps, 0.5, 0.0)]
    asked = dict.fromkeys(("engines_stay", "engines_start_anew"), len(kills))
    report = Report(args.out, asked, keys=args.keys)
    report["load_before"] = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as jobs:
        folder = Path(temporary)
        prepare = [sys.executable, "-m", "examples.quickstart.prepare", "--out", temporary]
        subprocess.run(prepare, cwd=REPOSITORY, check=True, capture_output=True)
        anew = folder / "python"
        anew.write_text(NONE_STAYS.format(python=sys.executable))
        anew.chmod(0o700)
        runs = {}
        for name, python in zip(asked, (sys.executable, str(anew)), strict=True):
            struck = Struck(args, folder, name, args.step_s, python)
            runs[name] = jobs.enter_context(contextlib.closing(struck))

            def seen(known: list[dict[str, Any]], name: str = name, struck: Struck = struck) -> None:
                restart_s = [kill["restart_s"] for kill in known]
                report[name] = {"restart_s": restart_s, "engines": struck.engines}
                report[name] |= {"start_s": round(struck.started_s, 2), "kills": known}
                report.count(name, len(known))

            measured(struck, kills, seen)
        report["weights_equal"] = same_weights(*(run.output for run in runs.values()))
    report["load_after"] = round(os.getloadavg()[0], 2)
    report.finish()
    print(json.dumps({name: x for name, x in report.items() if name != "command"}, indent=1))
    stayed = len({tuple(engines) for engines in report["engines_stay"]["engines"]}) == 1
    return 0 if report["weights_equal"] and stayed else 1


class Struck(Run):
    """Notes the engines of each attempt, by the numbers of their processes."""

    def __init__(self, *how: Any):
        super().__init__(*how)
        self.engines: list[list[int]] = []
        self.started_s = 0.0

    def first_instructions(self) -> tuple[float, float]:
        """See Run."""
        first_s, last_s = super().first_instructions()
        self.started_s = self.started_s or last_s - self.began_s
        found = []
        for process in psutil.Process(self._job.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if SERVER in process.cmdline():
                    found.append(process.pid)
        self.engines.append(sorted(found))
        return first_s, last_s


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=4.0, help="seconds that each step waits")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("keys", nargs="*")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
