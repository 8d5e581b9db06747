"""Tasks of NeMo-Gym: nemo_gym:FILE.jsonl in the place of a file. No torch.

A line is a request of the Responses API (`responses_create_params`) and whatever its server verifies by.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from siirl.data.made_rows import Made, MadeRows
from siirl.errors import DataError

PREFIX = "nemo_gym:"
ROW_KEY = "nemo_gym_row"
"""Of extra_info: the line, which the environment gives its server."""
PARAMS = "responses_create_params"


@dataclass(frozen=True)
class NemoGymRows(MadeRows):
    """The lines of a file."""

    text: str
    extra = pa.struct([(ROW_KEY, pa.string())])

    def __str__(self) -> str:
        return self.text

    @property
    def data_source(self) -> str:
        """See MadeRows."""
        return f"nemo_gym/{self._path.stem}"

    @property
    def num_rows(self) -> int:
        """How many there are. DataError for a file that cannot be read."""
        return len(_lines(self._path))

    def rows(self) -> Iterator[Made]:
        """See MadeRows."""
        for number, line in enumerate(_lines(self._path), 1):
            yield _chat(line, f"{self.text}, line {number}"), "", {ROW_KEY: json.dumps(line)}

    @property
    def _path(self) -> Path:
        return Path(self.text.removeprefix(PREFIX)).expanduser()


@functools.lru_cache(maxsize=16)
def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{PREFIX}{path} cannot be read: {error}. Name a file of NeMo-Gym's rows.") from error
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not isinstance(line.get(PARAMS), dict):
            raise DataError(f"{PREFIX}{path}, line {number} has no {PARAMS}: it is no row of NeMo-Gym.")
    return lines


def _chat(line: dict[str, Any], who: str) -> list[dict[str, str]]:
    """The messages of a request. DataError for what is no text."""
    given, system = line[PARAMS].get("input"), line[PARAMS].get("instructions")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{who}: {PARAMS}.input is no text and no list of messages.")
    chat = [{"role": "system", "content": system}] if isinstance(system, str) else []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts]
        if role not in ("system", "developer", "user", "assistant") or not all(
            isinstance(text, str) for text in texts
        ):
            raise DataError(
                f"{who}: {PARAMS}.input has {str(message)!r:.100}, which is no message of text. Leave the "
                "row out."
            )
        chat.append({"role": "system" if role == "developer" else role, "content": "".join(map(str, texts))})
    return chat
