"""Files of models and datasets from the Hugging Face hub or ModelScope, in their local caches. No torch."""

import difflib
import importlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from siirl.errors import ConfigError, DataError, UserError
from siirl.observe.printable import first_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9]")
MODELSCOPE_SWITCH = "SIIRL_USE_MODELSCOPE"
OFFLINE_SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
DEFAULT_REVISION = "main"

Kind = Literal["model", "dataset"]


@dataclass(frozen=True)
class HubRepo:
    """A repository on a hub."""

    name: str
    kind: Kind = "model"
    revision: str = DEFAULT_REVISION
    """Branch, tag or commit."""
    cache_dir: str | None = None
    """None: that of the hub's own settings (HF_HOME)."""
    token: str | None = None
    """None: that of the hub's own settings (HF_TOKEN, a login)."""


def is_hub_id(name: str) -> bool:
    """Whether a name that is no local path may be one on a hub: ORG/NAME."""
    return HUB_ID.fullmatch(str(name)) is not None and ".." not in name  # str: of a refused key, it raises


def is_on(switch: str, env: Mapping[str, str] = os.environ) -> bool:
    """Whether an environment variable switches something on."""
    return env.get(switch, "").lower() in ("1", "true", "yes", "on")


def fetch(repo: HubRepo, patterns: Sequence[str], modelscope: bool) -> Path:
    """The local folder with those files of a repository that match the patterns; downloads what is missing.

    Safe to call from many processes: the hub's client locks each file, so that it is downloaded once on a
    machine. Without a network the cache alone is used. DataError, with what was tried, if a download fails
    and the cache does not hold the files; ConfigError without the package modelscope.
    """
    try:
        return Path(_from_modelscope(repo, patterns) if modelscope else _from_hugging_face(repo, patterns))
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # what the clients' own errors descend from
        raise DataError(_message(repo, modelscope, error)) from error


def fetch_cached(repo: HubRepo, patterns: Sequence[str], modelscope: bool) -> Path | None:
    """The local folder, asking no hub; None if it is not in the cache. It may lack files."""
    try:
        from_hub = _from_modelscope if modelscope else _from_hugging_face
        return Path(from_hub(repo, patterns, local_files_only=True))
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError):
        return None


def _from_hugging_face(repo: HubRepo, patterns: Sequence[str], **options: bool) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(
        repo.name,
        repo_type=repo.kind,
        revision=repo.revision,
        cache_dir=Path(repo.cache_dir).expanduser() if repo.cache_dir else None,
        token=repo.token,
        allow_patterns=list(patterns),
        **options,
    )


def _from_modelscope(repo: HubRepo, patterns: Sequence[str], **more: bool) -> str:
    try:
        hub = importlib.import_module("modelscope")
    except ImportError as error:
        raise ConfigError(
            f"{MODELSCOPE_SWITCH}=true, but the package modelscope is not installed: {repo.name} cannot be "
            f"downloaded from there. Install it (pip install modelscope), or unset {MODELSCOPE_SWITCH}."
        ) from error
    options = {"cache_dir": repo.cache_dir, "allow_file_pattern": list(patterns), **more}
    if repo.revision != DEFAULT_REVISION:  # ModelScope's default branch has another name
        options["revision"] = repo.revision
    if repo.kind == "dataset":
        return hub.dataset_snapshot_download(repo.name, **options)
    return hub.snapshot_download(repo.name, **options)


def _message(repo: HubRepo, modelscope: bool, error: Exception) -> str:
    where = "ModelScope" if modelscope else os.environ.get("HF_ENDPOINT", "the Hugging Face hub")
    offline = [name for name in OFFLINE_SWITCHES if is_on(name)]
    why = f"{type(error).__name__}: {first_line(str(error)).rstrip('.')}"
    fix = "Check the name, the revision, the network and, for a private one, the token"
    if offline:
        why = f"{offline[0]} is set, and not all of its files are there"
        fix = f"Unset {offline[0]}"
    return (
        f"{repo.kind} {repo.name!r} (revision {repo.revision}) is no directory on host "
        f"{socket.gethostname()}, and could not be downloaded from {where} to {_cache(repo, modelscope)}: "
        f"{why}. {near_folder(repo.name)}{fix}; or download it elsewhere, and give the local directory."
    )


def near_folder(name: str) -> str:
    """What a local folder has that was perhaps meant; empty where there is no such folder."""
    parent = Path(name).parent
    try:
        there = sorted(path.name for path in parent.iterdir() if path.is_dir())
    except OSError:
        return ""
    near = difflib.get_close_matches(Path(name).name, there, n=1)
    return f"Did you mean the directory {str(parent / near[0])!r}? " if near else ""


def _cache(repo: HubRepo, modelscope: bool) -> str:
    if repo.cache_dir or modelscope:
        return repo.cache_dir or os.environ.get("MODELSCOPE_CACHE", "ModelScope's cache")
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE
