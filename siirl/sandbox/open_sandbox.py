"""Starts the sandbox of an episode, of whichever kind its settings name."""

import importlib

from siirl.errors import SandboxError
from siirl.sandbox.sandboxes import KINDS, Build, Sandbox, SandboxSettings, missing_here

CLASSES = {
    "local": "siirl.sandbox.local_sandbox:LocalSandbox",
    "docker": "siirl.sandbox.container:ContainerSandbox",
    "podman": "siirl.sandbox.container:ContainerSandbox",
    "daytona": "siirl.sandbox.hosted:DaytonaSandbox",
    "modal": "siirl.sandbox.hosted:ModalSandbox",
    "e2b": "siirl.sandbox.hosted:E2BSandbox",
}
"""sandbox.kind -> its class, imported when one is started; made of (settings, build, program)."""
assert CLASSES.keys() == KINDS.keys()


def open_sandbox(settings: SandboxSettings, build: Build | None = None) -> Sandbox:
    """Start a sandbox. SandboxError if it cannot be made here."""
    if problem := missing_here(settings):
        raise SandboxError(problem)
    module, _, name = CLASSES[settings.kind].partition(":")
    return getattr(importlib.import_module(module), name)(settings, build, KINDS[settings.kind].program)
