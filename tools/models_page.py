"""The tables of docs/models.md (what trains, what is refused) and docs/evidence/models.md (what was proven).

`python tools/models_page.py [FILE ...]` adds the cases of FILEs to docs/models_proven.json, and writes both.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from family_columns import family_rows
from family_limits import limit_rows
from proven_models import ALONE, CPU, FILE, FP32, ROOT, SAMPLED, TRAINING, Case, Cases, Proof, load, merge

from siirl.models.families import known_types, types_with
from siirl.models.trained import TRAINABLE

WHY_NOT = types_with(lambda row: row.vllm.why_not)

PAGE = ROOT / "docs" / "models.md"
EVIDENCE = ROOT / "docs" / "evidence" / "models.md"
BEGIN, END = "<!-- what was proven, of models_proven.json: begin -->", "<!-- end -->"
TYPES, TYPES_END = "<!-- what trains, of siirl/models/families.py: begin -->", "<!-- types: end -->"
LIMITS, LIMITS_END = "<!-- what is refused, of tools/family_limits.py: begin -->", "<!-- limits: end -->"
FSDP = "fsdp"
NOT_RUN = "not run"
REFUSED = "refused"
NAMED = 3
"""Up to so many layouts are named; of more, the sizes that they have."""


def table(cases: Cases) -> str:
    """Both tables: what ran on CPUs, with a row for each type that is trained, and what ran on GPUs."""
    return "\n".join([*_on_cpu(cases), "", *_elsewhere(cases)])


def written(cases: Cases) -> dict[Path, str]:
    """Both pages with their tables as they are now."""
    page = _between(PAGE.read_text(encoding="utf-8"), TYPES, TYPES_END, family_rows())
    return {
        PAGE: _between(page, LIMITS, LIMITS_END, limit_rows()),
        EVIDENCE: _between(EVIDENCE.read_text(encoding="utf-8"), BEGIN, END, table(cases).splitlines()),
    }


def _between(text: str, begin: str, end: str, rows: Iterable[str]) -> str:
    head, _, rest = text.partition(begin)
    return "\n\n".join([head + begin, "\n".join(rows), end + rest.partition(end)[2]])


def strangers(cases: Cases) -> list[Case]:
    """Cases of types that their strategy is not said to train."""
    return [
        case
        for case in cases
        if case.strategy not in TRAINABLE or case.model_type not in known_types(case.strategy)
    ]


def _on_cpu(cases: Cases) -> Iterator[str]:
    yield "| model type | strategy | layouts | log-prob | gradient | in vLLM | besides |"
    yield "|---|---|---|---|---|---|---|"
    here = {case: proof for case, proof in cases.items() if (case.device, case.dtype) == (CPU, FP32)}
    rows = sorted((kind, strategy) for strategy in TRAINABLE for kind in known_types(strategy))
    for kind, strategy in rows:
        parts: dict[str, Cases] = {}
        for case, proof in sorted(here.items(), key=lambda item: item[0]):
            if (case.model_type, case.strategy) == (kind, strategy):
                parts.setdefault(case.part, {})[case] = proof
        own = parts.pop(TRAINING, {})
        parts.pop(SAMPLED, None)
        cells = [layouts(own), *farthest(own.values())] if own else [NOT_RUN, "", ""]
        cells.append(_in_vllm(kind, cases) if strategy == FSDP else "")
        yield f"| {kind} | {strategy} | {' | '.join(cells)} | {_besides(parts)} |"


def _in_vllm(kind: str, cases: Cases) -> str:
    """How near vLLM's log-probs of a type came; by whatever strategy it is trained, so it is said once."""
    if kind in WHY_NOT:
        return REFUSED
    found = {
        case: proof
        for case, proof in cases.items()
        if (case.model_type, case.part, case.device) == (kind, SAMPLED, CPU)
    }
    types = sorted({case.dtype for case in found} - {FP32})
    return ", ".join([farthest(found.values())[0], *types]) if found else NOT_RUN


def _besides(parts: dict[str, Cases]) -> str:
    """What else was compared, in how many layouts, and the largest distance of all of it."""
    distances = [text for found in parts.values() for text in farthest(found.values()) if text]
    named = ", ".join(f"{part} {len(found)}" if len(found) > 1 else part for part, found in parts.items())
    return f"{named}: {max(distances, key=float)}" if parts else ""


def _elsewhere(cases: Cases) -> Iterator[str]:
    yield "| model type | strategy | device | what | layouts | log-prob | gradient |"
    yield "|---|---|---|---|---|---|---|"
    rows: dict[tuple[str, ...], Cases] = {}
    for case in sorted(cases):
        if case.device != CPU:
            key = (case.model_type, case.strategy, f"{case.device}, {case.dtype}", case.part)
            rows.setdefault(key, {})[case] = cases[case]
    for key, found in rows.items():
        yield f"| {' | '.join([*key, layouts(found), *farthest(found.values())])} |"


def layouts(cases: Cases) -> str:
    """The layouts of cases: their names, or their number and the sizes in them."""
    names = sorted({case.layout for case in cases}, key=lambda name: (name != ALONE, len(name), name))
    if len(names) <= NAMED:
        return ", ".join(names)
    sizes = sorted({word for name in names if name != ALONE for word in name.split()})
    return f"{len(names)} of {' '.join(sizes)}"


def farthest(found: Iterable[Proof]) -> list[str]:
    """The largest distances of log-probs and of gradients; empty where none was kept."""
    proofs = list(found)
    bounds = [proof.log_prob for proof in proofs if isinstance(proof.log_prob, str)]
    measured = [proof.log_prob for proof in proofs if isinstance(proof.log_prob, float)]
    log_prob = max(bounds, key=lambda bound: float(bound[1:])) if bounds else _largest(measured)
    return [log_prob, _largest([proof.gradient for proof in proofs if proof.gradient is not None])]


def _largest(numbers: list[float]) -> str:
    return f"{max(numbers):.1e}".replace("e-0", "e-") if numbers else ""


if __name__ == "__main__":
    merge(FILE, map(Path, sys.argv[1:]))
    for page, text in written(load(FILE)).items():
        page.write_text(text, encoding="utf-8")
