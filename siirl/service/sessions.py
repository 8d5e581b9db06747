"""Sessions of clients, and the file from which a server that begins again knows them."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siirl.service.desk import Ticket


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
    file.parent.mkdir(parents=True, exist_ok=True)
    (aside := file.with_suffix(".new")).write_text(json.dumps({"base": base, "sessions": told}))
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
