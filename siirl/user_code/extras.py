"""Packages that a setting asks for and siirl does not need otherwise: each is an optional extra. Pure."""

import importlib.util

EXTRAS = {
    "reasoning_gym": ("reasoning-gym", "reasoning-gym"),
    "gymnasium": ("gymnasium", "gymnasium"),
    "textarena": ("textarena", "textarena"),
    "mcp": ("mcp", "mcp"),
    "langdetect": ("langdetect", "ifeval"),
}
"""Module -> (its package, the extra of siirl that installs it)."""
ENV_PACKAGES = ("gymnasium", "textarena", "openenv", "nemo_gym", "sandbox")
"""Whose environments are named as PACKAGE:NAME. What is none of EXTRAS needs no package."""

REPLAYABLE_PACKAGES = ("gymnasium", "textarena")
"""Those of them that the same seed and actions bring to the same state."""


def env_package(reference: object) -> tuple[str, str] | None:
    """(module, name) of an environment of a package; None for a class in a file or module of the user's."""
    module, _, name = str(reference).partition(":")
    return (module, name) if module in ENV_PACKAGES else None


def missing_extra(module: str) -> str | None:
    """What is wrong and the fix, as two sentences, if a module of EXTRAS is not installed; else None."""
    if importlib.util.find_spec(module) is not None:
        return None
    package, extra = EXTRAS[module]
    return f"the package {package} is not installed. Install it: pip install 'siirl[{extra}]'."
