"""What tests have proven of each model type: cases with their largest distances, in docs/models_proven.json.

A test gives `record` a case and its distances. With SIIRL_RECORD_MODELS=FILE in the environment they are
kept in FILE: those of an older commit are replaced, of one commit's the larger stay, and a case that fails
goes, so that partial runs add up. On a machine without git SIIRL_COMMIT says which commit runs.
tools/models_page.py makes the tables of docs/evidence/models.md.
"""

import fcntl
import functools
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "models_proven.json"
TRAINING = "training"
"""The part of a case that is the model itself: log-probs, entropies, gradients."""
SAMPLED = "sampled by vLLM"
"""The part of a case that is what vLLM says of its tokens."""
ALONE = "1 rank"
"""The layout of one rank."""
CPU, FP32 = "CPU", "float32"
"""The device and the type of numbers of most cases."""


class Case(NamedTuple):
    """What was compared, where."""

    model_type: str
    strategy: str
    part: str
    """TRAINING, or what else the model was compared with: adapters, values, experts that are given."""
    layout: str
    """The parallel sizes above 1, as "tp2 pp2"."""
    device: str
    dtype: str


class Proof(NamedTuple):
    """How near a case came to what it was compared with."""

    log_prob: float | str | None
    """The largest distance, in nats; "<BOUND" where a run passed a test and its distance was not kept."""
    gradient: float | None
    """The norm of the difference over the norm, all tensors together."""
    source: str
    """The commit that ran, or the file in the repository that tells of the run."""


Cases = dict[Case, Proof]


def load(file: Path) -> Cases:
    """The cases of a file; none if it is not there."""
    if not file.exists():
        return {}
    size = len(Case._fields)
    rows = json.loads(file.read_text(encoding="utf-8"))["cases"]
    return {Case(*row[:size]): Proof(*row[size:]) for row in rows}


def save(file: Path, cases: Cases) -> None:
    """Write cases, one a line, in one order."""
    names = [*Case._fields, *Proof._fields]
    lines = [json.dumps([*case, *cases[case]]) for case in sorted(cases)]
    inner = ",\n  ".join(lines)
    file.write_text(
        f'{{\n "columns": {json.dumps(names)},\n "cases": [\n  {inner}\n ]\n}}\n', encoding="utf-8"
    )


def record(case: Case, log_prob: float | None = None, gradient: float | None = None) -> None:
    """Keep how near a case came, if that is asked for; without any distance it failed.

    Of several ranks the first writes; processes take turns.
    """
    file = os.environ.get("SIIRL_RECORD_MODELS")
    if not file or _is_not_first():
        return
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cases = load(Path(file))
        before = cases.pop(case, None)
        if log_prob is not None or gradient is not None:
            cases[case] = _farther(Proof(_short(log_prob), _short(gradient), _commit()), before)
        save(Path(file), cases)


def merge(file: Path, others: Iterable[Path]) -> None:
    """Add the cases of other files to a file's; the later ones win."""
    cases = load(file)
    for other in others:
        cases |= load(other)
    save(file, cases)


def _farther(proof: Proof, before: Proof | None) -> Proof:
    """A proof with the larger distances of two, if one commit gave both: a case may have several options."""
    if before is None or before.source != proof.source or isinstance(before.log_prob, str):
        return proof
    log_probs, gradients = zip(before[:2], proof[:2], strict=True)
    return Proof(_largest(log_probs), _largest(gradients), proof.source)


def _largest(numbers: Iterable[float | None]) -> float | None:
    return max((number for number in numbers if number is not None), default=None)


def _is_not_first() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_rank() != 0


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.1e}")


@functools.cache
def _commit() -> str:
    """The commit that runs, with a + if files of siirl differ from it."""
    if said := os.environ.get("SIIRL_COMMIT"):
        return said
    ask = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    head = ask(["git", "rev-parse", "--short=9", "HEAD"]).stdout.strip()
    return head + "+" * bool(ask(["git", "status", "--porcelain", "--", "siirl"]).stdout.strip())
