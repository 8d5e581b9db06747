"""The keys of those who share a service: a file with a line for each tenant, its name and its key."""

import re
import stat
from pathlib import Path

from siirl.errors import ConfigError

KEY = "tml-"
"""What the client's keys begin with; it takes no other."""
NAME = re.compile(r"[a-z0-9_]{1,64}")
LEAST = 16
"""Characters of a key."""


def tenant_keys(file: str | None) -> dict[str, str]:
    """Name -> key. ConfigError for a file that cannot be used, or that others can read."""
    if file is None:
        return {}
    path = Path(file).expanduser()
    try:
        lines, mode = path.read_text().splitlines(), path.stat().st_mode
    except (OSError, ValueError) as error:
        raise _wrong(file, f"cannot be read: {error}", "Name a text file") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise _wrong(file, "can be read by others, and keys are secrets", f"chmod 600 {file}")
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, key = line.strip().partition(" ")
        key = key.strip()
        if NAME.fullmatch(name) is None or not key.startswith(KEY) or len(key) < LEAST or " " in key:
            raise _wrong(
                file,
                f"has no tenant in line {number}: small letters, digits and _, a space, and a key of "
                f"{LEAST} characters or more that begins with {KEY}",
                "Correct it",
            )
        if name in keys or key in keys.values():
            raise _wrong(file, f"has the name or the key of line {number} twice", "Give each one of its own")
        keys[name] = key
    if not keys:
        raise _wrong(file, "names nobody", f"Write a line for each tenant: NAME {KEY}...")
    return keys


def _wrong(file: str, what: str, fix: str) -> ConfigError:
    return ConfigError(f"service.tenants_file={file} {what}. {fix}.")
