"""What a script becomes: settings of siirl, each with what it was there and why it is so."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from siirl.config.keys import Key
from siirl.config.resolve import FOLLOWS
from siirl.config.root import all_keys
from siirl.config.values import plain

Kind = Literal["kept", "changed", "added", "dropped", "impossible"]
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Setting:
    """One setting of the result. A dropped or impossible one has no name."""

    kind: Kind
    name: str
    value: str
    """As text."""
    there: str = ""
    """How the script had it, "" for one that is added."""
    why: str = ""
    """Why it is so."""


@dataclass
class Translation:
    """What a script becomes."""

    settings: list[Setting] = field(default_factory=list)
    """In the order of the script."""
    options: list[str] = field(default_factory=list)
    """--config-path and --config-name that are kept."""

    def add(self, kind: Kind, there: str = "", why: str = "", name: str = "", value: str = "") -> None:
        self.settings.append(Setting(kind, name, value, there, why))

    def of(self, *kinds: Kind) -> list[Setting]:
        return [setting for setting in self.settings if setting.kind in kinds]

    def written(self) -> list[Setting]:
        """What the command has, each name once: the last of equal names, as on a command line."""
        last = {setting.name: setting for setting in self.of("kept", "changed", "added")}
        return [setting for setting in self.of("kept", "changed", "added") if last[setting.name] is setting]


def typed(key: Key, text: str) -> Any:
    """The value that a text on a command line means for a key."""
    text = text.strip()
    quoted = len(text) > 1 and text[0] in "'\"" and text[0] == text[-1]
    if quoted:
        return text[1:-1]
    if text.startswith("[") and text.endswith("]"):
        items = [unquoted(item.strip()) for item in text[1:-1].split(",") if item.strip()]
        return [scalar(item) if not key.takes_text else item for item in items]
    if text.startswith("{") and key.is_map:
        pairs = (item.partition(":") for item in text[1:-1].split(",") if item.strip())
        return {unquoted(name.strip()): scalar(unquoted(value.strip())) for name, _, value in pairs}
    if key.takes_text and text.lower() not in ("null", "true", "false"):
        return text
    if key.takes_text and text.lower() in ("true", "false") and bool not in _options_of(key):
        return text
    return scalar(text)


def _options_of(key: Key) -> tuple[Any, ...]:
    return getattr(key.type, "__args__", (key.type,))


def scalar(text: str) -> Any:
    """true, false, null and numbers as such; other text as it is."""
    word = {"true": True, "false": False, "null": None}.get(text.lower(), text)
    if word is not text or not NUMBER.fullmatch(text):
        return word
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def unquoted(text: str) -> str:
    """The text without quotes around it."""
    return text[1:-1] if len(text) > 1 and text[0] in "'\"" and text[0] == text[-1] else text


def value_of(result: Translation, name: str) -> Any:
    """What a key will be: as written, else its default."""
    for setting in result.written():
        if setting.name == name:
            return typed(all_keys()[name], setting.value)
    if name in FOLLOWS and FOLLOWS[name].startswith("${") and FOLLOWS[name].endswith("}"):
        return value_of(result, FOLLOWS[name][2:-1])
    return plain(all_keys()[name].default)
