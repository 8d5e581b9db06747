"""Sessions of clients; the files from which a server that begins again, and `siirl view`, know of them."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siirl.service.desk import Tenant, Ticket


@dataclass
class Model:
    """A model in training, as its session knows it."""

    rank: int
    created: Ticket | None = None

    @property
    def is_there(self) -> bool:
        """Or may be soon."""
        return self.created is None or not isinstance(self.created.answer, Exception)


@dataclass
class Session:
    """One client, from its first request to its end."""

    tenant: str
    seen_s: float
    told: dict[str, Any]
    """What the client says of itself: user_metadata, display_name."""
    samplers: dict[str, str] = field(default_factory=dict)
    """Id of a sampling session -> what it samples from."""
    models: dict[str, Model] = field(default_factory=dict)
    """Each that was asked for."""


def write_sessions(file: Path, base: str, sessions: Mapping[str, Session]) -> None:
    """Whole or not at all. base: the model that they are on."""
    told = {
        id: {
            "tenant": one.tenant,
            "told": one.told,
            "samplers": one.samplers,
            "models": {model: found.rank for model, found in one.models.items() if found.is_there},
        }
        for id, one in sessions.items()
    }
    _write(file, {"base": base, "sessions": told})


def write_status(file: Path, sessions: Mapping[str, Session], tenants: Mapping[str, Tenant]) -> None:
    """Who is there, what each trains, has waiting and has had: `siirl view` shows it."""
    rows: dict[str, dict[str, Any]] = {}
    for id, session in sessions.items():
        tenant = tenants.get(name := session.tenant or id, Tenant())
        row = rows.setdefault(name, {"sessions": 0, "samplers": 0, "adapters": {}})
        row["sessions"] += 1
        row["samplers"] += len(session.samplers)
        row["adapters"] |= {model: one.rank for model, one in session.models.items() if one.is_there}
        row |= {"waiting": tenant.num_waiting, "waiting_bytes": tenant.waiting_bytes}
        row |= {"tokens": tenant.tokens, "unread_bytes": tenant.kept_bytes}
    _write(file, {"time": time.time(), "tenants": rows})


def _write(file: Path, told: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    (aside := file.with_suffix(".new")).write_text(json.dumps(told))
    os.replace(aside, file)


def read_sessions(file: Path, base: str) -> dict[str, Session]:
    """Those that were written; none on another model."""
    if not file.is_file() or (told := json.loads(file.read_text()))["base"] != base:
        return {}
    found: dict[str, Session] = {}
    for id, one in told["sessions"].items():
        models = {model: Model(rank) for model, rank in one["models"].items()}
        found[id] = Session(one["tenant"], time.monotonic(), one["told"], one["samplers"], models)
    return found
