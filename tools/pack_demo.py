"""Packs a run for `siirl view --demo`, or for a test: python tools/pack_demo.py RUN [--out FILE]

What the page shows is kept, without names of the machine and folders. docs/evidence/dashboard.md says which.
"""

import argparse
import gzip
import io
import json
import re
import socket
import tarfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "siirl" / "view" / "demo.tar.gz"
KEPT = (
    *("job.json", "run.yaml", "metrics.jsonl", "progress.jsonl", "trace.json.gz"),
    *("status/rank_*", "rollouts/*/step_*.jsonl", "logs/rank_*.log"),
)
PACKAGES = ("torch", "transformers")
MOST_BYTES = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    run, out = args.run.absolute(), args.out.absolute()
    places = {
        str(run): "outputs/demo",
        str(run.parent): "outputs",
        str(ROOT): ".",
    }
    host = re.compile(rf"\b{re.escape(socket.gethostname())}\b")

    def plain(text: str) -> str:
        for place, instead in places.items():
            text = text.replace(place, instead)
        return host.sub("demo", text)

    with tarfile.open(out, "w:gz", compresslevel=9) as archive:
        for path in sorted(path for pattern in KEPT for path in run.glob(pattern)):
            data = path.read_bytes()
            if path.name == "run.yaml":
                starts = [_shown(start) for start in yaml.safe_load_all(data)]
                data = yaml.safe_dump_all(starts, explicit_start=True, sort_keys=False).encode()
            if path.name == "trace.json.gz":
                data = gzip.compress(plain(gzip.decompress(data).decode()).encode(), 9, mtime=0)
            else:
                data = plain(data.decode()).encode()
            entry = tarfile.TarInfo(str(path.relative_to(run)))
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    left = re.findall(r"(?<![\w.:/~-])/(?!usr/)\w+/\w[^\s\"',]*", json.dumps(_texts(out)))
    assert not left, f"names of this machine are left: {sorted(set(left))[:5]}"
    size = out.stat().st_size
    assert size < MOST_BYTES, f"{out} has {size} bytes: record a shorter run"
    print(f"wrote {out.relative_to(ROOT)}: {size >> 10} KiB")


def _shown(start: dict) -> dict:
    """A start without folders, commits and the packages that nobody looks at."""
    packages = {name: start["packages"][name] for name in PACKAGES if name in start["packages"]}
    return {**start, "directory": "", "packages": packages, "siirl": {}, "project": {}}


def _texts(packed: Path) -> list[str]:
    with tarfile.open(packed) as archive:
        return [
            archive.extractfile(entry).read().decode(errors="replace")  # type: ignore[union-attr]
            for entry in archive.getmembers()
            if not entry.name.endswith(".gz")
        ]


if __name__ == "__main__":
    main()
