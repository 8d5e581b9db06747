"""What clients have saved: whose it is, and what its owner does with it besides training. Files alone.

FOLDER/MODEL/KIND/NAME.json says what is saved, and is written last: what has none is not there. Its tensors
are beside it, NAME.safetensors, or the files of a folder NAME for external weights. The model's name begins
with that of its session, `session-TENANT-NUMBER`, or `session-NUMBER` of who has the server's own key: so
each file says whose it is, also to a server that was started again. A tenant reaches its own and what is
published; the server's own key all.
"""

import hashlib
import hmac
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siirl.service.commands import PATH, Refused

OPERATOR = ""
"""The tenant of the server's own key."""
SESSION = re.compile(r"session-(?:([a-z0-9_]+)-)?[0-9a-f]{16}")
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Of a path -> the client's word for it."""
URL_S = 3600.0
"""How long an address of a file can be used."""
CODE_BYTES = 16
NAME = re.compile(r"\w[\w.-]{0,127}")
MOST_SECONDS = float(1 << 31)


@dataclass(frozen=True)
class Saved:
    """One thing that was saved, and what its file says."""

    path: str
    model: str
    kind: str
    name: str
    about: dict[str, Any]

    @property
    def is_public(self) -> bool:
        return bool(self.about.get("public"))

    def told(self) -> dict[str, Any]:
        """As clients read it."""
        expires_s = self.about.get("expires_s")
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": when(self.about["time"]),
            "tinker_path": self.path,
            "size_bytes": self.about["size_bytes"],
            "public": self.is_public,
            "user_metadata": self.about.get("user_metadata"),
            "expires_at": None if expires_s is None else when(expires_s),
        }


def owner_of(name: str) -> str:
    """The tenant of a session, or of what is named after one."""
    match = SESSION.match(name)
    return OPERATOR if match is None else match[1] or OPERATOR


class SavedWeights:
    """The folder. For any thread: a file is whole, or not there."""

    def __init__(self, folder: Path, key: str) -> None:
        """key: what addresses of files are signed with."""
        self._folder, self._key = folder, key.encode()

    def all(self, tenant: str, model: str | None = None) -> list[Saved]:
        """What a tenant has saved, of one model or of all, the oldest first."""
        found = [
            one
            for one in read(self._folder)
            if model in (None, one.model) and tenant in (OPERATOR, owner_of(one.model))
        ]
        return sorted(found, key=lambda one: (one.about["time"], one.path))

    def find(self, path: str, tenant: str, to_change: bool = False) -> Saved:
        """Refused for no path; LookupError if nothing is there, or nothing for this tenant."""
        match = PATH.fullmatch(str(path))
        if match is None:
            raise Refused(
                f"{str(path)[:200]!r} is no path of weights: tinker://MODEL/weights/NAME and the like"
            )
        model, kind, name = match.groups()
        missing = LookupError(f"{path}: nothing was saved there")
        try:
            about = json.loads(self._about(model, kind, name).read_text())
        except FileNotFoundError:
            raise missing from None
        found = Saved(str(path), model, kind, name, about)
        if tenant in (OPERATOR, owner_of(model)) or (found.is_public and not to_change):
            return found
        raise missing

    def _about(self, model: str, kind: str, name: str) -> Path:
        return self._folder / model / kind / f"{name}.json"

    def _data(self, saved: Saved) -> Path:
        """A file of tensors, or a folder of files."""
        file = self._about(saved.model, saved.kind, saved.name)
        return file.with_suffix("") if saved.kind == "external_weights" else file.with_suffix(".safetensors")

    def label(self, saved: Saved, **labels: Any) -> None:
        """Change what is said of it."""
        file = self._about(saved.model, saved.kind, saved.name)
        aside = file.with_suffix(".labels")
        aside.write_text(json.dumps(saved.about | labels))
        os.replace(aside, file)

    def delete(self, saved: Saved) -> None:
        self._about(saved.model, saved.kind, saved.name).unlink(missing_ok=True)
        data = self._data(saved)
        if data.is_dir():
            shutil.rmtree(data, ignore_errors=True)
        else:
            data.unlink(missing_ok=True)

    def delete_expired(self) -> list[str]:
        """Paths of what was to be kept until now."""
        now_s = time.time()
        gone = [one for one in read(self._folder) if (one.about.get("expires_s") or now_s + 1) <= now_s]
        for one in gone:
            self.delete(one)
        return [one.path for one in gone]

    def copy(self, saved: Saved, model: str, labels: Mapping[str, Any]) -> str:
        """Under the name of another model, which shares its bytes. Idempotent. The path."""
        copied = Saved(f"tinker://{model}/{saved.kind}/{saved.name}", model, saved.kind, saved.name, {})
        source, target = self._data(saved), self._data(copied)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not self._about(model, saved.kind, saved.name).exists():
            if source.is_dir():
                shutil.copytree(source, target, copy_function=os.link, dirs_exist_ok=True)
            elif not target.exists():
                os.link(source, target)
            self.label(Saved(copied.path, model, saved.kind, saved.name, saved.about), public=False, **labels)
        return copied.path

    def files(self, saved: Saved) -> dict[str, str]:
        """Name of each file of external weights -> the end of an address that needs no key for URL_S."""
        until = int(time.time() + URL_S)
        return {
            file.name: f"{saved.model}/{saved.name}/{file.name}?until={until}&code="
            f"{self._code(saved.model, saved.name, file.name, until)}"
            for file in sorted(self._data(saved).iterdir())
        }

    def file(self, model: str, name: str, file: str, until: str, code: str) -> Path:
        """What such an address names. PermissionError for one that is too old, or nobody's."""
        wanted = self._code(model, name, file, until)
        if not hmac.compare_digest(code.encode(), wanted.encode()) or int(until) < time.time():
            raise PermissionError("this address of a file is too old, or was not given out here: ask anew")
        return self._folder / model / "external_weights" / name / file

    def _code(self, *parts: object) -> str:
        text = "\n".join(str(part) for part in parts).encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()[: 2 * CODE_BYTES]


def path_of(model: str, kind: str, name: str) -> str:
    """Refused for what is no name."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise Refused(f"{name!r:.80} is no name: letters, digits, _ . and -, 128 at most")
    return f"tinker://{model}/{kind}/{name}"


def labels_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What a request says of something that is saved. Refused for a time that is none."""
    return {"expires_s": expiry(asked), "user_metadata": asked.get("user_metadata")}


def expiry(asked: Mapping[str, Any]) -> float | None:
    """When what ttl_seconds is asked for ends; None: never."""
    seconds = asked.get("ttl_seconds")
    if seconds is None:
        return None
    if not 0 < float(seconds) < MOST_SECONDS:
        raise Refused(f"ttl_seconds {seconds!r:.40}: a number of seconds from 1 on")
    return time.time() + float(seconds)


def read(folder: Path) -> Iterator[Saved]:
    """All that was saved."""
    for file in folder.glob("*/*/*.json"):
        if file.parts[-2] in KINDS:
            name = file.name.removesuffix(".json")
            try:
                about = json.loads(file.read_text())
            except FileNotFoundError:  # deleted meanwhile
                continue
            path = f"tinker://{file.parts[-3]}/{file.parts[-2]}/{name}"
            yield Saved(path, file.parts[-3], file.parts[-2], name, about)


def check_room(folder: Path, model: str, num_bytes: int, most_gb: float) -> None:
    """Refused if a tenant's model would save more than the tenant may have."""
    if not most_gb:
        return
    tenant = owner_of(model)
    there = sum(one.about["size_bytes"] for one in read(folder) if owner_of(one.model) == tenant)
    if there + num_bytes > most_gb * 1e9:
        raise Refused(
            f"this tenant has saved {there / 1e9:.3g} GB, and {num_bytes / 1e9:.3g} GB more are over its "
            f"{most_gb:g} GB (service.max_disk_gb): delete checkpoints"
        )


def when(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
